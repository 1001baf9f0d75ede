"""Files of what `termgen tune` measured: one for each shape and form of a weight, in a folder for
each kind of GPU.

The folder's name says what a measurement depends on: the GPU, and the versions of the kernels, of
Triton and of torch (which brings cuBLAS). A file is believed only if it says the same, has every
number of rows, and chooses among today's candidates. Otherwise it is ignored, with a logged reason,
as if it were not there.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import re
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from termgen.engine.device.kernels.gemm.candidates import Found, Gpu, candidates_by_rows
from termgen.engine.device.kernels.gemm.small_gemm_config import (
    ByRows,
    Shape,
    SmallGemmConfig,
    Weights,
)

logger = logging.getLogger(__name__)

FORMAT = 3
"""Changes with the fields of a file."""
SOURCES = (
    *("gemm/small_gemm.py", "gemm/small_gemm_config.py", "launch.py"),
    *("gemm/group_gemm.py", "gemm/group_gemv.py", "gemm/group_layout.py", "gemm/float8_gemm.py"),
)
"""Files of `kernels` whose text is the version of the kernels."""
PACKAGES = ("triton", "torch")
_DIGITS = 12
_KERNELS = Path(__file__).parents[1]


class Measured(msgspec.Struct, forbid_unknown_fields=True):
    """The choice for a number of rows, with the times that led to it."""

    choice: SmallGemmConfig | None
    """None: cuBLAS."""
    us: float | None
    """Microseconds of the fastest candidate; None: none ran."""
    library_us: float


class ShapeFile(msgspec.Struct, forbid_unknown_fields=True):
    """One measured shape."""

    format: int
    gpu: str
    """`describe` of the GPU."""
    versions: dict[str, str]
    n: int
    k: int
    weights: Weights
    rows: dict[str, Measured]
    """Rows of x, in digits -> the fastest up to this many rows."""


class TunedTables:
    """`Tuned`: the measured shapes of one GPU, read when they are first asked for."""

    def __init__(self, root: Path, gpu: Gpu) -> None:
        """root: the folder for all GPUs."""
        self.gpu = gpu
        self.folder = root / folder_name(gpu, versions())
        self._read: dict[Shape, ByRows | None] = {}

    def get(self, n: int, k: int, weights: Weights = "half") -> ByRows | None:
        """Rows -> choice; None if the shape was not measured, or its file cannot be used."""
        shape = Shape(n, k, weights)
        if shape not in self._read:
            self._read[shape] = self._load(shape)
        return self._read[shape]

    def write(self, n: int, k: int, found: Mapping[int, Found], weights: Weights = "half") -> Path:
        """Store a measured shape, all of it or nothing. Raises OSError."""
        shape = Shape(n, k, weights)
        file = ShapeFile(
            format=FORMAT,
            gpu=describe(self.gpu),
            versions=versions(),
            n=n,
            k=k,
            weights=weights,
            rows={str(rows): _measured(one) for rows, one in found.items()},
        )
        text = msgspec.json.format(msgspec.json.encode(file), indent=1)
        path = self._path(shape)
        write_whole(path, text + b"\n")
        self._read.pop(shape, None)
        return path

    def _path(self, shape: Shape) -> Path:
        end = "" if shape.weights == "half" else f"-{shape.weights}"
        return self.folder / f"{shape.n}x{shape.k}{end}.json"

    def _load(self, shape: Shape) -> ByRows | None:
        path = self._path(shape)
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s is ignored: %s", path, error.strerror)
            return None
        try:
            file = msgspec.json.decode(text, type=ShapeFile)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning("%s is ignored: %s", path, error)
            return None
        if reason := why_not(file, shape, self.gpu):
            logger.warning("%s is ignored: %s", path, reason)
            return None
        return {int(rows): measured.choice for rows, measured in file.rows.items()}


def why_not(file: ShapeFile, shape: Shape, gpu: Gpu) -> str:
    """The reason not to believe what the file says of this shape; empty if there is none."""
    if file.format != FORMAT:
        return f"its format is {file.format}, not {FORMAT}"
    if file.gpu != describe(gpu):
        return f"it was measured on {file.gpu}, not on {describe(gpu)}"
    for name, here in versions().items():
        if (there := file.versions.get(name)) != here:
            return f"it was measured with {name} {there}, not {here}"
    if (about := Shape(file.n, file.k, file.weights)) != shape:
        return f"it is about {about}, not {shape}"
    if file.rows.keys() != {str(rows) for rows in shape.bands}:
        return f"it has rows {', '.join(file.rows)}, not {', '.join(map(str, shape.bands))}"
    known = candidates_by_rows(*shape[:2], gpu, shape.weights)
    for rows, measured in file.rows.items():
        if measured.choice is not None and measured.choice not in known[int(rows)]:
            return f"its choice for {rows} rows is not among the candidates"
    return ""


def describe(gpu: Gpu) -> str:
    major, minor = gpu.capability
    return f"{gpu.name}, capability {major}.{minor}, {gpu.num_sms} multiprocessors"


@functools.cache
def versions() -> dict[str, str]:
    """Names and versions of the software that a time depends on."""
    text = b"".join((_KERNELS / source).read_bytes() for source in SOURCES)
    found = {"kernels": hashlib.sha256(text).hexdigest()[:_DIGITS]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def folder_name(gpu: Gpu, software: Mapping[str, str]) -> str:
    """A name for people to recognise the GPU by, and a digest of all that counts."""
    digest = hashlib.sha256(repr((describe(gpu), sorted(software.items()))).encode())
    name = re.sub(r"[^A-Za-z0-9]+", "-", gpu.name).strip("-")
    return f"{name}-{digest.hexdigest()[:_DIGITS]}"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a reader finds the old one or the new one, and never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _measured(found: Found) -> Measured:
    us = found.seconds * 1e6 if math.isfinite(found.seconds) else None
    return Measured(found.choice, us, found.library_seconds * 1e6)
