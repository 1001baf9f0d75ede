"""Which of a layer's experts have a copy on the GPU: those that tokens went to most.

All experts stay in main memory, so giving one its place on the GPU is a copy. The GPU has the same
number of each layer's. A step reads from tables on the GPU where an expert is, and they change
between steps, in the order of the GPU's stream: within a step both sides agree.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from termgen.engine.device.host_experts.host_call import call_on
from termgen.engine.device.host_experts.host_list import HostExperts
from termgen.engine.device.native.expert_kernels import Activation, Job
from termgen.engine.device.native.experts import MOST_TOKENS, BlockTable, ExpertWeights
from termgen.engine.device.quantization.group_experts import GroupExperts
from termgen.vocabulary.memory_ledger import HostExperts as HostExpertsFacts

STEPS_BETWEEN = 4
"""Steps after which an expert may change places with another one. It takes the time of about a
tenth of a step."""
KEPT = 0.998
"""Weight of what was counted, each time that an expert may change places."""
LEAST_GAIN, LEAST_RATIO = 8.0, 1.5
"""How much more tokens must go to an expert than to the one whose place it takes."""


class HostCompute:
    """The CPU's part of all layers, which run one after another and share its memory."""

    def __init__(
        self, hidden: int, top_k: int, max_tokens: int, *, device: torch.device, threads: int
    ) -> None:
        """top_k: an expert of all tokens included."""
        is_cuda = device.type == "cuda"

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, pin_memory=is_cuda)

        self._device, self._threads = device, threads
        self._x, self._out = buffer(max_tokens, hidden), buffer(max_tokens, hidden)
        self._codes = buffer(max_tokens, top_k, dtype=torch.int32)
        self._weights = buffer(max_tokens, top_k)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._stream = _new_stream(device) if is_cuda else None
        self._jobs: dict[tuple[int, int, int], Job] = {}
        self.rests = False
        """True while an engine starts, to rehearse and record steps: rehearsals then compute no
        experts here, which would take the time of as many long prompts."""

    def reserve(self, experts: ExpertWeights) -> None:
        """Make room for a layer. Before the first step."""
        needed = experts.scratch_bytes(MOST_TOKENS, self._codes.shape[1])
        if needed > self._scratch.nbytes:
            self._scratch = torch.empty(needed, dtype=torch.uint8)

    def begin(
        self, places: ExpertPlaces, x: torch.Tensor, codes: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Start computing the experts in main memory: [T, hidden] float32, to be read after `end`.
        codes: see `ExpertPlaces`."""
        num_tokens = len(x)
        if self._stream is None:
            self._take(x, codes, weights)
            for job in self._jobs_of(places, num_tokens):
                places.experts.program(ctypes.addressof(job))
            return self._out[:num_tokens].clone()
        computes = not self.rests or torch.cuda.is_current_stream_capturing()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._take(x, codes, weights)
            for job in self._jobs_of(places, num_tokens) if computes else ():
                call_on(self._stream, places.experts.program, ctypes.addressof(job))
            return self._out[:num_tokens].to(self._device, non_blocking=True)

    def end(self) -> None:
        """Have the GPU wait for the result."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _take(self, x: torch.Tensor, codes: torch.Tensor, weights: torch.Tensor) -> None:
        num_tokens = len(x)
        self._x[:num_tokens].copy_(x, non_blocking=True)
        self._codes[:num_tokens].copy_(codes, non_blocking=True)
        self._weights[:num_tokens].copy_(weights, non_blocking=True)

    def _jobs_of(self, places: ExpertPlaces, num_tokens: int) -> list[Job]:
        """Jobs live as long as recordings that call them: they are made once."""
        jobs = []
        for first in range(0, num_tokens, MOST_TOKENS):
            part = slice(first, min(first + MOST_TOKENS, num_tokens))
            key = places.layer, first, part.stop
            if key not in self._jobs:
                self._jobs[key] = places.experts.job(
                    self._x[part],
                    self._codes[part],
                    self._weights[part],
                    self._out[part],
                    self._scratch,
                    counts=places.counts,
                    threads=self._threads,
                )
            jobs.append(self._jobs[key])
        return jobs


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class ExpertPlaces(nn.Module):
    """One layer's experts."""

    def __init__(
        self,
        layer: int,
        host: tuple[HostExperts, HostExperts],
        compute: HostCompute,
        *,
        num_experts: int,
        num_on_card: int,
        activation: Activation,
        biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        weighs_inputs: bool = False,
    ) -> None:
        """host: gate and up, and down; they may have one more matrix, of an expert of all tokens,
        which is on the GPU always. num_experts, num_on_card: without it. biases: on the GPU."""
        super().__init__()
        self.layer, self.compute = layer, compute
        self.num_experts, self.num_on_card = num_experts, num_on_card
        device = host[0].build.device
        self.num_ids = num_ids = len(host[0])
        blocks = [matrices.blocks for matrices in host]
        tables = [BlockTable.of(one) for one in blocks]
        assert tables[0] is not None and tables[1] is not None, "the kernels do not cover these"
        of_host = [None if bias is None else bias.float().cpu().contiguous() for bias in biases]
        self.experts = ExpertWeights(
            tables[0], tables[1], activation, of_host[0], of_host[1], weighs_inputs
        )
        self.counts = torch.zeros(num_ids, dtype=torch.int64)
        """How many tokens went to each expert."""
        self.on_card = list(range(num_on_card))
        """The expert in each place on the GPU, but for that of all tokens."""
        shared = list(range(num_experts, num_ids))
        slots = torch.full((num_ids,), -1, dtype=torch.int32)
        slots[self.on_card + shared] = torch.arange(num_on_card + len(shared), dtype=torch.int32)
        ids = torch.arange(num_ids, dtype=torch.int32)
        self.slots: torch.Tensor
        """[num_ids] int32: each expert's place on the GPU, or -1."""
        self.codes: torch.Tensor
        """[num_ids] int32, for the CPU: an expert that it is to compute; -1 - expert of others."""
        self.register_buffer("slots", slots.to(device), persistent=False)
        self.register_buffer(
            "codes", torch.where(slots < 0, ids, -1 - ids).to(device), persistent=False
        )
        here = self.on_card + shared
        self.gate_up: GroupExperts | None = None
        self.down: GroupExperts | None = None
        """The matrices of the experts on the GPU."""
        if here:
            self.gate_up, self.down = (_on_card(matrices, here) for matrices in host)
        self.biases = [None if bias is None or not here else bias[here] for bias in biases]
        self._biases_of_all = biases
        compute.reserve(self.experts)

    @property
    def num_away(self) -> int:
        return self.num_experts - self.num_on_card

    def replace(self, slot: int, expert: int) -> None:
        """Give an expert the place of another one, for steps that are launched from now on."""
        before, device = self.on_card[slot], self.slots.device
        kept = (self.gate_up, self.experts.gate_up), (self.down, self.experts.down)
        for matrices, table in kept:
            assert matrices is not None
            matrices.replace(slot, table.matrices[expert].quantized(device))
        for bias, of_all in zip(self.biases, self._biases_of_all, strict=True):
            if bias is not None and of_all is not None:
                bias[slot] = of_all[expert]
        self.slots[before], self.slots[expert] = -1, slot
        self.codes[before], self.codes[expert] = before, -1 - expert
        self.on_card[slot] = expert


def _on_card(matrices: HostExperts, here: Sequence[int]) -> GroupExperts:
    """Copies of some matrices on the GPU."""
    form, build, blocks = matrices.form, matrices.build, matrices.blocks
    card = GroupExperts((len(here), *matrices.shape[1:]), build, form.num_bits)
    card.allocate(form)
    for slot, expert in enumerate(here):
        card.replace(slot, blocks[expert].quantized(build.device))
    return card


class Placement:
    """All layers of a model."""

    def __init__(self, layers: Sequence[ExpertPlaces]) -> None:
        self.layers = list(layers)
        self._used = np.zeros((len(layers), layers[0].num_experts))
        self._counted = np.zeros_like(self._used, dtype=np.int64)
        self._steps_left = STEPS_BETWEEN

    @property
    def facts(self) -> HostExpertsFacts:
        first, each = self.layers[0], (layer.experts for layer in self.layers)
        nbytes = sum(experts.num_experts * experts.expert_bytes for experts in each)
        return HostExpertsFacts(first.num_on_card, first.num_experts, nbytes)

    @property
    def counts(self) -> np.ndarray:
        """[layers, num_experts] int64: tokens that went to each expert."""
        num_experts = self._used.shape[1]
        return np.stack([layer.counts.numpy()[:num_experts] for layer in self.layers])

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Compute nothing in main memory but what is replayed, and count nothing."""
        compute = self.layers[0].compute
        compute.rests = True
        before = [layer.counts.clone() for layer in self.layers]
        try:
            yield
        finally:
            compute.rests = False
            for layer, counts in zip(self.layers, before, strict=True):
                layer.counts.copy_(counts)

    def before_step(self) -> None:
        """Now and then give the most used of all experts that are not on the GPU the place of the
        least used one of its layer."""
        self._steps_left -= 1
        if self._steps_left > 0 or not self.layers[0].num_on_card or not self.layers[0].num_away:
            return
        self._steps_left = STEPS_BETWEEN
        counts = self.counts
        self._used *= KEPT
        self._used += counts - self._counted
        self._counted = counts
        found = self.best_change()
        if found is not None:
            layer, slot, expert = found
            self.layers[layer].replace(slot, expert)

    def best_change(self) -> tuple[int, int, int] | None:
        """(layer, place, expert) of the change that gains most; None if none gains enough."""
        on_card = np.asarray([layer.on_card for layer in self.layers])
        of_cards = np.take_along_axis(self._used, on_card, 1)
        away = self._used.copy()
        np.put_along_axis(away, on_card, -1.0, 1)
        least, most = of_cards.min(1), away.max(1)
        gains = np.where(most > LEAST_RATIO * least + LEAST_GAIN, most - least, 0.0)
        layer = int(gains.argmax())
        if not gains[layer]:
            return None
        return layer, int(of_cards[layer].argmin()), int(away[layer].argmax())
