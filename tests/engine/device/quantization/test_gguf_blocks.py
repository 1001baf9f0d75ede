"""Every block type equals the reference implementation to the bit, on random blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from termgen.engine.device.quantization import gguf_blocks
from termgen.engine.device.quantization.gguf_blocks import SUPPORTED_TYPES, dequantize
from termgen.engine.gguf.gguf_file import GGML_TYPES, GGMLType
from termgen.errors import UnsupportedModelError

TYPE_IDS = {ggml_type.name: type_id for type_id, ggml_type in GGML_TYPES.items()}
# Byte offsets of the 16-bit floats in a block.
FLOAT16_AT = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def random_blocks(ggml_type: GGMLType, num_blocks: int, seed: int) -> np.ndarray:
    """Random bits everywhere, with scales of every magnitude but no NaN or infinity."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (num_blocks, ggml_type.block_bytes), dtype=np.uint8)
    if ggml_type.name == "F32":
        values = rng.standard_normal((num_blocks, 1)).astype(np.float32)
        return values.view(np.uint8).reshape(-1)
    if ggml_type.name in ("F16", "BF16"):
        # Below the exponent of all ones, every bit pattern is a number.
        exponents = 0x7C00 if ggml_type.name == "F16" else 0x7F80
        patterns = raw.view(np.uint16)
        patterns[(patterns & exponents) == exponents] = 0x3C01
        return raw.reshape(-1)
    if ggml_type.name == "MXFP4":
        # 255 stands for no number, and 6 times the power of 253 or 254 is beyond float32.
        raw[:, 0] = raw[:, 0].clip(max=252)
        return raw.reshape(-1)
    for offset in FLOAT16_AT[ggml_type.name]:
        scales = (rng.standard_normal(num_blocks) * 10.0 ** rng.integers(-6, 3, num_blocks)).astype(
            np.float16
        )
        scales[:2] = (0.0, -0.0)
        raw[:, offset : offset + 2] = scales[:, None].view(np.uint8)
    return raw.reshape(-1)


def test_the_type_table_is_the_reference_one() -> None:
    for type_id, ggml_type in GGML_TYPES.items():
        reference = gguf.GGMLQuantizationType(type_id)
        assert reference.name == ggml_type.name
        assert gguf.GGML_QUANT_SIZES[reference] == (ggml_type.block_size, ggml_type.block_bytes)


@pytest.mark.parametrize("name", SUPPORTED_TYPES)
def test_equals_reference_on_random_blocks(name: str) -> None:
    ggml_type = GGML_TYPES[TYPE_IDS[name]]
    for seed in (1, 2, 3):
        raw = random_blocks(ggml_type, 700, seed)
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
        result = dequantize(raw, ggml_type, (700 * ggml_type.block_size,), name="t")
        assert result.dtype == torch.float32
        np.testing.assert_array_equal(
            result.numpy().view(np.uint32),
            np.asarray(expected, dtype=np.float32).reshape(-1).view(np.uint32),
            err_msg=f"{name}, seed {seed}",
        )


@pytest.mark.parametrize("name", SUPPORTED_TYPES)
def test_chunks_join_without_a_seam(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ggml_type = GGML_TYPES[TYPE_IDS[name]]
    raw = random_blocks(ggml_type, 24, seed=4)
    shape = (6, 4 * ggml_type.block_size)
    whole = dequantize(raw, ggml_type, shape, name="t")
    monkeypatch.setattr(gguf_blocks, "CHUNK_ELEMENTS", 5 * ggml_type.block_size)
    assert torch.equal(dequantize(raw, ggml_type, shape, name="t"), whole)
    assert whole.shape == shape


def test_reads_a_read_only_buffer_without_changing_it() -> None:
    ggml_type = GGML_TYPES[TYPE_IDS["Q4_1"]]
    raw = random_blocks(ggml_type, 8, seed=5)
    frozen = np.frombuffer(raw.tobytes(), dtype=np.uint8)
    result = dequantize(frozen, ggml_type, (8, 32), name="t")
    result.zero_()
    assert bytes(frozen) == raw.tobytes()


@pytest.mark.parametrize("name", ["TQ1_0", "IQ2_S", "F64", "I32", "NVFP4"])
def test_unsupported_type_names_the_tensor_and_the_type(name: str) -> None:
    ggml_type = GGML_TYPES[TYPE_IDS[name]]
    raw = np.zeros(ggml_type.block_bytes, dtype=np.uint8)
    with pytest.raises(UnsupportedModelError, match=rf"'blk\.3\.ffn_up\.weight'.*{name}"):
        dequantize(raw, ggml_type, (ggml_type.block_size,), name="blk.3.ffn_up.weight")


def test_a_power_of_two_that_is_none_shows() -> None:
    raw = np.full(17, 255, dtype=np.uint8)
    values = dequantize(raw, GGML_TYPES[TYPE_IDS["MXFP4"]], (32,), name="t")
    assert not values.isfinite().any()
