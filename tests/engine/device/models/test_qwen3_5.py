"""Qwen3.5 apart from its logits: files with a vision part, states, norms, recordings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_model import PagedModel, Row, StateDictCheckpoint, build, delta_shape, load
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5ForConditionalGeneration

from termgen.engine.device.attention.base import AttentionShape
from termgen.engine.device.kernels import why_unusable
from termgen.engine.device.layers.triton_ops import TritonOps
from termgen.engine.device.loader import open_checkpoint
from termgen.engine.device.loader.weights import load_dummy, load_weights
from termgen.errors import CorruptFileError

TinyModelDir = Callable[..., Path]
TOKENS = [5, 77, 401, 9, 33, 12, 250, 3, 8, 100, 41, 7, 7, 300, 2, 19, 64]
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def folder(tiny_model_dir: TinyModelDir) -> Path:
    return tiny_model_dir("qwen3_5_text")


def logits_of(folder: Path, tokens: list[int] = TOKENS) -> torch.Tensor:
    return PagedModel(load(folder)).step([Row(0, 0, tokens)])[0]


def test_a_file_with_a_vision_part(folder: Path, tmp_path: Path) -> None:
    """Names and config as transformers writes them, and tensors of a draft head beside."""
    text = AutoConfig.from_pretrained(folder)
    config = AutoConfig.for_model("qwen3_5", text_config=text.to_dict(), vision_config=VISION)
    whole = Qwen3_5ForConditionalGeneration(config).eval()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole.model.language_model.load_state_dict(plain.model.state_dict())
    whole.lm_head.load_state_dict(plain.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in tensors)
    tensors["mtp.fc.weight"] = torch.zeros(4, 8)
    save_file(tensors, tmp_path / "model.safetensors")

    with torch.inference_mode():
        expected = whole(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(tmp_path), expected, atol=1e-4, rtol=1e-4)

    name = "lm_head.weight"
    tensors["model.norm.weight"] = tensors["model.language_model.norm.weight"].clone()
    assert name in tensors
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CorruptFileError, match=r"model\.norm\.weight.* for one tensor"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"linear_num_value_heads": 8}, r"layers\.0\.linear_attn\.in_proj_qkv"),
        ({"num_attention_heads": 8}, r"layers\.3\.self_attn\.q_proj"),
        (
            {"layer_types": ["linear_attention", "full_attention"] * 2},
            r"layers\.1\.self_attn\.q_proj\.weight is missing",
        ),
    ],
)
def test_sizes_that_are_not_those_of_the_tensors(
    folder: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CorruptFileError, match=said):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "amount"),
    [
        ("layers.0.input_norm.weight", -1.0),
        ("layers.3.input_norm.weight", -1.0),
        ("layers.0.post_attention_norm.weight", -1.0),
        ("layers.3.qk_norm.weight", -1.0),
        ("norm.weight", -1.0),
        ("layers.0.norm", 1.0),
    ],
)
def test_each_norm_is_of_its_own_kind(folder: Path, name: str, amount: float) -> None:
    """A weight loaded as the other kind shows in the logits: distances from one as they are, or
    plain ones as distances."""
    model = load(folder)
    expected = PagedModel(model).step([Row(0, 0, TOKENS)])[0]
    with torch.no_grad():
        dict(model.named_parameters())[name].add_(amount)
    actual = PagedModel(model).step([Row(0, 0, TOKENS)])[0]
    assert (actual - expected).norm() > 0.01 * expected.norm()


def test_experts_in_one_tensor(tiny_model_dir: TinyModelDir) -> None:
    """Published files have the experts of a layer together, what transformers saves one by one."""
    folder = tiny_model_dir("qwen3_5_moe_text")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = dict(reference.state_dict())
    assert tensors["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 80, 64)
    checkpoint = open_checkpoint(folder)
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in checkpoint.names()
    checkpoint.close()
    model = build(checkpoint.config)
    load_weights(model, StateDictCheckpoint(tensors))
    model.finalize()
    actual = PagedModel(model).step([Row(0, 0, TOKENS)])[0]
    torch.testing.assert_close(actual, logits_of(folder))


def test_decays_stay_in_float32(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    model = build(checkpoint.config, dtype=torch.bfloat16)
    load_weights(model, checkpoint)
    parameters = dict(model.named_parameters())
    for ours, stored in (("a_log", "A_log"), ("dt_bias", "dt_bias")):
        expected = checkpoint.tensor(f"model.layers.1.linear_attn.{stored}")
        assert torch.equal(parameters[f"layers.1.{ours}"], expected)
        assert not torch.equal(expected, expected.to(torch.bfloat16).float())
    checkpoint.close()


def test_two_sequences_go_on_from_copies_of_one_state(folder: Path) -> None:
    model = load(folder)
    paged = PagedModel(model, block_size=4)
    shared, tails = TOKENS[:8], (TOKENS[8:], TOKENS[:3])  # two whole blocks
    paged.step([Row(0, 0, shared)])
    assert paged.states is not None
    paged.states.slots[1] = 11
    paged.pool.tables[1] = list(paged.pool.tables[0])
    for state in paged.states.states:
        for tensor in (state.delta, state.conv):
            tensor[11] = tensor[paged.states.slots[0]]
    found = paged.step([Row(key, 8, tail) for key, tail in enumerate(tails)])
    for actual, tail in zip(found, tails, strict=True):
        expected = PagedModel(model).step([Row(0, 0, shared + tail)])[0][8:]
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_8_bit_weights_stay_near_floats(folder: Path) -> None:
    expected = logits_of(folder)
    actual = PagedModel(load(folder, quantization="int8")).step([Row(0, 0, TOKENS)])[0]
    error = (actual - expected).norm() / expected.norm()
    assert 0 < error < 0.08


def test_a_pass_is_not_cut_into_pieces(folder: Path, tiny_llama_dir: Path) -> None:
    assert load(tiny_llama_dir).can_be_cut and not load(folder).can_be_cut


@pytest.mark.gpu
@torch.inference_mode()
def test_a_recorded_step_equals_an_eager_one(folder: Path) -> None:
    from termgen.engine.device.attention.triton_paged import TritonPagedAttention
    from termgen.engine.device.recurrent.triton_delta import TritonGatedDelta

    device, dtype = torch.device("cuda"), torch.bfloat16
    if reason := why_unusable(device):
        pytest.skip(reason)
    checkpoint = open_checkpoint(folder)
    config, shape = checkpoint.config, delta_shape(checkpoint.config)
    checkpoint.close()
    assert shape is not None
    attention = TritonPagedAttention(
        AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            windows=(None,),
            block_size=16,
            max_num_seqs=4,
            max_num_tokens=64,
            dtype=dtype,
            kv_cache_dtype=dtype,
            device=device,
        )
    )
    recurrent = TritonGatedDelta(shape, max_rows=4, max_tokens=64, device=device)
    model = build(
        config,
        dtype=dtype,
        attention=attention,
        device=device,
        ops=TritonOps(),
        recurrent=recurrent,
    )
    load_dummy(model, 3)
    model.finalize()
    paged = PagedModel(model, num_blocks=16, block_size=16, dtype=dtype)
    paged.step([Row(0, 0, TOKENS), Row(1, 0, TOKENS[:5])])
    ids, positions, ctx = paged.inputs([Row(0, 17, [3]), Row(1, 5, [4])])
    assert paged.states is not None
    kept = [(s, s.delta.clone(), s.conv.clone()) for s in paged.states.states]

    def restore() -> None:
        for state, delta, conv in kept:
            state.delta.copy_(delta)
            state.conv.copy_(conv)

    eager = model(ids, positions, ctx).clone()
    after = [(s.delta.clone(), s.conv.clone()) for s in paged.states.states]
    restore()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = model(ids, positions, ctx)
    restore()
    graph.replay()
    assert torch.equal(recorded, eager) and bool(eager.isfinite().all())
    for state, (delta, conv) in zip(paged.states.states, after, strict=True):
        used = list(paged.states.slots.values())
        assert torch.equal(state.delta[used], delta[used])
        # The row of the ring that is never read may be anything.
        assert torch.equal(state.conv[used].nan_to_num(), conv[used].nan_to_num())
