"""A session whose context is full: `/fit` has the oldest turns left out of what is sent."""

from __future__ import annotations

from termgen.tui.chat.state.conversation import Conversation

FULL_WORDS = (
    "The chat has filled the model's context: /fit goes on without the oldest turns, a new session "
    "begins another chat."
)
USAGE = "/fit goes on without the oldest turns, /fit off sends all of them."


def fit(chat: Conversation, argument: str) -> str:
    """`/fit`, `/fit off`; returns the words for the user."""
    if argument not in ("", "off"):
        return USAGE
    chat.fits_itself = not argument
    if argument:
        chat.num_left_out = 0
        return "Every turn is sent again."
    return "In a full context the oldest turns are not sent. /fit off ends that."


def leave_out(chat: Conversation) -> str:
    """Leave a third more of the oldest turns out, and say so; nothing is said where that is not
    wanted, or there are no more."""
    last = len(chat.turns) - 1
    if not chat.fits_itself or chat.num_left_out >= last:
        return ""
    chat.num_left_out += (last - chat.num_left_out + 2) // 3
    which = "Turn 1 is" if chat.num_left_out == 1 else f"Turns 1-{chat.num_left_out} are"
    return f"{which} no longer sent: the context is full."
