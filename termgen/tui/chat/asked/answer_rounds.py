"""Answers a question of a chat that has no screen, in as many rounds as the model calls tools. No
Textual.

The prompt is fitted to the context before it is sent and after it was refused. What a front end
shows of it all is its own: it gives `AnswerRounds` its hooks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from termgen.client import EngineClient
from termgen.errors import ContextLengthError, EngineError, RequestError
from termgen.tools.calls import ToolCall, run_rounds
from termgen.tui.chat.state.context_policy import cut_notice, turns_words
from termgen.tui.chat.state.conversation import Conversation, Turn
from termgen.tui.chat.state.full_context import cut_holder, make_room
from termgen.tui.chat.state.summary import Draft, SummaryWish, read_draft
from termgen.tui.chat.state.thoughts import AnswerNews, read_answer
from termgen.tui.chat.state.tool_offers import ToolOffers
from termgen.vocabulary.sampling_params import SamplingParams


class AnswerRounds(ABC):
    """Answers the last question of a chat's path."""

    def __init__(
        self,
        client: EngineClient,
        chat: Conversation,
        offers: ToolOffers,
        next_id: Callable[[], str],
        on_cut: Callable[[Turn], None] | None = None,
    ) -> None:
        """next_id: an id for each request. on_cut: called if something else is left out than
        before, with the turn that has it."""
        self._client = client
        self._chat = chat
        self._offers = offers
        self._next_id = next_id
        self._on_cut = on_cut
        path = chat.turns
        self._holder: Turn = cut_holder(path) if len(path) > 1 else path[-1]
        """The turn that has what is left out."""
        self._may_write = True
        """No summary was made for the request that is under way."""

    @abstractmethod
    def say(self, words: str) -> None:
        """Show words that are not the model's."""

    @abstractmethod
    async def read(
        self, turn: Turn, request_id: str, answer: AsyncGenerator[AnswerNews, None]
    ) -> None:
        """Take an answer as it is written. Raises its error."""

    @abstractmethod
    async def run_calls(self, calls: Sequence[ToolCall]) -> None:
        """Carry out the calls of an answer."""

    async def write_summary(self, wish: SummaryWish, params: SamplingParams) -> Draft:
        self.say(f"The model summarises {turns_words(wish.first, wish.last)}.")
        return await read_draft(
            self._client, wish, params, request_id=self._next_id(), show=lambda *_: None
        )

    def say_fault(self, fault: str) -> None:
        self.say(f"The model's summary is not used: {fault}.")

    async def answer(self, turn: Turn, params: SamplingParams) -> bool:
        """Ask until the model calls no more tools; False if it has called in all its rounds."""

        async def ask(offers: bool) -> Sequence[ToolCall]:
            await self._ask_once(turn, params, offers=offers)
            return turn.calls_to_run()

        return await run_rounds(ask, self.run_calls)

    async def _ask_once(self, turn: Turn, params: SamplingParams, *, offers: bool) -> None:
        """Stream one answer. A request that was refused is sent again with less, if that helps."""
        before, self._may_write = self._holder.cut, True
        try:
            await self._ask_in_room(turn, params, offers=offers)
        except ContextLengthError:
            self._holder.cut = before  # leaving more out did not help
            raise
        finally:
            if self._on_cut is not None and self._holder.cut != before:
                self._on_cut(self._holder)

    async def _ask_in_room(self, turn: Turn, params: SamplingParams, *, offers: bool) -> None:
        client, chat, is_first = self._client, self._chat, True
        while True:
            tools = await self._offers.request_for(chat, turn, client.model, offers=offers)
            if is_first:
                await self._make_room(params, refused=False)
                is_first = False
            prompt = chat.prompt() if tools is None else tools.prompt(chat.prompt())
            request_id = self._next_id()
            answer = read_answer(client, prompt, params, request_id=request_id, tools=tools)
            try:
                await self.read(turn, request_id, answer)
                return
            except (RequestError, EngineError) as error:
                if not turn.is_waiting:
                    raise
                if self._offers.asks_again(chat, turn, error, tools):
                    continue
                if not isinstance(error, ContextLengthError):
                    raise
                if params.max_tokens is not None:  # the answer may have the rest of the context
                    params = replace(params, max_tokens=None)
                elif not await self._make_room(params, refused=True):
                    raise

    async def _make_room(self, params: SamplingParams, *, refused: bool) -> bool:
        """Leave more out, and say so. False if there is nothing more, or it is not wanted. Raises
        ContextLengthError for a question that is too long alone."""
        chat, client = self._chat, self._client

        async def write(wish: SummaryWish) -> Draft:
            self._may_write = False
            return await self.write_summary(wish, params)

        change = await make_room(
            client,
            chat,
            max_tokens=params.max_tokens,
            with_tools=self._offers.offerer(chat, client.model),
            with_calls=self._offers.shower(chat, client.model),
            write=write if self._may_write else None,
            refused=refused,
        )
        if change is None:
            return False
        if change.fault:
            self.say_fault(change.fault)
        if change.is_one:
            is_new = change.after.summary != change.before.summary
            self.say("\n".join(filter(None, cut_notice(change.after, is_new=is_new))))
        return change.is_one
