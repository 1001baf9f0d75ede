"""Large files of the hub, fetched into its cache in a way that can be broken off and resumed.

The hub's client begins a broken download anew, so its large files are fetched here first, beside
the blobs of its cache, and checked: the name of such a blob is the SHA-256 of its content. The
client then finds them there and makes its links. What termgen fetched is noted, so that it can be
deleted without touching the files of other programs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from termgen.errors import DownloadError
from termgen.library.hub_names import quiet_client
from termgen.library.places import models_folder
from termgen.library.stores import HUB_PREFIX

LARGE_BYTES = 10 << 20
"""Smaller files are left to the hub's client."""
PART_SUFFIX = ".termgen.incomplete"
CHUNK_BYTES = 1 << 22
NOTES = "fetched"
"""Folder, in that of the models: for each repository a list of the blobs that termgen fetched."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
Progress = Callable[[str, float], None]


def fetch_large_files(
    repo_id: str, is_wanted: Callable[[str], bool], on_progress: Progress
) -> None:
    """Fetch the wanted large files of a repository, but for those that are there.

    Raises what the hub's client raises, and DownloadError for a wrong checksum.
    """
    from huggingface_hub import HfApi, constants

    quiet_client()
    folder = repository_folder(repo_id)
    info = HfApi().model_info(repo_id, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    wanted = [
        (file.rfilename, file.size, file.lfs.sha256)
        for file in info.siblings or ()
        if is_wanted(file.rfilename)
        and file.lfs is not None
        and file.size is not None
        and LARGE_BYTES <= file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE
    ]
    total, done = sum(size for _, size, _ in wanted), 0
    for name, size, sha256 in wanted:
        if _SHA256.fullmatch(sha256) and not (folder / "blobs" / sha256).exists():
            share = _Share(f"fetching {name}", done, size, total, on_progress)
            _fetch_blob(folder, repo_id, name, size, sha256, share)
        done += size


class _Share:
    """Progress of one file as part of that of all."""

    def __init__(self, what: str, done: int, size: int, total: int, report: Progress) -> None:
        self._what, self._done, self._size = what, done, size
        self._total, self._report = total, report

    def received(self, num_bytes: int) -> None:
        """Raises what the receiver of the report raises, which stops the download."""
        self._report(self._what, min((self._done + num_bytes) / max(self._total, 1), 1.0))

    def checked(self, num_bytes: int) -> None:
        what = self._what.replace("fetching", "checking", 1)
        self._report(what, min(num_bytes / max(self._size, 1), 1.0))


def _fetch_blob(
    folder: Path, repo_id: str, name: str, size: int, sha256: str, share: _Share
) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        WeakFileLock,
        build_hf_headers,
    )

    blobs = folder / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    blob, part = blobs / sha256, blobs / f"{sha256}{PART_SUFFIX}"
    locks = folder.parent / ".locks" / folder.name
    locks.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(locks / f"{sha256}.termgen.lock"):
        if blob.exists():
            return  # another process fetched it meanwhile
        there = part.stat().st_size if part.exists() else 0
        if there > size:
            part.unlink()
            there = 0
        with part.open("ab") as file:
            http_get(
                hf_hub_url(repo_id, name),
                file,
                resume_size=there,
                headers=build_hf_headers(),
                expected_size=size,
                tqdm_class=_bar(share),
            )
            file.flush()
            os.fsync(file.fileno())
        _check(part, name, sha256, share)
        os.replace(part, blob)


def _check(part: Path, name: str, sha256: str, share: _Share) -> None:
    """Remove the file and raise DownloadError if it has another checksum."""
    found, done = hashlib.sha256(), 0
    with part.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            found.update(chunk)
            done += len(chunk)
            share.checked(done)
    if found.hexdigest() != sha256:
        part.unlink()
        raise DownloadError(
            f"{name} arrived with the wrong checksum (sha256 {found.hexdigest()[:16]}... instead "
            f"of {sha256[:16]}...); try again"
        )


def _bar(share: _Share) -> type[Any]:
    """A tqdm class that draws nothing and reports the bytes received."""
    from tqdm import tqdm

    class FileProgress(tqdm):  # type: ignore[misc]
        monitor_interval = 0
        _instances: WeakSet[tqdm] = WeakSet()  # takes no line from bars that are drawn

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            share.received(int(self.n))
            return True

        def display(self, *args: Any, **kwargs: Any) -> bool:
            return True

        def close(self) -> None:
            self.disable = True

    return FileProgress


def repository_folder(repo_id: str) -> Path:
    """The folder of a repository in the cache that the hub's client uses."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / (HUB_PREFIX + repo_id.replace("/", "--"))


def blobs_of(folder: Path) -> set[str]:
    """Names of a repository's whole blobs."""
    with suppress(OSError):
        return {name for name in os.listdir(folder / "blobs") if not name.endswith(".incomplete")}
    return set()


def note_fetched(folder: Path, before: set[str]) -> None:
    """Note the blobs of a repository's folder that have come since."""
    fetched = (blobs_of(folder) - before) | noted(folder)
    if not fetched:
        return
    notes = models_folder() / NOTES
    path = notes / f"{folder.name}.json"
    notes.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"folder": str(folder), "blobs": sorted(fetched)}))
    os.replace(part, path)


def noted(folder: Path) -> set[str]:
    """Blobs of a repository's folder that termgen fetched."""
    try:
        note = json.loads((models_folder() / NOTES / f"{folder.name}.json").read_bytes())
        if note["folder"] != str(folder):
            return set()
        return {str(name) for name in note["blobs"] if os.path.basename(str(name)) == name}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def forget(folder: Path, blobs: set[str]) -> None:
    """Take blobs out of the note."""
    path = models_folder() / NOTES / f"{folder.name}.json"
    left = noted(folder) - blobs
    if left:
        path.write_text(json.dumps({"folder": str(folder), "blobs": sorted(left)}))
    else:
        path.unlink(missing_ok=True)
