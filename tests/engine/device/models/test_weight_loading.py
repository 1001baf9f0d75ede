from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged_model import PagedModel, Row, StateDictCheckpoint, build, load

from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.attention.torch_reference import TorchReferenceAttention
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.ops import TorchOps
from termgen.engine.device.loader import load_model_config, open_checkpoint
from termgen.engine.device.loader.weights import check_finite, load_dummy, load_weights
from termgen.engine.device.models.registry import build_model
from termgen.errors import ConfigError, CorruptFileError, ModelError, UnsupportedModelError

TinyModelDir = Callable[..., Path]


def read_tensors(folder: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    checkpoint = open_checkpoint(folder)
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
    checkpoint.close()
    return checkpoint.config, tensors


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_moe",
        "qwen3_moe",
        "mixtral",
        "gpt_oss",
        "llama4_text",
        "muse_glimmer",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "qwen3_next",
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_filled(family: str, tied: bool, tiny_model_dir: TinyModelDir) -> None:
    config, tensors = read_tensors(tiny_model_dir(family, tie_word_embeddings=tied))
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    load_weights(model, StateDictCheckpoint(tensors))
    assert not any(parameter.isnan().any() for parameter in model.parameters())


def test_fused_rows_are_in_order(tiny_model_dir: TinyModelDir) -> None:
    config, tensors = read_tensors(tiny_model_dir("qwen2"))
    model = build(config)
    load_weights(model, StateDictCheckpoint(tensors))
    parameters = dict(model.named_parameters())
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    for fused, parts in {
        "layers.1.qkv_proj.method.weight": [f"{attention}.{n}_proj.weight" for n in "qkv"],
        "layers.1.qkv_proj.bias": [f"{attention}.{n}_proj.bias" for n in "qkv"],
        "layers.1.mlp.gate_up_proj.method.weight": [
            f"{mlp}.{n}_proj.weight" for n in ("gate", "up")
        ],
    }.items():
        assert torch.equal(parameters[fused], torch.cat([tensors[part] for part in parts]))


def test_offsets_of_norm_weights_keep_their_digits(tiny_model_dir: TinyModelDir) -> None:
    config, tensors = read_tensors(tiny_model_dir("gemma3_text"))
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    model = build(config, dtype=torch.bfloat16)
    load_weights(model, StateDictCheckpoint(halves))
    parameters = dict(model.named_parameters())
    prefix = "model.layers.1"
    for ours, stored in {
        "layers.1.input_norm": f"{prefix}.input_layernorm",
        "layers.1.post_attention_norm": f"{prefix}.post_attention_layernorm",
        "layers.1.pre_mlp_norm": f"{prefix}.pre_feedforward_layernorm",
        "layers.1.post_mlp_norm": f"{prefix}.post_feedforward_layernorm",
        "norm": "model.norm",
    }.items():
        weight = parameters[f"{ours}.weight"]
        assert torch.equal(weight, 1.0 + halves[f"{stored}.weight"].float())
        assert not torch.equal(weight, weight.to(torch.bfloat16).float())
    heads = parameters["layers.1.qk_norm.weight"]
    for part, rows in (("q", heads[: config.num_heads]), ("k", heads[config.num_heads :])):
        stored_weight = halves[f"{prefix}.self_attn.{part}_norm.weight"].float()
        assert torch.equal(rows, (1.0 + stored_weight).expand_as(rows))


def test_progress_rises_to_one(tiny_llama_dir: Path) -> None:
    config, tensors = read_tensors(tiny_llama_dir)
    seen: list[float] = []
    load_weights(build(config), StateDictCheckpoint(tensors), progress=seen.append)
    assert seen == sorted(seen) and seen[0] > 0 and seen[-1] == 1.0
    assert len(seen) == len(tensors)


def test_known_buffers_and_a_tied_head_are_ignored(tiny_model_dir: TinyModelDir) -> None:
    config, tensors = read_tensors(tiny_model_dir("llama", tie_word_embeddings=True))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    load_weights(build(config), StateDictCheckpoint(tensors))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_a_tied_head_that_differs_is_refused(family: str, tiny_model_dir: TinyModelDir) -> None:
    """transformers then uses both tensors, whatever config.json says."""
    config, tensors = read_tensors(tiny_model_dir(family, tie_word_embeddings=True))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 0.01
    said = "tie_word_embeddings is true, but lm_head.weight differs"
    with pytest.raises(UnsupportedModelError, match=said):
        load_weights(build(config), StateDictCheckpoint(tensors))


def test_a_missing_tensor_is_named(tiny_llama_dir: Path) -> None:
    config, tensors = read_tensors(tiny_llama_dir)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CorruptFileError, match=r"lacks tensor model\.layers\.1\.mlp\.up_proj"):
        load_weights(build(config), StateDictCheckpoint(tensors))


def test_a_missing_head_is_not_silently_tied(tiny_llama_dir: Path) -> None:
    config, tensors = read_tensors(tiny_llama_dir)
    del tensors["lm_head.weight"]
    with pytest.raises(CorruptFileError, match=r"lacks tensor lm_head\.weight"):
        load_weights(build(config), StateDictCheckpoint(tensors))


def test_an_extra_tensor_is_named(tiny_llama_dir: Path) -> None:
    config, tensors = read_tensors(tiny_llama_dir)
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2, 2)
    tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(2, 2)
    with pytest.raises(CorruptFileError, match=r"model\.layers\.2\.mlp\.down_proj.* and 1 more"):
        load_weights(build(config), StateDictCheckpoint(tensors))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.0.mlp.down_proj.weight",
    ],
)
def test_a_wrong_shape_is_an_error_naming_the_tensor(
    name: str, tiny_model_dir: TinyModelDir
) -> None:
    config, tensors = read_tensors(tiny_model_dir("qwen2"))
    tensors[name] = tensors[name][1:]
    with pytest.raises(CorruptFileError, match=name):
        load_weights(build(config), StateDictCheckpoint(tensors))


def test_a_tensor_of_integers_is_an_error(tiny_llama_dir: Path) -> None:
    config, tensors = read_tensors(tiny_llama_dir)
    tensors["model.norm.weight"] = torch.ones(config.hidden_size, dtype=torch.int32)
    with pytest.raises(CorruptFileError, match=r"model\.norm\.weight holds torch\.int32"):
        load_weights(build(config), StateDictCheckpoint(tensors))


def test_weights_take_the_models_type(tiny_llama_dir: Path) -> None:
    config, tensors = read_tensors(tiny_llama_dir)
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    model = build(config)
    load_weights(model, StateDictCheckpoint(halves))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_dummy_weights_depend_on_the_seed_alone(tiny_model_dir: TinyModelDir) -> None:
    config = load_model_config(tiny_model_dir("qwen3"))

    def parameters(seed: int) -> list[torch.Tensor]:
        model = build(config)
        load_dummy(model, seed)
        return [parameter.clone() for parameter in model.parameters()]

    first, again, other = parameters(7), parameters(7), parameters(8)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("qwen2", None),
        ("qwen2", "int8"),
        ("qwen2", "q4"),
        ("gemma3_text", None),
        ("gemma3_text", "int8"),
        ("gemma3n_text", None),
        ("gemma3n_text", "int8"),
        ("gemma4_text", None),
        ("gemma4_text", "int8"),
        ("gemma4_moe", None),
        ("qwen3_moe", None),
    ],
)
def test_a_dummy_model_gives_varied_logits(
    family: str, quantization: str | None, tiny_model_dir: TinyModelDir
) -> None:
    model = build(load_model_config(tiny_model_dir(family)), quantization=quantization)
    load_dummy(model, 0)
    model.finalize()
    logits = PagedModel(model).step([Row(0, 0, list(range(1, 41)))])[0]
    assert logits.isfinite().all()
    assert 0.3 < logits.std() < 3.0
    assert logits.argmax(-1).unique().numel() > 20


def test_the_plain_weight_is_dropped_once_it_is_packed(tiny_llama_dir: Path) -> None:
    model = load(tiny_llama_dir)
    left = {name for name, _ in model.named_parameters() if "proj" in name}
    packs = torch.backends.mkldnn.is_available()
    assert bool(left) is not packs
    model.finalize()  # twice changes nothing
    assert {name for name, _ in model.named_parameters() if "proj" in name} == left


def test_unknown_names_are_errors(tiny_llama_dir: Path) -> None:
    config = load_model_config(tiny_llama_dir)
    with pytest.raises(ConfigError, match="int8") as error:
        build(config, quantization="int3")
    assert error.value.param == "quantization"


@pytest.mark.parametrize("quantization", ["int8", "q4"])
def test_integers_need_kernels(quantization: str, tiny_llama_dir: Path) -> None:
    config = load_model_config(tiny_llama_dir)
    attention = GroupedAttention.without_windows(TorchReferenceAttention(), config.layer_caches)
    with pytest.raises(ConfigError, match="are for a CPU or an NVIDIA GPU, not for meta") as error:
        build_model(
            config,
            dtype=torch.bfloat16,
            device=torch.device("meta"),
            quantization=quantization,
            attention=attention,
            ops=TorchOps(),
        )
    assert error.value.param == "quantization"


def test_more_than_the_machines_memory_is_refused_before_it_is_allocated(
    tiny_llama_dir: Path,
) -> None:
    config = replace(load_model_config(tiny_llama_dir), num_layers=1024, intermediate_size=2**31)
    with pytest.raises(ModelError, match="GiB of memory"):
        build(config)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(
    value: float, tiny_model_dir: TinyModelDir
) -> None:
    config, tensors = read_tensors(tiny_model_dir("llama"))
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"):
        damaged = {n: t.clone() for n, t in tensors.items()}
        damaged[name].view(-1)[-1] = value
        with pytest.raises(CorruptFileError, match=f"tensor {name} has NaN or infinite values"):
            load_weights(build(config), StateDictCheckpoint(damaged))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_weights_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(64, 64, dtype=dtype)
    with torch.no_grad():
        model.weight.fill_(torch.finfo(dtype).max)
        assert not model.weight.sum().isfinite()
        check_finite(model)
        for fault in (float("nan"), float("inf"), -float("inf")):
            model.bias[7] = fault
            with pytest.raises(CorruptFileError, match="weight bias has NaN or infinite values"):
                check_finite(model)


def test_weights_that_leave_the_range_of_float16_are_refused(tiny_model_dir: TinyModelDir) -> None:
    config, tensors = read_tensors(tiny_model_dir("llama"))
    tensors["model.norm.weight"][0] = 1e6
    load_weights(build(config), StateDictCheckpoint(tensors))
    with pytest.raises(CorruptFileError, match="norm.* infinite values in float16"):
        load_weights(build(config, dtype=torch.float16), StateDictCheckpoint(tensors))
