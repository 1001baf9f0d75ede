"""A session whose context is full: what its policy leaves out of what is sent, in words."""

from __future__ import annotations

from termgen.tui.chat.state.context_policy import (
    CHOSEN_WORDS,
    FIT_USAGE,
    FIT_WORDS,
    ContextPolicy,
)
from termgen.tui.chat.state.conversation import Conversation, Turn

FULL_WORDS = (
    "The chat has filled the model's context: /fit goes on without the oldest turns, a new session "
    "begins another chat."
)


def fit(chat: Conversation, argument: str) -> tuple[str, list[Turn]]:
    """`/fit` with or without an argument; returns the words for the user, and turns that are other
    than before."""
    policy = FIT_WORDS.get(argument)
    if policy is None:
        return f"{FIT_USAGE}.", []
    return CHOSEN_WORDS[policy], chat.choose(policy)


def full_words(chat: Conversation) -> str:
    """What to do about a context that is full; empty where the policy has done all it can."""
    return FULL_WORDS if chat.policy is ContextPolicy.ASK else ""
