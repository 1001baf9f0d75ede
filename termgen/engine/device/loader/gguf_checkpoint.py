"""A GGUF file as a checkpoint: Hugging Face names, values dequantised one tensor at a time.

Opened through `open_checkpoint`. Reading a tensor expands its blocks to float32 and undoes what
conversion to GGUF did to it, which `gguf_tensors` knows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.loader.checkpoint import check_sizes, parse_config
from termgen.engine.device.loader.gguf_config import hf_config
from termgen.engine.device.loader.gguf_keys import ROPE_FACTORS, GGUFKeys
from termgen.engine.device.loader.gguf_tensors import (
    Recipe,
    layer_recipes,
    made_up_parts,
    mtp_recipes,
    top_recipes,
)
from termgen.engine.device.quantization.gguf_blocks import (
    CHUNK_ELEMENTS,
    check_supported,
    dequantize,
)
from termgen.engine.gguf.gguf_file import GGUFFile, GGUFTensor
from termgen.errors import CorruptFileError, UnsupportedModelError

_BLOCKS_CHUNK = 1 << 24
"""Numbers whose blocks are given at a time: on a GPU each part is some dozens of kernels."""
_IN_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.([\w.]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Source:
    """The tensors of the file that one of the checkpoint is made of."""

    recipe: Recipe
    stored: tuple[GGUFTensor, ...]
    shape: tuple[int, ...]


class GGUFCheckpoint:
    """A `Checkpoint` from one .gguf file."""

    def __init__(self, path: Path, *, mtp: bool = False) -> None:
        """mtp: the tensors of its MTP layer alone."""
        self._file = GGUFFile.open(path)
        try:
            self.config: ModelConfig = parse_config(hf_config(self._file), path)
            self._sources = self._all_sources(mtp)
            shapes = {name: source.shape for name, source in self._sources.items()}
            if not mtp:
                check_sizes(self.config, shapes, path)
        except BaseException:
            self._file.close()
            raise

    @property
    def nbytes(self) -> int:
        stored = {t.name: t.nbytes for source in self._sources.values() for t in source.stored}
        return sum(stored.values())

    def names(self) -> Sequence[str]:
        return list(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._sources[name].shape

    def tensor(self, name: str) -> torch.Tensor:
        source = self._sources[name]
        return self._made(
            source, [self._values(stored, stored.data, stored.shape) for stored in source.stored]
        )

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        source = self._sources[name]
        num_rows, *of_row = source.stored[0].shape
        if not source.recipe.by_rows or not of_row:
            yield self.tensor(name)
            return
        rows = [stored.data.reshape(num_rows, -1) for stored in source.stored]
        shapes = [stored.shape[1:] for stored in source.stored]
        step = max(1, CHUNK_ELEMENTS // math.prod(of_row))
        for first in range(0, num_rows, step):
            parts = [raw[first : first + step] for raw in rows]
            values = [
                self._values(stored, part, (len(part), *shape))
                for stored, part, shape in zip(source.stored, parts, shapes, strict=True)
            ]
            yield self._made(source, values)

    def kind(self, name: str) -> str | None:
        source = self._sources[name]
        kinds = {stored.type.name for stored in source.stored}
        is_kept = source.recipe.change is None or source.recipe.of_blocks is not None
        has_rows = len(source.shape) in (2, 3) and is_kept and len(kinds) == 1
        return kinds.pop() if has_rows else None

    def stored(self, name: str) -> Iterator[StoredRows]:
        source = self._sources[name]
        block_bytes = source.stored[0].type.block_bytes
        rows = [
            stored.data.reshape(*stored.shape[:-1], -1, block_bytes) for stored in source.stored
        ]
        kind, of_blocks = source.stored[0].type.name, source.recipe.of_blocks
        if len(source.shape) == 3:
            for expert in range(source.shape[0]):
                parts = [torch.from_numpy(raw[expert : expert + 1].copy()) for raw in rows]
                made = parts[0] if of_blocks is None else of_blocks(*parts)
                yield StoredRows(kind, made[0])
            return
        if of_blocks is not None:
            made = of_blocks(*(torch.from_numpy(raw.copy()) for raw in rows))
            yield StoredRows(kind, made)
            return
        (raw,) = rows
        step = max(1, _BLOCKS_CHUNK // source.shape[1])
        for first in range(0, len(raw), step):
            yield StoredRows(kind, torch.from_numpy(raw[first : first + step].copy()))

    def close(self) -> None:
        self._file.close()

    def _values(
        self, stored: GGUFTensor, raw: npt.NDArray[np.uint8], shape: tuple[int, ...]
    ) -> torch.Tensor:
        values = dequantize(raw, stored.type, shape, name=stored.name)
        # A damaged block scale is the one corruption that the values show. NaN and infinity survive
        # a sum, which costs little beside dequantising.
        if not math.isfinite(values.sum().item()):
            raise CorruptFileError(
                f"{self._file.path}: tensor {stored.name!r} has values that are not finite"
            )
        return values

    def _made(self, source: _Source, values: list[torch.Tensor]) -> torch.Tensor:
        recipe = source.recipe
        made = values[0] if recipe.change is None else recipe.change(*values)
        if recipe.must_be and not bool(made.isfinite().all()):
            raise CorruptFileError(
                f"{self._file.path}: tensor {source.stored[0].name!r} has values that are not"
                f" {recipe.must_be}"
            )
        return made

    def _all_sources(self, mtp: bool) -> dict[str, _Source]:
        """Hugging Face name -> what it is made of, in file order; every tensor is accounted for.
        mtp: those of the first block behind the model's own."""
        keys = GGUFKeys(self._file)
        of_model = top_recipes(keys.architecture, self.config)
        find = mtp_recipes if mtp else layer_recipes
        of_layer, num_layers = find(keys.architecture, self.config), self.config.num_layers
        ignored, num_blocks = made_up_parts(keys.architecture), keys.num_blocks()
        sources: dict[str, _Source] = {}
        for stored in self._file.tensors.values():
            if stored.name == ROPE_FACTORS or ".rot_embd." in stored.name:
                continue  # rotary tables: the configuration says the same
            recipes, layer = of_model.get(stored.name, ()), ""
            if match := _IN_BLOCK.fullmatch(stored.name):
                layer, part = match.groups()
                is_draft = num_layers <= int(layer) < num_blocks
                if part in ignored or is_draft != mtp or (mtp and int(layer) > num_layers):
                    continue  # what conversion made up, and the other part
                recipe = of_layer.get(part) if int(layer) < num_blocks else None
                recipes = () if recipe is None else (recipe,)
            elif mtp:
                continue
            if not recipes:
                raise UnsupportedModelError(
                    f"{self._file.path}: the tensor {stored.name!r} belongs to no supported "
                    f"part of a {self.config.architecture} model"
                )
            check_supported(stored.type, stored.name, where=f"{self._file.path}: ")
            for recipe in recipes:
                is_named = mtp or not layer
                name = recipe.name if is_named else f"model.layers.{layer}.{recipe.name}"
                source = sources.get(name)
                if source is None:
                    sources[name] = self._source(recipe, f"blk.{layer}." if layer else "", stored)
                elif source.recipe is not recipe:
                    raise CorruptFileError(
                        f"{self._file.path} has {source.stored[0].name} and {stored.name} for one"
                        " tensor"
                    )
        return sources

    def _source(self, recipe: Recipe, prefix: str, present: GGUFTensor) -> _Source:
        """prefix: the block of the tensors, one of which is present."""
        names = [prefix + name for name in recipe.stored]
        for name in names:
            if name not in self._file.tensors:
                raise CorruptFileError(
                    f"{self._file.path}: the tensor {name} is missing, which belongs to"
                    f" {present.name}"
                )
        stored = tuple(self._file.tensors[name] for name in names)
        if recipe.change is None:
            return _Source(recipe, stored, present.shape)
        try:
            made = recipe.change(*(torch.empty(t.shape, device="meta") for t in stored))
        except (RuntimeError, IndexError):
            sizes = " and ".join(f"{t.name} {list(t.shape)}" for t in stored)
            raise CorruptFileError(
                f"{self._file.path}: {sizes}: not the sizes that the metadata asks for"
            ) from None
        return _Source(recipe, stored, tuple(made.shape))
