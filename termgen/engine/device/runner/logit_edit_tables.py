"""Per-slot tables of logit edits: a bias, allowed ids, bad words. On the device, for the sampler.

A part of `RequestState`, made once a request asks for an edit, because most engines never see one.
Rows change only on the compute stream, as all request state does.
"""

from __future__ import annotations

import numpy as np
import torch

from termgen.engine.device.sampling.logit_edits import NOTHING, LogitEdits
from termgen.vocabulary.request import MAX_BAD_SEQUENCE_TOKENS, MAX_BAD_SEQUENCES
from termgen.vocabulary.sampling_params import MAX_LOGIT_BIAS
from termgen.vocabulary.step import AddedRow


class LogitEditTables:
    """R rows, of which each is neutral until it is set."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._edited: set[int] = set()
        """Slots whose rows are not neutral."""
        words = (rows, MAX_BAD_SEQUENCES, MAX_BAD_SEQUENCE_TOKENS)
        self.counts = torch.zeros((rows, 2), dtype=torch.int32, device=device)
        """How many biases and how many bad words a slot has: the first ones of its row."""
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
        counts = np.asarray((len(pairs), len(row.bad_token_ids)), np.int32)
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
        *,
        token_ids: torch.Tensor,  # [R, max_model_len] int32
        total_len: torch.Tensor,  # [R] int64
        prompt_len: torch.Tensor,  # [R] int64
    ) -> LogitEdits:
        """The edits of a step's rows, with the tokens that they have generated last."""
        back = torch.arange(MAX_BAD_SEQUENCE_TOKENS - 1, 0, -1, device=slots.device)
        positions = total_len[slots].unsqueeze(1) - back
        recent = token_ids[slots.unsqueeze(1), positions.clamp(min=0)]
        recent = recent.masked_fill(positions < prompt_len[slots].unsqueeze(1), NOTHING)
        return LogitEdits(
            self.bias_ids[slots],
            self.biases[slots],
            self.allowed_bits[slots],
            self.bad_words[slots],
            recent,
        )
