"""Fetching from the hub: its client is replaced, its exceptions are real."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from termgen.errors import DownloadError
from termgen.library.fetch import fetch_hub_snapshot


@pytest.fixture(autouse=True)
def without_large_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """These are fetched apart, see `test_hub.py`."""
    monkeypatch.setenv("TERMGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("termgen.library.fetch.fetch_large_files", lambda *arguments: None)


def silent(stage: str, fraction: float) -> None:
    pass


def hub_raises(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot_download(repo_id: str, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def hub_error(name: str, text: str = "said\nmuch more") -> BaseException:
    from huggingface_hub import errors

    kind = getattr(errors, name)
    error: BaseException = kind.__new__(kind, text)  # its constructor takes an HTTP response
    error.args = (text,)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "is gated: accept its terms at https://huggingface.co/org/name"),
        ("RepositoryNotFoundError", "does not exist on the hub, or it is private"),
        ("HFValidationError", "'org/name' is not a valid hub id"),
    ],
)
def test_hub_refusals(error: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_raises(hub_error(error), monkeypatch)
    with pytest.raises(DownloadError, match=message) as raised:
        fetch_hub_snapshot("org/name", None, silent)
    assert "\n" not in str(raised.value)


def test_hub_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for error, message in (
        (ConnectionError("no route to host"), "cannot fetch org/name from the hub: no route"),
        (RuntimeError("first line\nsecond"), "from the hub: first line$"),
        (OSError(errno.ENOSPC, "full"), "no space left for org/name: .*HF_HUB_CACHE"),
    ):
        hub_raises(error, monkeypatch)
        with pytest.raises(DownloadError, match=message):
            fetch_hub_snapshot("org/name", None, silent)


def test_hub_offline_is_said_plainly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real client in offline mode."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match="org/name is not in the hub cache, and HF_HUB_OFFLINE"):
        fetch_hub_snapshot("org/name", None, silent)


def test_one_file_of_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    files = ["model-Q4_K_M.gguf", "model-Q8_0.gguf", "config.json", "sub/model-Q8_0.gguf"]
    wanted: list[str] = []

    def snapshot_download(repo_id: str, **kwargs: Any) -> str:
        patterns = {key: kwargs[key] for key in ("allow_patterns", "ignore_patterns")}
        wanted.extend(filter_repo_objects(files, **patterns))
        return "folder"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    fetch_hub_snapshot("org/name", 1000, silent, file="model-Q8_0.gguf")
    assert wanted == ["model-Q8_0.gguf"]


def test_hub_patterns_and_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    files = ["config.json", "tokenizer.json", "chat_template.jinja", "merges.txt"]
    files += ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    unwanted = ["pytorch_model.bin", "modeling.py", "original/consolidated.00.pth", "model.gguf"]
    unwanted += ["consolidated.safetensors", "onnx/model.onnx", "fp16/model.safetensors"]
    wanted: list[str] = []

    def snapshot_download(repo_id: str, **kwargs: Any) -> str:
        patterns = {key: kwargs[key] for key in ("allow_patterns", "ignore_patterns")}
        wanted.extend(filter_repo_objects(files + unwanted, **patterns))
        bars: Callable[..., Any] = kwargs["tqdm_class"]
        received = bars(desc="received", total=0, initial=0, unit="B", unit_scale=True)
        written = bars(desc="written", total=0, unit="B", unit_scale=True)
        with bars(total=2, desc="files") as counted:
            for _ in range(2):
                for bar in (received, written):
                    bar.total = (bar.total or 0) + 500
                    bar.refresh()
                    for _ in range(5):
                        bar.update(100)
                        bar.refresh()
                counted.update(1)
        for bar in (received, written):
            bar.set_description("done")
            bar.close()
        return "folder"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    seen: list[tuple[str, float]] = []
    fetch_hub_snapshot("org/name", 1000, lambda stage, fraction: seen.append((stage, fraction)))
    assert sorted(wanted) == sorted(files)
    fractions = [fraction for _, fraction in seen]
    assert {stage for stage, _ in seen} == {"fetching org/name"}
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0) and 0.5 in fractions
    assert capsys.readouterr() == ("", "")
