"""What a drafter is, and what it reads and writes of every slot."""

from __future__ import annotations

from typing import Protocol

import torch

from termgen.vocabulary.step import StepPlan


class DraftedRows(Protocol):
    """Rows of the request state. R slots."""

    token_ids: torch.Tensor  # [R, max_model_len] int32
    total_len: torch.Tensor  # [R] int64
    finished: torch.Tensor  # [R] bool
    edit_kinds: torch.Tensor  # [R] int64, see `sampling.metadata`
    num_drafts: torch.Tensor  # [R] int64


class Drafter(Protocol):
    """Guesses tokens. Runs on the device, at the end of each step."""

    num_tokens: int
    """Most drafts of a row."""

    def step_ended(self, plan: StepPlan, took_ns: int, state: DraftedRows) -> None:
        """Learn from a step, and write drafts behind the tokens of its rows, and their number.

        plan: as it ran, with the drafts that were there. took_ns: the time from the plan's arrival
        to here.
        """
        ...
