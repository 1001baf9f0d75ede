"""From hidden states to the vectors of prompts. Skip it on a first reading."""

from __future__ import annotations

import numpy as np
import torch

from termgen.vocabulary.device.pooling import PoolingKind
from termgen.vocabulary.step import StepPlan


class Pooler:
    """Pools the rows of steps; what a prompt computed in chunks needs of earlier ones is kept."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._max_num_seqs = max_num_seqs
        self._device = device
        self._carried: torch.Tensor | None = None
        """[max_num_seqs, hidden] float32: by slot, the sum so far (MEAN) or the first token's
        hidden state (CLS). Made when first needed. A row starts anew at position 0, to which a
        preempted request returns, as such requests do not read the prefix cache."""

    @staticmethod
    def needs_all(plan: StepPlan) -> bool:
        """True if other hidden states than those of the rows' last tokens are pooled, or if those
        of drafts stand between these."""
        kinds = (span.kind is not PoolingKind.LAST for span in plan.pooled)
        return plan.num_drafts > 0 or any(kinds)

    def __call__(
        self,
        plan: StepPlan,
        hidden: torch.Tensor,  # [T, H], or [B, H] of each row's last token
        *,
        has_all: bool,
    ) -> torch.Tensor:  # [N, H] float32
        """The vectors of the prompts that end in this step, in the order of their spans."""
        ends = np.cumsum(plan.num_tokens) - 1
        vectors = [hidden.new_zeros((0, hidden.shape[1]), dtype=torch.float32)]
        order: list[int] = []
        for kind in PoolingKind:
            spans = [(i, span) for i, span in enumerate(plan.pooled) if span.kind is kind]
            if not spans:
                continue
            rows = np.asarray([span.row for _, span in spans])
            lasts = ends[rows] if has_all else rows
            if kind is PoolingKind.LAST:
                pooled = hidden[self._upload(lasts)].float()
            else:
                pooled = self._whole(plan, kind, hidden, rows, lasts)
            ended = [at for at, (_, span) in enumerate(spans) if span.length]
            order += [spans[at][0] for at in ended]
            if len(ended) < len(spans):
                pooled = pooled[self._upload(np.asarray(ended, np.int64))]
            vectors.append(pooled)
        found = torch.cat(vectors)
        return found[self._upload(np.argsort(order))] if len(vectors) > 2 else found

    def _whole(
        self,
        plan: StepPlan,
        kind: PoolingKind,
        hidden: torch.Tensor,
        rows: np.ndarray,
        lasts: np.ndarray,
    ) -> torch.Tensor:
        """Vectors of these rows over all their tokens, as far as they are computed."""
        spans = [span for span in plan.pooled if span.kind is kind]
        firsts = lasts + 1 - np.asarray([span.num_tokens for span in spans])
        if kind is PoolingKind.MEAN:
            parts = [hidden[a : b + 1].float().sum(0) for a, b in zip(firsts, lasts, strict=True)]
            pooled = torch.stack(parts)
        else:
            pooled = hidden[self._upload(firsts)].float()
        goes_on = np.asarray([span.start > 0 for span in spans])
        if goes_on.any() or not all(span.length for span in spans):
            carried = self._carried_of(hidden.shape[1])
            slots = self._upload(plan.slots[rows])
            began = carried[slots] * self._upload(goes_on[:, None].astype(np.float32))
            if kind is PoolingKind.MEAN:
                pooled = began + pooled
            else:
                pooled = torch.where(self._upload(goes_on[:, None]), began, pooled)
            carried[slots] = pooled
        if kind is PoolingKind.MEAN:
            lengths = np.asarray([[max(1, span.length)] for span in spans], np.float32)
            pooled = pooled / self._upload(lengths)
        return pooled

    def _carried_of(self, size: int) -> torch.Tensor:
        if self._carried is None:
            self._carried = torch.zeros((self._max_num_seqs, size), device=self._device)
        return self._carried

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        is_index = values.dtype.kind == "i"
        tensor = torch.from_numpy(values.astype(np.int64) if is_index else values)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
