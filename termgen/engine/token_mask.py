"""Which tokens a constrained row may sample next: the masks of a plan, and who makes them.

Vocabulary. A mask is filled by another thread while the device works on something else; whoever
needs its bits waits for them. Matchers and grammars are seen here only by what others ask of them.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


class TokenMatcher(Protocol):
    """One answer's way through a grammar."""

    @property
    def num_words(self) -> int:
        """Words of 32 tokens that a mask has."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on by a token. False if the grammar does not allow it, then and for ever after."""
        ...

    @property
    def is_ended(self) -> bool:
        """The answer is complete, and nothing could follow."""
        ...

    def fill(self, bits: IntArray) -> None:
        """Write the mask of the next token: bit i % 32 of word i // 32 stands for token i."""
        ...


class TokenGrammar(Protocol):
    """A compiled grammar; any thread may begin answers."""

    def start(self, *, ends_at_eos: bool) -> TokenMatcher:
        """A matcher at the beginning. Without `ends_at_eos` an end token is only allowed where
        nothing else is."""
        ...


class TokenMask:
    """The bits of one row, once they are there."""

    __slots__ = ("_bits", "_job")

    def __init__(self, bits: IntArray, job: Future[None] | None = None) -> None:
        self._bits = bits  # [num_words]
        self._job = job

    def wait(self, timeout_s: float) -> bool:
        """Whether the bits are there in time."""
        return self._job is None or bool(wait((self._job,), timeout_s).done)

    def bits(self) -> IntArray:
        """Waits. Raises what filling raised."""
        if self._job is not None:
            self._job.result()
        return self._bits

    def __reduce__(self) -> tuple[type[TokenMask], tuple[IntArray]]:
        return TokenMask, (self.bits(),)  # a plan can be sent to another process


@dataclass(frozen=True, slots=True, eq=False)
class RowMasks:
    """The masks of the rows of a plan that sample under a grammar."""

    rows: IntArray
    """[num_masks] index of each in the plan."""
    masks: tuple[TokenMask, ...]

    def bits(self) -> IntArray:
        """[num_masks, num_words]; waits for those still being filled."""
        return np.stack([mask.bits() for mask in self.masks])
