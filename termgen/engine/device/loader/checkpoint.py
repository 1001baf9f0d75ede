"""Access to a model's files: the `Checkpoint` protocol of their readers, and the configuration.

`load_model_config` is for models built without weights, `load_generation_config` for the authors'
recommended sampling. Both file formats use Hugging Face names from here on, in the configuration
and for tensors. This module reads JSON and GGUF metadata only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from termgen.engine.device.config.layer_differences import LayerDifferences
from termgen.engine.device.loader.gguf_config import generation_config, hf_config
from termgen.engine.gguf.gguf_file import GGUFFile
from termgen.errors import ConfigError, CorruptFileError, ModelError, ModelNotFoundError

if TYPE_CHECKING:
    import torch

from termgen.engine.device.config.model_config import ModelConfig
from termgen.vocabulary.sampling_params import RECOMMENDED

Parsed = TypeVar("Parsed")
MAX_CONFIG_BYTES = 1 << 24
MAX_INDEX_BYTES = 1 << 26
MODELOPT_CONFIG = "hf_quant_config.json"

_TOKEN_KEYS = ("bos_token_id", "pad_token_id")

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Checkpoint(Protocol):
    """An open model. Tensors come one at a time; none is kept here."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in the files."""

    def names(self) -> Sequence[str]:
        """Hugging Face names of all tensors, in the order in which reading them is cheapest."""

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor on the CPU in the stored type, or float32 if it had to be dequantised. Do not
        write to it: it may be a view of the file."""

    def close(self) -> None: ...


def load_model_config(path: Path | str, *, model_impl: str = "auto") -> ModelConfig:
    """The shape of a model from a folder with config.json, that file itself, or a .gguf file.

    model_impl: the code that will run it, see `EngineConfig.model_impl`.
    """
    path = Path(path)
    if path.is_dir() or path.suffix.lower() == ".json":
        source = path / "config.json" if path.is_dir() else path
        return parse_config(read_config(source), source, model_impl=model_impl)
    check_exists(path)
    if model_impl == "transformers":
        raise ConfigError(
            f"model_impl transformers needs a folder with safetensors, and {path.name} is a file",
            param="model_impl",
        )
    with GGUFFile.open(path) as file:
        return parse_config(hf_config(file), path)


def parse_config(
    config: dict[str, Any], source: Path, *, model_impl: str = "termgen"
) -> ModelConfig:
    """The configuration's meaning, with the file's name in front of its errors."""
    from termgen.engine.device.config.model_config import ModelConfig, is_known

    def parse() -> ModelConfig:
        if model_impl == "termgen" or (model_impl == "auto" and is_known(config)):
            return ModelConfig.from_hf(config)
        from termgen.engine.device.models.transformers_config import (
            read_transformers_config,  # seconds
        )

        return read_transformers_config(config)

    return parsed(source, parse)


def parsed(source: Path, parse: Callable[[], Parsed]) -> Parsed:
    """What `parse` returns, with the file's name in front of its errors."""
    try:
        return parse()
    except ModelError as error:
        reason = str(error).removeprefix("config.json: ")
        if reason.startswith(str(source)):
            raise
        raise type(error)(f"{source}: {reason}") from error


def check_sizes(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], source: Path) -> None:
    """The sizes in the configuration are those of the tensors, by the shapes that imply them all.

    So a few wrong numbers cannot cause an allocation that the weights would never fill.
    """
    hidden = config.hidden_size
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens": (config.vocab_size, hidden)}
    linear, layers = config.linear, {0, config.num_layers - 1}
    if linear is not None:  # one of each kind
        layers |= {linear.layers[0], min(set(range(config.num_layers)).difference(linear.layers))}
    if config.differences != LayerDifferences():
        layers = set(range(config.num_layers))
    if (inputs := config.per_layer_inputs) is not None:
        size = config.num_layers * inputs.size
        expected["model.embed_tokens_per_layer"] = (inputs.vocab_size, size)
    if (streams := config.streams) is not None:
        expected[f"model.altup_projections.{streams.num - 2}"] = (hidden, hidden)
        expected["model.layers.0.laurel.linear_left"] = (streams.laurel_rank, hidden)
    for layer in sorted(layers):
        prefix, own = f"model.layers.{layer}", config.of_layer(layer)
        if linear is not None and layer in linear.layers:
            delta = f"{prefix}.linear_attn"
            channels, v_size = linear.num_channels, linear.num_v_heads * linear.v_dim
            if linear.is_by_k_head:
                expected[f"{delta}.in_proj_qkvz"] = (channels + v_size, hidden)
            else:
                expected[f"{delta}.in_proj_qkv"] = (channels, hidden)
                expected[f"{delta}.in_proj_z"] = (v_size, hidden)
        else:
            q_size = own.num_heads * own.head_dim * (2 if config.has_output_gate else 1)
            expected[f"{prefix}.self_attn.q_proj"] = (q_size, hidden)
            if own.num_kv_heads:
                kv_size = own.num_kv_heads * own.head_dim
                expected[f"{prefix}.self_attn.k_proj"] = (kv_size, hidden)
        expected |= _mlp_sizes(own, prefix, shapes, source)
    for stem, shape in expected.items():
        is_stack = stem.endswith("gate_up_proj") and f"{stem}.weight" not in shapes
        name = stem if is_stack else f"{stem}.weight"
        if name not in shapes:
            raise CorruptFileError(f"{source}: the tensor {name} is missing")
        if shapes[name] != shape:
            raise CorruptFileError(
                f"{source}: tensor {name} is {list(shapes[name])}, but the configuration asks for "
                f"{list(shape)}"
            )


def _mlp_sizes(
    config: ModelConfig, prefix: str, shapes: Mapping[str, tuple[int, ...]], source: Path
) -> dict[str, tuple[int, ...]]:
    """The tensors that imply the sizes of a layer's MLP and experts. config: of that layer."""
    expected: dict[str, tuple[int, ...]] = {}
    moe, hidden = config.moe, config.hidden_size
    if moe is None or moe.is_beside_mlp:
        expected[f"{prefix}.{config.mlp_block}.up_proj"] = (config.intermediate_size, hidden)
    if moe is None:
        return expected
    if moe.shared_intermediate_size is not None:
        shared = f"{prefix}.{config.mlp_block}.shared_expert.up_proj"
        expected[shared] = (moe.shared_intermediate_size, hidden)
    sizes = (2 * moe.intermediate_size, hidden)
    block = prefix if moe.is_beside_mlp else f"{prefix}.{config.mlp_block}"
    stacked = f"{block}.experts.gate_up_proj"
    if stacked in shapes or moe.is_beside_mlp:
        expected[stacked] = (moe.num_experts, *(sizes[::-1] if moe.is_transposed else sizes))
        return expected
    if f"{stacked}.weight" in shapes:  # of a GGUF file
        expected[stacked] = (moe.num_experts, *sizes)
        return expected
    last = f"{prefix}.{moe.names.block}.experts.{moe.num_experts - 1}"
    if moe.is_transposed and f"{last}.{moe.names.up}.weight" not in shapes:
        raise CorruptFileError(f"{source}: the tensor {stacked} is missing")
    expected[f"{last}.{moe.names.up}"] = (moe.intermediate_size, hidden)
    return expected


def read_config(source: Path) -> dict[str, Any]:
    """A config.json, with what ModelOpt's older exports say of quantised weights in a file beside
    it."""
    config = read_json(source, limit=MAX_CONFIG_BYTES)
    beside = source.with_name(MODELOPT_CONFIG)
    if config.get("quantization_config") is None and beside.is_file():
        settings = read_json(beside, limit=MAX_CONFIG_BYTES).get("quantization")
        if not isinstance(settings, dict):
            raise CorruptFileError(f"{beside}: quantization must be a dictionary")
        config["quantization_config"] = {"quant_method": "modelopt", **settings}
    return config


def load_generation_config(path: Path | str) -> dict[str, Any]:
    """Sampling defaults and end tokens: `eos_token_id` as a list, other keys only where set."""
    path = Path(path)
    if path.is_file() and path.suffix.lower() != ".json":
        with GGUFFile.open(path) as file:
            return generation_config(file)
    source = (path if path.is_dir() else path.parent) / "generation_config.json"
    if not source.is_file():
        return {}
    raw = read_json(source, limit=MAX_CONFIG_BYTES)
    settings: dict[str, Any] = {}
    if (eos := raw.get("eos_token_id")) is not None:
        settings["eos_token_id"] = _token_ids(eos, source)
    for key in _TOKEN_KEYS:
        if (value := raw.get(key)) is not None:
            # Some models list several; the first is the one to write.
            settings[key] = _token_ids(value, source)[0]
    for key in RECOMMENDED:
        if (value := raw.get(key)) is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise CorruptFileError(f"{source}: {key} is {value!r}, which is not a number")
            settings[key] = value
    if raw.get("do_sample") is not None:
        settings["do_sample"] = bool(raw["do_sample"])
    return settings


def _token_ids(value: Any, source: Path) -> list[int]:
    ids = value if isinstance(value, list) else [value]
    if not ids or any(type(token) is not int or token < 0 for token in ids):
        raise CorruptFileError(f"{source}: {str(value)[:80]} is not a token id or a list of them")
    return ids


def read_json(source: Path, *, limit: int) -> dict[str, Any]:
    """A JSON object from a file that may be anything."""
    try:
        with source.open("rb") as file:
            # Not read(limit): that would set aside the whole limit for a small file.
            size = os.fstat(file.fileno()).st_size
            raw = file.read(min(size, limit))
    except FileNotFoundError:
        raise CorruptFileError(f"{source.parent} has no {source.name}") from None
    except OSError as error:
        raise CorruptFileError(f"{source}: cannot be read: {error.strerror or error}") from error
    if size > limit:
        raise CorruptFileError(f"{source}: larger than {limit} bytes")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{source}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptFileError(f"{source}: not a JSON object")
    return value


def check_exists(path: Path) -> None:
    if not path.exists():
        raise ModelNotFoundError(f"{path}: no such file or folder")
