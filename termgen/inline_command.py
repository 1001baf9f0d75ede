"""`termgen chat --inline`: one question, its answer in the scrollback. Called by `cli` only.

Between `generate`, which is for scripts and knows every parameter, and the chat: the answer looks
as in the chat and what is piped in goes with the question. Any engine will do, here or elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from termgen.config import EngineConfig, UIConfig
from termgen.errors import ConfigError, TermgenError
from termgen.exit_codes import INTERRUPTED, OK
from termgen.settings import SettingLayers

if TYPE_CHECKING:
    from termgen.client import EngineClient
    from termgen.remote_command import RemoteTarget
    from termgen.tui.conversation import AnswerStats
    from termgen.tui.inline import AnswerWriter

Progress = Callable[[str, float], None]
REQUEST_ID = "inline"
MAX_PIPED_BYTES = 2 * 2**20
"""About half a million tokens."""


def check_flags(layers: SettingLayers) -> None:
    """Refuse what is about screens and kept chats: there are none."""
    for name in ("theme", "dashboard_hz", "chat_db"):
        if layers.given(name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} has no effect with --inline: leave it out", param=name)


def read_question(words: str | None) -> str:
    """The question, below what is piped in; that alone is the question if there is no other."""
    piped = "" if sys.stdin.isatty() else _read_piped()
    if words is None or not words.strip():
        if not piped.strip():
            raise ConfigError("no question: give one as an argument, or pipe it in")
        return piped
    if any("\ud800" <= c <= "\udfff" for c in words):  # undecodable bytes of an argument
        raise ConfigError("the question is not UTF-8 text")
    if not piped.strip():
        return words
    from termgen.tui.attachments import fenced

    # it comes first, so that another question about the same text finds it in the prefix cache
    return f"{fenced('standard input', piped)}\n\n{words}"


def _read_piped() -> str:
    raw = sys.stdin.buffer.read(MAX_PIPED_BYTES + 1)
    if len(raw) > MAX_PIPED_BYTES:
        raise ConfigError(f"standard input is larger than {MAX_PIPED_BYTES // 2**20} MiB")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise ConfigError("standard input is not UTF-8 text") from None


def run_inline(question: str, config: EngineConfig, ui: UIConfig) -> int:
    """With an engine of its own."""
    from termgen.launch import EngineHolder, find_model
    from termgen.progress import TerminalProgress

    holder = EngineHolder(config)

    async def start() -> EngineClient:
        with TerminalProgress() as progress:
            find_model(config, progress)
            # a script's log need not say that weights were loaded; fetching them it should
            return await holder.start(progress if sys.stderr.isatty() else _say_nothing)

    return _run(question, ui, start, holder.stop)


def run_remote_inline(question: str, target: RemoteTarget, ui: UIConfig) -> int:
    """With a server elsewhere."""
    from termgen.progress import TerminalProgress
    from termgen.remote_command import RemoteHolder

    holder = RemoteHolder(target)

    async def start() -> EngineClient:
        with TerminalProgress() as progress:
            return await holder.start(progress.of_server)

    return _run(question, ui, start, holder.stop)


def _say_nothing(stage: str, fraction: float) -> None:
    """The progress of a start that nobody watches."""


def _run(
    question: str,
    ui: UIConfig,
    start: Callable[[], Awaitable[EngineClient]],
    stop: Callable[[], Awaitable[None]],
) -> int:
    from termgen.tui.inline import writer_for

    async def whole() -> int:
        try:
            client = await start()
            writer = writer_for(sys.stdout, no_color=bool(os.environ.get("NO_COLOR")))
            return await answer(client, question, ui, writer)
        finally:
            await stop()

    return asyncio.run(whole())


async def answer(client: EngineClient, question: str, ui: UIConfig, writer: AnswerWriter) -> int:
    """Stream one answer. Returns the exit code: 0, or 130 after Ctrl-C.

    Raises `TermgenError` when it fails; what has come by then has been written.
    """
    from termgen.client import ChatPrompt
    from termgen.tui.conversation import AnswerStats, sampling_params

    system = [{"role": "system", "content": ui.system_prompt}] if ui.system_prompt else []
    prompt = ChatPrompt([*system, {"role": "user", "content": question}])
    params = sampling_params(client.model.default_params, ui)
    stats = AnswerStats(time.perf_counter())
    stream = client.generate(prompt, params, request_id=REQUEST_ID)
    with Interrupt(client) as interrupt:
        try:
            async with contextlib.aclosing(stream) as deltas:
                async for delta in deltas:
                    if delta.error is not None:
                        raise delta.error
                    stats.update(delta, time.perf_counter())
                    writer.feed(delta.text)
        except TermgenError:
            writer.close()
            raise
    writer.close(_footer(stats, stopped=interrupt.came))
    return INTERRUPTED if interrupt.came else OK


def _footer(stats: AnswerStats, *, stopped: bool) -> str:
    from termgen.tui.formatting import count, duration, rate

    parts = ["■ stopped"] if stopped else []
    parts.append(f"{count(stats.output_tokens)} tok")
    if stats.decode_rate is not None:
        parts.append(f"{rate(stats.decode_rate)} tok/s")
    if stats.ttft_s is not None:
        parts.append(f"TTFT {duration(stats.ttft_s)}")
    return " · ".join(parts)


class Interrupt:
    """The first Ctrl-C ends the answer and keeps its text; a second one does not wait for that."""

    def __init__(self, client: EngineClient, request_id: str = REQUEST_ID) -> None:
        self._client = client
        self._request_id = request_id
        self._aborting: asyncio.Future[bool] | None = None
        """Kept here: of a task under way a loop has but a weak reference."""
        self.came = False

    def __enter__(self) -> Interrupt:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            # where there is none, or not in the main thread, Ctrl-C ends the command at once
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self.note)
        return self

    def __exit__(self, *exception: Any) -> None:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def note(self) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
        self._aborting = asyncio.ensure_future(self._client.abort(self._request_id))
