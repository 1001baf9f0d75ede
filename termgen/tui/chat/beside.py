"""`/beside`: the last question to another model too, beside the present one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from itertools import count

from termgen.client import EngineClient
from termgen.errors import TermgenError
from termgen.tui.chat.asking import Settings
from termgen.tui.chat.beside_screen import BesideScreen, Side
from termgen.tui.chat.dialogue import Dialogue
from termgen.tui.chat.state.conversation import AnswerStats, Turn
from termgen.tui.chat.state.sampling_fields import without
from termgen.tui.chat.state.thoughts import AnswerNews, read_answer
from termgen.tui.chat.view import ChatView
from termgen.tui.paint.sanitize import clean_line
from termgen.vocabulary.model_shelf import OtherModels

USAGE = "`/beside NAME` or `/beside URL MODEL` asks another server the last question, too."


class Beside:
    def __init__(
        self,
        view: ChatView,
        settings: Settings,
        dialogue: Dialogue,
        others: OtherModels | None,
        *,
        clock: Callable[[], float],
    ) -> None:
        """others: None if there are none to be asked."""
        self._view = view
        self._settings = settings
        self._dialogue = dialogue
        self._others = others
        self._clock = clock
        self._request_ids = (f"beside-{number}" for number in count(1))

    @property
    def names(self) -> list[tuple[str, str]]:
        return self._others.names if self._others is not None else []

    def run_command(self, wanted: str) -> None:
        """`/beside NAME` or `/beside URL MODEL`; alone: list the names."""
        turn = self._dialogue.current
        if self._others is None or not wanted:
            named = ", ".join(clean_line(f"{name} ({what})") for name, what in self.names)
            self._view.note(f"Servers to ask: {named or 'none are named'}.", hint=USAGE)
        elif self._dialogue.is_streaming:
            self._dialogue.say_streaming()
        elif turn is None:
            self._view.warn("ask something first: the last question is asked again, of both")
        else:
            work = self._asking
            self._view.start_worker("beside", work, self._others, wanted, turn, exclusive=True)

    async def _asking(self, others: OtherModels, wanted: str, turn: Turn) -> None:
        chat = self._dialogue.conversation
        self._view.notify(f"connecting to {clean_line(wanted)}")
        try:
            other = await others.open(wanted)
        except TermgenError as error:
            self._view.refuse(error)
            return
        try:
            if self._dialogue.is_streaming or self._dialogue.conversation is not chat:
                self._view.warn(f"{clean_line(wanted)} is there now, but the chat has gone on")
                return
            sides = [self._side(turn, client) for client in (self._settings.client, other)]
            screen = BesideScreen(sides, self._view.key, clock=self._clock)
            kept = await self._view.screen.app.push_screen_wait(screen)
            if kept is not None:
                self._dialogue.keep_answer(chat, turn, kept)
        finally:
            await other.aclose()

    def _side(self, turn: Turn, client: EngineClient) -> Side:
        """The same question, with what was said before it, to a model."""
        fresh = Turn(
            turn.question,
            stats=AnswerStats(self._clock()),
            attachments=turn.attachments,
            form=self._settings.form,
            model_id=client.model.model_id,
            parent=turn.parent,
        )
        prompt = self._dialogue.conversation.prompt_for(fresh)
        params, _ = without(self._settings.params_for(client), client.model.unsent_params)
        request_id = next(self._request_ids)

        def read() -> AsyncGenerator[AnswerNews, None]:
            return read_answer(client, prompt, params, request_id=request_id)

        return Side(fresh, client.model, read)
