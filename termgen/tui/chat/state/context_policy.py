"""What of a chat is sent when its context is full: the policies, and what a request leaves out.

Plain values. A turn holds the `Cut` of the requests for all questions after it, so that a branch
without this turn is not touched by it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

FIT_USAGE = (
    "/fit goes on without the oldest turns, /fit ends keeps the first one too, /fit summarise has "
    "them summarised, /fit off sends all of them"
)
FULL = ": the context is full"
ANSWER_TOKENS = 512
"""Tokens kept free for an answer of no given length, in a context that large."""
ANSWER_SHARE = 0.25
"""Largest share of the context that is kept free for an answer."""
SUMMARY_TRIGGER = 0.85
"""Share of the room for a prompt at which a summary is made: making it takes room, too."""
GOAL_SHARE = 0.5
"""Share of the context that a prompt has at most after turns were left out."""
BLOCK_SHARE = 0.25
"""Least share of the context that is left out at once: what follows is read again each time."""
SUMMARY_SHARE = 0.15
"""Largest share of the context that a summary takes."""
KEPT_SHARE = GOAL_SHARE - SUMMARY_SHARE
TAIL_SHARE = 0.25
"""Largest share of the context for the last turns that stay beside a summary."""
FIRST_SHARE = 0.25
"""A first turn of a larger share of the context is left out like others."""


class ContextPolicy(enum.Enum):
    ASK = "ask"
    """Say that the context is full."""
    DROP = "drop"
    """Leave out the oldest turns."""
    ENDS = "ends"
    """Leave out turns after the first one."""
    SUMMARISE = "summarise"
    """Leave out turns after the first one, and send a summary of them."""


POLICY_WORDS = {
    ContextPolicy.ASK: "say that it is full, and ask",
    ContextPolicy.DROP: "leave out the oldest turns",
    ContextPolicy.ENDS: "keep the first turn and the last ones",
    ContextPolicy.SUMMARISE: "keep them, and a summary of those between",
}

FIT_WORDS = {
    "": ContextPolicy.DROP,
    "drop": ContextPolicy.DROP,
    "ends": ContextPolicy.ENDS,
    "summarise": ContextPolicy.SUMMARISE,
    "off": ContextPolicy.ASK,
}
"""Arguments of `/fit` and what they choose."""
CHOSEN_WORDS = {
    ContextPolicy.ASK: "Every turn is sent again.",
    ContextPolicy.DROP: "In a full context the oldest turns are not sent.",
    ContextPolicy.ENDS: "In a full context the first turn and the last ones are sent.",
    ContextPolicy.SUMMARISE: "In a full context the model's summary stands for older turns.",
}


@dataclass(frozen=True, slots=True)
class Summary:
    text: str
    first: int
    """Number of the first turn that is summarised, from 1."""
    last: int

    @property
    def message(self) -> str:
        """The end of the system message."""
        return f"Summary of {turns_words(self.first, self.last)}, made by the model:\n{self.text}"


@dataclass(frozen=True, slots=True)
class Cut:
    """What a request leaves out of the turns before its question."""

    first: int = 0
    """Number of turns at the beginning that are sent: none or one."""
    upto: int = 0
    """Number of turns after which all are sent; those from `first` to here are not."""
    pruned: int = 0
    """Number of oldest turns whose results of tools are sent shortened."""
    summary: Summary | None = None

    @property
    def num_left_out(self) -> int:
        return max(0, self.upto - self.first)

    def within(self, num_turns: int) -> Cut:
        """The same for so many turns, of which the last is always sent."""
        if self.upto < num_turns:
            return self
        upto = max(0, num_turns - 1)
        return replace(self, upto=upto, first=min(self.first, upto))

    def sends(self, index: int) -> bool:
        return not self.first <= index < self.upto


ALL = Cut()
"""Nothing is left out."""


@dataclass(frozen=True, slots=True)
class Window:
    """A context in tokens, and how much of it what may take."""

    size: int
    answer: int
    """Kept free for the answer."""

    @classmethod
    def of(cls, size: int, max_tokens: int | None) -> Window:
        return cls(size, min(int(size * ANSWER_SHARE), max_tokens or ANSWER_TOKENS))

    @property
    def room(self) -> int:
        """Tokens for a prompt."""
        return self.size - self.answer

    def trigger(self, policy: ContextPolicy) -> int:
        """The longest prompt before which nothing is done."""
        is_early = policy is ContextPolicy.SUMMARISE
        return int(self.room * SUMMARY_TRIGGER) if is_early else self.room

    def goal(self, now: int) -> int:
        """How long a prompt of `now` tokens may be after turns were left out."""
        return min(int(self.size * GOAL_SHARE), now - int(self.size * BLOCK_SHARE))


def turns_words(first: int, last: int) -> str:
    """`turn 3`, `turns 2-9`."""
    return f"turn {first}" if first == last else f"turns {first}-{last}"


def cut_words(cut: Cut) -> str:
    """`Turns 2-9 are no longer sent`; empty where none is left out."""
    if not cut.num_left_out:
        return ""
    words = turns_words(cut.first + 1, cut.upto).capitalize()
    return f"{words} {'is' if cut.num_left_out == 1 else 'are'} no longer sent"


def short_cut_words(cut: Cut) -> str:
    """For the status line: `from turn 5`, `without turns 2-9`; empty where none is left out."""
    if not cut.num_left_out:
        return ""
    if cut.summary is not None:
        return f"{turns_words(cut.summary.first, cut.summary.last)} summarised"
    words = turns_words(cut.first + 1, cut.upto)
    return f"without {words}" if cut.first else f"from turn {cut.upto + 1}"


def cut_notice(cut: Cut, *, is_new: bool, why: str = FULL) -> tuple[str, str]:
    """The notice about turns that are left out, and the summary, where that is to be shown.

    why: the end of its first sentence.
    """
    text = f"{cut_words(cut)}{why}."
    if cut.summary is None:
        return text, ""
    which = turns_words(cut.summary.first, cut.summary.last)
    if not is_new:
        return f"{text} The summary of {which} still is sent.", ""
    return f"{text} The model's summary of {which} is sent instead:", cut.summary.text
