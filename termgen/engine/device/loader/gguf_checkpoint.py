"""A GGUF file as a checkpoint: Hugging Face names, values dequantised one tensor at a time.

Opened through `open_checkpoint`. Reading a tensor undoes what conversion to GGUF did to it: its
blocks are expanded to float32, the rows of q and k of a `llama` model go back to the order in which
a head's rotary pairs are half a head apart, and the norms of a `gemma3` model are distances from
one again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.loader.checkpoint import check_sizes, parse_config
from termgen.engine.device.loader.gguf_config import ROPE_FACTORS, hf_config
from termgen.engine.device.quantization.gguf_blocks import (
    CHUNK_ELEMENTS,
    check_supported,
    dequantize,
)
from termgen.engine.gguf.gguf_file import GGUFFile, GGUFTensor
from termgen.errors import CorruptFileError, UnsupportedModelError

_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_GEMMA3_LAYER = {
    **_IN_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)", re.ASCII)
_TOP_NAME = re.compile(r"(\w+)\.(weight|bias)", re.ASCII)


class GGUFCheckpoint:
    """A `Checkpoint` from one .gguf file."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile.open(path)
        try:
            raw = hf_config(self._file)
            self.config: ModelConfig = parse_config(raw, path)
            # What conversion did to the values depends on the architecture alone.
            architecture = self._file.metadata["general.architecture"]
            self._permuted = architecture == "llama"
            self._norms_plus_one = architecture == "gemma3"
            self._in_layer = _IN_GEMMA3_LAYER if self._norms_plus_one else _IN_LAYER
            self._names = self._hf_names()
            stored = self._file.tensors
            shapes = {name: stored[inside].shape for name, inside in self._names.items()}
            check_sizes(self.config, shapes, path)
        except BaseException:
            self._file.close()
            raise

    @property
    def nbytes(self) -> int:
        return sum(self._file.tensors[name].nbytes for name in self._names.values())

    def names(self) -> Sequence[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._names[name]].shape

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._file.tensors[self._names[name]]
        values = self._values(stored, stored.data, stored.shape)
        if num_heads := self._heads_of(stored):
            return self._unpermute(values, num_heads, stored.name)
        if self._norms_plus_one and stored.name.endswith("norm.weight"):
            return values.sub_(1.0)
        return values

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        stored = self._file.tensors[self._names[name]]
        if len(stored.shape) != 2 or self._heads_of(stored):
            yield self.tensor(name)
            return
        num_rows, row_size = stored.shape
        rows = stored.data.reshape(num_rows, -1)
        step = max(1, CHUNK_ELEMENTS // row_size)
        for first in range(0, num_rows, step):
            part = rows[first : first + step]
            yield self._values(stored, part, (len(part), row_size))

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

    def _heads_of(self, stored: GGUFTensor) -> int:
        """The heads whose rows conversion put in another order; 0 if it did not."""
        if self._permuted and ".attn_q." in stored.name:
            return self.config.num_heads
        if self._permuted and ".attn_k." in stored.name:
            return self.config.num_kv_heads
        return 0

    def close(self) -> None:
        self._file.close()

    def _unpermute(self, rows: torch.Tensor, num_heads: int, name: str) -> torch.Tensor:
        # [num_heads * head_dim, ...]: pairs (0, 1), (2, 3), ... of a head become (i, i + half).
        half = self.config.head_dim // 2
        if rows.shape[0] != num_heads * 2 * half:
            raise CorruptFileError(
                f"{self._file.path}: tensor {name!r} has {rows.shape[0]} rows, which is not "
                f"{num_heads} heads of {2 * half}"
            )
        paired = rows.view(num_heads, half, 2, *rows.shape[1:])
        return paired.transpose(1, 2).reshape(rows.shape)

    def _hf_names(self) -> dict[str, str]:
        """Hugging Face name -> name in the file, in file order; every tensor is accounted for."""
        names = {}
        for stored in self._file.tensors.values():
            if stored.name == ROPE_FACTORS or ".rot_embd." in stored.name:
                continue  # rotary tables: the configuration says the same
            name = self._hf_name(stored.name)
            if name is None:
                raise UnsupportedModelError(
                    f"{self._file.path}: the tensor {stored.name!r} belongs to no supported "
                    f"part of a {self.config.architecture} model"
                )
            check_supported(stored.type, stored.name, where=f"{self._file.path}: ")
            names[name] = stored.name
        return names

    def _hf_name(self, name: str) -> str | None:
        if match := _LAYER_NAME.fullmatch(name):
            layer, part, suffix = match.groups()
            if part in self._in_layer and int(layer) < self.config.num_layers:
                return f"model.layers.{layer}.{self._in_layer[part]}.{suffix}"
        elif match := _TOP_NAME.fullmatch(name):
            part, suffix = match.groups()
            if part in _TOP_LEVEL:
                return f"{_TOP_LEVEL[part]}.{suffix}"
        return None
