"""`LocalShelf`: gives the chat's model picker the models of this machine and of the catalog.

What a model needs is worked out in `needs`, from facts that `model_facts` reads. Files are looked
at in threads; the engine goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from termgen.client import EngineClient
from termgen.commands.shelf.model_facts import model_facts
from termgen.commands.shelf.needs import Machine, mark_best, mark_best_file, stored_form
from termgen.config import EngineConfig
from termgen.errors import DownloadError, EngineError, ModelError, ModelNotFoundError, TermgenError
from termgen.library import catalog, hub, removal
from termgen.library.hub_names import is_hub_file, is_hub_id, quantization_of
from termgen.library.local_models import find_others, size_of
from termgen.library.memory_rates import (
    READ_BYTES,
    device_key,
    keep_rate,
    kept_rate,
    measure_cpu_rate,
)
from termgen.library.stores import FoundModel
from termgen.library.user_cache import UserCache, digest
from termgen.system.sure_ends import in_daemon_thread
from termgen.vocabulary.model_shelf import ModelChoice, Report, Switch

STOP_WAIT_S = 0.5
"""A running fetch checks for a stop at least this often."""
LEAST_FREE_TO_MEASURE = 8
"""The memory's rate is measured only if this many times as much as is read is free."""
HUB_WAIT_S = 20.0
"""An answer of the hub is waited for this long."""
OFFER_WAIT_S = 5.0
"""A better model is offered if the hub answers in this time."""
_OFFERS = UserCache("offers", most_entries=8)
"""Models that were offered: each is once, so that a later start asks no hub."""
CONTINUES_TEXT = "continues text, has no chat template"
T = TypeVar("T")


class Holder(Protocol):
    """The engine of this process, as `EngineHolder` has it."""

    config: EngineConfig

    @property
    def client(self) -> EngineClient | None: ...

    async def restart(self, config: EngineConfig, on_progress: Report) -> EngineClient: ...


class LocalShelf:
    """A `ModelShelf` over the running engine of a holder."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder

    async def choices(self) -> list[ModelChoice]:
        rate = await self._memory_rate()
        with _named_faults():
            return await asyncio.to_thread(self._list, rate)

    async def look_up(self, name: str) -> ModelChoice:
        rate = await self._memory_rate()
        with _named_faults():
            return await asyncio.to_thread(self._look_up, name, self._machine(rate))

    @property
    def can_search(self) -> bool:
        return True

    async def search(self, words: str) -> list[ModelChoice]:
        found = await _on_the_hub("search the hub", lambda: hub.search(words))
        return [_of_repository(repository) for repository in found]

    async def files(self, name: str) -> list[ModelChoice]:
        machine = self._machine(await self._memory_rate())
        found = await _on_the_hub(f"list the files of {name}", lambda: hub.model_files(name))
        with _named_faults():
            choices = await asyncio.to_thread(self._of_files, name, found, machine)
        return mark_best_file(choices)

    async def remove(self, name: str) -> int:
        current = self._current()
        model = await asyncio.to_thread(catalog.resolve_model, name)
        if current is not None and model.path.samefile(current):
            raise ModelError(f"{name} is in use: choose another model first")
        return await asyncio.to_thread(removal.delete, name)

    async def offer(self) -> ModelChoice | None:
        if self._holder.config.model not in (None, catalog.DEFAULT_MODEL):
            return None
        choices = await self.choices()
        best = next((choice for choice in choices if choice.is_best and not choice.is_here), None)
        has_better = any(c.is_best and c.is_here and not c.is_current for c in choices)
        if best is None or has_better or _OFFERS.read(digest(best.name)) is not None:
            return None
        _, done = in_daemon_thread("termgen-hub", hub.can_reach)
        try:
            is_there = await asyncio.wait_for(asyncio.wrap_future(done), OFFER_WAIT_S)
        except TimeoutError:
            return None
        if not is_there:
            return None
        _OFFERS.write(digest(best.name), b"offered")
        return best

    async def fetch(self, name: str, report: Report) -> None:
        stopped = threading.Event()

        def on_progress(stage: str, share: float) -> None:
            if stopped.is_set():
                raise DownloadError("fetching was stopped")
            report(stage, share)

        thread, done = in_daemon_thread("termgen-fetch", lambda: catalog.pull(name, on_progress))
        try:
            await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            stopped.set()
            await asyncio.to_thread(thread.join, STOP_WAIT_S)  # it removes partial files
            raise

    async def switch(self, name: str, report: Report) -> Switch:
        former = self._holder.config
        await asyncio.to_thread(catalog.resolve_model, name)  # fail while the engine still runs
        try:
            # a `tokenizer` setting belongs to the former model
            config = replace(former, model=name, tokenizer=None)
            client = await self._holder.restart(config, report)
            return Switch(client, name=await asyncio.to_thread(_lasting_name, name))
        except TermgenError as error:
            failure = str(error)
        except Exception as error:  # top of a start: any failure becomes one line
            failure = f"{type(error).__name__}: {error}"
        report("going back to the former model", 0.0)
        try:
            return Switch(await self._holder.restart(former, report), failure)
        except Exception as error:  # as above
            raise EngineError(
                f"{name} did not start: {failure}; nor does the former model any more: {error}"
            ) from error

    def _list(self, rate: float | None) -> list[ModelChoice]:
        machine, current = self._machine(rate), self._current()
        choices = [_of_catalog(entry, current, machine) for entry in catalog.list_models()]
        choices += [_of_found(model, current, machine) for model in find_others(current)]
        if current is not None and not any(choice.is_current for choice in choices):
            choices.insert(0, self._look_up(str(current), machine))
        choices.sort(key=lambda choice: (not choice.is_here, not choice.is_current))
        return mark_best(choices)

    def _look_up(self, name: str, machine: Machine) -> ModelChoice:
        known = catalog.CATALOG.get(name.lower())
        try:
            model = catalog.resolve_model(name)
        except ModelNotFoundError:
            if known is None and not (is_hub_id(name) or is_hub_file(name)):
                raise
            if known is None:
                return ModelChoice(name, name, is_here=False)
            return _missing(known, machine)
        choice = ModelChoice(name, model.root, size_of(model))
        return _described(choice, model.path, self._current(), machine)

    def _of_files(
        self, hub_id: str, files: list[hub.HubFile], machine: Machine
    ) -> list[ModelChoice]:
        choices = []
        for file in files:
            name = f"{hub_id}:{file.name}"
            try:
                catalog.resolve_model(name)
                choices.append(self._look_up(name, machine))
            except ModelNotFoundError:
                choices.append(_of_hub_file(name, file, machine))
        return choices

    def _current(self) -> Path | None:
        try:
            return catalog.resolve_model(self._holder.config.model).path
        except ModelError:
            return None  # removed from disk meanwhile

    def _machine(self, rate: float | None) -> Machine:
        client = self._holder.client
        memory = None if client is None else client.model.memory
        device = "cpu" if client is None else client.model.device
        if memory is None:
            return Machine(
                self._holder.config, device, None, bytes_per_s=rate, has_float8=_has_float8(device)
            )
        steps = memory.activations_bytes + memory.graphs_bytes + memory.workspace_bytes
        own = memory.weights_bytes + steps + memory.kv_cache_bytes
        room = own + memory.free_below_limit_bytes
        main = 0
        if device != "cpu":
            from termgen.engine.device.runner.memory import HostMeter  # torch, which is loaded

            main = HostMeter().free_and_total()[0]
        has_float8 = _has_float8(device)
        return Machine(self._holder.config, device, room, steps, rate, main, has_float8)

    async def _memory_rate(self) -> float | None:
        """The rate of the engine's memory. A CPU's is measured the first time that the engine has
        nothing to do, which takes 0.2 s; a GPU's is that of its clock and width."""
        client = self._holder.client
        if client is None:
            return None
        model = client.model
        if model.device != "cpu":
            reads = None if model.memory is None else model.memory.reads
            return (reads.bytes_per_s or None) if reads is not None else None
        threads = model.num_threads or os.cpu_count() or 1
        key = device_key(model.device_name, threads)
        rate = await asyncio.to_thread(kept_rate, key)
        if rate is not None or not await _is_idle(client):
            return rate
        if model.memory is None or model.memory.free_bytes < LEAST_FREE_TO_MEASURE * READ_BYTES:
            return None
        rate = await asyncio.to_thread(measure_cpu_rate, threads)
        await asyncio.to_thread(keep_rate, key, rate)
        return rate


def _lasting_name(name: str) -> str:
    """A path that does not depend on the working folder; other names as they are."""
    if name.lower() not in catalog.CATALOG:
        path = Path(name).expanduser()
        if path.exists():
            return str(path.absolute())
    return name


async def _on_the_hub(what: str, ask: Callable[[], T]) -> T:
    """The hub's answer, or an error in a line when it does not come in time."""
    _, done = in_daemon_thread("termgen-hub", ask)
    try:
        return await asyncio.wait_for(asyncio.wrap_future(done), HUB_WAIT_S)
    except TimeoutError:
        raise DownloadError(f"cannot {what}: no answer in {HUB_WAIT_S:.0f} s") from None


async def _is_idle(client: EngineClient) -> bool:
    state = await client.snapshot()
    return state.num_running + state.num_waiting == 0


def _of_catalog(entry: catalog.ModelEntry, current: Path | None, machine: Machine) -> ModelChoice:
    known = catalog.CATALOG[entry.name]
    if entry.path is None:
        return _missing(known, machine)
    choice = ModelChoice(known.name, known.hub_id, entry.size_bytes, is_base=known.is_base)
    return _described(choice, entry.path, current, machine)


def _missing(known: catalog.CatalogModel, machine: Machine) -> ModelChoice:
    """The entry of a model that must be fetched first: its name says what is known of it."""
    file = None if known.gguf_name is None else Path(known.gguf_name)
    size = known.download_bytes
    detail = f"{CONTINUES_TEXT} · {known.hub_id}" if known.is_base else known.hub_id
    return ModelChoice(
        known.name,
        detail,
        size,
        is_here=False,
        needs=machine.needs(None, file, size, of_transformers=known.of_transformers),
        quantization=known.quantization or "16 bit",
        num_weights=int(size * 8 / stored_form(file)),
        is_base=known.is_base,
    )


def _of_found(found: FoundModel, current: Path | None, machine: Machine) -> ModelChoice:
    """The entry of a model without a name of the catalog."""
    name, short = found.name, found.path.stem
    if name == str(found.path):  # its name is its path
        title, detail = found.path.name if found.path.is_dir() else short, f"{found.store} · {name}"
    elif found.store == "Ollama" or not found.path.is_file():
        title, detail = name, found.store
    else:
        title, detail = short if short != "model" else name, f"{found.store} · {name}"
    choice = ModelChoice(name, detail, found.size_bytes, title=title, problem=found.problem)
    if found.problem:
        return replace(choice, quantization=quantization_of(found.path.name))
    return _described(choice, found.path, current, machine)


def _described(
    choice: ModelChoice, path: Path, current: Path | None, machine: Machine
) -> ModelChoice:
    """A model on this machine, with what its files say."""
    facts = model_facts(path)
    file = path if facts.num_parameters or path.suffix else None
    is_base = choice.is_base or facts.is_base
    notes = (CONTINUES_TEXT if is_base else "", facts.note, choice.detail)
    size = choice.size_bytes or 0
    needs = machine.needs(facts, file, size, of_transformers=facts.is_of_transformers)
    return replace(
        choice,
        detail=" · ".join(note for note in notes if note),
        is_current=current is not None and path.samefile(current),
        needs=None if facts.problem else needs,
        quantization=quantization_of(path.name) or facts.quantization,
        num_weights=facts.num_parameters or int(size * 8 / stored_form(path)),
        problem=facts.problem,
        is_base=is_base,
        is_own=removal.is_own(path),
    )


def _of_repository(found: hub.HubRepository) -> ModelChoice:
    from termgen.engine.device.loader.gguf_keys import ARCHITECTURES

    problem = ""
    if found.architecture and found.architecture not in ARCHITECTURES:
        problem = f"the architecture {found.architecture!r} is not supported from GGUF"
    gated = "gated: accept its terms on the hub first" if found.is_gated else ""
    notes = (f"{found.downloads:,} downloads", _weights_words(found.num_parameters), gated)
    return ModelChoice(
        found.hub_id,
        " · ".join(note for note in notes if note),
        is_here=False,
        num_weights=found.num_parameters,
        problem=problem,
        is_repository=True,
    )


def _weights_words(number: int) -> str:
    if number >= 10**9:
        return f"{number / 1e9:.1f}B weights"
    return f"{number / 1e6:.0f}M weights" if number else ""


def _has_float8(device: str) -> bool:
    """True for a GPU that multiplies 8-bit floats. An engine on it has loaded torch."""
    if not device.startswith("cuda"):
        return False
    from termgen.engine.device.kernels import has_float8

    return has_float8(device)


def _of_hub_file(name: str, file: hub.HubFile, machine: Machine) -> ModelChoice:
    path = Path(file.name)
    problem = f"it is in {file.parts} parts, and termgen reads one file" if file.parts > 1 else ""
    return ModelChoice(
        name,
        name,
        file.size_bytes,
        is_here=False,
        needs=None if problem else machine.needs(None, path, file.size_bytes),
        title=path.stem,
        quantization=file.quantization,
        num_weights=int(file.size_bytes * 8 / stored_form(path)),
        problem=problem,
    )


@contextmanager
def _named_faults() -> Iterator[None]:
    """Turn an `OSError`, such as for a file that disappears, into an error line of the picker."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror or error}") from error
