"""Fills a model from a checkpoint, strictly, or with random numbers.

Called by the model runner. Each tensor is read once and goes straight into its place in the
model's type, fused or quantized on the way. Every parameter must be filled and every tensor used;
what does not fit is an error that names the tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.errors import CorruptFileError, UnsupportedModelError


class TensorSource(Protocol):
    """The part of a checkpoint that loading needs."""

    def names(self) -> Sequence[str]: ...

    def tensor(self, name: str) -> torch.Tensor: ...


@runtime_checkable
class PartedSource(Protocol):
    """A checkpoint that can read a tensor in parts, so that it never exists as a whole."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor's rows, some at a time."""


@runtime_checkable
class StoredSource(Protocol):
    """A checkpoint some of whose matrices are in blocks, which it gives as they are."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def kind(self, name: str) -> str | None:
        """The kind of the matrix's blocks; None if only its numbers can be had."""

    def stored(self, name: str) -> Iterator[StoredRows]:
        """The rows of a matrix of some kind, some at a time."""


class LoadableModel(Protocol):
    """A model that says which tensors it wants."""

    def weight_slots(self) -> Iterable[WeightSlot]: ...

    def ignored_weights(self) -> tuple[str, ...]: ...

    def repeated_weights(self) -> dict[str, str]: ...


def load_weights(
    model: LoadableModel,
    checkpoint: TensorSource,
    *,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Fills every parameter. `progress` is called with the part done, rising from above 0 to 1."""
    names = checkpoint.names()  # in the order in which reading is cheapest
    slots = _slots_in(model.weight_slots(), set(names))
    _check_names(set(slots), names, model.ignored_weights())
    _check_repeated(checkpoint, set(names), model.repeated_weights())
    num_elements = sum(_num_elements(slot) for slot in slots.values())
    num_loaded = 0
    with torch.no_grad():
        for slot in (slots[name] for name in names if name in slots):
            if _keeps_blocks(slot, checkpoint):
                assert isinstance(checkpoint, StoredSource) and slot.load_stored is not None
                _check_shape(slot, checkpoint.shape(slot.name))
                first_row = 0
                for stored in checkpoint.stored(slot.name):
                    slot.load_stored(stored, first_row)
                    first_row += len(stored.blocks)
            elif slot.load_rows is not None and isinstance(checkpoint, PartedSource):
                _check_shape(slot, checkpoint.shape(slot.name))
                first_row = 0
                for rows in checkpoint.parts(slot.name):
                    _check_type(slot, rows)
                    slot.load_rows(rows, first_row)
                    first_row += len(rows)
            else:
                tensor = checkpoint.tensor(slot.name)
                _check_shape(slot, tuple(tensor.shape))
                _check_type(slot, tensor)
                slot.load(tensor)
            num_loaded += _num_elements(slot)
            if progress is not None:
                progress(num_loaded / num_elements)
    if isinstance(model, nn.Module):
        try:
            check_finite(model)
        except CorruptFileError as error:
            raise _named_in_file(checkpoint) or error from None


def kept_kinds(
    model: LoadableModel, checkpoint: TensorSource
) -> Iterator[tuple[WeightSlot, str | None]]:
    """Every slot that loading would fill, with the kind of the blocks that it would keep. Raises
    CorruptFileError, as loading does, for tensors that are not there or too many."""
    names = checkpoint.names()
    slots = _slots_in(model.weight_slots(), set(names))
    _check_names(set(slots), names, model.ignored_weights())
    for slot in slots.values():
        if _keeps_blocks(slot, checkpoint):
            assert isinstance(checkpoint, StoredSource)
            yield slot, checkpoint.kind(slot.name)
        else:
            yield slot, None


def _keeps_blocks(slot: WeightSlot, checkpoint: TensorSource) -> bool:
    """True if the checkpoint has blocks of a kind that the slot takes as they are."""
    if not slot.kinds or not isinstance(checkpoint, StoredSource):
        return False
    return checkpoint.kind(slot.name) in slot.kinds


@torch.no_grad()
def check_finite(model: nn.Module) -> None:
    """Raises CorruptFileError for NaN or infinity among the weights. Each is read once on its
    device, and the device is waited for once."""
    parameters = [(n, p) for n, p in model.named_parameters() if p.is_floating_point()]
    # NaN and infinity survive a sum, and summing in a weight's own type is fastest by far.
    sums = [p.sum().double() for _, p in parameters]
    if not sums:
        return
    for (name, parameter), is_finite in zip(
        parameters, torch.stack(sums).isfinite().tolist(), strict=True
    ):
        # A sum of finite values may overflow, but not in float64.
        if not is_finite and not bool(parameter.sum(dtype=torch.float64).isfinite()):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise CorruptFileError(f"weight {name} has NaN or infinite values in {dtype}")


def _named_in_file(checkpoint: TensorSource) -> CorruptFileError | None:
    """The error for a tensor of the file; None where the change of type made the values."""
    for name in checkpoint.names():
        if not bool(checkpoint.tensor(name).isfinite().all()):
            return CorruptFileError(f"tensor {name} has NaN or infinite values")
    return None


def _slots_in(wanted: Iterable[WeightSlot], present: set[str]) -> dict[str, WeightSlot]:
    """Slots by name, in the form that this checkpoint has them."""
    slots: dict[str, WeightSlot] = {}
    for slot in wanted:
        if slot.pieces and slot.name not in present:
            slots.update(_slots_in(slot.pieces, present))
        else:
            slots[slot.name] = slot
    return slots


def _num_elements(slot: WeightSlot) -> int:
    return int(torch.Size(slot.shape).numel())


def _check_names(wanted: set[str], present: Sequence[str], ignored: tuple[str, ...]) -> None:
    missing = wanted.difference(present)
    if missing:
        raise CorruptFileError(f"the checkpoint lacks {_some(missing)}")
    extra = {name for name in present if name not in wanted and not name.endswith(ignored)}
    if extra:
        raise CorruptFileError(
            f"the checkpoint has {_some(extra)}, which the model in config.json does not have"
        )


def _check_repeated(checkpoint: TensorSource, present: set[str], repeated: dict[str, str]) -> None:
    """Refuse a tensor that config.json calls the same as another, and is not."""
    for name, original in repeated.items():
        if {name, original} <= present and not torch.equal(
            checkpoint.tensor(name), checkpoint.tensor(original)
        ):
            raise UnsupportedModelError(
                f"config.json: tie_word_embeddings is true, but {name} differs from {original}"
                " in the checkpoint: set it to false to use both, or remove the tensor"
            )


def _some(names: set[str]) -> str:
    first, *others = sorted(names)
    return f"tensor {first}" + (f" and {len(others)} more" if others else "")


def _check_shape(slot: WeightSlot, shape: tuple[int, ...]) -> None:
    if shape != slot.shape:
        raise CorruptFileError(
            f"tensor {slot.name} has shape {list(shape)},"
            f" but config.json asks for {list(slot.shape)}"
        )


def _check_type(slot: WeightSlot, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        raise CorruptFileError(f"tensor {slot.name} holds {tensor.dtype}, not floating point")


class DummyTarget(Protocol):
    @property
    def device(self) -> torch.device: ...

    def weight_slots(self) -> Iterable[WeightSlot]: ...


def load_dummy(model: DummyTarget, seed: int) -> None:
    """Fills every parameter with random values: benchmarks and tests need only a model's shape.

    Deterministic in (seed, tensor name) on one kind of device, so neither the order of layers nor
    fusing changes a value. Scales keep activations near one through any depth, so that sampled
    tokens vary.
    """
    generator = torch.Generator(device=model.device)
    with torch.no_grad():
        for slot in _smallest(model.weight_slots()):
            # A 32-bit seed: of a longer one the CPU's generator uses the low half alone.
            generator.manual_seed(zlib.crc32(f"{seed} {slot.name}".encode()))
            slot.load(_random_tensor(slot, generator))


def _smallest(slots: Iterable[WeightSlot]) -> Iterator[WeightSlot]:
    """Pieces in place of slots that have them: less has to be held at a time."""
    for slot in slots:
        yield from _smallest(slot.pieces) if slot.pieces else (slot,)


def _random_tensor(slot: WeightSlot, generator: torch.Generator) -> torch.Tensor:
    tensor = torch.empty(slot.shape, device=generator.device)
    if slot.role == "norm":
        return tensor.normal_(1.0 - slot.offset, 0.05, generator=generator)
    if slot.role == "bias":
        return tensor.normal_(0.0, 0.02, generator=generator)
    return tensor.normal_(0.0, slot.shape[-1] ** -0.5, generator=generator)
