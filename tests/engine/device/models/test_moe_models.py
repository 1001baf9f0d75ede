"""Models with experts: both ways to store them, and the kernels' path against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged_model import PagedModel, Row, StateDictCheckpoint, build, load
from transformers import AutoModelForCausalLM
from triton_device import IS_INTERPRETED, require_triton

from termgen.engine.device.attention.base import AttentionShape
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.loader import load_model_config, open_checkpoint
from termgen.engine.device.loader.weights import load_weights
from termgen.engine.device.models.decoder import CausalDecoder
from termgen.engine.device.runner.make_attention import attention_needs
from termgen.errors import CorruptFileError

TinyModelDir = Callable[..., Path]
families = pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
families_with_single_experts = pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])


def stacked(folder: Path, family: str) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """The tensors in transformers' layout: one matrix holds all experts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in tensors), family
    return load_model_config(folder), tensors


@families_with_single_experts
def test_stacked_and_single_experts_load_alike(family: str, tiny_model_dir: TinyModelDir) -> None:
    folder = tiny_model_dir(family)
    config, tensors = stacked(folder, family)
    checkpoint = open_checkpoint(folder)
    assert any(".experts.1." in name for name in checkpoint.names())
    models = build(config), build(config)
    for model, source in zip(models, (StateDictCheckpoint(tensors), checkpoint), strict=True):
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        load_weights(model, source)
    checkpoint.close()
    for one, other in zip(*(model.named_parameters() for model in models), strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1]), one[0]


@families_with_single_experts
def test_what_lacks_or_exceeds_is_named(family: str, tiny_model_dir: TinyModelDir) -> None:
    config, tensors = stacked(tiny_model_dir(family), family)
    name = "model.layers.1.mlp.experts.down_proj"
    wrong = {**tensors, name: tensors[name][1:]}
    with pytest.raises(CorruptFileError, match=name):
        load_weights(build(config), StateDictCheckpoint(wrong))
    extra = f"model.layers.1.{config.moe.names.block}.experts.0.{config.moe.names.down}.weight"  # type: ignore[union-attr]
    with pytest.raises(CorruptFileError, match=extra):
        load_weights(build(config), StateDictCheckpoint({**tensors, extra: torch.zeros(1)}))
    del tensors[name]
    with pytest.raises(CorruptFileError, match=f"lacks tensor {extra}"):
        load_weights(build(config), StateDictCheckpoint(tensors))


def load_on_kernels(folder: Path, dtype: torch.dtype, device: torch.device) -> CausalDecoder:
    """The path of a GPU: paged attention and everything else in Triton."""
    require_triton()
    from termgen.engine.device.attention.triton_paged import TritonPagedAttention
    from termgen.engine.device.layers.triton_ops import TritonOps

    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    shape = AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        windows=tuple(dict.fromkeys(config.layer_windows)),
        block_size=16,
        max_num_seqs=4,
        max_num_tokens=256,
        dtype=dtype,
        kv_cache_dtype=dtype,
        device=device,
        needs=attention_needs(config),
    )
    attention = TritonPagedAttention(shape)
    model = build(config, dtype=dtype, attention=attention, device=device, ops=TritonOps())
    load_weights(model, checkpoint)
    checkpoint.close()
    return model


def check_against_transformers(
    model: CausalDecoder, folder: Path, lengths: tuple[int, ...], *, most: float
) -> None:
    """Whole prompts in one step, then their last tokens again as decodes: the relative error."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 512, (n,), generator=generator).tolist() for n in lengths]
    with torch.inference_mode():
        expected = [reference(torch.tensor([prompt])).logits[0] for prompt in prompts]
    paged = PagedModel(model, block_size=16, dtype=model.dtype)
    whole = paged.step([Row(k, 0, prompt) for k, prompt in enumerate(prompts)])
    decodes = paged.step([Row(k, len(p) - 1, p[-1:]) for k, p in enumerate(prompts)])
    expected += [logits[-1:] for logits in expected]
    # Over all tokens: rounding may send a token to another, equally good expert.
    logits = torch.cat(expected)
    error = float((torch.cat(whole + decodes).cpu() - logits).std() / logits.std())
    print("relative error", error)
    assert error < most


@pytest.mark.skipif(not IS_INTERPRETED, reason="kernels are compiled here")
@families
def test_interpreted_kernels_give_the_logits(family: str, tiny_model_dir: TinyModelDir) -> None:
    folder = tiny_model_dir(family, num_hidden_layers=1)
    model = load_on_kernels(folder, torch.float32, torch.device("cpu"))
    check_against_transformers(model, folder, (5, 9), most=1e-5)


@pytest.mark.gpu
@families
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_logits_on_a_gpu(
    family: str, dtype: torch.dtype, most: float, tiny_model_dir: TinyModelDir
) -> None:
    folder = tiny_model_dir(family, initializer_range=0.05)
    model = load_on_kernels(folder, dtype, torch.device("cuda"))
    model.finalize()
    check_against_transformers(model, folder, (100, 17, 1), most=most)


@families
def test_half_types_on_the_cpu_stay_near(family: str, tiny_model_dir: TinyModelDir) -> None:
    folder = tiny_model_dir(family, initializer_range=0.05)
    tokens = list(range(3, 40))
    checkpoint = open_checkpoint(folder)
    model = build(checkpoint.config, dtype=torch.bfloat16)
    load_weights(model, checkpoint)
    checkpoint.close()
    actual = PagedModel(model, dtype=torch.bfloat16).step([Row(0, 0, tokens)])[0]
    expected = PagedModel(load(folder)).step([Row(0, 0, tokens)])[0]
    error = float((actual - expected).std() / expected.std())
    print("relative error", error)
    assert error < 0.05
