"""`termgen chat`: the chat screen over an engine of this machine, which can change its model.

`LocalShelf` is what the screen's model picker sees: the models of this machine and of the catalog.
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

from termgen.commands.launch import EngineHolder, find_model, run_app
from termgen.commands.progress import TerminalProgress
from termgen.config import EngineConfig, UIConfig
from termgen.errors import DownloadError, EngineError, ModelError, ModelNotFoundError, TermgenError
from termgen.library import catalog
from termgen.library.local_models import find_others, size_of
from termgen.tui.models import ModelChoice, Report, Switch

STOP_WAIT_S = 0.5
"""A fetch that is told to stop looks for that more often than this."""
SPARE_SHARE = 1.1
"""Beside its weights an engine needs room for steps and a KV cache."""
_GGUF_BITS = re.compile(r"(?:^|[^a-z])(?:i?q(\d)|(b?f16)|(f32))(?![0-9])", re.IGNORECASE)


def run_chat(
    config: EngineConfig, ui: UIConfig, *, session: str | None, given: Mapping[str, Any]
) -> int:
    """`session` is an earlier chat to go on with, by id or title, or "" for the last one.

    `given` are settings from the command line, which count more than those it was held with.
    """
    from termgen.tui.app import TermgenApp  # textual: later
    from termgen.tui.chat.saved.chat_store import chats_to_begin_with

    TermgenApp.check_settings(ui)
    chats, resume = chats_to_begin_with(ui.chat_db, session, given)
    with TerminalProgress() as progress:
        find_model(config, progress)
    holder = EngineHolder(config)
    return run_app(
        holder.start,
        holder.stop,
        ui,
        start_screen="chat",
        models=LocalShelf(holder),
        chats=chats,
        resume=resume,
    )


class LocalShelf:
    """A `ModelShelf` over an `EngineHolder` whose engine runs."""

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
                return  # it was stopped before it began
            try:
                catalog.pull(name, on_progress)
            except BaseException as error:  # thread top: whoever awaits it is told
                done.set_exception(error)
            else:
                done.set_result(None)

        # a daemon: what hangs in the network must not keep the program from ending
        thread = threading.Thread(target=work, name="termgen-fetch", daemon=True)
        thread.start()
        try:
            await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            stopped.set()
            await asyncio.to_thread(thread.join, STOP_WAIT_S)  # it takes away what is half there
            raise

    async def switch(self, name: str, report: Report) -> Switch:
        former = self._holder.config
        await asyncio.to_thread(catalog.resolve_model, name)  # before anything is given up
        try:
            # the tokenizer that was named is the former model's
            return Switch(
                await self._holder.restart(replace(former, model=name, tokenizer=None), report)
            )
        except TermgenError as error:
            failure = str(error)
        except Exception as error:  # the top of a start: whatever it is, one line says so
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
        """One that has to be fetched first."""
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
        """`file`: what will be fetched, when nothing is here yet."""
        needs = None
        if size is not None:
            needs = weights_bytes(path or file, size, self._holder.config, self._device)
        room = self._room()
        fits = None if needs is None or room is None else needs * SPARE_SHARE <= room
        is_current = path is not None and current is not None and path.samefile(current)
        return ModelChoice(name, detail, size, path is not None, is_current, needs, fits)

    def _current(self) -> Path | None:
        try:
            return catalog.resolve_model(self._holder.config.model).path
        except ModelNotFoundError:
            return None  # somebody has removed it

    @property
    def _device(self) -> str:
        client = self._holder.client
        return "cpu" if client is None else client.model.device

    def _room(self) -> int | None:
        """What an engine may take once the present one has given its memory back."""
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
    """What goes while it is looked at is a line in the picker, not the end of the chat."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror or error}") from error


def weights_bytes(path: Path | None, size: int, config: EngineConfig, device: str) -> int:
    """About what weights of this size on disk take in memory, in the type they will have there."""
    stored_bits = 16.0
    if path is not None and path.suffix.lower() == ".gguf":
        found = _GGUF_BITS.search(path.stem)
        stored_bits = 4.6  # the most usual
        if found is not None:
            digits, _, is_32 = found.groups()
            stored_bits = float(digits) + 0.6 if digits else 32.0 if is_32 else 16.0
    is_wide = config.dtype == "float32" or (config.dtype == "auto" and device == "cpu")
    bits = 9.0 if config.quantization == "int8" else 32.0 if is_wide else 16.0
    return int(size * bits / stored_bits)
