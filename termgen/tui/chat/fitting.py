"""A chat whose context is full: what is sent of it, the lines that say so, and `/fit`.

`Dialogue` streams every answer through it. What is left out is decided without a screen, in
`state.full_context`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from termgen.client import ChatPrompt
from termgen.errors import ContextLengthError
from termgen.tools.request import ToolRequest
from termgen.tui.chat.asking import QuestionFiles, Settings
from termgen.tui.chat.state.conversation import Conversation, Turn
from termgen.tui.chat.state.full_context import least_that_fits
from termgen.tui.chat.state.thoughts import AnswerNews, read_answer
from termgen.tui.chat.view import ChatView
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams

ANSWER_TOKENS = 512
"""Tokens kept free for an answer of no given length, in a context that large."""


class Fitting:
    def __init__(
        self,
        view: ChatView,
        settings: Settings,
        files: QuestionFiles,
        *,
        conversation: Callable[[], Conversation],
        say_above: Callable[[Turn, str], None],
        save: Callable[[], None],
    ) -> None:
        """conversation: the one on the screen. say_above: shows a notice above a turn. save: saves
        the settings of the chat."""
        self._view = view
        self._settings = settings
        self._files = files
        self._conversation = conversation
        self._say_above = say_above
        self._save = save

    async def answer(
        self,
        chat: Conversation,
        turn: Turn,
        params: SamplingParams,
        *,
        request_id: str,
        tools: ToolRequest | None,
    ) -> AsyncGenerator[AnswerNews, None]:
        """Stream the answer to the path. A request too long for the context is sent again: first
        without `max_tokens`, so that the answer has the rest of the context, then, if the user
        wants that, without the oldest turns."""
        entries = self._view.transcript.entries
        left_out, too_many = chat.num_left_out, 0

        def prompt(num_left_out: int | None = None) -> ChatPrompt:
            found = chat.prompt(num_left_out)
            return found if tools is None else tools.prompt(found)

        if chat.fits_itself and self._is_nearly_full(chat, turn, params):
            await self._leave_out(chat, turn, params, prompt)
        while True:
            answer = read_answer(
                self._settings.client, prompt(), params, request_id=request_id, tools=tools
            )
            try:
                async with contextlib.aclosing(answer) as stream:
                    async for news in stream:
                        if too_many:
                            words = f"max_tokens {too_many} is more than the context leaves"
                            self._say_above(turn, f"{words}; the answer may take what is left.")
                            too_many = 0
                        yield news
                return
            except ContextLengthError:
                if turn.is_waiting and params.max_tokens is not None:
                    too_many = params.max_tokens
                    params = replace(params, max_tokens=None)
                elif not (turn.is_waiting and chat.fits_itself) or not await self._leave_out(
                    chat, turn, params, prompt, refused=True
                ):
                    chat.num_left_out = left_out  # it did not help
                    self._view.transcript.set_entries(entries)
                    raise

    def _room_wanted(self, params: SamplingParams) -> int:
        """Tokens that an answer should have."""
        return min(
            self._settings.client.model.max_model_len // 4, params.max_tokens or ANSWER_TOKENS
        )

    def _is_nearly_full(self, chat: Conversation, turn: Turn, params: SamplingParams) -> bool:
        """True if the path may be too long, so that its tokens are worth counting."""
        before = turn.parent.stats.context_tokens if turn.parent is not None else 0
        asked = sum(len(message["content"]) for message in turn.messages(chat.result_chars))
        limit = self._settings.client.model.max_model_len
        return bool(limit) and before + asked > limit - self._room_wanted(params)

    async def _leave_out(
        self,
        chat: Conversation,
        turn: Turn,
        params: SamplingParams,
        prompt_of: Callable[[int], ChatPrompt],
        *,
        refused: bool = False,
    ) -> bool:
        """Leave more of the oldest turns out, with a notice. False if there are no more."""
        last = len(chat.turns) - 1
        before = min(chat.num_left_out, last)
        least = before + refused
        if least > last:
            return False
        wanted = await self._num_to_leave_out(least, last, params, prompt_of)
        if wanted is None:  # tokens cannot be counted here: try with a third less
            wanted = min(last, max(least, before + (last - before + 2) // 3)) if refused else before
        if wanted > before:
            chat.num_left_out = wanted
            self._save()
            which = "Turn 1 is" if wanted == 1 else f"Turns 1-{wanted} are"
            self._say_above(turn, f"{which} no longer sent: the context is full.")
        return wanted > before

    async def _num_to_leave_out(
        self, least: int, last: int, params: SamplingParams, prompt_of: Callable[[int], ChatPrompt]
    ) -> int | None:
        """The least number of oldest turns to leave out so that an answer has room; None if the
        engine cannot count tokens, or its context length is unknown."""
        client = self._settings.client
        limit = client.model.max_model_len
        if not limit:
            return None
        room = limit - self._room_wanted(params)
        return await least_that_fits(client, prompt_of, room, least, last)

    def say_if_full(self, turn: Turn) -> None:
        """Add a notice if the answer ended because the context is full."""
        stats, limit = turn.stats, self._settings.client.model.max_model_len
        is_full = 0 < limit <= stats.context_tokens + 1
        if stats.finish_reason is FinishReason.LENGTH and is_full:
            self._view.note(self._full_words(), hint=self.remedies())

    def _full_words(self) -> str:
        limit = self._settings.client.model.max_model_len
        most = f": the model reads {limit:,} tokens at most" if limit else ""
        return f"The context is full{most}."

    def refusal(self) -> str:
        """Why a question was refused that was taken back already."""
        chat, text = self._conversation(), self._full_words()
        too_long = not chat.turns or chat.fits_itself
        return f"This message is too long. {text}" if too_long else text

    def remedies(self) -> str:
        """Remedies for a full context, first those that keep the chat."""
        chat = self._conversation()
        fit, new = self._view.key("chat.fit"), self._view.key("chat.new")
        remedies = [f"{new} begins a new chat"]
        if chat.turns and not chat.fits_itself:
            remedies.insert(0, f"{fit} goes on without the oldest turns, which stay on the screen")
        if self._files.attached:
            remedies.append("/attach off leaves the files out")
        return "; ".join(remedies) + "."

    def fit(self, argument: str) -> None:
        """`/fit`: leave out the oldest turns of a full context; `/fit off`: send all again."""
        chat = self._conversation()
        if argument not in ("", "off"):
            self._view.refuse("/fit goes on without the oldest turns, /fit off sends all of them")
            return
        chat.fits_itself = not argument
        if argument:
            chat.num_left_out = 0
            self._view.note("Every turn is sent again.")
        else:
            self._view.note(
                "In a full context the oldest turns are not sent. `/fit off` ends that."
            )
        self._save()
        self._view.status.repaint()
