"""Speculation: guesses of a row's next tokens, and the check that keeps the right ones.

Drafts are tokens written behind a row's own in `RequestState.token_ids`, so a step computes them as
it computes a part of a prompt. At each of their places it draws what it would have drawn in a step
of its own: `acceptance` keeps the drafts that equal these draws, so the answer is the same with and
without them, whatever they are. A drafter (`base`) writes the next ones at the end of every step.
"""
