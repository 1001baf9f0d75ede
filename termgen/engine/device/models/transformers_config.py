"""The ModelConfig of a model that runs through transformers' own code.

What the engine must know of it (heads, windows, sizes) is measured, not read: the model is built
without memory, on torch's meta device, and run on a few tokens, while `MeasuredCalls` stands in for
attention. What cannot work is refused here, before any weight is read. Called by the loader; the
model itself is built by `models.transformers_backend`.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from termgen.engine.device.config.config_reader import ConfigReader
from termgen.engine.device.config.family_keys import read_torch_dtype
from termgen.engine.device.config.model_config import (
    ModelConfig,
    TransformersSource,
    architecture_name,
)
from termgen.engine.device.config.rope_config import RopeConfig
from termgen.engine.device.config.stored_weights import reject_quantized
from termgen.engine.device.models.transformers_attention import (
    IMPLEMENTATION,
    LayerCall,
    MeasuredCalls,
    install,
    register,
)
from termgen.errors import TermgenError, UnsupportedModelError

logger = logging.getLogger(__name__)

_MAX_LAYERS = 1024
_NUM_TOKENS = 4
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_FAULTS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError)
"""Exceptions of Python and torch inside transformers' code, whose texts do not help a user."""


def read_transformers_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Raises UnsupportedModelError saying why a model cannot run, or CorruptFileError."""
    read = ConfigReader(raw)
    architecture = architecture_name(read)
    reject_quantized(read)
    with refusals_of(architecture), quiet():
        hf_config = make_hf_config(raw)
        _check_kind(hf_config)
        model = build_empty(hf_config, dtype=torch.bfloat16, device=torch.device("meta"))
        stage = MeasuredCalls()
        install(model, stage)
        num_parameters = sum(p.numel() for p in model.parameters())
        limit = freeze_rope(model)
        hidden_size, vocab_size = _run(model)
        windows = _layer_windows(stage.calls, hf_config)
    call, (positions, most) = stage.calls[0], _positions(hf_config, limit, architecture)
    ids = ConfigReader(hf_config.to_dict())
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=0,
        num_layers=len(stage.calls),
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.head_dim,
        max_position_embeddings=positions,
        extended_positions=most,
        rms_norm_eps=0.0,
        hidden_act="",
        tie_word_embeddings=False,
        rope=RopeConfig(),
        window_rope=None,
        attention_scale=1.0,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=next((w for w in windows if w is not None), None),
        layer_windows=windows,
        bos_token_id=ids.token_id("bos_token_id"),
        eos_token_ids=ids.token_ids("eos_token_id"),
        torch_dtype=read_torch_dtype(read),
        transformers=TransformersSource(raw=raw, num_parameters=num_parameters),
    )


@contextmanager
def refusals_of(architecture: str) -> Iterator[None]:
    """Turn any exception of transformers' code into one line that names the model."""
    try:
        yield
    except TermgenError as error:
        raise type(error)(_refusal(architecture, str(error))) from error
    except Exception as error:
        logger.debug("%s: refused", architecture, exc_info=True)
        raise UnsupportedModelError(_refusal(architecture, _in_words(error))) from error


def _in_words(error: Exception) -> str:
    """The reason transformers' code failed, for readers who do not know that code."""
    if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
        return "it chooses its attention from a list of its own, without one for a paged KV cache"
    if isinstance(error, torch.OutOfMemoryError):
        return "it needs more memory than there is"
    if isinstance(error, ImportError):
        return "it needs a Python package that is not installed"
    if isinstance(error, _FAULTS) or not _is_raised_by_statement(error):
        return (
            "its code fails in a trial run with this config.json, on one row of tokens and without"
            " a KV cache of its own"
        )
    reason = re.sub(r"\b\w+Error: ", "", " ".join(str(error).split()))[:300]
    return f"transformers does not take its config.json: {reason or 'no reason given'}"


def _is_raised_by_statement(error: Exception) -> bool:
    """True if a `raise` statement made it, with a text for readers, and not an operation."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and (frames[-1].line or "").startswith("raise")


def _refusal(architecture: str, reason: str) -> str:
    return f"architecture {architecture!r} cannot run through transformers' code: {reason}"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and reports that transformers writes to the terminal."""
    from transformers.utils import logging

    hf_logging: Any = logging  # untyped
    verbosity = hf_logging.get_verbosity()
    has_bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if has_bars:
            hf_logging.enable_progress_bar()


def make_hf_config(raw: Mapping[str, Any]) -> Any:
    """transformers' own config object. Code that a repository brings along is never run."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = ConfigReader(raw).text("model_type", default="")
    if model_type not in CONFIG_MAPPING:
        if "auto_map" in raw:
            raise UnsupportedModelError("it needs code from its own folder, which is never run")
        raise UnsupportedModelError(f"transformers knows no model_type {model_type!r}")
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if name != raw["architectures"][0]:
        raise UnsupportedModelError("it is no language model that only decodes text")
    values = {key: value for key, value in raw.items() if key != "auto_map"}
    # JSON has no infinity: transformers writes it as a dictionary.
    return CONFIG_MAPPING[model_type].from_dict(PreTrainedConfig._decode_special_floats(values))


def build_empty(
    hf_config: Any, *, dtype: torch.dtype, device: torch.device, length: int | None = None
) -> Any:
    """transformers' model with memory for its weights, none of them filled; tables that follow from
    the config are. length: as for `freeze_rope`."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    register()
    auto_class: Any = AutoModelForCausalLM  # untyped
    with torch.device(device), no_init_weights():
        model = auto_class.from_config(
            hf_config, attn_implementation=IMPLEMENTATION, dtype=dtype, trust_remote_code=False
        )
    model.tie_weights()
    freeze_rope(model, length)
    return model.eval()


def freeze_rope(model: nn.Module, length: int | None = None) -> int | None:
    """Keeps rotary frequencies those of short texts, where a model changes them with the longest
    text of a batch: requests that share a step must not change each other. With a length beyond
    that, they become those of texts of that length.

    Returns the positions that the former are right for; None when they are for all. May be done
    again.
    """
    limits = []
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if not (
            isinstance(kinds, str | dict) and any("inv_freq" in n for n, _ in _buffers(module))
        ):
            continue
        found: list[int] = getattr(module, "termgen_rope_limits", [])
        if isinstance(kinds, dict):  # one rotation for each type of layer
            for layer_type, kind in kinds.items():
                if _follows_length(kind):
                    found = [*found, _rope_limit(module.config, layer_type)]
                    _lengthen(module, kind, found[-1], length, layer_type)
                    kinds[layer_type] = "default"
        elif _follows_length(kinds):
            found = [_rope_limit(module.config)]
            _lengthen(module, kinds, found[-1], length)
            module.rope_type = "default"  # type: ignore[assignment]
        module.termgen_rope_limits = found  # type: ignore[assignment]
        limits += found
    return min(limits, default=None)


def _lengthen(
    module: Any, kind: str, limit: int, length: int | None, layer_type: str | None = None
) -> None:
    """Make a module's frequencies those of texts of a length beyond the limit."""
    if length is None or length <= limit:
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    present = getattr(module, name)
    options = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](
        module.config, present.device, seq_len=length, **options
    )
    present.copy_(frequencies)


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return module.named_buffers(recurse=False)


def _follows_length(kind: object) -> bool:
    """True for the scalings whose frequencies depend on the longest text of a batch."""
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def _rope_limit(config: Any, layer_type: str | None = None) -> int:
    rope = config.rope_parameters or {}
    if layer_type is not None:
        rope = rope.get(layer_type) or {}
    limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return int(limit)


def _check_kind(hf_config: Any) -> None:
    if hf_config.is_encoder_decoder:
        raise UnsupportedModelError("it is an encoder and a decoder")
    if hf_config.get_text_config() is not hf_config:
        raise UnsupportedModelError("it is not only a text model")
    if not 1 <= hf_config.num_hidden_layers <= _MAX_LAYERS:
        raise UnsupportedModelError(f"it has {hf_config.num_hidden_layers} layers")
    for kind in getattr(hf_config, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            raise UnsupportedModelError(f"it has layers of type {kind!r}")


@torch.inference_mode()
def _run(model: Any) -> tuple[int, int]:
    """(hidden size, vocabulary), from a forward pass that computes nothing."""
    if model._is_stateful:
        raise UnsupportedModelError("its layers keep a state besides keys and values")
    base, head = split(model)
    ids = torch.zeros((1, _NUM_TOKENS), dtype=torch.int64, device="meta")
    hidden = base(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state
    return int(hidden.shape[-1]), int(head(hidden).shape[-1])


def split(hf_model: Any) -> tuple[nn.Module, LogitsHead]:
    """The part that computes hidden states, and all that comes after it."""
    base: nn.Module = hf_model.base_model
    if base is hf_model:
        raise UnsupportedModelError("it has no base model that computes hidden states alone")
    return base, LogitsHead(hf_model)


class LogitsHead(nn.Module):
    """The rest of a model after its hidden states: turns them into logits, with the scale or cap of
    its architecture."""

    def __init__(self, hf_model: Any) -> None:
        super().__init__()
        self._given = _GivenHidden()
        setattr(hf_model, hf_model.base_model_prefix, self._given)
        self._model = hf_model

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [1, N, hidden] -> [1, N, vocab_size]"""
        self._given.hidden = hidden
        logits: torch.Tensor = self._model(use_cache=False).logits
        self._given.hidden = None
        return logits


class _GivenHidden(nn.Module):
    """Takes the place of the base model."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    @property
    def decoder(self) -> _GivenHidden:
        """Some models call this part of the base model."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> _GivenOutput:
        return _GivenOutput(self.hidden)


class _GivenOutput:
    """A base model's output that has only hidden states."""

    def __init__(self, hidden: torch.Tensor | None) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _layer_windows(calls: list[LayerCall], hf_config: Any) -> tuple[int | None, ...]:
    """The window of each layer, after a check that one cache suits them all."""
    if len(calls) != hf_config.num_hidden_layers:
        raise UnsupportedModelError(
            f"{len(calls)} of its {hf_config.num_hidden_layers} layers call attention as "
            "transformers' attention interface has it"
        )
    shapes = {(c.num_heads, c.num_kv_heads, c.head_dim) for c in calls}
    if len(shapes) > 1:
        raise UnsupportedModelError("its layers differ in heads or head size")
    windows = tuple(call.sliding_window for call in calls)
    kinds = getattr(hf_config, "layer_types", None)
    if kinds is None:
        is_windowed = bool(getattr(hf_config, "sliding_window", None))
        is_untold = is_windowed and all(window is None for window in windows)
    else:
        pairs = zip(kinds, windows, strict=True)
        is_untold = any(k == "sliding_attention" and w is None for k, w in pairs)
    if is_untold:
        raise UnsupportedModelError("it has sliding windows that it does not pass to its attention")
    return windows


def _positions(hf_config: Any, limit: int | None, architecture: str) -> tuple[int, int]:
    """The positions of the frequencies as they are, and those that others can be made for."""
    most = getattr(hf_config, "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        raise UnsupportedModelError(
            _refusal(architecture, "its config has no max_position_embeddings")
        )
    if limit is None or limit >= most:
        return most, most
    logger.warning(
        "%s: the context is limited to %d of %d positions: beyond, its rotary frequencies change "
        "with the length. A max_model_len above %d gives all requests those of that length",
        architecture,
        limit,
        most,
        limit,
    )
    return limit, most
