"""Answers of `termgen chat --plain`: the text as it comes, tool calls as lines, and lines read.

Imported by `plain_chat` once a chat begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

from termgen.client import EngineClient
from termgen.commands.plain.interrupt import REQUEST_ID, Interrupt
from termgen.errors import ConfigError, EngineError, TermgenError
from termgen.tools.calls import Approval, CallRunner, CallState, ToolCall, arguments_of
from termgen.tools.text import amount, escaped, shortened
from termgen.tools.toolbox import Offered, Toolbox
from termgen.tui.chat.asked.answer_rounds import AnswerRounds
from termgen.tui.chat.state.context_policy import turns_words
from termgen.tui.chat.state.conversation import Conversation, Turn
from termgen.tui.chat.state.summary import Draft, SummaryWish, read_draft
from termgen.tui.chat.state.thoughts import AnswerNews
from termgen.tui.chat.state.tool_offers import ToolOffers
from termgen.tui.paint.formatting import duration
from termgen.tui.paint.inline import PlainWriter
from termgen.tui.paint.sanitize import clean, clean_line
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams

MAX_ARGUMENT_CHARS = 8000
"""Characters of a call's arguments that the user is shown before it runs."""
MAX_FAULT_CHARS = 200
APPROVALS = {
    "y": Approval.ONCE,
    "yes": Approval.ONCE,
    "a": Approval.ALWAYS,
    "always": Approval.ALWAYS,
    "n": Approval.DENY,
    "no": Approval.DENY,
}
ASK_LINE = "Run it? y once, a always this tool, n no; Ctrl-C stops the answer: "
NO_TERMINAL = "is not run: calls are approved on a terminal only"


class StoppedError(TermgenError):
    """Ctrl-C has ended the calls of an answer."""


def say(text: str) -> None:
    print(clean(text), flush=True)


class Lines:
    """Lines of standard input."""

    def __init__(self) -> None:
        self._ahead: deque[str] = deque()
        """Lines that were typed before a question of ours, which they do not answer."""

    def read(self) -> str:
        """The next line with its end; empty at the end of the input."""
        if not self._ahead:
            return _readline()
        line = self._ahead.popleft()
        print(clean(line), end="", flush=True)  # it was typed before there was a prompt for it
        return line

    async def reply(self, question: str) -> str:
        """A line of a terminal that is typed after the question; empty at the end of the input."""
        while select.select([sys.stdin], [], [], 0)[0]:
            line = _readline()
            if not line:
                return ""
            self._ahead.append(line)
        print(question, end="", flush=True)
        loop = asyncio.get_running_loop()
        typed = asyncio.Event()
        loop.add_reader(sys.stdin, typed.set)
        try:
            await typed.wait()
        finally:
            loop.remove_reader(sys.stdin)
        return _readline()


def _readline() -> str:
    try:
        return sys.stdin.readline()
    except UnicodeDecodeError:
        raise ConfigError("standard input is not UTF-8 text") from None


class PlainTools:
    """The tools of a chat in lines: each call is approved by a line, and shown as lines."""

    def __init__(self, toolbox: Toolbox, lines: Lines) -> None:
        self.toolbox = toolbox
        self.offers = ToolOffers(toolbox, lambda _turn, words: say(words))
        self._lines = lines
        self._runner = CallRunner(toolbox, self._approve, self._show)
        self._calls: Sequence[ToolCall] = ()
        self._shown: dict[str, CallState] = {}

    async def run(self, calls: Sequence[ToolCall]) -> None:
        """Carry out the calls of an answer. Raises `StoppedError` after Ctrl-C."""
        self._calls, self._shown = calls, {}
        running = asyncio.ensure_future(self._runner.run(calls))

        async def stop() -> None:
            running.cancel()

        with Interrupt(stop) as interrupt:
            try:
                await running
            except asyncio.CancelledError:
                if not interrupt.came:
                    running.cancel()
                    raise
                raise StoppedError("Stopped.") from None

    async def _approve(self, call: ToolCall, offered: Offered) -> Approval:
        arguments = json.dumps(arguments_of(call.arguments), ensure_ascii=False)
        shown = shortened(escaped(arguments), MAX_ARGUMENT_CHARS)
        say(f"The model calls {clean_line(offered.name)}: {shown}")
        if not sys.stdin.isatty():
            say(f"{clean_line(offered.name)} {NO_TERMINAL}.")
            return Approval.DENY
        while True:
            line = await self._lines.reply(ASK_LINE)
            word = APPROVALS.get(line.strip().lower())
            if word is not None or not line:
                return word or Approval.DENY

    def _show(self) -> None:
        for call in self._calls:
            if self._shown.get(call.call_id) is call.state:
                continue
            self._shown[call.call_id] = call.state
            if words := _call_words(call):
                say(words)


def _call_words(call: ToolCall) -> str:
    """What has become of a call; empty where that is said otherwise."""
    name = clean_line(shortened(escaped(call.name), MAX_FAULT_CHARS))
    if call.state is CallState.RUNNING:
        return f"{name} runs."
    if call.state is CallState.DONE:
        return f"{name} is done: {duration(call.seconds)}, {amount(len(call.result))} characters."
    if call.state is CallState.FAILED:
        return f"{name} failed: {clean_line(shortened(escaped(call.result), MAX_FAULT_CHARS))}"
    return f"{name} was not run." if call.state is CallState.DENIED else ""


class PlainRounds(AnswerRounds):
    """The rounds of one question in lines."""

    def __init__(
        self, client: EngineClient, chat: Conversation, tools: PlainTools, *, is_labelled: bool
    ) -> None:
        """is_labelled: a line says where an answer begins."""
        super().__init__(client, chat, tools.offers, lambda: REQUEST_ID)
        self._tools = tools
        self._is_labelled = is_labelled
        self.is_stopped = False
        """Ctrl-C has ended an answer."""

    def say(self, words: str) -> None:
        say(words)

    def say_fault(self, fault: str) -> None:
        say(f"The model's summary is not used: {fault}. /compact tries again.")

    async def run_calls(self, calls: Sequence[ToolCall]) -> None:
        await self._tools.run(calls)

    async def write_summary(self, wish: SummaryWish, params: SamplingParams) -> Draft:
        return await write_summary(self._client, wish, params)

    async def read(
        self, turn: Turn, request_id: str, answer: AsyncGenerator[AnswerNews, None]
    ) -> None:
        label, writer = "", PlainWriter(sys.stdout, is_cleaned=True)
        with Interrupt(partial(self._client.abort, request_id)) as interrupt:
            try:
                async with contextlib.aclosing(answer) as stream:
                    async for news in stream:
                        turn.take(news, time.perf_counter())
                        if news.delta.finish_reason is FinishReason.ERROR:
                            raise news.delta.error or EngineError("the engine failed this request")
                        for name, text in zip(("Thoughts:", "Answer:"), news.pieces, strict=True):
                            if text and name != label:
                                writer.close()
                                if label or self._is_labelled or name == "Thoughts:":
                                    say(name)
                                label, writer = name, PlainWriter(sys.stdout, is_cleaned=True)
                            writer.feed(text)
            finally:
                self.is_stopped |= interrupt.came
                writer.close()


async def write_summary(client: EngineClient, wish: SummaryWish, params: SamplingParams) -> Draft:
    """Have a summary written; Ctrl-C ends it."""
    say(f"The model summarises {turns_words(wish.first, wish.last)}. Ctrl-C stops it.")
    with Interrupt(partial(client.abort, REQUEST_ID)):
        return await read_draft(client, wish, params, request_id=REQUEST_ID, show=lambda *_: None)


Write = Callable[[SummaryWish], "asyncio.Future[Draft]"]
