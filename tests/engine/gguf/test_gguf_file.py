"""The GGUF reader against gguf-py's writer, and against malicious files."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_samples import finish

from termgen.engine.gguf.gguf_file import GGUFFile
from termgen.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
STRING, ARRAY, UINT8, UINT32, BOOL = 8, 9, 0, 4, 7


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return U64.pack(len(raw)) + raw


def pair(key: str, value_type: int, value: bytes) -> bytes:
    return text(key) + U32.pack(value_type) + value


def info(
    name: str = "t",
    dims: tuple[int, ...] = (4,),
    type_id: int = 0,
    offset: int = 0,
    *,
    rank: int | None = None,
) -> bytes:
    sizes = b"".join(U64.pack(dim) for dim in dims)
    count = len(dims) if rank is None else rank
    return text(name) + U32.pack(count) + sizes + U32.pack(type_id) + U64.pack(offset)


def document(
    *,
    pairs: tuple[bytes, ...] = (),
    infos: tuple[bytes, ...] = (),
    data: bytes = b"",
    version: int = 3,
    num_pairs: int | None = None,
    num_infos: int | None = None,
    magic: bytes = b"GGUF",
) -> bytes:
    head = magic + U32.pack(version)
    head += U64.pack(len(infos) if num_infos is None else num_infos)
    head += U64.pack(len(pairs) if num_pairs is None else num_pairs)
    body = head + b"".join(pairs) + b"".join(infos)
    return body + bytes(-len(body) % 32) + data


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(raw: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(raw)
        return path

    return write


def test_every_value_type(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    expected: dict[str, Any] = {
        "uint8": 200,
        "int8": -100,
        "uint16": 60000,
        "int16": -30000,
        "uint32": 4_000_000_000,
        "int32": -2_000_000_000,
        "uint64": 2**63 + 5,
        "int64": -(2**62),
        "float32": 0.5,
        "float64": 0.1,
        "bool": True,
        "string": "grüße 你好 🎉\0 end",
        "array": [1, 2, 3],
    }
    for kind, value in expected.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    arrays: dict[str, Any] = {
        "texts": ["", "a", "你好"],
        "floats": [0.5, -1.25],
        "truths": [True, False, True],
        "nested": [[1, 2], [3]],
        "one": [[["deep"]]],
    }
    for key, value in arrays.items():
        writer.add_array(f"y.{key}", value)
    finish(writer)
    with GGUFFile.open(path) as file:
        assert file.version == 3
        assert file.metadata["general.architecture"] == "llama"
        for kind, value in expected.items():
            assert file.metadata[f"x.{kind}"] == value
            assert type(file.metadata[f"x.{kind}"]) is type(value)
        for key, value in arrays.items():
            assert file.metadata[f"y.{key}"] == value
        assert file.metadata["y.truths"][0] is True
        assert file.metadata.get("absent") is None
        assert len(file.metadata) == 1 + len(expected) + len(arrays) == len(set(file.metadata))


@pytest.mark.parametrize("alignment", [32, 256, 8])
def test_tensors_and_alignment(alignment: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal(7).astype(np.float16),
        "c": rng.standard_normal((2, 3, 4)).astype(np.float32),
    }
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    blocks = gguf.quants.quantize(
        rng.standard_normal((4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("q", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    finish(writer)
    with GGUFFile.open(path) as file:
        assert list(file.tensors) == ["a", "b", "c", "q"]
        for name, values in tensors.items():
            tensor = file.tensors[name]
            assert tensor.shape == values.shape
            assert tensor.offset % alignment == 0
            np.testing.assert_array_equal(tensor.data.view(values.dtype), values.reshape(-1))
        assert file.tensors["q"].shape == (4, 64)
        assert file.tensors["q"].type.name == "Q8_0"
        assert file.tensors["q"].data.tobytes() == blocks.tobytes()


def test_the_real_file_equals_gguf_py(smollm2_gguf: Path) -> None:
    # Only fields that gguf-py reads quickly; its arrays take seconds.
    with GGUFFile.open(smollm2_gguf) as file:
        metadata = file.metadata
        assert metadata["llama.block_count"] == 30
        assert metadata["tokenizer.ggml.pre"] == "smollm"
        assert len(metadata["tokenizer.ggml.tokens"]) == 49152
        assert metadata["tokenizer.ggml.tokens"][1:3] == ["<|im_start|>", "<|im_end|>"]
        assert len(metadata["tokenizer.ggml.merges"]) == 48900
        assert metadata["tokenizer.ggml.add_bos_token"] is False
        counts: dict[str, int] = {}
        for tensor in file.tensors.values():
            counts[tensor.type.name] = counts.get(tensor.type.name, 0) + 1
        assert counts == {"Q4_1": 210, "Q8_0": 1, "F32": 61}
        assert file.tensors["token_embd.weight"].shape == (49152, 576)


def test_views_outlive_the_file(write: Callable[[bytes], Path]) -> None:
    values = np.arange(4, dtype=np.float32)
    file = GGUFFile.open(write(document(infos=(info(),), data=values.tobytes())))
    data = file.tensors["t"].data
    file.close()
    np.testing.assert_array_equal(data.view(np.float32), values)
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1


def test_version_2_reads_like_3(write: Callable[[bytes], Path]) -> None:
    raw = document(pairs=(pair("k", STRING, text("v")),), version=2)
    with GGUFFile.open(write(raw)) as file:
        assert dict(file.metadata) == {"k": "v"} and file.version == 2


HUGE = 1 << 62
HOSTILE = {
    "empty": (b"", "not a GGUF file"),
    "other file": (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
    "header cut": (document()[:20], "truncated: 20 bytes"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
    "reversed magic": (document(magic=b"FUGG"), "big-endian"),
    "version 1": (document(version=1), "version 1 is not supported"),
    "version 4": (document(version=4), "version 4 is not supported"),
    "keys beyond the file": (document(num_pairs=50_000), "50000 metadata keys do not fit"),
    "keys absurd": (document(num_pairs=HUGE), "metadata keys announced"),
    "tensors beyond the file": (document(num_infos=9), "9 tensors do not fit"),
    "tensors absurd": (document(num_infos=2**64 - 1), "tensors announced"),
    "key length absurd": (document(pairs=(U64.pack(HUGE) + bytes(20),)), "text of"),
    "key past the end": (document(pairs=(U64.pack(1000) + bytes(20),)), "truncated"),
    "key empty": (document(pairs=(pair("", UINT8, b"\1") + bytes(9),)), "is empty"),
    "key not UTF-8": (
        document(pairs=(text(b"\xff\xfe") + U32.pack(UINT8) + b"\1",)),
        "not valid UTF-8",
    ),
    "key twice": (document(pairs=(pair("k", UINT8, b"\1"),) * 2), "'k' appears twice"),
    "value type": (document(pairs=(pair("k", 13, bytes(8)),)), "unknown value type 13"),
    "string past the end": (document(pairs=(pair("k", STRING, U64.pack(HUGE)),)), "truncated"),
    "string wraps": (document(pairs=(pair("k", STRING, U64.pack(2**64 - 8)),)), "truncated"),
    "array of numbers absurd": (
        document(pairs=(pair("k", ARRAY, U32.pack(UINT32) + U64.pack(HUGE)),)),
        "elements of 'k' announced",
    ),
    "array of numbers too long": (
        document(pairs=(pair("k", ARRAY, U32.pack(UINT32) + U64.pack(10**6)),)),
        "do not fit",
    ),
    "array of texts too long": (
        document(pairs=(pair("k", ARRAY, U32.pack(STRING) + U64.pack(3) + bytes(7)),)),
        "do not fit|run past",
    ),
    "array of texts past the end": (
        document(
            pairs=(pair("k", ARRAY, U32.pack(STRING) + U64.pack(2) + U64.pack(500) + bytes(9)),)
        ),
        "run past",
    ),
    "array of unknown": (
        document(pairs=(pair("k", ARRAY, U32.pack(77) + U64.pack(1) + bytes(8)),)),
        "unknown value type 77",
    ),
    "arrays nested without end": (
        document(pairs=(pair("k", ARRAY, (U32.pack(ARRAY) + U64.pack(1)) * 5000),)),
        "nests arrays",
    ),
    "alignment zero": (
        document(pairs=(pair("general.alignment", UINT32, U32.pack(0)),)),
        "general.alignment 0",
    ),
    "alignment odd": (
        document(pairs=(pair("general.alignment", UINT32, U32.pack(33)),)),
        "general.alignment 33",
    ),
    "alignment text": (
        document(pairs=(pair("general.alignment", STRING, text("32")),)),
        "general.alignment '32'",
    ),
    "alignment huge": (
        document(pairs=(pair("general.alignment", UINT32, U32.pack(1 << 31)),)),
        "general.alignment 2147483648",
    ),
    "tensor twice": (
        document(infos=(info(), info(offset=32)), data=bytes(64)),
        "tensor 't' appears twice",
    ),
    "rank zero": (document(infos=(info(dims=()),), data=bytes(64)), "0 dimensions"),
    "rank absurd": (document(infos=(info(rank=2**32 - 1),), data=bytes(64)), "4294967295 dim"),
    "dimension zero": (document(infos=(info(dims=(0, 4)),), data=bytes(64)), "empty dimension"),
    "product overflows": (
        document(infos=(info(dims=(2**32, 2**32, 2**32, 4)),), data=bytes(64)),
        "truncated: tensor 't'",
    ),
    "product wraps to small": (
        document(infos=(info(dims=(2**63, 2)),), data=bytes(64)),
        "truncated: tensor 't'",
    ),
    "row not whole blocks": (
        document(infos=(info(dims=(33,), type_id=8),), data=bytes(99)),
        "not a multiple of Q8_0's 32",
    ),
    "offset odd": (document(infos=(info(offset=4),), data=bytes(64)), "not a multiple of 32"),
    "offset past the end": (document(infos=(info(offset=64),), data=bytes(64)), "truncated"),
    "offset absurd": (document(infos=(info(offset=2**64 - 32),), data=bytes(64)), "truncated"),
    "data cut": (document(infos=(info(),), data=bytes(15)), "truncated: tensor 't'"),
    "overlap": (
        document(infos=(info(dims=(16,)), info("u", offset=32)), data=bytes(64)),
        "'t' and 'u' overlap",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_in_one_line(case: str, write: Callable[[bytes], Path]) -> None:
    raw, message = HOSTILE[case]
    path = write(raw)
    with pytest.raises(CorruptFileError, match=message) as raised:
        GGUFFile.open(path)
    assert str(raised.value).startswith(str(path)) and "\n" not in str(raised.value)


LATE = {
    "text not UTF-8": (STRING, text(b"\xc3\x28"), "'k' is not valid UTF-8"),
    "truth of 2": (BOOL, b"\2", "neither 0 nor 1"),
    "truths": (ARRAY, U32.pack(BOOL) + U64.pack(3) + b"\0\1\5", "neither 0 nor 1"),
    "texts": (ARRAY, U32.pack(STRING) + U64.pack(1) + text(b"\xff"), "not valid UTF-8"),
}


@pytest.mark.parametrize("case", LATE)
def test_bad_value_is_reported_when_it_is_read(case: str, write: Callable[[bytes], Path]) -> None:
    value_type, value, message = LATE[case]
    with GGUFFile.open(write(document(pairs=(pair("k", value_type, value),)))) as file:
        with pytest.raises(CorruptFileError, match=message):
            file.metadata["k"]


def test_many_small_arrays_share_one_budget(
    write: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("termgen.engine.gguf.gguf_file.MAX_ARRAY_ELEMENTS", 100)
    texts = U32.pack(STRING) + U64.pack(60) + U64.pack(0) * 60
    raw = document(pairs=(pair("a", ARRAY, texts), pair("b", ARRAY, texts)))
    with pytest.raises(CorruptFileError, match="more than 100 elements, up to 'b'"):
        GGUFFile.open(write(raw))


def test_unknown_tensor_type_names_the_tensor(write: Callable[[bytes], Path]) -> None:
    raw = document(infos=(info("blk.0.x", type_id=999),), data=bytes(64))
    with pytest.raises(UnsupportedModelError, match=r"'blk\.0\.x' has the unknown type number 999"):
        GGUFFile.open(write(raw))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        GGUFFile.open(tmp_path / "absent.gguf")
    with pytest.raises(CorruptFileError, match="cannot be read"):
        GGUFFile.open(tmp_path)
