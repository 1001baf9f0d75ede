"""One session: a chat of the store with tools of its own, which answers a prompt at a time.

A prompt is answered by a task of its own, and cancelling that task is how it is cancelled, whatever
it waits for. The chat's own parts hold the conversation, save it and offer the tools.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import acp
from acp.schema import (
    PermissionOption,
    PromptResponse,
    SessionInfoUpdate,
    StopReason,
    Usage,
    UsageUpdate,
)

from termgen.agent.engine_source import EngineSource
from termgen.agent.faults import INVALID_REQUEST, clear_error
from termgen.agent.full_context import full_words
from termgen.agent.outbox import Outbox
from termgen.agent.questions import question_of
from termgen.agent.slash_commands import run_command
from termgen.agent.updates import ShownCalls
from termgen.client import EngineClient
from termgen.config import UIConfig
from termgen.errors import ContextLengthError, EngineError, TermgenError
from termgen.tools.calls import Approval, CallRunner, ToolCall
from termgen.tools.text import result_chars
from termgen.tools.toolbox import Offered, Toolbox
from termgen.tui.chat.asked.answer_rounds import AnswerRounds
from termgen.tui.chat.saved.autosave import Autosave
from termgen.tui.chat.saved.chat_records import restored_params
from termgen.tui.chat.saved.chat_store import ChatStore
from termgen.tui.chat.state.attachments import Attachment
from termgen.tui.chat.state.commands import parse
from termgen.tui.chat.state.conversation import (
    AnswerState,
    Conversation,
    Turn,
    sampling_params,
    title_of,
)
from termgen.tui.chat.state.full_context import MessageTooLong
from termgen.tui.chat.state.sampling_fields import without
from termgen.tui.chat.state.thoughts import AnswerNews
from termgen.tui.chat.state.tool_offers import ToolOffers
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams

LOADING_WORDS_S = 2.0
"""A prompt that waits longer for the engine says so."""
ALLOW_ONCE, ALLOW_ALWAYS, REJECT_ONCE = "allow_once", "allow_always", "reject_once"
OPTIONS = (
    PermissionOption(option_id=ALLOW_ONCE, name="Allow once", kind="allow_once"),
    PermissionOption(option_id=ALLOW_ALWAYS, name="Always allow this tool", kind="allow_always"),
    PermissionOption(option_id=REJECT_ONCE, name="Reject", kind="reject_once"),
)
APPROVALS = {
    ALLOW_ONCE: Approval.ONCE,
    ALLOW_ALWAYS: Approval.ALWAYS,
    REJECT_ONCE: Approval.DENY,
}

logger = logging.getLogger("termgen.agent")


@dataclass(frozen=True, slots=True)
class House:
    """What all sessions share."""

    client: Any
    """The connection, an `acp.AgentSideConnection`."""
    engine: EngineSource
    store: ChatStore
    ui: UIConfig
    given: Mapping[str, Any]
    """Settings of the command line, which count more than those that a chat was held with."""


class AgentSession:
    def __init__(
        self,
        house: House,
        conversation: Conversation,
        toolbox: Toolbox,
        folder: Path,
        kept: Mapping[str, Any],
    ) -> None:
        """kept: parameters of a chat that is gone on with, as its record has them."""
        self.conversation = conversation
        self.folder = folder
        self.toolbox = toolbox
        self.task: asyncio.Task[StopReason] | None = None
        """The prompt that is answered now."""
        self.is_stopping = False
        """That prompt was cancelled."""
        self.usage: Usage | None = None
        """Tokens of the last answer."""
        self._house = house
        self._kept = kept
        self._autosave = Autosave(house.store)
        self.offers = ToolOffers(toolbox, self._note)
        self._runner = CallRunner(toolbox, self._approve, self.calls_changed)
        self._shown = ShownCalls(folder)
        self._turn: Turn | None = None
        """The turn that is answered now."""
        self._said_left_out: tuple[str, ...] = ()
        """Parameters that the last notice named, as the server does not know them."""
        self.request_ids = (f"acp-{conversation.session_id[:8]}-{number}" for number in count(1))
        session_id = conversation.session_id
        self.outbox = Outbox(lambda update: house.client.session_update(session_id, update))
        if not toolbox.is_empty:
            toolbox.start()

    @property
    def session_id(self) -> str:
        return self.conversation.session_id

    @property
    def is_busy(self) -> bool:
        return self.task is not None

    def cancel(self) -> None:
        """End the answer that is written; its text so far is kept."""
        if self.task is not None:
            self.is_stopping = True
            self.task.cancel()

    async def close(self) -> None:
        """End the answer and the tools."""
        self.cancel()
        if self.task is not None:
            await asyncio.wait([self.task])
        self._autosave.flush()
        await self.toolbox.close()

    # -- what the chat is held with --------------------------------------------------------

    def _params(self, client: EngineClient) -> tuple[SamplingParams, SamplingParams]:
        """The parameters of the chat, and the model's own."""
        own = client.model.default_params
        params = restored_params(self._kept, sampling_params(own, self._house.ui))
        return restored_params(self._house.given, params), sampling_params(own, UIConfig())

    def save(self) -> None:
        """Save the settings of a chat that is saved at all."""
        client = self._house.engine.ready
        if self.conversation.turns and client is not None:
            params, own = self._params(client)
            self._autosave.save_session(self.conversation, params, own=own)

    def save_turns(self, turns: Sequence[Turn]) -> None:
        """Save turns that are other than before."""
        for turn in turns:
            self._autosave.changed(self.conversation, turn)

    def save_all(self) -> None:
        """Save the whole chat, into a new file."""
        client = self._house.engine.ready
        if client is not None:
            params, own = self._params(client)
            self._autosave.save_all(self.conversation, params, own=own)

    def rename(self, title: str) -> None:
        self.conversation.title = title_of(title)
        self._autosave.rename(self.session_id, self.conversation.title)
        self._show_title()

    def _show_title(self) -> None:
        title = self.conversation.title
        self.outbox.put(SessionInfoUpdate(session_update="session_info_update", title=title))

    # -- an answer -------------------------------------------------------------------------

    async def prompt(self, blocks: Sequence[Any]) -> PromptResponse:
        """Answer a prompt to its end, or until it is cancelled. Raises `acp.RequestError`."""
        if self.task is not None:
            raise acp.RequestError(
                INVALID_REQUEST, "this session answers a prompt already: cancel it, or wait"
            )
        self.is_stopping, self.usage = False, None
        self.task = task = asyncio.create_task(self._answer(blocks))
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:  # the connection ends
            task.cancel()
            await asyncio.wait([task])
            raise
        finally:
            self.task = None
        await self.outbox.flush()
        try:
            reason = task.result()
        except (asyncio.CancelledError, TermgenError, acp.RequestError) as error:
            if not self.is_stopping and isinstance(error, TermgenError):
                raise clear_error(error) from error
            if not self.is_stopping and isinstance(error, acp.RequestError):
                raise
            reason = "cancelled"
        return PromptResponse(stop_reason=reason, usage=self.usage)

    async def _answer(self, blocks: Sequence[Any]) -> StopReason:
        question, attachments = await asyncio.to_thread(question_of, blocks, self.folder)
        found = parse(question)
        if found is not None:
            self.outbox.say(await run_command(self, *found))
            return "end_turn"
        return await self._answer_question(question, attachments)

    async def _answer_question(
        self, question: str, attachments: tuple[Attachment, ...]
    ) -> StopReason:
        client = await self._engine()
        model, is_first = client.model, not self.conversation.turns
        turn = self.conversation.ask(question, now_s=time.perf_counter(), model_id=model.model_id)
        turn.attachments = attachments
        self.conversation.result_chars = result_chars(model.max_model_len)
        params, own = self._params(client)
        self._autosave.asked(self.conversation, turn, params, own=own)
        self._turn = turn
        if is_first:
            self._show_title()
        state = AnswerState.STOPPED
        try:
            ended = await self._answer_in_rounds(client, turn, params)
            if turn.stats.finish_reason is not FinishReason.ABORT:
                state = AnswerState.DONE
        except TermgenError:
            state = AnswerState.FAILED
            raise
        finally:
            self._finish(client, turn, state)
        return _stop_reason(turn, ended)

    async def _engine(self) -> EngineClient:
        """The engine; says what it does if that takes long."""
        engine = self._house.engine
        getting = asyncio.ensure_future(engine.client())
        try:
            await asyncio.wait([getting], timeout=LOADING_WORDS_S)
            if not getting.done():
                self.say_apart(f"The model is not ready yet ({engine.phase}).")
            return await getting
        finally:
            getting.cancel()

    def _finish(self, client: EngineClient, turn: Turn, state: AnswerState) -> None:
        """End the turn, and save it. A question without any answer is taken back if it failed."""
        turn.end(state)
        self._show_calls(turn)
        self._turn = None
        if state is AnswerState.FAILED and turn.is_bare:
            self.conversation.remove(turn)
            self._autosave.withdrew(self.conversation, turn)
            return
        self._autosave.ended(self.conversation, turn)
        stats = turn.stats
        self.usage = Usage(
            total_tokens=stats.prompt_tokens + stats.output_tokens,
            input_tokens=stats.prompt_tokens,
            output_tokens=stats.output_tokens,
            cached_read_tokens=stats.cached_tokens,
        )
        size = client.model.max_model_len
        if size and stats.prompt_tokens:
            used = UsageUpdate(session_update="usage_update", used=stats.context_tokens, size=size)
            self.outbox.put(used)

    async def _answer_in_rounds(
        self, client: EngineClient, turn: Turn, params: SamplingParams
    ) -> bool:
        """Ask until the model calls no more tools; False if it has called in all its rounds."""
        sent, left_out = without(params, client.model.unsent_params)
        if left_out and left_out != self._said_left_out:
            self._note(turn, f"Left out, as the server knows no {', '.join(left_out)}.")
        self._said_left_out = left_out

        rounds = _SessionRounds(self, client)
        try:
            return await rounds.answer(turn, sent)
        except MessageTooLong:
            raise
        except ContextLengthError as error:
            words = f"{error} {full_words(self.conversation)}".strip()
            raise ContextLengthError(words) from None

    async def run_calls(self, calls: Sequence[ToolCall]) -> None:
        """Carry out calls, those that the client approves."""
        self.calls_changed()
        await self._runner.run(calls)

    def cut_changed(self, holder: Turn) -> None:
        """Save the turn that has what is left out."""
        self._autosave.changed(self.conversation, holder)

    async def read(self, turn: Turn, answer: AsyncGenerator[AnswerNews, None]) -> None:
        """Stream an answer to the client."""
        async with contextlib.aclosing(answer) as stream:
            async for news in stream:
                num_before = len(turn.thought.text)
                turn.take(news, time.perf_counter())
                self.outbox.think(turn.thought.text[num_before:])
                self.outbox.say(news.pieces[1])
                self._autosave.streamed(self.conversation, turn)
                if news.delta.finish_reason is FinishReason.ERROR:
                    raise news.delta.error or EngineError("the engine failed this request")
                await self.outbox.room()

    # -- tools -----------------------------------------------------------------------------

    def calls_changed(self) -> None:
        """Save and show the calls."""
        turn = self._turn
        if turn is not None:
            self._autosave.streamed(self.conversation, turn)
            self._autosave.flush()  # a tool may run for long
            self._show_calls(turn)

    def _show_calls(self, turn: Turn) -> None:
        for update in self._shown.news(turn):
            self.outbox.put(update)

    async def _approve(self, call: ToolCall, offered: Offered) -> Approval:
        await self.outbox.flush()
        try:
            reply = await self._house.client.request_permission(
                self.session_id, tool_call=self._shown.question(call), options=list(OPTIONS)
            )
        except (acp.RequestError, ConnectionError) as error:
            logger.warning("the client does not ask about %s: %s", offered.name, error)
            return Approval.DENY
        outcome = reply.outcome
        if outcome.outcome == "cancelled":
            self.cancel()
            await asyncio.sleep(0)  # the cancellation ends this here
        return APPROVALS.get(getattr(outcome, "option_id", ""), Approval.DENY)

    # -- words that are not the model's ------------------------------------------------------

    def _note(self, turn: Turn, words: str) -> None:
        self.say_apart(words)

    def say_apart(self, words: str) -> None:
        """Say something where it is not taken for the answer."""
        self.outbox.think(f"[termgen] {words}\n\n")


def _stop_reason(turn: Turn, ended: bool) -> StopReason:
    reason = turn.stats.finish_reason
    if reason is FinishReason.ABORT:
        return "cancelled"
    if reason is FinishReason.LENGTH:
        return "max_tokens"
    return "end_turn" if ended else "max_turn_requests"


class _SessionRounds(AnswerRounds):
    """The rounds of a session's question."""

    def __init__(self, session: AgentSession, client: EngineClient) -> None:
        next_id = partial(next, session.request_ids)
        super().__init__(
            client, session.conversation, session.offers, next_id, on_cut=session.cut_changed
        )
        self._session = session

    def say(self, words: str) -> None:
        self._session.say_apart(words)

    async def read(
        self, turn: Turn, request_id: str, answer: AsyncGenerator[AnswerNews, None]
    ) -> None:
        await self._session.read(turn, answer)

    async def run_calls(self, calls: Sequence[ToolCall]) -> None:
        await self._session.run_calls(calls)
