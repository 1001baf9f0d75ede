"""Facts about a model on disk, from its config.json or the metadata of its GGUF file alone.

Nothing is loaded: the shape of the model and the types of its tensors say what it will take. What
was read of a file is kept in the user's cache until the file changes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from termgen.engine.device.config.config_reader import ConfigReader
from termgen.engine.device.config.head_config import mtp_head
from termgen.engine.device.config.model_config import ModelConfig, is_known
from termgen.engine.device.config.stored_weights import (
    KEYS,
    KeptGroups,
    are_float8,
    kept_groups,
)
from termgen.engine.gguf.gguf_file import GGUFFile
from termgen.errors import ModelError
from termgen.library.user_cache import UserCache, digest
from termgen.vocabulary.cache_groups import most_keys

FOUR_BIT_TYPES = frozenset({"Q4_0", "Q4_1", "Q4_K"})
"""Types of GGUF blocks that stay what they are in memory."""
SIX_BIT_TYPE = "Q6_K"
FLOAT_TYPES = frozenset({"F32", "F16", "BF16", "F64"})
OF_TRANSFORMERS = "run by the code of transformers, if that can"
TEMPLATE_KEY = "tokenizer.chat_template"
MAX_SETTINGS_BYTES = 1 << 24
FORMAT = 7
"""Changes with what is kept."""
_KEPT = UserCache("model-facts", most_entries=1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's files say about it."""

    problem: str = ""
    """Why termgen cannot run it."""
    note: str = ""
    quantization: str = ""
    """The type of most of its numbers: `Q4_K`, `bfloat16`, `fp8`."""
    num_parameters: int = 0
    """0: not known."""
    experts_share: float = 0.0
    """Part of them that are experts which a router picks."""
    active_share: float = 1.0
    """Part of them that a step of one token reads."""
    four_bit_share: float = 0.0
    """Part of them that is in blocks of 4 bits which stay so in memory."""
    six_bit_share: float = 0.0
    """Part of them, without experts, in blocks of 6 bits, which stay so on a CPU."""
    is_rounded_on_cpu: bool = False
    """True if a CPU rounds those to 8 bits."""
    is_in_blocks: bool = False
    """True if most of them are in quantised blocks."""
    layers_share: float = 1.0
    """Part of them that is neither in tables of embeddings nor in heads."""
    are_float8: bool = False
    """True if matrices of layers are 8-bit floats which a GPU may keep."""
    is_base: bool = False
    """True without a chat template."""
    kv_layers: tuple[tuple[int, int, int], ...] = ()
    """(heads that a token keeps, of keys and of values; their size; tokens that are kept or 0 for
    all), per layer."""
    context: int = 0

    @property
    def is_of_transformers(self) -> bool:
        """True if it is run by the code of transformers, if that can."""
        return self.note == OF_TRANSFORMERS

    def kv_bytes(self, context: int, head_bytes: Callable[[int], int]) -> int:
        """Bytes of keys and values that a context of one request keeps. head_bytes: of a head by
        its size."""
        return sum(
            num_heads * head_bytes(head_dim) * min(context, most or context)
            for num_heads, head_dim, most in self.kv_layers
        )


def model_facts(path: Path) -> ModelFacts:
    """Facts about a GGUF file, or about a folder with config.json."""
    source = path / "config.json" if path.is_dir() else path
    try:
        state = source.stat()
    except OSError as error:
        return ModelFacts(problem=f"cannot be read: {error.strerror or error}")
    entry = digest(FORMAT, os.path.abspath(source), state.st_size, state.st_mtime_ns)
    found = _unpacked(_KEPT.read(entry))
    if found is None:
        found = _read(path, source)
        _KEPT.write(entry, json.dumps(asdict(found)).encode())
    return found


def _unpacked(content: bytes | None) -> ModelFacts | None:
    if content is None:
        return None
    try:
        kept = json.loads(content)
        layers = tuple((int(n), int(dim), int(most)) for n, dim, most in kept.pop("kv_layers"))
        return ModelFacts(**kept, kv_layers=layers)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # of another version


def _read(path: Path, source: Path) -> ModelFacts:
    from termgen.engine.device.loader.checkpoint import parse_config, read_config

    try:
        if source.suffix.lower() == ".json":
            raw = read_config(source)
            is_base, kind = not _has_template(source.parent), _method(raw)
            if not is_known(raw):
                return ModelFacts(note=OF_TRANSFORMERS, quantization=kind, is_base=is_base)
            config = parse_config(raw, source)
            # Experts whose rows are columns in files become 16 bits.
            is_kept = config.moe is None or not config.moe.is_transposed
            part = ConfigReader(_quantized_part(raw))
            in_float8, groups = is_kept and are_float8(part), kept_groups(part)
            of_folder = {"quantization": kind, "are_float8": in_float8, "is_base": is_base}
            found = _of_config(config, has_mtp=_has_mtp(config, source.parent), **of_folder)
            return found if groups is None else _in_groups(found, groups)
        return _of_gguf(path)
    except ModelError as error:
        # the line shows the file already
        reason = str(error).removeprefix(f"{path}: ").removeprefix(f"{source}: ")
        return ModelFacts(problem=reason)


def _in_groups(facts: ModelFacts, groups: KeptGroups) -> ModelFacts:
    return replace(
        facts,
        is_in_blocks=True,
        four_bit_share=facts.layers_share if groups.num_bits == 4 else 0.0,
        is_rounded_on_cpu=groups.is_rounded_on_cpu,
    )


def _of_gguf(path: Path) -> ModelFacts:
    from termgen.engine.device.loader.checkpoint import parse_config
    from termgen.engine.device.loader.gguf_config import hf_config
    from termgen.engine.device.quantization.gguf_blocks import check_supported

    with GGUFFile.open(path) as file:
        config = parse_config(hf_config(file), path)
        by_type: dict[str, int] = {}
        in_six_bits = 0
        for tensor in file.tensors.values():
            check_supported(tensor.type, tensor.name)
            name = tensor.type.name
            count = math.prod(tensor.shape)
            by_type[name] = by_type.get(name, 0) + count
            if name == SIX_BIT_TYPE and len(tensor.shape) == 2:
                in_six_bits += count
        is_base = TEMPLATE_KEY not in file.metadata
        has_mtp = any(".nextn." in name for name in file.tensors)
    total = sum(by_type.values()) or 1
    blocks = sum(n for name, n in by_type.items() if name not in FLOAT_TYPES)
    return _of_config(
        config,
        has_mtp=has_mtp and config.num_mtp_layers == 1,
        quantization=max(by_type, key=lambda name: by_type[name], default=""),
        four_bit_share=sum(by_type.get(name, 0) for name in FOUR_BIT_TYPES) / total,
        six_bit_share=in_six_bits / total,
        is_in_blocks=blocks > total / 2,
        is_base=is_base,
    )


def _has_mtp(config: ModelConfig, folder: Path) -> bool:
    """True if a folder's files have the one MTP layer that its model may have."""
    from termgen.engine.device.loader import open_checkpoint

    if config.num_mtp_layers != 1:
        return False
    try:
        with closing(open_checkpoint(folder, mtp=True)) as files:
            return bool(files.names())
    except ModelError:
        return False  # loading says what is wrong


def _of_config(config: ModelConfig, *, has_mtp: bool, **of_file: Any) -> ModelFacts:
    """has_mtp: the model runs with its MTP layer."""
    caches, total = config.layer_caches, config.num_parameters
    idle = _idle(config)
    if has_mtp:
        head = mtp_head(config).layers
        caches = (*caches, *head.layer_caches)
        total += head.num_parameters - _in_tables(head) + 2 * config.hidden_size**2
        idle += _idle(head)
    layers = tuple(
        (2 * spec.num_kv_heads, spec.head_dim, 0 if spec.window is None else most_keys(spec.window))
        for spec in caches
        if spec is not None
    )
    return ModelFacts(
        num_parameters=total,
        experts_share=_routed(config) / max(total, 1),
        active_share=1.0 - (_looked_up(config) + idle) / max(total, 1),
        layers_share=1.0 - _in_tables(config) / max(total, 1),
        kv_layers=layers,
        context=config.max_position_embeddings,
        **of_file,
    )


def _looked_up(config: ModelConfig) -> int:
    """Parameters of tables that a step reads no more than rows of."""
    return _in_tables(config) - config.vocab_size * config.hidden_size


def _idle(config: ModelConfig) -> int:
    """Parameters of experts that a token does not go to."""
    if (moe := config.moe) is None:
        return 0
    return _routed(config) * (moe.num_experts - moe.num_experts_per_tok) // moe.num_experts


def _routed(config: ModelConfig) -> int:
    """Parameters of the experts that a router picks from."""
    if (moe := config.moe) is None:
        return 0
    of_expert = 3 * moe.intermediate_size * config.hidden_size
    return len(moe.sparse_layers) * moe.num_experts * of_expert


def _in_tables(config: ModelConfig) -> int:
    """Parameters of tables of embeddings, and of the head."""
    num_alike = 1 if config.tie_word_embeddings else 2
    total = num_alike * config.vocab_size * config.hidden_size
    if (inputs := config.per_layer_inputs) is not None:
        total += inputs.vocab_size * config.num_layers * inputs.size
    return total


def _quantized_part(raw: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that says how weights are stored."""
    inner = raw.get("text_config")
    parts = (raw, inner if isinstance(inner, dict) else {})
    return next((part for part in parts if any(part.get(key) for key in KEYS)), raw)


def _has_template(folder: Path) -> bool:
    if any((folder / f"chat_template.{kind}").is_file() for kind in ("jinja", "json")):
        return True
    settings = folder / "tokenizer_config.json"
    try:
        if settings.stat().st_size > MAX_SETTINGS_BYTES:
            return False
        return b'"chat_template"' in settings.read_bytes()
    except OSError:
        return False


def _method(raw: dict[str, Any]) -> str:
    """How the weights of a folder are stored, as its config.json says."""
    settings = raw.get("quantization_config")
    if isinstance(settings, dict):
        return str(settings.get("quant_method", "quantised"))[:20]
    inner = raw.get("text_config")
    for keys in (raw, inner if isinstance(inner, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if isinstance(keys.get(key), str):
                return str(keys[key])[:20]
    return "16 bit"
