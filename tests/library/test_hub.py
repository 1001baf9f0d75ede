"""Search, downloads and deletion against a server that answers as the hub does."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub, FakeRepository, fake_hub

from termgen.errors import CacheError, DownloadError, ModelNotFoundError, UnsupportedModelError
from termgen.library import hub_files, stores
from termgen.library.catalog import pull, resolve_model
from termgen.library.hub import HubFile, can_reach, model_files, search
from termgen.library.removal import delete, is_own

LARGE = b"GGUF" + bytes(range(256)) * 1000
OTHER = b"GGUF" + b"other" * 10_000


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("TERMGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LLAMA_CACHE", raising=False)
    monkeypatch.setattr(stores, "OLLAMA_SERVICE", tmp_path / "service")
    monkeypatch.setattr(hub_files, "LARGE_BYTES", 1000)
    with fake_hub(monkeypatch, str(tmp_path / "hub")) as server:
        server.repositories["org/small-GGUF"] = FakeRepository(
            {
                "README.md": b"x",
                "small-Q8_0.gguf": LARGE,
                "small-Q4_K_M.gguf": OTHER,
                "mmproj-small.gguf": b"GGUF",
            },
            downloads=1234,
            gguf={"architecture": "qwen3", "total": 600_000_000},
        )
        yield server


def silent(stage: str, share: float) -> None:
    pass


def test_search(hub: FakeHub) -> None:
    hub.repositories["org/small-more"] = FakeRepository({}, downloads=9999)
    hub.repositories["org/none"] = FakeRepository({})
    first, second = search("small")
    assert (first.hub_id, first.downloads, first.architecture) == ("org/small-more", 9999, "")
    assert (second.hub_id, second.architecture) == ("org/small-GGUF", "qwen3")
    assert second.num_parameters == 600_000_000 and not second.is_gated
    query = hub.queries[-1]
    assert query["search"] == ["small"] and query["filter"] == ["gguf"]
    assert query["sort"] == ["downloads"] and query["limit"] == ["20"]
    assert search("nothing of the kind") == []
    assert can_reach()


def test_what_the_hub_says_is_not_trusted(hub: FakeHub) -> None:
    hub.repositories["org/odd"] = FakeRepository({}, gguf={"architecture": 7, "total": "many"})
    (odd,) = search("odd")
    assert (odd.architecture, odd.num_parameters) == ("", 0)


def test_files_of_a_repository(hub: FakeHub) -> None:
    repository = hub.repositories["org/small-GGUF"]
    for number in (1, 2):
        repository.files[f"big/small-F16-0000{number}-of-00002.gguf"] = b"GGUF" + bytes(10**6)
    assert model_files("org/small-GGUF") == [
        HubFile("small-Q4_K_M.gguf", len(OTHER)),
        HubFile("small-Q8_0.gguf", len(LARGE)),
        HubFile("big/small-F16-00001-of-00002.gguf", 2 * (10**6 + 4), 2),
    ]
    assert [f.quantization for f in model_files("org/small-GGUF")] == ["Q4_K_M", "Q8_0", "F16"]
    with pytest.raises(ModelNotFoundError, match="org/none does not exist on the hub"):
        model_files("org/none")


def test_no_hub_is_one_line(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="cannot search the hub: HF_HUB_OFFLINE is set"):
        search("small")
    assert not can_reach()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with pytest.raises(DownloadError, match="cannot search the hub: .") as raised:
        search("small")
    assert "\n" not in str(raised.value)
    assert not can_reach()


def test_a_file_is_pulled_by_its_quantisation(hub: FakeHub, tmp_path: Path) -> None:
    reports: list[tuple[str, float]] = []
    model = pull("org/small-GGUF:q8_0", lambda stage, share: reports.append((stage, share)))
    assert model.name == "org/small-GGUF:small-Q8_0.gguf" and model.path.read_bytes() == LARGE
    assert model.path.parent.name == COMMIT
    blob = model.path.resolve()
    assert blob.name == hashlib.sha256(LARGE).hexdigest() and blob.parent.name == "blobs"
    stages = dict(reports)
    assert stages["fetching small-Q8_0.gguf"] == stages["checking small-Q8_0.gguf"] == 1.0
    assert hub.requests == [("small-Q8_0.gguf", "")], "it came over the network once"
    assert pull("org/small-GGUF:Q8_0").path == model.path and len(hub.requests) == 1
    with pytest.raises(ModelNotFoundError, match="no GGUF file Q2_K; it has Q4_K_M, Q8_0"):
        pull("org/small-GGUF:Q2_K")
    hub.repositories["org/small-GGUF"].files |= {
        f"x-F16-0000{number}-of-00002.gguf": LARGE for number in (1, 2)
    }
    with pytest.raises(UnsupportedModelError, match="is in 2 parts, and termgen reads one file"):
        pull("org/small-GGUF:F16")


def test_a_stopped_download_goes_on_where_it_was(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)

    def stop(stage: str, share: float) -> None:
        if share > 0.5:
            raise DownloadError("fetching was stopped")

    with pytest.raises(DownloadError, match="fetching was stopped"):
        pull("org/small-GGUF:Q8_0", stop)
    (part,) = hub_files.repository_folder("org/small-GGUF").glob("blobs/*")
    there = part.stat().st_size
    assert part.name.endswith(".termgen.incomplete") and 100_000 < there < len(LARGE)
    assert stores.find_models() == [], "what is not complete is not listed"
    assert pull("org/small-GGUF:Q8_0").path.read_bytes() == LARGE
    assert hub.requests[-1] == ("small-Q8_0.gguf", f"bytes={there}-")
    assert not part.exists()


def test_a_broken_connection_is_taken_up_again(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.break_after = 100_000
    assert pull("org/small-GGUF:Q8_0").path.read_bytes() == LARGE
    assert len(hub.requests) == 3 and hub.requests[1][1] == "bytes=100000-"


def test_a_wrong_checksum_leaves_nothing(hub: FakeHub) -> None:
    repository = hub.repositories["org/small-GGUF"]
    repository.said["small-Q8_0.gguf"] = "a" * 64
    with pytest.raises(DownloadError, match="arrived with the wrong checksum"):
        pull("org/small-GGUF:Q8_0")
    assert list(hub_files.repository_folder("org/small-GGUF").glob("blobs/*")) == []
    repository.said.clear()
    folder = hub_files.repository_folder("org/small-GGUF")
    part = folder / "blobs" / (repository.sha256("small-Q8_0.gguf") + ".termgen.incomplete")
    part.write_bytes(b"damaged")
    with pytest.raises(DownloadError, match="wrong checksum"):
        pull("org/small-GGUF:Q8_0")
    assert pull("org/small-GGUF:Q8_0").path.read_bytes() == LARGE
    part.write_bytes(bytes(len(OTHER) + 1))  # longer than the file
    other = part.with_name(repository.sha256("small-Q4_K_M.gguf") + ".termgen.incomplete")
    part.rename(other)
    assert pull("org/small-GGUF:Q4_K_M").path.read_bytes() == OTHER


def test_a_folder_of_weights(hub: FakeHub) -> None:
    hub.repositories["org/whole"] = FakeRepository(
        {
            "config.json": b"{}",
            "model.safetensors": b"w" * 5000,
            "pytorch_model.bin": b"p" * 5000,
        }
    )
    model = pull("org/whole")
    assert model.kind == "folder" and (model.path / "model.safetensors").stat().st_size == 5000
    assert not (model.path / "pytorch_model.bin").exists()
    assert is_own(model.path) and delete("org/whole") > 5000
    assert not hub_files.repository_folder("org/whole").exists()


def test_what_came_before_a_failure_counts_as_fetched(hub: FakeHub) -> None:
    files = {"config.json": b"{}", "a.safetensors": b"a" * 5000, "model.safetensors": b"w" * 5000}
    repository = hub.repositories["org/whole"] = FakeRepository(files)
    repository.said["model.safetensors"] = "b" * 64
    with pytest.raises(DownloadError, match="wrong checksum"):
        pull("org/whole")
    repository.said.clear()
    assert pull("org/whole").kind == "folder"
    assert delete("org/whole") == 10_002
    assert not hub_files.repository_folder("org/whole").exists()


def test_deleting_what_termgen_fetched_and_nothing_else(hub: FakeHub) -> None:
    folder = hub_files.repository_folder("org/small-GGUF")
    mine = pull("org/small-GGUF:Q8_0").path
    snapshot = mine.parent
    foreign = folder / "blobs" / "foreign"  # another program fetched this one
    foreign.write_bytes(OTHER)
    (snapshot / "small-Q4_K_M.gguf").symlink_to(foreign)
    assert is_own(mine) and not is_own(snapshot / "small-Q4_K_M.gguf")
    with pytest.raises(CacheError, match="not fetched by this termgen.*hf cache rm model/org/smal"):
        delete("org/small-GGUF:Q4_K_M")
    assert delete("org/small-GGUF:small-Q8_0.gguf") == len(LARGE)
    assert not mine.exists() and not os.path.lexists(mine) and foreign.read_bytes() == OTHER
    assert resolve_model("org/small-GGUF:Q4_K_M").path.read_bytes() == OTHER
    with pytest.raises(ModelNotFoundError):
        delete("org/small-GGUF:Q8_0")


def test_files_of_others_are_never_deleted(hub: FakeHub, tmp_path: Path) -> None:
    studio = tmp_path / ".lmstudio" / "models" / "org" / "m" / "a.gguf"
    studio.parent.mkdir(parents=True)
    studio.write_bytes(LARGE)
    with pytest.raises(CacheError, match="belongs to LM Studio: delete it there"):
        delete("lmstudio:org/m/a")
    with pytest.raises(CacheError, match="was not fetched by termgen"):
        delete(str(studio))
    assert studio.read_bytes() == LARGE and not is_own(studio)
    own = tmp_path / "cache" / "models" / "own.gguf"
    own.parent.mkdir(parents=True)
    own.write_bytes(LARGE)
    assert is_own(own) and delete(str(own)) == len(LARGE) and not own.exists()


@pytest.mark.parametrize(
    "note", ["", "[]", '{"folder": 1}', '{"folder": "F", "blobs": ["../../x"]}', "{"]
)
def test_a_damaged_note_deletes_nothing(hub: FakeHub, note: str, tmp_path: Path) -> None:
    mine = pull("org/small-GGUF:Q8_0").path
    (path,) = (tmp_path / "cache" / "models" / "fetched").iterdir()
    folder = hub_files.repository_folder("org/small-GGUF")
    path.write_text(note.replace("F", str(folder)))
    with pytest.raises(CacheError, match="left where it is"):
        delete("org/small-GGUF:Q8_0")
    assert mine.exists()
