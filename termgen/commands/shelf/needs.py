"""What models take in memory and how fast one request may go, before they are loaded.

The rules are documented in docs/models.md, "What a model needs".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from termgen.commands.shelf.model_facts import ModelFacts
from termgen.config import EngineConfig
from termgen.vocabulary.device.kv_cache_types import head_bytes
from termgen.vocabulary.model_shelf import ModelChoice, Needs

WORKING_SHARE = 0.1
"""Memory of the steps relative to the weights, where the engine's own is not known or smaller."""
FLUENT_TOKENS_PER_S = 10.0
"""A model is quick enough to read along from this rate on."""
Q4_BITS, INT8_BITS, FOUR_BIT_BITS, SIX_BIT_BITS = 5.5, 9.0, 5.0, 7.0
"""Bits of a weight in memory: of --quantization q4, of int8, and of blocks of 4 and 6 bits that
stay."""
FLOAT8_BITS, FLOAT_BITS = 8.0, 16.0
"""The same with fp8: of layers, and of tables and heads."""
_FLOAT8_MEAN = 9.0
"""Where the size of tables and heads is not known."""
_GGUF_BITS = re.compile(r"(?:^|[^a-z])(?:i?q(\d)|(b?f16)|(f32))(?![0-9])", re.IGNORECASE)
_STORED_BITS_OF_Q4 = 4.6
_HELD_BITS_OF_Q4_K_M = 5.8
"""Bits a weight in memory of the most common file: 5, and 9 for a fifth of the weights."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The device that an engine runs on, and its settings."""

    config: EngineConfig
    device: str
    room_bytes: int | None
    """Memory that an engine may use once the present one has released its own; None: not known."""
    working_bytes: int = 0
    """The present engine's memory for its steps."""
    bytes_per_s: float | None = None
    """Rate of the memory; None: not measured."""
    main_bytes: int = 0
    """Free main memory beside a GPU, for experts that do not fit."""
    has_float8: bool = False
    """True if the device multiplies 8-bit floats."""

    def needs(
        self,
        facts: ModelFacts | None,
        path: Path | None,
        size: int,
        *,
        of_transformers: bool = False,
    ) -> Needs:
        """size: bytes of the file. facts: None where the file is not on this machine; its name
        says what is known of it then. of_transformers: run by its code, which keeps floats."""
        if of_transformers and self.config.quantization == "auto":
            held_as, bits = _floats(self.config, self.device)
            weights = int(size * bits / stored_form(path))
        else:
            held_as = held_form(path, self.config, self.device)[0]
            weights = weights_bytes(path, size, self.config, self.device)
        if facts is None or not facts.num_parameters:
            facts = ModelFacts()
        else:
            held_as, bits = self._held(facts)
            weights = int(facts.num_parameters * bits / 8)
        context = min(self.config.max_model_len or facts.context, facts.context)
        step_bytes = weights * facts.active_share
        is_known = self.bytes_per_s is not None and step_bytes > 0
        working = max(self.working_bytes, int(weights * WORKING_SHARE))
        in_main = self._in_main_memory(weights, working, held_as, facts.experts_share)
        is_known &= not in_main  # the CPU's experts take most of the time
        return Needs(
            weights_bytes=weights,
            held_as=held_as,
            kv_bytes=facts.kv_bytes(context, self._head_bytes),
            context=context,
            working_bytes=working,
            room_bytes=self.room_bytes,
            tokens_per_s=(self.bytes_per_s or 0.0) / step_bytes if is_known else None,
            main_bytes=in_main,
        )

    def _in_main_memory(
        self, weights: int, working: int, held_as: str, experts_share: float
    ) -> int:
        """Bytes of experts that a GPU has no room for, if main memory has room for all experts."""
        is_shared = held_as in ("int8", "q4") and self.device != "cpu"
        if self.room_bytes is None or not is_shared or self.config.cpu_experts == "0":
            return 0
        experts = int(weights * experts_share)
        missing = max(0, weights + working - self.room_bytes)
        return missing if missing <= experts <= self.main_bytes else 0

    def _held(self, facts: ModelFacts) -> tuple[str, float]:
        """The type that weights have in memory, and its bits for each of them, by the types in the
        file."""
        is_open = self.config.quantization == "auto" and self.config.dtype == "auto"
        name, bits = _form(self.config, self.device, is_in_blocks=facts.is_in_blocks)
        if is_open and self.has_float8 and facts.are_float8:
            name = "fp8"
        if name == "int8":
            is_rounded = self.device == "cpu" and facts.is_rounded_on_cpu
            share = 0.0 if is_rounded else facts.four_bit_share
            six = facts.six_bit_share if self.device == "cpu" else 0.0
            bits = share * FOUR_BIT_BITS + six * SIX_BIT_BITS + (1 - share - six) * bits
        elif name == "fp8":
            bits = facts.layers_share * FLOAT8_BITS + (1 - facts.layers_share) * FLOAT_BITS
        return name, bits

    def _head_bytes(self, head_dim: int) -> int:
        """Bytes of a token's head in the cache."""
        is_wide = self.config.dtype == "float32"
        of_auto = 4 if is_wide or (self.device == "cpu" and self.config.dtype == "auto") else 2
        return head_bytes(self.config.kv_cache_dtype, head_dim, of_auto)


def mark_best(choices: Iterable[ModelChoice]) -> list[ModelChoice]:
    """Mark the best for this machine among those here and, if it is larger, among those to fetch.

    It is the model with the most weights of those that can run, chat, fit the memory and may write
    at least ten tokens a second; of equal ones the smaller file.
    """
    choices = list(choices)
    best_here = _best(choice for choice in choices if choice.is_here)
    to_fetch = _best(choice for choice in choices if not choice.is_here)
    if best_here is not None and to_fetch is not None:
        if _num_weights(to_fetch) <= _num_weights(best_here):
            to_fetch = None
    return [replace(c, is_best=True) if c in (best_here, to_fetch) else c for c in choices]


def _best(choices: Iterable[ModelChoice]) -> ModelChoice | None:
    fit = [c for c in choices if c.needs is not None and c.needs.fits and is_usable(c)]
    quick = [
        c
        for c in fit
        if c.needs is not None and (c.needs.tokens_per_s or 0.0) >= FLUENT_TOKENS_PER_S
    ]
    return max(quick, key=lambda c: (_num_weights(c), -(c.size_bytes or 0)), default=None)


def mark_best_file(choices: Iterable[ModelChoice]) -> list[ModelChoice]:
    """Mark the best file of one model for this machine: the largest of up to 8 bits a weight that
    fits and may write ten tokens a second, or else the smallest that fits."""
    choices = list(choices)
    fit = [c for c in choices if c.needs is not None and c.needs.fits and is_usable(c)]
    quick = [
        c
        for c in fit
        if c.needs is not None
        and (c.needs.tokens_per_s or 0.0) >= FLUENT_TOKENS_PER_S
        and stored_form(Path(c.name)) < INT8_BITS
    ]
    best = max(quick, key=_size_of, default=min(fit, key=_size_of, default=None))
    return [replace(c, is_best=c is best) for c in choices]


def _size_of(choice: ModelChoice) -> int:
    return choice.size_bytes or 0


def is_usable(choice: ModelChoice) -> bool:
    return not choice.problem and not choice.is_base and not choice.is_repository


def _num_weights(choice: ModelChoice) -> int:
    """Millions of weights, so that two files of one model count as equal."""
    return choice.num_weights // 10**6


def weights_bytes(path: Path | None, size: int, config: EngineConfig, device: str) -> int:
    """Approximate memory for weights of this size on disk, in the dtype they will be loaded as."""
    stored_bits, held_bits = stored_form(path), held_form(path, config, device)[1]
    if stored_bits == _STORED_BITS_OF_Q4 and held_bits < 16:  # most of its blocks stay as they are
        held_bits = min(held_bits, _HELD_BITS_OF_Q4_K_M)
    return int(size * held_bits / stored_bits)


def stored_form(path: Path | None) -> float:
    """Bits of a weight in a file, by its name."""
    if path is None or path.suffix.lower() != ".gguf":
        return 16.0
    found = _GGUF_BITS.search(path.stem)
    digits, _, is_32 = found.groups() if found is not None else ("4", None, None)
    return int(digits) + 0.6 if digits else 32.0 if is_32 else 16.0


def held_form(path: Path | None, config: EngineConfig, device: str) -> tuple[str, float]:
    """The type that weights have in memory, and its bits for each of them."""
    return _form(config, device, is_in_blocks=stored_form(path) < 16)


def _form(config: EngineConfig, device: str, *, is_in_blocks: bool) -> tuple[str, float]:
    if config.quantization == "q4":
        return "q4", Q4_BITS
    if config.quantization == "fp8":
        return "fp8", _FLOAT8_MEAN
    is_on_cpu, is_open = device == "cpu", config.dtype == "auto"
    is_kept = is_open and (is_on_cpu or is_in_blocks)
    if config.quantization == "int8" or (config.quantization == "auto" and is_kept):
        return "int8", INT8_BITS
    return _floats(config, device)


def _floats(config: EngineConfig, device: str) -> tuple[str, float]:
    is_wide = config.dtype == "float32" or (config.dtype == "auto" and device == "cpu")
    return ("float32", 32.0) if is_wide else ("16-bit floats", 16.0)
