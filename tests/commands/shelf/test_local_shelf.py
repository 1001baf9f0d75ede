"""The picker's models, their needs, fetching one, and changing engines."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import weakref
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import FakeEngine, make_memory_ledger, make_model_info
from fake_hub import FakeRepository, fake_hub
from gguf_samples import write_model

from termgen.client import TokenDelta
from termgen.commands.launch import EngineHolder
from termgen.commands.shelf.local_shelf import LocalShelf
from termgen.commands.shelf.needs import weights_bytes
from termgen.config import EngineConfig
from termgen.errors import (
    DownloadError,
    EngineDeadError,
    EngineError,
    ModelError,
    ModelNotFoundError,
)
from termgen.library import catalog, hub_files, stores
from termgen.library.fetch import Progress
from termgen.library.local_models import find_others
from termgen.vocabulary.events import EngineSnapshot
from termgen.vocabulary.memory_ledger import GIB, WeightReads
from termgen.vocabulary.model_shelf import ModelChoice
from termgen.vocabulary.sampling_params import SamplingParams


def silent(stage: str, share: float) -> None:
    pass


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any model."""
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(stores, "OLLAMA_SERVICE", tmp_path / "service")
    monkeypatch.setenv("TERMGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put_folder(folder: Path, size: int = 1000) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w" * size)
    return folder


def put_in_hub(machine: Path, hub_id: str, size: int = 1000) -> Path:
    repository = machine / "hub" / ("models--" + hub_id.replace("/", "--"))
    put_folder(repository / "snapshots" / "c0ffee", size)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    return repository


def put_gguf(file: Path, size: int = 1000) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"GGUF".ljust(size, b"g"))
    return file


def holder_of(model: str | None, engine: FakeEngine | None = None, **config: str) -> EngineHolder:
    holder = EngineHolder(EngineConfig(model=model, **config))  # type: ignore[arg-type]
    holder._engine = engine
    return holder


def test_what_the_catalog_has_no_name_for_is_found(machine: Path) -> None:
    assert find_others() == []
    put_in_hub(machine, "org/one--two")
    put_in_hub(machine, "Qwen/Qwen3-0.6B")  # in the catalog
    (machine / "hub" / "models--org--broken" / "refs").mkdir(parents=True)
    (machine / "hub" / "version.txt").write_text("1")
    put_gguf(machine / "cache" / "models" / "fetched.Q8_0.gguf")
    here = put_gguf(machine / "mine" / "a.gguf")
    put_folder(machine / "mine" / "b")
    (machine / "mine" / "notes").mkdir()
    found = find_others(here)
    own = machine / "cache" / "models" / "fetched.Q8_0.gguf"
    names = ["org/one--two", str(own), str(here), str(machine / "mine" / "b")]
    assert [model.name for model in found] == names
    assert find_others(catalog.resolve_model("org/one--two").path)[0].name == "org/one--two"
    assert len(find_others(catalog.resolve_model("org/one--two").path)) == 2


async def test_the_list(machine: Path) -> None:
    put_in_hub(machine, "Qwen/Qwen3-0.6B", 5000)
    smollm3 = put_in_hub(machine, "HuggingFaceTB/SmolLM3-3B", 5000) / "snapshots" / "c0ffee"
    (smollm3 / "config.json").write_text('{"architectures": ["SmolLM3ForCausalLM"]}')
    here = put_gguf(machine / "mine" / "a.Q4_0.gguf", 2000)
    ledger = make_memory_ledger(total_bytes=8 * GIB, limit_bytes=8 * GIB, kv_cache_bytes=GIB)
    engine = FakeEngine(model=make_model_info(memory=ledger, device="cuda:0"))
    choices = await LocalShelf(holder_of(str(here), engine)).choices()
    by_name = {choice.name: choice for choice in choices}
    fetched = by_name["qwen3-0.6b"]
    assert (fetched.is_here, fetched.size_bytes, fetched.detail) == (True, 5002, "Qwen/Qwen3-0.6B")
    assert not fetched.is_current
    missing = by_name["mistral-7b"]
    assert not missing.is_here and missing.size_bytes == 14_500_000_000
    assert missing.needs is not None and missing.needs.fits is False
    assert missing.needs.weights_bytes == missing.size_bytes
    quantised = by_name["qwen3-8b-q4"].needs
    assert quantised is not None and quantised.weights_bytes == int(5_030_000_000 * 5.8 / 4.6)
    assert quantised.held_as == "int8" and quantised.fits
    floats = [by_name[name].needs for name in ("smollm3-3b", "granite-3.3-2b")]
    assert [needs and needs.held_as for needs in floats] == ["16-bit floats"] * 2
    assert by_name["smollm3-3b"].is_here and "code of transformers" in by_name["smollm3-3b"].detail
    smaller = by_name["qwen3-1.7b-q8"].needs
    assert smaller is not None and smaller.fits
    assert by_name["gemma-3-270m-base-q4"].detail.startswith("continues text, has no chat template")
    current = [choice.name for choice in choices if choice.is_current]
    assert current == [str(here)]
    # the memory is unknown: no verdict
    choices = await LocalShelf(holder_of(str(here), FakeEngine())).choices()
    assert {choice.needs.fits for choice in choices if choice.needs is not None} == {None}
    here_first = [choice.is_here for choice in choices]
    assert here_first == sorted(here_first, reverse=True) and choices[0].is_current


async def test_models_of_other_programs_are_listed(machine: Path, tiny_llama_dir: Path) -> None:
    digest = "a" * 64
    root = machine / ".ollama" / "models"
    manifest = root / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "1b"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": stores.OLLAMA_MODEL, "digest": f"sha256:{digest}"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    blob = root / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir()
    write_model(tiny_llama_dir, blob, arch="llama")
    studio = machine / ".lmstudio" / "models" / "org" / "repo-GGUF"
    put_gguf(studio / "bad-Q4_K_M.gguf")
    put_gguf(studio / "big-Q8_0-00001-of-00002.gguf")
    put_gguf(studio / "big-Q8_0-00002-of-00002.gguf")
    choices = await LocalShelf(holder_of("ollama:tiny:1b", FakeEngine())).choices()
    first = choices[0]
    assert (first.name, first.shown, first.is_current) == ("ollama:tiny:1b",) * 2 + (True,)
    assert first.detail == "continues text, has no chat template · Ollama" and not first.problem
    assert first.needs is not None and first.needs.kv_bytes > 0 and first.num_weights > 0
    by_title = {choice.shown: choice for choice in choices if choice.is_here}
    bad = by_title["bad-Q4_K_M"]
    assert bad.name == "lmstudio:org/repo-GGUF/bad-Q4_K_M" and bad.quantization == "Q4_K_M"
    assert bad.problem and bad.needs is None
    assert bad.detail == "LM Studio · lmstudio:org/repo-GGUF/bad-Q4_K_M"
    big = by_title["big-Q8_0-00001-of-00002"]
    assert "join them" in big.problem and big.quantization == "Q8_0" and big.size_bytes == 2000


async def test_the_memory_is_measured_once_and_never_beside_a_request(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def measure(threads: int) -> float:
        measured.append(threads)
        return 1e10

    monkeypatch.setattr("termgen.commands.shelf.local_shelf.measure_cpu_rate", measure)
    ledger = make_memory_ledger(total_bytes=16 * GIB, limit_bytes=16 * GIB, kv_cache_bytes=GIB)
    engine = FakeEngine(model=make_model_info(memory=ledger, num_threads=3))
    busy = replace(await engine.snapshot(), num_running=1)

    async def state() -> EngineSnapshot:
        return busy

    idle, engine.snapshot = engine.snapshot, state  # type: ignore[method-assign]
    shelf = LocalShelf(holder_of(None, engine))

    async def rates() -> set[bool]:
        needs = [choice.needs for choice in await shelf.choices()]
        return {n.tokens_per_s is not None for n in needs if n is not None}

    assert await rates() == {False} and measured == []
    engine.snapshot = idle  # type: ignore[method-assign]
    assert await rates() == {True} and measured == [3]
    assert await rates() == {True} and measured == [3]
    crowded = replace(engine.model, memory=replace(ledger, free_bytes=GIB), num_threads=4)
    shelf = LocalShelf(holder_of(None, FakeEngine(model=crowded)))
    assert await rates() == {False} and measured == [3], "it would push others out of the memory"
    on_gpu = replace(engine.model, device="cuda:0", num_threads=0)
    shelf = LocalShelf(holder_of(None, FakeEngine(model=on_gpu)))
    assert await rates() == {False} and measured == [3]
    reads = WeightReads(always_bytes=GIB, bytes_per_s=2e12)
    on_gpu = replace(on_gpu, memory=replace(ledger, reads=reads))
    shelf = LocalShelf(holder_of(None, FakeEngine(model=on_gpu)))
    assert await rates() == {True} and measured == [3], "a GPU's is known by its clock"


async def test_the_hub_in_the_picker(
    machine: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama_dir: Path
) -> None:
    monkeypatch.setattr(hub_files, "LARGE_BYTES", 1000)
    ledger = make_memory_ledger(total_bytes=16 * GIB, limit_bytes=16 * GIB, kv_cache_bytes=GIB)
    engine = FakeEngine(model=make_model_info(memory=ledger, device="cuda:0"))
    shelf = LocalShelf(holder_of(None, engine))
    content = write_model(tiny_llama_dir, machine / "tiny.gguf", arch="llama").read_bytes()
    with fake_hub(monkeypatch, str(machine / "hub")) as server:
        server.repositories["org/tiny-GGUF"] = FakeRepository(
            {"tiny-Q8_0.gguf": content, "tiny-F16-00001-of-00002.gguf": content},
            downloads=12_345,
            gguf={"architecture": "llama", "total": 1_234_000_000},
        )
        server.repositories["org/tiny-bert"] = FakeRepository({}, gguf={"architecture": "bert"})
        first, second = await shelf.search("tiny")
        assert first.is_repository and first.detail == "12,345 downloads · 1.2B weights"
        assert not first.problem and second.problem.startswith("the architecture 'bert' is not")
        files = {choice.shown: choice for choice in await shelf.files("org/tiny-GGUF")}
        assert "is in 2 parts" in files["tiny-F16-00001-of-00002"].problem
        file = files["tiny-Q8_0"]
        assert file.is_best and not file.is_here and file.quantization == "Q8_0"
        await shelf.fetch(file.name, silent)
        (here,) = [choice for choice in await shelf.files("org/tiny-GGUF") if choice.is_here]
        assert here.is_own and here.size_bytes == len(content)
        (listed,) = [c for c in await shelf.choices() if c.name == file.name]
        assert listed.is_own and listed.shown == "tiny-Q8_0" and not listed.problem
        assert await shelf.remove(file.name) == len(content)
        assert not any(choice.name == file.name for choice in await shelf.choices())
        with pytest.raises(ModelNotFoundError):
            await shelf.remove(file.name)
    own = put_gguf(machine / "cache" / "models" / "own.gguf")
    shelf = LocalShelf(holder_of(str(own), engine))
    with pytest.raises(ModelError, match="is in use: choose another model first"):
        await shelf.remove(str(own))
    assert own.exists()


async def test_a_better_model_is_offered_if_the_hub_answers(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    ledger = make_memory_ledger(total_bytes=16 * GIB, limit_bytes=16 * GIB, kv_cache_bytes=GIB)
    ledger = replace(ledger, reads=WeightReads(always_bytes=1, bytes_per_s=1e11))
    engine = FakeEngine(model=make_model_info(memory=ledger, device="cuda:0"))
    with fake_hub(monkeypatch, str(machine / "hub")) as server:
        server.repositories["org/any"] = FakeRepository({})
        offered = await LocalShelf(holder_of(None, engine)).offer()
        assert offered is not None and not offered.is_here and offered.is_best
        assert offered.num_weights > 10**9
        assert await LocalShelf(holder_of(None, engine)).offer() is None, "once is enough"
        shutil.rmtree(machine / "cache" / "offers")
        chosen = put_gguf(machine / "mine" / "chosen.gguf")
        assert await LocalShelf(holder_of(str(chosen), engine)).offer() is None, "it was chosen"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert await LocalShelf(holder_of(None, engine)).offer() is None
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("termgen.commands.shelf.local_shelf.OFFER_WAIT_S", 0.05)
        may_end = threading.Event()
        monkeypatch.setattr("termgen.library.hub.can_reach", lambda: may_end.wait(20))
        assert await LocalShelf(holder_of(None, engine)).offer() is None
        may_end.set()
        no_rate = FakeEngine(model=make_model_info(device="cuda:0"))
        assert await LocalShelf(holder_of(None, no_rate)).offer() is None


async def test_a_hub_that_hangs_is_given_up(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr("termgen.commands.shelf.local_shelf.HUB_WAIT_S", 0.05)
    monkeypatch.setattr("termgen.library.hub.search", lambda words: may_end.wait(20))
    try:
        with pytest.raises(DownloadError, match="cannot search the hub: no answer in 0 s"):
            await LocalShelf(holder_of(None)).search("x")
    finally:
        may_end.set()


async def test_what_is_gone_does_not_break_the_list(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = put_in_hub(machine, "org/linked")
    snapshot = repository / "snapshots" / "c0ffee"
    (snapshot / "old.safetensors").symlink_to("../../blobs/removed")
    here = put_gguf(machine / "mine" / "a.gguf")
    shelf = LocalShelf(holder_of(str(here)))
    found = {choice.name: choice.size_bytes for choice in await shelf.choices()}
    assert found["org/linked"] == 1000

    def vanish(model: catalog.LocalModel) -> int:
        raise FileNotFoundError(2, "No such file or directory", str(model.path))

    monkeypatch.setattr("termgen.commands.shelf.local_shelf.size_of", vanish)
    for ask in (shelf.look_up("org/linked"),):
        with pytest.raises(ModelError, match="No such file or directory"):
            await ask


@pytest.mark.parametrize(
    ("name", "config", "device", "share"),
    [
        ("x", {}, "cuda:0", 1.0),
        ("x", {}, "cpu", 9 / 16),
        ("x", {"quantization": "none"}, "cpu", 2.0),
        ("x", {"dtype": "float32"}, "cpu", 2.0),
        ("x", {"dtype": "bfloat16"}, "cpu", 1.0),
        ("x", {"quantization": "int8"}, "cpu", 9 / 16),
        ("x.Q8_0.gguf", {}, "cuda:0", 9 / 8.6),
        ("x.Q8_0.gguf", {"dtype": "bfloat16"}, "cuda:0", 16 / 8.6),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", {}, "cpu", 5.8 / 4.6),
        ("x.Q4_K_M.gguf", {"quantization": "int8"}, "cuda:0", 5.8 / 4.6),
        ("x.Q4_K_M.gguf", {"quantization": "none"}, "cpu", 32 / 4.6),
        ("x.Q4_K_M.gguf", {"quantization": "q4"}, "cpu", 5.5 / 4.6),
        ("x.Q6_K.gguf", {"quantization": "q4"}, "cuda:0", 5.5 / 6.6),
        ("x", {"quantization": "q4"}, "cpu", 5.5 / 16),
        ("model-f16.gguf", {}, "cpu", 9 / 16),
        ("model-BF16.gguf", {}, "cuda:0", 1.0),
        ("model.F32.gguf", {}, "cpu", 9 / 32),
        ("q4u1ck.gguf", {}, "cuda:0", 5.8 / 4.6),
    ],
)
def test_what_weights_take(name: str, config: dict[str, str], device: str, share: float) -> None:
    settings = EngineConfig(**config)  # type: ignore[arg-type]
    assert weights_bytes(Path(name), 10_000, settings, device) == int(10_000 * share)


async def test_names_that_are_typed(machine: Path) -> None:
    shelf = LocalShelf(holder_of("none"))
    named = await shelf.look_up("Qwen3-0.6B")
    assert (named.name, named.detail, named.is_here) == ("qwen3-0.6b", "Qwen/Qwen3-0.6B", False)
    assert named.needs is not None and named.needs.held_as == "int8"
    assert named.size_bytes == 1_520_000_000 and named.needs.weights_bytes == 855_000_000
    needs = (await shelf.look_up("smollm2-1.7b-q4")).needs
    # in the file that is to be fetched
    assert needs is not None and needs.weights_bytes == int(1_060_000_000 * 5.8 / 4.6)
    assert await shelf.look_up("org/new") == ModelChoice("org/new", "org/new", is_here=False)
    folder = put_folder(machine / "m")
    assert (await shelf.look_up("./m")).is_here and folder.is_dir()
    for name in ("nonsense", "./nothing", "x.gguf"):
        with pytest.raises(ModelNotFoundError):
            await shelf.look_up(name)


async def test_fetching_can_be_stopped(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def pull(name: str, on_progress: Progress) -> None:
        try:
            while True:  # like the wait for pip
                on_progress(f"fetching {name}", 0.5)
                began.set()
                ended.wait(0.005)
        finally:
            may_end.wait(5)
            ended.set()

    monkeypatch.setattr(catalog, "pull", pull)
    reports: list[tuple[str, float]] = []
    shelf = LocalShelf(holder_of(None))
    task = asyncio.create_task(shelf.fetch("m", lambda *report: reports.append(report)))
    await asyncio.to_thread(began.wait, 5)
    task.cancel()
    await asyncio.sleep(0.01)
    may_end.set()  # the loop goes on while partial files are removed
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set() and reports[0] == ("fetching m", 0.5)

    def refuse(name: str, on_progress: Progress) -> None:
        raise DownloadError("no network")

    monkeypatch.setattr(catalog, "pull", refuse)
    with pytest.raises(DownloadError, match="no network"):
        await shelf.fetch("m", silent)


async def text_of(deltas: AsyncGenerator[TokenDelta, None]) -> str:
    """The text of all deltas: how many tokens a delta holds depends on timing."""
    return "".join([delta.text async for delta in deltas])


async def test_engines_change_and_come_back(tiny_llama_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_llama_dir, other)
    broken = put_folder(tmp_path / "broken")
    (broken / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    holder = EngineHolder(
        EngineConfig(
            model=str(tiny_llama_dir),
            device="cpu",
            dtype="float32",
            threads=1,
            max_model_len=128,
            kv_cache_gib=0.01,
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    try:
        first = await holder.start(silent)
        expected = await text_of(first.generate([5, 6, 7], params))
        runner = weakref.ref(first.parts.core.executor._runner)  # type: ignore[attr-defined]
        shelf = LocalShelf(holder)
        phases: list[str] = []
        changed = await shelf.switch(str(other), lambda stage, _: phases.append(stage))
        assert changed.failure is None and changed.client.model.root == str(other)
        assert holder.config.max_model_len == 128 and "weights" in " ".join(phases)
        assert await text_of(changed.client.generate([5, 6, 7], params)) == expected
        assert runner() is None, "its memory was given back before the other one took some"
        with pytest.raises(EngineDeadError):
            await anext(first.generate([5], params))
        back = await shelf.switch(str(broken), silent)
        assert back.failure is not None and "no tokenizer in" in back.failure
        assert back.client.model.root == str(other) == holder.config.model
        assert await text_of(back.client.generate([5, 6, 7], params)) == expected
        with pytest.raises(ModelNotFoundError):
            await shelf.switch("nonsense", silent)
        assert back.client.is_healthy, "nothing is given up for a name that is none"
        shutil.rmtree(other)
        with pytest.raises(EngineError, match="no tokenizer.*nor does the former model any more"):
            await shelf.switch(str(broken), silent)
        assert holder.client is None
    finally:
        await holder.stop()
