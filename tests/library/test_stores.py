"""Models in the folders of other programs, whole and hostile ones."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from termgen.errors import ModelNotFoundError, UnsupportedModelError
from termgen.library import stores
from termgen.library.catalog import resolve_model
from termgen.library.stores import FoundModel, Look, find_models, gguf_models, look_up

GGUF = b"GGUF" + bytes(60)
MODEL = "application/vnd.ollama.image.model"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without any model."""
    for name in (
        *("OLLAMA_MODELS", "LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"),
        *("XDG_CACHE_HOME", "XDG_DATA_HOME"),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TERMGEN_CACHE", str(tmp_path / "termgen"))
    monkeypatch.setattr(stores, "OLLAMA_SERVICE", tmp_path / "service")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(path: Path, data: bytes = GGUF) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def put_ollama(root: Path, place: str, *layers: tuple[str, str], blob: bytes = GGUF) -> Path:
    manifest = {"layers": [{"mediaType": kind, "digest": digest} for kind, digest in layers]}
    for _, digest in layers:
        put(root / "blobs" / digest.replace(":", "-"), blob)
    return put(root / "manifests" / place, json.dumps(manifest).encode())


def digest_of(letter: str) -> str:
    return "sha256:" + letter * 64


def names() -> list[str]:
    return [model.name for model in find_models()]


def test_an_empty_machine() -> None:
    assert find_models() == []


def test_ollama_by_the_names_it_shows(machine: Path) -> None:
    root, a = machine / ".ollama" / "models", digest_of("a")
    template = ("application/vnd.ollama.image.template", digest_of("f"))
    put_ollama(root, "registry.ollama.ai/library/qwen3/8b", (MODEL, a), template)
    put_ollama(root, "registry.ollama.ai/library/qwen3/latest", (MODEL, a))
    put_ollama(root, "registry.ollama.ai/someone/own/v1", (MODEL, digest_of("b")))
    put_ollama(root, "hf.co/org/repo-GGUF/Q4_K_M", (MODEL, digest_of("c")))
    assert names() == [
        "ollama:hf.co/org/repo-GGUF:Q4_K_M",
        "ollama:qwen3:8b",
        "ollama:qwen3:latest",
        "ollama:someone/own:v1",
    ]
    found = resolve_model("ollama:qwen3:8b")
    assert found.path == root / "blobs" / ("sha256-" + "a" * 64) and found.kind == "gguf"
    assert found.name == "ollama:qwen3:8b" and found.root == str(found.path)
    assert resolve_model("Ollama:qwen3").path == found.path, "the tag latest may be left out"
    with pytest.raises(ModelNotFoundError, match="Ollama has no model 'llama3' on this machine"):
        resolve_model("ollama:llama3")


def test_ollama_elsewhere(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "registry.ollama.ai/library/a/latest"
    put_ollama(machine / "service", place, (MODEL, digest_of("a")))
    put_ollama(machine / "set", place.replace("/a/", "/b/"), (MODEL, digest_of("b")))
    monkeypatch.setenv("OLLAMA_MODELS", str(machine / "set"))
    assert names() == ["ollama:b:latest", "ollama:a:latest"]


def test_ollama_models_that_cannot_run_say_why(machine: Path) -> None:
    root, library = machine / ".ollama" / "models", "registry.ollama.ai/library"
    adapter = ("application/vnd.ollama.image.adapter", digest_of("c"))
    put_ollama(root, f"{library}/adapted/latest", (MODEL, digest_of("a")), adapter)
    put_ollama(root, f"{library}/mlx/latest", ("application/vnd.ollama.image.tensor", "x" * 3))
    put_ollama(
        root, f"{library}/tensors/latest", ("application/vnd.ollama.image.tensor", digest_of("d"))
    )
    put_ollama(root, f"{library}/two/latest", (MODEL, digest_of("a")), (MODEL, digest_of("b")))
    assert {model.name: model.problem for model in find_models()} == {
        "ollama:adapted:latest": "it has an adapter, which termgen does not read",
        "ollama:tensors:latest": "its weights are not a GGUF file",
        "ollama:two:latest": "its weights are in 2 files, and termgen reads one",
    }
    with pytest.raises(UnsupportedModelError, match="ollama:tensors: its weights are not a GGUF"):
        resolve_model("ollama:tensors")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"layers": [',
        b"[]",
        b"{}",
        b'{"layers": []}',
        b'{"layers": {}}',
        b'{"layers": [1]}',
        b'{"layers": [{"digest": 7}]}',
        b'{"layers": [{"digest": "sha256:../../etc/passwd"}]}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
    ids=[str(number) for number in range(11)],
)
def test_damaged_manifests_are_passed_over(machine: Path, content: bytes) -> None:
    root = machine / ".ollama" / "models"
    put(root / "manifests" / "registry.ollama.ai" / "library" / "bad" / "latest", content)
    put_ollama(root, "registry.ollama.ai/library/good/latest", (MODEL, digest_of("a")))
    assert names() == ["ollama:good:latest"]


def test_an_incomplete_blob_is_passed_over(machine: Path) -> None:
    root = machine / ".ollama" / "models"
    put_ollama(root, "registry.ollama.ai/library/a/latest", (MODEL, digest_of("a")))
    (root / "blobs" / ("sha256-" + "a" * 64)).unlink()
    put_ollama(root, "registry.ollama.ai/library/b/latest", (MODEL, digest_of("b")), blob=b"tar")
    assert names() == []


def test_lm_studio(machine: Path) -> None:
    for home in (machine / ".lmstudio", machine / ".cache" / "lm-studio", machine / "moved"):
        put(home / "models" / "org" / "model-GGUF" / f"in-{home.name}-Q4_K_M.gguf")
        assert names() == [f"lmstudio:org/model-GGUF/in-{home.name}-Q4_K_M"]
        (machine / ".lmstudio-home-pointer").write_text(str(machine / "moved") + "\n") if (
            home.name == "lm-studio"
        ) else None
    downloads = machine / "downloads"
    put(downloads / "org" / "other" / "x.gguf")
    put(downloads / "org" / "other" / "mmproj-x.gguf")
    put(downloads / "org" / "other" / "y.gguf.part")
    put(downloads / "org" / "other" / "deeper" / "z.gguf")
    settings = machine / "moved" / "settings.json"
    settings.write_text(json.dumps({"downloadsFolder": str(downloads)}))
    assert names() == ["lmstudio:org/other/x"]
    assert resolve_model("lmstudio:org/other/x.gguf").path == downloads / "org" / "other" / "x.gguf"
    settings.write_text('{"downloadsFolder": 7}')
    assert names() == ["lmstudio:org/model-GGUF/in-moved-Q4_K_M"]


def test_the_flat_folders(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(machine / ".cache" / "llama.cpp" / "org_repo_model-Q8_0.gguf")
    put(machine / ".cache" / "llama.cpp" / "org_repo_model-Q8_0.gguf.json", b"{}")
    put(machine / ".cache" / "llama.cpp" / "manifest=org=repo=Q8_0.json", b"{}")
    put(machine / ".local" / "share" / "nomic.ai" / "GPT4All" / "Small.gguf")
    put(machine / ".local" / "share" / "nomic.ai" / "GPT4All" / "incomplete-Big.gguf", b"")
    jan = machine / ".local" / "share" / "Jan" / "data" / "llamacpp" / "models"
    put(jan / "org" / "tiny" / "model.gguf")
    put(jan / "org" / "tiny" / "model.yml", b"")
    assert names() == ["llamacpp:org_repo_model-Q8_0", "gpt4all:Small", "jan:org/tiny"]
    assert resolve_model("jan:org/tiny").path == jan / "org" / "tiny" / "model.gguf"
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine / "none"))
    monkeypatch.setenv("LLAMA_CACHE", str(machine / ".cache" / "llama.cpp"))
    monkeypatch.setenv("XDG_DATA_HOME", str(machine / "none"))
    assert names() == ["llamacpp:org_repo_model-Q8_0"]


def put_in_hub(root: Path, hub_id: str, *files: str) -> Path:
    repository = root / ("models--" + hub_id.replace("/", "--"))
    put(repository / "refs" / "main", b"c0ffee\n")
    for number, file in enumerate(files):
        blob = put(repository / "blobs" / str(number))
        link = repository / "snapshots" / "c0ffee" / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    return repository / "snapshots" / "c0ffee"


def test_files_of_a_hub_repository(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = machine / ".cache" / "huggingface" / "hub"
    snapshot = put_in_hub(hub, "org/repo", "a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-a.gguf")
    assert names() == ["org/repo:a-Q4_K_M.gguf", "org/repo:a-Q8_0.gguf"]
    found = resolve_model("org/repo:a-Q8_0.gguf")
    assert (found.name, found.path) == ("org/repo:a-Q8_0.gguf", snapshot / "a-Q8_0.gguf")
    assert resolve_model("org/repo:q4_k_m").name == "org/repo:a-Q4_K_M.gguf"
    put_in_hub(hub, "org/twice", "a-Q8_0.gguf", "b-Q8_0.gguf")
    with pytest.raises(ModelNotFoundError, match=r"a-Q8_0.gguf, b-Q8_0.gguf in the hub cache are"):
        resolve_model("org/twice:Q8_0")
    for name in ("org/repo:Q2_K", "org/repo:none.gguf", "org/none:Q8_0", "org/repo:../a.gguf"):
        with pytest.raises(ModelNotFoundError):
            resolve_model(name)
    put_in_hub(machine / "of-llama", "org/other", "x.gguf")
    monkeypatch.setenv("LLAMA_CACHE", str(machine / "of-llama"))
    assert "org/other:x.gguf" in names()


def test_split_models_are_one_line_with_the_reason(machine: Path) -> None:
    folder = machine / ".lmstudio" / "models" / "org" / "big"
    for number in (1, 2, 3):
        put(folder / f"big-Q4_K_M-{number:05}-of-00003.gguf")
    put(folder / "half-00002-of-00002.gguf")
    put(folder / "one-00001-of-00001.gguf")
    found = {model.name: model for model in find_models()}
    assert set(found) == {
        "lmstudio:org/big/big-Q4_K_M",
        "lmstudio:org/big/half",
        "lmstudio:org/big/one-00001-of-00001",
    }
    whole = found["lmstudio:org/big/big-Q4_K_M"]
    assert whole.size_bytes == 3 * len(GGUF) and whole.path.name.endswith("00001-of-00003.gguf")
    assert "in 3 parts: join them with `llama-gguf-split --merge" in whole.problem
    assert found["lmstudio:org/big/half"].problem == "1 of its 2 parts are here"
    with pytest.raises(UnsupportedModelError, match="in 3 parts"):
        resolve_model("lmstudio:org/big/big-Q4_K_M")


def test_loops_and_what_is_no_file(machine: Path) -> None:
    folder = machine / ".lmstudio" / "models" / "org" / "m"
    put(folder / "real.gguf")
    (folder / "loop").symlink_to(folder)
    (folder.parent / "round").symlink_to(folder.parent)
    (folder / "self.gguf").symlink_to(folder / "self.gguf")
    (folder / "gone.gguf").symlink_to(folder / "nothing")
    (folder / "folder.gguf").mkdir()
    os.mkfifo(folder / "pipe.gguf")  # opening it would wait for a writer
    put(folder / "empty.gguf", b"")
    put(folder / "text.gguf", b"nothing of the kind")
    assert names() == ["lmstudio:org/m/real"]
    jan = machine / ".local" / "share" / "Jan" / "data" / "llamacpp" / "models"
    put(jan / "m" / "model.gguf")
    (jan / "m" / "again").symlink_to(jan)
    assert [model.path for model in find_models()][1:] == [jan / "m" / "model.gguf"]


@pytest.mark.skipif(
    sys.platform == "win32" or os.geteuid() == 0, reason="every file can be read here"
)
def test_what_may_not_be_read_is_passed_over(machine: Path) -> None:
    folder = machine / ".lmstudio" / "models" / "org"
    put(folder / "shut" / "a.gguf")
    put(folder / "open" / "b.gguf").chmod(0)
    (folder / "shut").chmod(0)
    try:
        assert names() == []
    finally:
        (folder / "shut").chmod(0o700)


def test_an_unreadable_folder_is_passed_over(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(machine / ".lmstudio" / "models" / "org" / "m" / "a.gguf")
    put(machine / ".cache" / "llama.cpp" / "b.gguf")
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if "lmstudio" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert names() == ["llamacpp:b"]


def test_a_million_entries_are_not_read(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = machine / ".cache" / "llama.cpp"
    put(folder / "a.gguf")
    read = 0

    class Entry:
        def __init__(self, number: int) -> None:
            self.path = str(folder / f"{number}.gguf")

    class Endless:
        def __enter__(self) -> Endless:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def __iter__(self) -> Endless:
            return self

        def __next__(self) -> Entry:
            nonlocal read
            read += 1
            return Entry(read)

    monkeypatch.setattr(os, "scandir", lambda path: Endless())
    began = time.perf_counter()
    assert len(Look(50).into(folder)) == 50 and read == 51
    assert list(stores.LlamaCpp().find(Look(1000))) == []
    assert read <= 51 + 3 * 1001, "one look through a store has one limit"
    assert time.perf_counter() - began < 5


def test_many_models_of_one_store(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        put(machine / ".cache" / "llama.cpp" / f"{number}.gguf")
    monkeypatch.setattr(stores, "MAX_FOUND", 5)
    assert len(names()) == 5


def test_a_look_up_by_another_prefix_finds_nothing() -> None:
    assert look_up("qwen3-0.6b") is None and look_up("other:x") is None


def test_names_of_files(machine: Path) -> None:
    listed = [put(machine / "x" / name) for name in ("A.GGUF", ".hidden.gguf", "b.MMPROJ.gguf")]
    found: list[FoundModel] = list(gguf_models(listed, "here"))
    assert [model.path.name for model in found] == ["A.GGUF"]
