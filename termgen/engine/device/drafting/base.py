"""What a drafter is, and what it reads and writes of every slot.

A drafter has a half on the host, which learns what drafts give and says how many there shall be,
and, where its guesses come from a model, a half on the device, which runs in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from termgen.engine.device.attention.base import AttentionMetadata
from termgen.vocabulary.events import DraftChoice
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import StepPlan, StepResult


class DraftedRows(Protocol):
    """Rows of the request state. R slots."""

    token_ids: torch.Tensor  # [R, max_model_len] int32
    total_len: torch.Tensor  # [R] int64
    num_computed: torch.Tensor  # [R] int64
    finished: torch.Tensor  # [R] bool
    edit_kinds: torch.Tensor  # [R] int64, see `sampling.metadata`
    num_drafts: torch.Tensor  # [R] int64
    block_tables: torch.Tensor  # [groups, R, max_blocks] int32


class DraftedBatch(Protocol):
    """A step's inputs as its model had them: B rows, T tokens."""

    @property
    def slots(self) -> torch.Tensor: ...  # [B] int64

    @property
    def num_tokens(self) -> torch.Tensor: ...  # [B] int64, 0 for a padded row

    @property
    def positions(self) -> torch.Tensor: ...  # [T] int64

    @property
    def metadata(self) -> tuple[AttentionMetadata, ...]: ...


@dataclass(frozen=True, slots=True, eq=False)
class TargetStates:
    """What the pass of a step leaves of each of its tokens."""

    normed: torch.Tensor  # [T, hidden], behind the final norm
    kept: Sequence[torch.Tensor] = ()  # each [T, hidden], see `ForwardContext.kept`


class DraftModel(Protocol):
    """The half on the device.

    It has layers whose keys and values lie behind the target's in `kv_caches`, under the same block
    tables and slots, so it sees every token that the target computes, those of prompts too.
    """

    kept_layers: tuple[int, ...]
    """Layers of the target whose inputs it reads: see `ForwardContext`."""
    reads_states: bool
    """False for one that needs no `TargetStates` of any but the sampled tokens."""
    is_lookup: bool
    """True if making drafts takes next to no time."""
    num_ahead: int
    """Positions behind a row's computed ones for which it may write keys and values. Those without
    a block go to the null block."""

    def draft(
        self,
        batch: DraftedBatch,
        states: TargetStates,
        kv_caches: list[torch.Tensor],
        rows: DraftedRows,
        num_drafts: int,
    ) -> None:
        """Write keys and values of the step's tokens, then drafts behind the tokens of its rows,
        and their number: 0 for a row that has drawn none.

        Called once the rows have the step's tokens. Operations on tensors alone, whose shapes
        follow from those of the batch and from num_drafts: a recording may hold them.
        """


class Drafter(Protocol):
    """Guesses tokens. Runs at the end of each step."""

    num_tokens: int
    """Most drafts of a row."""
    model: DraftModel | None
    """None: `step_ended` writes the drafts."""
    num_wanted: int
    """Drafts of a row that `model` is to make at the end of the next step."""
    lengths: Sequence[int]
    """Numbers of drafts, one for all rows of a step, where the host cannot see how many each has;
    none, where it can."""
    may_idle: bool
    """True if `is_idle` may be."""
    is_idle: bool
    """True if no drafts need be made at the end of the step that `places` was asked about last."""
    choice: DraftChoice | None
    """Why the newest step with places for drafts got as many as `places` said."""

    def places(self, plan: StepPlan, state: DraftedRows, lengths: Sequence[int]) -> IntArray:
        """[num_rows] most drafts that each row of a planned step computes; no more than planned
        will be. lengths: those of `lengths` that the step can have."""
        ...

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from a step that has landed. plan: with its places for drafts."""
        ...

    def step_ended(self, plan: StepPlan, took_ns: int, state: DraftedRows) -> None:
        """Learn from a step, and write the number of drafts that each of its rows gets.

        plan: as it ran, with the drafts that were there. took_ns: the time from the plan's arrival
        to here.
        """
