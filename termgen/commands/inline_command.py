"""`termgen chat --inline`: one answer in the scrollback, rendered as in the chat screen.

Piped input is added to the question. `--plain` (plain_chat) shares the engine's start, the stream
and Ctrl-C. Both work with a local or remote engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from termgen.commands.exit_codes import INTERRUPTED, OK
from termgen.commands.plain.interrupt import REQUEST_ID, Interrupt
from termgen.commands.settings import SettingLayers
from termgen.config import EngineConfig, UIConfig
from termgen.errors import ConfigError, TermgenError

if TYPE_CHECKING:
    from termgen.client import EngineClient, Message
    from termgen.commands.launch import EngineHolder
    from termgen.commands.remote_command import RemoteHolder, RemoteTarget
    from termgen.tui.chat.state.conversation import AnswerStats
    from termgen.tui.paint.inline import AnswerWriter

Progress = Callable[[str, float], None]
ASKED_FOR = ("temperature", "top_p", "max_tokens")
"""Settings of the user's that go into a request."""
MAX_PIPED_BYTES = 2 * 2**20
"""About half a million tokens."""


def check_flags(layers: SettingLayers, mode: str) -> None:
    """Refuse settings for screens and saved chats, which these modes lack. `mode`: their flag."""
    names = ["theme", "dashboard_hz", "alert", "alert_bell", "chat_db"]
    if mode == "--inline":  # one question
        names += ["context_policy", "tools"]
    for name in names:
        if layers.given(name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} has no effect with {mode}: leave it out", param=name)


def read_question(words: str | None) -> str:
    """The question, preceded by piped input; piped input alone is the question without words."""
    piped = "" if sys.stdin.isatty() else _read_piped()
    if words is None or not words.strip():
        if not piped.strip():
            raise ConfigError("no question: give one as an argument, or pipe it in")
        return piped
    if any("\ud800" <= c <= "\udfff" for c in words):  # undecodable bytes of an argument
        raise ConfigError("the question is not UTF-8 text")
    if not piped.strip():
        return words
    from termgen.tui.chat.state.attachments import fenced

    # The piped text comes first: another question about it then hits the prefix cache.
    return f"{fenced('standard input', piped)}\n\n{words}"


def _read_piped() -> str:
    raw = sys.stdin.buffer.read(MAX_PIPED_BYTES + 1)
    if len(raw) > MAX_PIPED_BYTES:
        raise ConfigError(f"standard input is larger than {MAX_PIPED_BYTES // 2**20} MiB")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise ConfigError("standard input is not UTF-8 text") from None


Start = Callable[[], Coroutine[Any, Any, "EngineClient"]]
Stop = Callable[[], Coroutine[Any, Any, None]]


def own_engine(holder: EngineHolder, *, plain: bool = False) -> tuple[Start, Stop]:
    """(start, stop) functions of a local engine, with progress on standard error."""
    from termgen.library.catalog import ensure_model
    from termgen.library.progress import TerminalProgress

    async def start() -> EngineClient:
        with TerminalProgress(plain=plain) as progress:
            ensure_model(holder.config.model, progress)
            # a script's log should report fetching weights, but not loading them
            return await holder.start(progress if sys.stderr.isatty() else _say_nothing)

    return start, holder.stop


def names_set(ui: UIConfig) -> set[str]:
    """Sampling parameters that the user has set; a server's own defaults apply to the others."""
    return {name for name in ASKED_FOR if getattr(ui, name) is not None}


def server_elsewhere(holder: RemoteHolder, *, plain: bool = False) -> tuple[Start, Stop]:
    """(start, stop) functions of a remote server."""
    from termgen.library.progress import TerminalProgress

    async def start() -> EngineClient:
        with TerminalProgress(plain=plain) as progress:
            return await holder.start(progress.of_server)

    return start, holder.stop


def run_inline(question: str, config: EngineConfig, ui: UIConfig) -> int:
    """Answer with a local engine."""
    from termgen.commands.launch import EngineHolder

    return _run(question, ui, *own_engine(EngineHolder(config)))


def run_remote_inline(question: str, target: RemoteTarget, ui: UIConfig) -> int:
    """Answer with a remote server."""
    from termgen.commands.remote_command import RemoteHolder

    return _run(question, ui, *server_elsewhere(RemoteHolder(target, given=names_set(ui))))


def _say_nothing(stage: str, fraction: float) -> None:
    """Progress callback that shows nothing."""


def _run(
    question: str,
    ui: UIConfig,
    start: Start,
    stop: Stop,
) -> int:
    from termgen.library.progress import is_dumb
    from termgen.tui.paint.inline import writer_for

    async def whole() -> int:
        try:
            client = await start()
            writer = writer_for(
                sys.stdout, no_color=bool(os.environ.get("NO_COLOR")), is_dumb=is_dumb()
            )
            return await answer(client, question, ui, writer)
        finally:
            await stop()

    return asyncio.run(whole())


async def answer(client: EngineClient, question: str, ui: UIConfig, writer: AnswerWriter) -> int:
    """Stream one answer. Returns the exit code: 0, or 130 after Ctrl-C.

    Raises `TermgenError` on failure; the text received by then has been written.
    """
    messages = [*system_message(ui.system_prompt), {"role": "user", "content": question}]
    _, stopped = await stream_answer(client, messages, ui, writer)
    return INTERRUPTED if stopped else OK


def system_message(text: str | None) -> list[dict[str, str]]:
    """The messages before the first question: one or none."""
    return [{"role": "system", "content": text}] if text else []


async def stream_answer(
    client: EngineClient,
    messages: Sequence[Message],
    ui: UIConfig,
    writer: AnswerWriter,
) -> tuple[str, bool]:
    """Stream the answer; returns (text, interrupted by Ctrl-C)."""
    from termgen.client import ChatPrompt
    from termgen.tui.chat.state.conversation import AnswerStats, sampling_params

    params = sampling_params(client.model.default_params, ui)
    stats = AnswerStats(time.perf_counter())
    stream = client.generate(ChatPrompt([*messages]), params, request_id=REQUEST_ID)
    parts: list[str] = []
    with Interrupt(partial(client.abort, REQUEST_ID)) as interrupt:
        try:
            async with contextlib.aclosing(stream) as deltas:
                async for delta in deltas:
                    if delta.error is not None:
                        raise delta.error
                    stats.update(delta, time.perf_counter())
                    parts.append(delta.text)
                    writer.feed(delta.text)
        except TermgenError:
            writer.close()
            raise
    writer.close(_footer(stats, stopped=interrupt.came))
    return "".join(parts), interrupt.came


def _footer(stats: AnswerStats, *, stopped: bool) -> str:
    from termgen.tui.paint.formatting import count, duration, rate

    parts = ["■ stopped"] if stopped else []
    parts.append(f"{count(stats.output_tokens)} tok")
    if stats.decode_rate is not None:
        parts.append(f"{rate(stats.decode_rate)} tok/s")
    if stats.ttft_s is not None:
        parts.append(f"TTFT {duration(stats.ttft_s)}")
    return " · ".join(parts)
