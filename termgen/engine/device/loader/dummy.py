"""Random weights for a model without a checkpoint: benchmarks and tests need only its shape.

Deterministic in (seed, tensor name), so neither the order of layers nor fusing changes a value.
Scales keep activations near one through any depth, so that sampled tokens vary.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from termgen.engine.device.layers.weight_slot import WeightSlot


class DummyTarget(Protocol):
    @property
    def device(self) -> torch.device: ...

    def weight_slots(self) -> Iterable[WeightSlot]: ...


def load_dummy(model: DummyTarget, seed: int) -> None:
    """Fills every parameter. Values are drawn on the model's device, and depend on its kind."""
    generator = torch.Generator(device=model.device)
    with torch.no_grad():
        for slot in _smallest(model.weight_slots()):
            # A 32-bit seed: of a longer one the CPU's generator uses the low half alone.
            generator.manual_seed(zlib.crc32(f"{seed} {slot.name}".encode()))
            slot.load(_random_tensor(slot, generator))


def _smallest(slots: Iterable[WeightSlot]) -> Iterator[WeightSlot]:
    """The pieces of what has any: less has to be held at a time."""
    for slot in slots:
        yield from slot.pieces or (slot,)


def _random_tensor(slot: WeightSlot, generator: torch.Generator) -> torch.Tensor:
    tensor = torch.empty(slot.shape, device=generator.device)
    if slot.role == "norm":
        return tensor.normal_(1.0 - slot.offset, 0.05, generator=generator)
    if slot.role == "bias":
        return tensor.normal_(0.0, 0.02, generator=generator)
    return tensor.normal_(0.0, slot.shape[-1] ** -0.5, generator=generator)
