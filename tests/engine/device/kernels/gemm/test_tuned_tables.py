"""Files of measured shapes: what is believed, what is ignored and why, and what goes first."""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from termgen.engine.device.kernels.gemm import tuned_tables
from termgen.engine.device.kernels.gemm.candidates import Found, Gpu, candidates_by_rows
from termgen.engine.device.kernels.gemm.small_gemm_config import (
    MAX_ROWS,
    ROW_BANDS,
    SmallGemmConfig,
    Weights,
    band_of,
    choose,
)
from termgen.engine.device.kernels.gemm.small_gemm_table import MEASURED
from termgen.engine.device.kernels.gemm.tuned_tables import TunedTables

GPU = Gpu("NVIDIA Made-up 9000", (9, 0), 132, 50 << 20, 227 * 1024)
AMPERE = replace(GPU, name="NVIDIA Made-up 8000", capability=(8, 0), shared_bytes=163 * 1024)
N, K = 4096, 1024
BF16 = torch.bfloat16
CUDA = torch.device("cuda")


def found_for(gpu: Gpu, place: int = 0) -> dict[int, Found]:
    """A complete measurement: for every number of rows one of the candidates; for 64, cuBLAS."""
    tried = candidates_by_rows(N, K, gpu)
    chosen = {rows: Found(configs[place], 2e-6, 4e-6) for rows, configs in tried.items()}
    return chosen | {64: Found(None, math.inf, 4e-6)}


def choices(found: dict[int, Found]) -> dict[int, SmallGemmConfig | None]:
    return {rows: one.choice for rows, one in found.items()}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The file of one measured shape."""
    return TunedTables(tmp_path, GPU).write(N, K, found_for(GPU))


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_shape_is_read_as_it_was_written(tmp_path: Path, written: Path) -> None:
    tables = TunedTables(tmp_path, GPU)
    assert tables.get(N, K) == choices(found_for(GPU)) and tables.get(N, K + 16) is None
    assert written.name == "4096x1024.json"
    assert written.parent.name.startswith("NVIDIA-Made-up-9000-")
    rows = json.loads(written.read_text())["rows"]
    assert rows["1"]["us"] == 2.0 and rows["1"]["library_us"] == 4.0
    assert rows["64"] == {"choice": None, "us": None, "library_us": 4.0}


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8", "fp8-blocks"])
def test_a_form_has_files_of_its_own(weights: Weights, tmp_path: Path, written: Path) -> None:
    """What is fastest for 16 bits says nothing of other forms of the same size."""
    tables = TunedTables(tmp_path, GPU)
    assert tables.get(N, K, weights) is None
    tried = candidates_by_rows(N, K, GPU, weights)
    found = {rows: Found(configs[-1], 2e-6, 4e-6) for rows, configs in tried.items()}
    path = tables.write(N, K, found, weights)
    assert path.name == f"4096x1024-{weights}.json" and path.parent == written.parent
    again = TunedTables(tmp_path, GPU)
    assert again.get(N, K, weights) == tables.get(N, K, weights) == choices(found)
    assert again.get(N, K) == choices(found_for(GPU))
    assert set(found) == {*ROW_BANDS, *((128,) if weights in ("int8", "int4") else ())}
    other: Weights = "fp8" if weights == "int8" else "int8"
    path.rename(path.with_name(f"4096x1024-{other}.json"))
    assert TunedTables(tmp_path, GPU).get(N, K, other) is None, "it is about another form"


def test_a_new_measurement_takes_the_place_of_the_old_one(tmp_path: Path, written: Path) -> None:
    tables = TunedTables(tmp_path, GPU)
    before = tables.get(N, K)
    tables.write(N, K, found_for(GPU, place=1))
    assert before != tables.get(N, K) == choices(found_for(GPU, place=1))
    assert list(written.parent.iterdir()) == [written]


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace_file(part: str, path: Path) -> None:
        assert Path(part).parent == path.parent and Path(part).stat().st_size > 1000
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace_file)
    with pytest.raises(OSError, match="No space left"):
        TunedTables(tmp_path, GPU).write(N, K, found_for(GPU, place=1))
    assert list(written.parent.iterdir()) == [written]
    assert TunedTables(tmp_path, GPU).get(N, K) == choices(found_for(GPU))


def without_row(path: Path, row: str) -> dict[str, Any]:
    rows: dict[str, Any] = json.loads(path.read_text())["rows"]
    del rows[row]
    return rows


def with_choice(path: Path, row: str, **fields: Any) -> dict[str, Any]:
    rows: dict[str, Any] = json.loads(path.read_text())["rows"]
    rows[row]["choice"] |= fields
    return rows


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (lambda path: {"format": 0}, "its format is 0, not 3"),
        (lambda path: {"n": 2048}, "it is about 2048 x 1024, not 4096 x 1024"),
        (lambda path: {"weights": "int8"}, "it is about 4096 x 1024 int8, not 4096 x 1024"),
        (lambda path: {"weights": "int2"}, "Invalid enum value 'int2'"),
        (lambda path: {"gpu": "another"}, "it was measured on another, not on NVIDIA Made-up 9000"),
        (lambda path: {"versions": {"kernels": "0"}}, "it was measured with kernels 0, not "),
        (lambda path: {"rows": {}}, "it has rows , not 1, 2, 4, 8, 16, 32, 64"),
        (lambda path: {"rows": without_row(path, "32")}, "it has rows 1, 2, 4, 8, 16, 64, not"),
        (
            lambda path: {"rows": with_choice(path, "8", block_n=17)},
            "its choice for 8 rows is not among the candidates",
        ),
        (
            lambda path: {"rows": with_choice(path, "1", block_m=2)},
            "its choice for 1 rows is not among the candidates",
        ),
        (lambda path: {"rows": with_choice(path, "1", kind="new")}, "Invalid enum value 'new'"),
        (lambda path: {"rows": with_choice(path, "1", splits="2")}, "Expected `int`, got `str`"),
        (lambda path: {"rows": None}, "Expected `object`, got `null`"),
        (lambda path: {"more": 1}, "unknown field `more`"),
    ],
)
def test_a_file_that_is_not_believed(
    fields: Any, reason: str, tmp_path: Path, written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(written, **fields(written))
    tables = TunedTables(tmp_path, GPU)
    assert tables.get(N, K) is None and tables.get(N, K) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith(f"{written} is ignored: ") and reason in record.message


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b'{"n": 1}', b"null"])
def test_a_file_that_is_not_one(
    text: bytes, tmp_path: Path, written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written.write_bytes(text)
    assert TunedTables(tmp_path, GPU).get(N, K) is None
    assert "is ignored" in caplog.text


def test_half_a_file_is_not_believed(tmp_path: Path, written: Path) -> None:
    text = written.read_bytes()
    for size in range(0, len(text) - 1, 97):
        written.write_bytes(text[:size])
        assert TunedTables(tmp_path, GPU).get(N, K) is None


def test_a_file_that_cannot_be_read(
    tmp_path: Path, written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written.unlink()
    written.mkdir()
    assert TunedTables(tmp_path, GPU).get(N, K) is None
    assert "Is a directory" in caplog.text


@pytest.mark.parametrize(
    "other",
    [
        replace(GPU, name="NVIDIA Made-up 9001"),
        replace(GPU, capability=(9, 1)),
        replace(GPU, num_sms=114),
    ],
)
def test_another_gpu_has_files_of_its_own(tmp_path: Path, written: Path, other: Gpu) -> None:
    assert TunedTables(tmp_path, other).get(N, K) is None


@pytest.mark.parametrize("name", ["kernels", "triton", "torch"])
def test_another_version_has_files_of_its_own(
    name: str, tmp_path: Path, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = tuned_tables.versions() | {name: "newer"}
    monkeypatch.setattr(tuned_tables, "versions", lambda: newer)
    tables = TunedTables(tmp_path, GPU)
    assert tables.get(N, K) is None, "no file"
    tables.folder.mkdir()
    (tables.folder / written.name).write_bytes(written.read_bytes())
    assert TunedTables(tmp_path, GPU).get(N, K) is None, "carried over by hand"


def test_the_kernels_have_a_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = tuned_tables.versions.__wrapped__
    before = real()
    for source in tuned_tables.SOURCES:
        copy = tmp_path / source
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes((tuned_tables._KERNELS / source).read_bytes())
    monkeypatch.setattr(tuned_tables, "_KERNELS", tmp_path)
    assert real() == before
    with (tmp_path / "launch.py").open("a") as file:
        file.write("# changed\n")
    assert real()["kernels"] != before["kernels"] and real()["torch"] == before["torch"]


# Which choice counts.


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Any:
    def pretend(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    pretend((9, 0))
    return pretend


def chosen(tables: TunedTables | None, *, dtype: torch.dtype = BF16) -> list[Any]:
    return [choose(m, N, K, dtype, CUDA, MEASURED, tables) for m in range(1, MAX_ROWS + 2)]


def test_a_measured_shape_goes_before_the_shipped_table(
    tmp_path: Path, written: Path, capability: Any
) -> None:
    tables = TunedTables(tmp_path, GPU)
    by_rows = choices(found_for(GPU))
    measured = [by_rows[band_of(m)] for m in range(1, MAX_ROWS + 1)] + [None]
    shipped = [MEASURED[N, K][band_of(m)] for m in range(1, MAX_ROWS + 1)] + [None]
    assert measured != shipped
    assert chosen(tables) == chosen(tables, dtype=torch.float16) == measured
    assert chosen(None) == shipped
    edit(written, rows=without_row(written, "2"))
    assert chosen(TunedTables(tmp_path, GPU)) == shipped, "as if it were not there"
    assert chosen(tables, dtype=torch.float32) == [None] * 65


def test_cublas_that_was_measured_goes_before_the_shipped_table(
    tmp_path: Path, capability: Any
) -> None:
    tables = TunedTables(tmp_path, GPU)
    tables.write(N, K, dict.fromkeys(ROW_BANDS, Found(None, 5e-6, 4e-6)))
    assert chosen(tables) == [None] * 65


@pytest.mark.parametrize("pretended", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
def test_other_generations_have_what_was_measured_or_cublas(
    pretended: tuple[int, int], tmp_path: Path, capability: Any
) -> None:
    capability(pretended)
    gpu = replace(AMPERE, capability=pretended)
    tables = TunedTables(tmp_path, gpu)
    assert chosen(tables) == [None] * 65
    tables.write(N, K, found_for(gpu))
    assert chosen(tables)[:64] == [
        choices(found_for(gpu))[band_of(m)] for m in range(1, MAX_ROWS + 1)
    ]


def test_a_generation_without_kernels_has_cublas(tmp_path: Path, capability: Any) -> None:
    capability((7, 5))
    gpu = replace(AMPERE, capability=(7, 5))
    tables = TunedTables(tmp_path, gpu)
    tables.write(N, K, found_for(gpu))
    assert chosen(tables) == [None] * 65
