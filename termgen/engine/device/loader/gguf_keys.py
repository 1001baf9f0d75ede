"""Typed access to the metadata of a GGUF file. Every error names the file and the key."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from termgen.engine.gguf.gguf_file import GGUFFile
from termgen.errors import CorruptFileError, UnsupportedModelError

# architecture -> (Hugging Face class, model_type)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "muse-glimmer": ("MuseGlimmerForConditionalGeneration", "muse_glimmer"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "gemma3n": ("Gemma3nForCausalLM", "gemma3n_text"),
    "llama4": ("Llama4ForCausalLM", "llama4_text"),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text"),
}
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of what rotary frequencies are divided by."""
MAX_SIZE = 1 << 31
MAX_LAYERS = 1024


class GGUFKeys:
    """Typed access to the metadata; a key without a dot prefix belongs to the architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = ""
        value = file.metadata.get("general.architecture")
        if not isinstance(value, str):
            self.corrupt("general.architecture is missing")
        if value not in ARCHITECTURES:
            self.refuse(
                f"the architecture {value[:64]!r} is not supported from GGUF "
                f"({', '.join(ARCHITECTURES)} are)"
            )
        self.architecture = value

    def corrupt(self, reason: str) -> NoReturn:
        raise CorruptFileError(f"{self.file.path}: {reason}")

    def refuse(self, reason: str) -> NoReturn:
        raise UnsupportedModelError(f"{self.file.path}: {reason}")

    def full(self, key: str) -> str:
        """The key with the architecture in front."""
        return f"{self.architecture}.{key}"

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(key, default)

    def size(self, key: str, *, default: int | None = None, least: int = 1) -> int:
        """A whole number; a list of one per layer is accepted when all are equal."""
        full = self.full(key)
        value = self.get(full, default)
        if value is None:
            self.corrupt(f"{full} is missing")
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                self.refuse(f"{full} differs between layers")
            value = value[0]
        if type(value) is not int or not least <= value < MAX_SIZE:
            self.corrupt(f"{full} is {str(value)[:40]}, which is not a possible size")
        return value

    def sizes(self, key: str, count: int) -> list[int]:
        """A whole number for each layer: one for all, or a list."""
        full = self.full(key)
        values = self.get(full)
        if not isinstance(values, list):
            return [self.size(key)] * count
        if len(values) != count or not all(
            type(item) is int and 1 <= item < MAX_SIZE for item in values
        ):
            self.corrupt(f"{full} is not a list of {count} possible sizes")
        return values

    def number(self, key: str, *, default: float | None = None) -> float:
        full = self.full(key)
        value = self.get(full, default)
        if value is None:
            self.corrupt(f"{full} is missing")
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            self.corrupt(f"{full} is {str(value)[:40]}, which is not a positive number")
        return float(value)

    def token(self, key: str) -> int | None:
        value = self.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < MAX_SIZE):
            self.corrupt(f"{key} is {str(value)[:40]}, which is not a token id")
        return value

    def flags(self, key: str, count: int) -> list[bool] | None:
        """So many truth values; None where the key is missing or is no list."""
        full = self.full(key)
        values = self.get(full)
        if not isinstance(values, list):
            return None
        if len(values) != count or not all(isinstance(item, bool) for item in values):
            self.corrupt(f"{full} is not a list of {count} truth values")
        return values

    def num_blocks(self) -> int:
        """Layers of the model, and of a draft head behind them."""
        blocks = self.size("block_count")
        if blocks > MAX_LAYERS:
            self.corrupt(f"{self.full('block_count')} is {blocks}, above {MAX_LAYERS}")
        return blocks

    def window_layers(self, layers: int, default: int) -> list[str]:
        """Layers with and without a window: a list, or the number of which the last has none."""
        key = "attention.sliding_window_pattern"
        pattern = self.flags(key, layers)
        if pattern is None:
            every = self.size(key, default=default)
            pattern = [bool((layer + 1) % every) for layer in range(layers)]
        return ["sliding_attention" if item else "full_attention" for item in pattern]
