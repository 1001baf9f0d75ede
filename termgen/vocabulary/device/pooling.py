"""What a request asks for that wants a vector of its prompt and no tokens.

The device pools hidden states (`runner/pooling.py`); what follows is cheap and done here, by the
front end: cutting the vector, and giving it length 1.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from termgen.errors import RequestError

FloatVector = npt.NDArray[np.float32]


class PoolingKind(enum.IntEnum):
    """The hidden states that become the vector. The numbers are those of the scheduler's column,
    where 0 is a request that generates."""

    LAST = 1
    """That of the last token."""
    MEAN = 2
    """The mean over all tokens."""
    CLS = 3
    """That of the first token."""


class PoolingSpan(NamedTuple):
    """Tokens of one row that a step pools."""

    row: int
    """Batch row."""
    start: int
    """Position of the first of them in the prompt."""
    num_tokens: int
    kind: PoolingKind
    length: int
    """Tokens of the whole prompt, if these are its last; else 0."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How a prompt becomes a vector."""

    kind: PoolingKind = PoolingKind.LAST
    normalize: bool = True
    """Give the vector length 1."""
    dimensions: int | None = None
    """Keep so many numbers, the first ones, for models trained for that (Matryoshka)."""

    def __post_init__(self) -> None:
        if self.dimensions is not None and self.dimensions < 1:
            raise RequestError("dimensions must be at least 1", param="dimensions")

    @property
    def needs_all(self) -> bool:
        """Hidden states of other tokens than the last are needed, so none of them may come from the
        prefix cache, which has keys and values only."""
        return self.kind is not PoolingKind.LAST

    def finish(self, pooled: FloatVector) -> FloatVector:
        """The vector of a prompt, from what the device pooled."""
        vector = pooled[: self.dimensions].astype(np.float32)
        if self.normalize:
            vector /= max(float(np.linalg.norm(vector)), 1e-12)
        return vector


@dataclass(frozen=True, slots=True)
class PoolingInfo:
    """How a model's files say that its vectors are made."""

    kind: PoolingKind = PoolingKind.LAST
    normalize: bool = True
    size: int = 0
    """Numbers of a vector; 0: unknown."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that go in front of others, by what these are for: `query`, `document`."""
    default_prompt: str | None = None
    """The name of the one that is used where none is asked for."""
    refusal: str = ""
    """Why the model's vectors cannot be made; "" if they can."""
    is_declared: bool = False
    """True if the files say so, and it is not the default of any model."""

    def params(self, dimensions: int | None = None) -> PoolingParams:
        """Raises RequestError."""
        if self.refusal:
            raise RequestError(f"this model makes no embeddings: {self.refusal}", param="model")
        if dimensions is not None and dimensions > self.size:
            raise RequestError(
                f"dimensions must be at most {self.size}, the size of this model's vectors, not"
                f" {dimensions}",
                param="dimensions",
            )
        return PoolingParams(self.kind, self.normalize, dimensions)

    def text(self, prompt_name: str | None) -> str:
        """The text to put in front of an input. Raises RequestError."""
        name = prompt_name or self.default_prompt
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise RequestError(
                f"this model's files have no prompt {name!r}; they have: {known}",
                param="prompt_name",
            )
        return self.prompts[name]
