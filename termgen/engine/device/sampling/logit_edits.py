"""Changes to single logits before anything else is done: allowed ids, a bias, bad words.

The runner gathers `LogitEdits` from its tables for a step in which some row has any; rows that have
none come out unchanged.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from termgen.vocabulary.request import MAX_BAD_SEQUENCE_TOKENS, MAX_BAD_SEQUENCES
from termgen.vocabulary.sampling_params import MAX_LOGIT_BIAS
from termgen.vocabulary.step import AddedRow

NOTHING = -1
"""Placeholder for no id, in tables and in the tokens they are compared with."""


class LogitEdits(NamedTuple):
    """Row `i` belongs to row `i` of the logits. B rows, vocabulary of V."""

    bias_ids: torch.Tensor
    """[B, N] int32: ids to raise or lower, each once; the rest is id 0 with a bias of 0."""
    biases: torch.Tensor
    """[B, N] float32"""
    allowed_bits: torch.Tensor
    """[B, ceil(V / 8)] uint8: bit `i % 8` of byte `i // 8` says whether id i may be drawn."""
    bad_words: torch.Tensor
    """[B, W, L] int32: token sequences that must not be completed, at the right end of L places
    that `NOTHING` fills up."""
    recent: torch.Tensor
    """[B, L - 1] int32: the tokens generated last, the newest at the right end; `NOTHING` where
    none was generated."""


def edit_logits(logits: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
    """logits [B, V] float32; a new tensor.

    Bias and bad words are one addition each: of 0 or minus infinity where several entries name one
    id, so that their order does not matter.
    """
    logits = logits.masked_fill(~_unpack(edits.allowed_bits, logits.shape[1]), -torch.inf)
    logits.scatter_add_(1, edits.bias_ids.long(), edits.biases)
    last = edits.bad_words[:, :, -1].long()  # [B, W]
    before = edits.bad_words[:, :, :-1]  # [B, W, L - 1]
    matches = (before == NOTHING) | (before == edits.recent.unsqueeze(1))
    forbidden = matches.all(dim=-1) & (last != NOTHING)
    return logits.scatter_add_(
        1,
        last.clamp(min=0),
        torch.zeros_like(last, dtype=logits.dtype).masked_fill_(forbidden, -torch.inf),
    )


def _unpack(bits: torch.Tensor, size: int) -> torch.Tensor:
    """[B, ceil(size / 8)] uint8 -> [B, size] bool, the lowest bit of a byte first."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(2) >> places) & 1).bool().flatten(1)[:, :size]


class LogitEditTables:
    """Per-slot tables on the device: R rows, each neutral until a request with edits gets the slot.

    A part of `RequestState`. Rows change only on the compute stream, as all request state does.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._edited: set[int] = set()
        """Slots whose rows are not neutral."""
        words = (rows, MAX_BAD_SEQUENCES, MAX_BAD_SEQUENCE_TOKENS)
        self.counts = torch.zeros((rows, 3), dtype=torch.int32, device=device)
        """[R, 3] number of biases and of bad words of each slot, at the front of its row, and
        whether only some ids are allowed."""
        self.bias_ids = torch.zeros((rows, MAX_LOGIT_BIAS), dtype=torch.int32, device=device)
        self.biases = torch.zeros((rows, MAX_LOGIT_BIAS), dtype=torch.float32, device=device)
        num_bytes = -(-vocab_size // 8)
        self.allowed_bits = torch.full((rows, num_bytes), 255, dtype=torch.uint8, device=device)
        self.bad_words = torch.full(words, NOTHING, dtype=torch.int32, device=device)

    def take_over(self, row: AddedRow) -> None:
        """A request gets a slot: its edits, or none, are the slot's from now on."""
        if row.params.edits_logits:
            self._edited.add(row.slot)
        elif row.slot not in self._edited:
            return
        else:
            self._edited.remove(row.slot)
        self._set(row)

    def _set(self, row: AddedRow) -> None:
        params, slot = row.params, row.slot
        bias_ids = np.zeros(MAX_LOGIT_BIAS, np.int32)
        biases = np.zeros(MAX_LOGIT_BIAS, np.float32)
        pairs = params.bias_pairs
        bias_ids[: len(pairs)] = [token_id for token_id, _ in pairs]
        biases[: len(pairs)] = [bias for _, bias in pairs]
        words = np.full(self.bad_words.shape[1:], NOTHING, np.int32)
        for i, sequence in enumerate(row.bad_token_ids):
            words[i, words.shape[1] - len(sequence) :] = sequence
        is_limited = params.allowed_token_ids is not None
        counts = np.asarray((len(pairs), len(row.bad_token_ids), is_limited), np.int32)
        self._write(self.counts, slot, counts)
        self._write(self.bias_ids, slot, bias_ids)
        self._write(self.biases, slot, biases)
        self._write(self.bad_words, slot, words)
        self._write(self.allowed_bits, slot, self._allowed(params.allowed_token_ids))

    def _allowed(self, ids: tuple[int, ...] | None) -> np.ndarray:
        may = np.full(self.vocab_size, ids is None)
        if ids is not None:
            may[list(ids)] = True
        return np.packbits(may, bitorder="little")

    def _write(self, table: torch.Tensor, slot: int, values: np.ndarray) -> None:
        host = torch.from_numpy(values)
        if table.device.type == "cuda":
            host = host.pin_memory()
        table[slot].copy_(host, non_blocking=True)

    def gather(
        self,
        slots: torch.Tensor,  # [B] int64
        lengths: torch.Tensor,  # [B] int64, tokens before the one to draw
        prompt_len: torch.Tensor,  # [B] int64
        *,
        token_ids: torch.Tensor,  # [R, max_model_len] int32
    ) -> LogitEdits:
        """The edits of a step's rows, with the tokens that they have generated last."""
        back = torch.arange(MAX_BAD_SEQUENCE_TOKENS - 1, 0, -1, device=slots.device)
        positions = lengths.unsqueeze(1) - back
        recent = token_ids[slots.unsqueeze(1), positions.clamp(min=0)]
        recent = recent.masked_fill(positions < prompt_len.unsqueeze(1), NOTHING)
        return LogitEdits(
            self.bias_ids[slots],
            self.biases[slots],
            self.allowed_bits[slots],
            self.bad_words[slots],
            recent,
        )
