"""GGUF files of Gemma 3 against their source weights, and against transformers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_reading import each_part_once
from gguf_samples import finish, write_model
from paged_model import PagedModel, Row, load
from safetensors.torch import load_file
from sample_texts import sample_texts
from transformers import AutoConfig, AutoModelForCausalLM

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.loader import load_model_config, open_checkpoint
from termgen.engine.device.runner.resolve import resolve_dtype
from termgen.engine.text.tokenizer import load_tokenizer
from termgen.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError
from termgen.library.catalog import resolve_model

Q = gguf.GGMLQuantizationType
Extra = Callable[[gguf.GGUFWriter], None]

# Values that no key of a file holds: scores divided by the root of the head size, six layers a
# period.
NUM_COMPARED = 90
"""The last tokens of a text: all of its logits take 700 MB."""
SILENT = {"query_pre_attn_scalar": 32, "num_hidden_layers": 7, "sliding_window_pattern": 6}
LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Callable[..., Path]) -> Path:
    return tiny_model_dir("gemma3_text", tie_word_embeddings=True, **SILENT)


def write(folder: Path, path: Path, extra: Extra | None = None, **options: Any) -> Path:
    def all_keys(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(8)
        if extra is not None:
            extra(writer)

    return write_model(folder, path, arch="gemma3", extra=all_keys, **options)


def assert_same_config(config: ModelConfig, original: ModelConfig) -> None:
    # The file holds single precision where JSON holds double.
    assert config.rms_norm_eps == pytest.approx(original.rms_norm_eps, rel=1e-6)
    assert dataclasses.replace(config, rms_norm_eps=original.rms_norm_eps) == original


def test_equals_the_model_it_was_made_from(folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(folder, tmp_path / "m.gguf"))
    expected = load_file(folder / "model.safetensors")
    assert sorted(checkpoint.names()) == sorted(expected)
    assert len([name for name in expected if "norm" in name]) == 7 * 6 + 1
    for name in checkpoint.names():
        # One was added to a norm in single precision.
        atol = 1e-6 if "norm" in name else 0.0
        torch.testing.assert_close(checkpoint.tensor(name), expected[name], rtol=0, atol=atol)
    config = checkpoint.config
    checkpoint.close()
    assert_same_config(config, load_model_config(folder))
    assert config.layer_windows == (8, 8, 8, 8, 8, None, 8)
    assert [rope.theta for rope in config.layer_ropes[4:6]] == [1e4, 1e6]
    assert config.attention_scale == 32**-0.5
    assert config.hidden_act == "gelu_tanh" and config.tie_word_embeddings


@pytest.mark.parametrize("quant", [Q.F32, Q.Q8_0, Q.Q5_0])
def test_logits_equal_transformers(
    quant: gguf.GGMLQuantizationType, tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model_dir(
        "gemma3_text", tie_word_embeddings=True, intermediate_size=128, **SILENT
    )
    path = write(folder, tmp_path / "m.gguf", quant=quant)
    reference = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.float32
    ).eval()
    weights = transformers_reading(path, reference)
    assert reference.load_state_dict(weights, strict=False) == (["lm_head.weight"], [])
    reference.tie_weights()
    rng = random.Random(270)
    tokens = [rng.randrange(512) for _ in range(60)]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    model = PagedModel(load(path))
    whole = model.step([Row(0, 0, tokens)])[0]
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    first, then = PagedModel(model.model), []
    for start in range(0, 60, 12):
        then += first.step([Row(0, start, tokens[start : start + 12])])
    torch.testing.assert_close(torch.cat(then), expected, atol=1e-4, rtol=1e-4)


def transformers_reading(path: Path, model: Any) -> dict[str, torch.Tensor]:
    """The file's weights under transformers' names, read by transformers."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    weights: dict[str, torch.Tensor] = read["tensors"]
    return weights


def test_what_newer_files_say_about_layers(
    tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model_dir(
        "gemma3_text", query_pre_attn_scalar=32, sliding_window_pattern=3, rope_parameters=LINEAR
    )
    kinds = [True, True, False, True]
    patterns: list[Any] = [3, kinds]
    for number, pattern in enumerate(patterns):

        def extra(writer: gguf.GGUFWriter, pattern: Any = pattern) -> None:
            writer.add_sliding_window_pattern(pattern)
            writer.add_rope_freq_base_swa(2e4)
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(8.0)

        config = load_model_config(write(folder, tmp_path / f"{number}.gguf", extra))
        assert_same_config(config, load_model_config(folder))
        assert [window is not None for window in config.layer_windows] == kinds
        assert config.window_rope is not None
        assert (config.rope.type, config.rope.factor, config.rope.theta) == ("linear", 8.0, 5e5)
        assert (config.window_rope.type, config.window_rope.theta) == ("default", 2e4)


def test_without_a_window_every_layer_sees_everything(folder: Path, tmp_path: Path) -> None:
    config = load_model_config(write_model(folder, tmp_path / "m.gguf", arch="gemma3"))
    assert config.layer_windows == (None,) * 7
    assert {rope.theta for rope in config.layer_ropes} == {1e6}


def test_without_a_rotary_base_it_is_that_of_the_family(folder: Path, tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["gemma3.rope.freq_base"]

    config = load_model_config(write(folder, tmp_path / "m.gguf", extra))
    assert_same_config(config, load_model_config(folder))


def test_27b_divides_scores_by_another_number(tmp_path: Path) -> None:
    def scale(layers: int) -> float:
        writer = gguf.GGUFWriter(tmp_path / f"{layers}.gguf", "gemma3")
        writer.add_block_count(layers)
        writer.add_context_length(131072)
        writer.add_embedding_length(5376)
        writer.add_feed_forward_length(21504)
        writer.add_head_count(32)
        writer.add_head_count_kv(16)
        writer.add_key_length(128)
        writer.add_value_length(128)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_sliding_window(1024)
        writer.add_tensor("token_embd.weight", np.ones((4, 5376), "float32"))
        finish(writer)
        return load_model_config(tmp_path / f"{layers}.gguf").attention_scale

    assert scale(62) == 168**-0.5
    assert scale(48) == 128**-0.5


def test_a_file_in_float16_runs_in_a_type_that_holds_it(folder: Path, tmp_path: Path) -> None:
    config = load_model_config(write(folder, tmp_path / "m.gguf", quant=Q.F16))
    assert config.torch_dtype == "float16"
    assert resolve_dtype("auto", config, torch.device("cuda")) is torch.bfloat16


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        (
            lambda w: w.add_final_logit_softcapping(30.0),
            UnsupportedModelError,
            "gemma3.final_logit_softcapping 30.0",
        ),
        (
            lambda w: w.add_attention_scale(0.5),
            UnsupportedModelError,
            "gemma3.attention.scale 0.5",
        ),
        (
            lambda w: w.add_attn_logit_softcapping(50.0),
            UnsupportedModelError,
            "gemma3.attn_logit_softcapping 50.0",
        ),
        (
            lambda w: w.add_tensor("blk.0.ffn_up.bias", np.ones(112, "float32")),
            UnsupportedModelError,
            "a gemma3 model with biases in the feed-forward network",
        ),
        (
            lambda w: w.add_tensor("v.patch_embd.weight", np.ones((4, 4), "float32")),
            UnsupportedModelError,
            "'v.patch_embd.weight' belongs to no supported part",
        ),
        (
            lambda w: w.add_sliding_window_pattern([True, False]),
            CorruptFileError,
            "sliding_window_pattern is not a list of 7 truth values",
        ),
        (
            lambda w: w.add_sliding_window_pattern(0),
            CorruptFileError,
            "sliding_window_pattern is 0, which is not a possible size",
        ),
        (
            lambda w: w.add_rope_freq_base_swa(-1.0),
            CorruptFileError,
            "rope.freq_base_swa is -1.0, which is not a positive number",
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused(
    extra: Extra, error: type[Exception], message: str, folder: Path, tmp_path: Path
) -> None:
    path = write(folder, tmp_path / "m.gguf", extra)
    with pytest.raises(error, match=message) as raised:
        open_checkpoint(path)
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)


def test_an_absurd_number_of_layers_is_refused_at_once(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.add_block_count(2**31 - 1)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(112)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(8)
    writer.add_tensor("token_embd.weight", np.ones((4, 64), "float32"))
    finish(writer)
    with pytest.raises(CorruptFileError, match="gemma3.block_count is 2147483647, above 1024"):
        load_model_config(tmp_path / "m.gguf")


# -- the real file -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_file() -> Path:
    """Gemma 3 270M of the catalog, if already fetched: 238 MB are too many for a test."""
    name = "gemma-3-270m-base-q4"
    try:
        return resolve_model(name).path
    except ModelNotFoundError:
        pytest.skip(f"needs `termgen pull {name}`")


@pytest.mark.slow
def test_real_logits_equal_transformers(real_file: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    from transformers.initialization import no_init_weights
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with each_part_once(), no_init_weights():
        settings = load_gguf_checkpoint(str(real_file))["config"]
        reference = Gemma3ForCausalLM(Gemma3TextConfig(**settings)).eval()
        weights = transformers_reading(real_file, reference)
    result = reference.load_state_dict(weights, strict=False, assign=True)
    assert result == (["lm_head.weight"], [])
    reference.tie_weights()
    tokenizer = load_tokenizer(real_file)
    text = "".join(sample_texts(270, 40)) + Path(__file__).read_text()
    tokens = tokenizer.encode(text)[:700]  # more than the window of 512
    model = load(real_file)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens]), logits_to_keep=NUM_COMPARED).logits[0]
    paged, first = PagedModel(model, num_blocks=256), len(tokens) - NUM_COMPARED
    paged.last_logits([Row(0, 0, tokens[:first])])
    actual = paged.step([Row(0, first, tokens[first:])])[0]
    torch.testing.assert_close(actual, expected, atol=2e-3, rtol=1e-4)
    prompt = tokenizer.encode("The capital of France is")
    answer = tokenizer.decode(PagedModel(model).greedy(prompt, 8))
    assert answer == " the capital of the country of France."


@pytest.mark.slow
def test_real_tokenizer_equals_transformers(real_file: Path) -> None:
    from transformers import AutoTokenizer

    with each_part_once():
        theirs = AutoTokenizer.from_pretrained(
            str(real_file.parent), gguf_file=real_file.name, local_files_only=True
        )
    ours, seed = load_tokenizer(real_file), 3270
    print("seed", seed)
    for text in [*sample_texts(seed, 1000), " " * 70, "\n" * 40, "<table>\n  <tr>", "\t\tx"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, text
    added = theirs.added_tokens_decoder
    assert ours.special_token_ids == {i for i, token in added.items() if token.special}
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_ids) == (262144, 2, (1,))
