"""`termgen chat`: the chat screen over an engine on this machine, which can change its model.

`LocalShelf` gives the screen's model picker the models of this machine and of the catalog.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from termgen.commands.launch import EngineHolder, model_argument, run_app
from termgen.config import EngineConfig, UIConfig
from termgen.errors import DownloadError, EngineError, ModelError, ModelNotFoundError, TermgenError
from termgen.library import catalog
from termgen.library.local_models import find_others, size_of
from termgen.library.progress import TerminalProgress
from termgen.tools.toolbox import Toolbox
from termgen.vocabulary.model_shelf import ModelChoice, Report, Switch

STOP_WAIT_S = 0.5
"""A running fetch checks for a stop at least this often."""
SPARE_SHARE = 1.1
"""Memory needed relative to the weights: steps and a KV cache take some too."""
_GGUF_BITS = re.compile(r"(?:^|[^a-z])(?:i?q(\d)|(b?f16)|(f32))(?![0-9])", re.IGNORECASE)
_STORED_BITS_OF_Q4 = 4.6
_HELD_BITS_OF_Q4_K_M = 5.8
"""Bits a weight in memory of the most common file: 5, and 9 for a fifth of the weights."""


def run_chat(
    config: EngineConfig,
    ui: UIConfig,
    toolbox: Toolbox,
    *,
    session: str | None,
    given: Mapping[str, Any],
) -> int:
    """Run the chat screen. `session`: id or title of a chat to continue, "" for the last one.

    `given`: settings from the command line, which override those of the continued chat.
    """
    from termgen.tui.app import TermgenApp  # imports textual
    from termgen.tui.chat.saved.chat_store import chats_to_begin_with

    TermgenApp.check_settings(ui)
    chats, resume = chats_to_begin_with(ui.chat_db, session, given)
    with TerminalProgress() as progress:
        catalog.ensure_model(config.model, progress)
    holder = EngineHolder(config)
    return run_app(
        holder.start,
        holder.stop,
        ui,
        start_screen="chat",
        models=LocalShelf(holder),
        chats=chats,
        resume=resume,
        toolbox=toolbox,
        found_by=model_argument(config),
    )


class LocalShelf:
    """A `ModelShelf` over the running engine of an `EngineHolder`."""

    def __init__(self, holder: EngineHolder) -> None:
        self._holder = holder

    async def choices(self) -> list[ModelChoice]:
        with _named_faults():
            return await asyncio.to_thread(self._list)

    async def look_up(self, name: str) -> ModelChoice:
        with _named_faults():
            return await asyncio.to_thread(self._look_up, name)

    async def fetch(self, name: str, report: Report) -> None:
        stopped = threading.Event()
        done: Future[None] = Future()

        def on_progress(stage: str, share: float) -> None:
            if stopped.is_set():
                raise DownloadError("fetching was stopped")
            report(stage, share)

        def work() -> None:
            if not done.set_running_or_notify_cancel():
                return  # cancelled before it began
            try:
                catalog.pull(name, on_progress)
            except BaseException as error:  # top of the thread: the awaiting task gets it
                done.set_exception(error)
            else:
                done.set_result(None)

        # a daemon thread: a hanging download must not keep the program from ending
        thread = threading.Thread(target=work, name="termgen-fetch", daemon=True)
        thread.start()
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
            return Switch(
                await self._holder.restart(replace(former, model=name, tokenizer=None), report)
            )
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

    def _list(self) -> list[ModelChoice]:
        current = self._current()
        choices = [self._of_catalog(entry, current) for entry in catalog.list_models()]
        for model in find_others(current):
            detail = "" if model.root == model.name else model.root
            name = model.name if "/" in model.name else model.root
            choices.append(self._choice(name, detail, model.path, size_of(model), current))
        if current is not None and not any(choice.is_current for choice in choices):
            choices.insert(0, self._look_up(str(current)))
        return choices

    def _look_up(self, name: str) -> ModelChoice:
        known = catalog.CATALOG.get(name.lower())
        try:
            model = catalog.resolve_model(name)
        except ModelNotFoundError:
            if known is None and not catalog.is_hub_id(name):
                raise
            if known is None:
                return self._choice(name, name, None, None, None)
            return self._missing(known)
        return self._choice(name, model.root, model.path, size_of(model), self._current())

    def _of_catalog(self, entry: catalog.ModelEntry, current: Path | None) -> ModelChoice:
        known = catalog.CATALOG[entry.name]
        if entry.path is None:
            return self._missing(known)
        return self._choice(known.name, _detail(known), entry.path, entry.size_bytes, current)

    def _missing(self, known: catalog.CatalogModel) -> ModelChoice:
        """The entry of a model that must be fetched first."""
        file = None if known.gguf_name is None else Path(known.gguf_name)
        size = known.download_bytes
        return self._choice(known.name, _detail(known), None, size, None, file=file)

    def _choice(
        self,
        name: str,
        detail: str,
        path: Path | None,
        size: int | None,
        current: Path | None,
        *,
        file: Path | None = None,
    ) -> ModelChoice:
        """`file`: name of the file to be fetched, for a model that is not on this machine."""
        needs = None
        if size is not None:
            needs = weights_bytes(path or file, size, self._holder.config, self._device)
        room = self._room()
        fits = None if needs is None or room is None else needs * SPARE_SHARE <= room
        is_current = path is not None and current is not None and path.samefile(current)
        form = (
            "" if needs is None else held_form(path or file, self._holder.config, self._device)[0]
        )
        return ModelChoice(name, detail, size, path is not None, is_current, needs, fits, form)

    def _current(self) -> Path | None:
        try:
            return catalog.resolve_model(self._holder.config.model).path
        except ModelNotFoundError:
            return None  # removed from disk meanwhile

    @property
    def _device(self) -> str:
        client = self._holder.client
        return "cpu" if client is None else client.model.device

    def _room(self) -> int | None:
        """Bytes an engine may use once the present one has released its memory."""
        client = self._holder.client
        memory = None if client is None else client.model.memory
        if memory is None:
            return None
        own = (
            memory.weights_bytes,
            memory.activations_bytes,
            memory.graphs_bytes,
            memory.workspace_bytes,
            memory.kv_cache_bytes,
            memory.free_below_limit_bytes,
        )
        return sum(own)


def _detail(known: catalog.CatalogModel) -> str:
    if not known.is_base:
        return known.hub_id
    return f"continues text, has no chat template · {known.hub_id}"


@contextmanager
def _named_faults() -> Iterator[None]:
    """Turn an `OSError`, such as for a file that disappears, into an error line of the picker."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror or error}") from error


def weights_bytes(path: Path | None, size: int, config: EngineConfig, device: str) -> int:
    """Approximate memory for weights of this size on disk, in the dtype they will be loaded as."""
    stored_bits, held_bits = stored_form(path), held_form(path, config, device)[1]
    if stored_bits == _STORED_BITS_OF_Q4 and held_bits < 16:  # most of its blocks stay as they are
        held_bits = min(held_bits, _HELD_BITS_OF_Q4_K_M)
    return int(size * held_bits / stored_bits)


def stored_form(path: Path | None) -> float:
    """Bits of a weight in a file, by its name."""
    if path is None or path.suffix.lower() != ".gguf":
        return 16.0
    found = _GGUF_BITS.search(path.stem)
    digits, _, is_32 = found.groups() if found is not None else ("4", None, None)
    return int(digits) + 0.6 if digits else 32.0 if is_32 else 16.0


def held_form(path: Path | None, config: EngineConfig, device: str) -> tuple[str, float]:
    """The type that weights have in memory, and its bits for each of them."""
    if config.quantization == "q4":
        return "q4", 5.5
    is_on_cpu, is_open = device == "cpu", config.dtype == "auto"
    is_kept = is_open and (is_on_cpu or stored_form(path) < 16)
    if config.quantization == "int8" or (config.quantization == "auto" and is_kept):
        return "int8", 9.0
    is_wide = config.dtype == "float32" or (is_open and is_on_cpu)
    return ("float32", 32.0) if is_wide else ("16-bit floats", 16.0)
