"""The conversation on screen: its path as entries of the transcript, and the worker that answers.

The text of an answer arrives on this loop token by token and is drawn at most `FLUSH_HZ` times a
second, less often when a frame costs much. A question that was not answered goes back to the
prompt, and one that is edited goes there first. The chat screen is made on top of this: keys,
commands, status line.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from itertools import count, takewhile

from textual import work
from textual.worker import Worker

from termgen.client import EngineClient
from termgen.config import UIConfig
from termgen.errors import ContextLengthError, EngineError, RequestError, TermgenError
from termgen.tui.chat.chat_tools import ChatTools
from termgen.tui.chat.saved.autosave import Autosave
from termgen.tui.chat.state.answer_branch import Branch, branch_at, read_branch
from termgen.tui.chat.state.answer_tokens import AnswerTokens, score_text, score_written
from termgen.tui.chat.state.attachments import Attachment
from termgen.tui.chat.state.conversation import AnswerState, Conversation, Turn
from termgen.tui.chat.state.sampling_fields import without
from termgen.tui.chat.state.thoughts import AnswerNews, read_answer
from termgen.tui.chat.state.token_scores import TokenScores
from termgen.tui.chat.token_lens import Choice, LensScreen
from termgen.tui.chat.widgets.entries import AnswerEntry, NoticeEntry, QuestionEntry
from termgen.tui.keys.keymap import brief_key_of, key_of
from termgen.tui.paint.sanitize import clean_line
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams

FLUSH_HZ = 15.0
ANSWER_TOKENS = 512
"""Room that is kept for an answer of no given length, where there is so much."""
FLUSH_SHARE = 0.25
"""Drawing the answer may take this share of the thread, not more."""


class DialogueScreen(ChatTools):
    def __init__(
        self,
        client: EngineClient,
        ui: UIConfig,
        *,
        autosave: Autosave,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(client, ui)
        self._clock = clock
        self.autosave = autosave
        self._entries = {}
        self._cursor: Turn | None = None
        self._draft = ""
        self._draft_files: tuple[Attachment, ...] = ()
        """What the prompt held when an edit began."""
        self.editing: Turn | None = None
        """The turn whose question is in the prompt, to be asked in its place."""
        self._streaming: Turn | None = None
        self._worker: Worker[None] | None = None
        self._next_flush_s = 0.0
        self._request_ids = count(1)
        self._said_left_out: tuple[str, tuple[str, ...]] = ("", ())
        """(session id, parameter names) of the last notice about parameters left out."""
        self.tokens = AnswerTokens()
        self.conversation = Conversation(system_prompt=ui.system_prompt)

    def on_mount(self) -> None:
        self._flusher = self.set_interval(1 / FLUSH_HZ, self._flush, pause=True)

    @property
    def is_streaming(self) -> bool:
        return self._streaming is not None

    def say_streaming(self) -> None:
        """Why what was asked for cannot be now."""
        stop = key_of(self, "chat.stop")
        self.notify(f"an answer is being written; {stop} stops it", severity="warning")

    @property
    def cursor_turn(self) -> Turn | None:
        """The turn that keys act on: the marked one, else the last."""
        if self._cursor is not None:
            return self._cursor
        turns = self.conversation.turns
        return turns[-1] if turns else None

    def ask(
        self,
        question: str,
        attachments: tuple[Attachment, ...] = (),
        *,
        beside: Turn | None = None,
        branch: Branch | None = None,
    ) -> None:
        """Stream the answer to a question at the end, or in place of `beside` and what follows;
        with a branch, one that begins as that of `beside`."""
        turn = self.conversation.ask(
            question,
            now_s=self._clock(),
            beside=beside,
            model_id=self._client.model.model_id,
        )
        turn.attachments, turn.form = attachments, self.form
        if branch is not None:
            assert beside is not None
            turn.form, turn.num_kept_tokens = None, len(branch.kept_ids) + 1
            turn.thought = replace(beside.thought)
            if branch.is_whole:  # they are read again from what is kept
                turn.thought.text, turn.thought.is_over = "", False
        self._streaming = turn
        self.autosave.asked(self.conversation, turn, self._params, own=self._own_params)
        self.show_path()
        params = self._told_params()
        self.transcript.to_end()
        self._flusher.resume()
        self.refresh_bindings()
        self._worker = self._answer(turn, params, branch)

    def _told_params(self) -> SamplingParams:
        """Those that the engine can be told. What is left out is said before the question, once in
        a chat."""
        params, left_out = without(self._params, self._client.model.untold_params)
        said = (self.conversation.session_id, left_out)
        if left_out and said != self._said_left_out:
            name, words = clean_line(self._client.model.model_id), ", ".join(left_out)
            notice = NoticeEntry(f"Left out, as the server of {name} knows no {words}.")
            entries = self.transcript.entries
            self.transcript.set_entries([*entries[:-2], notice, *entries[-2:]])
        self._said_left_out = said
        return params

    @work(group="answer")
    async def _answer(self, turn: Turn, params: SamplingParams, branch: Branch | None) -> None:
        request_id, entry = f"chat-{next(self._request_ids)}", self._entries[turn][1]
        if branch is not None:
            answer = read_branch(self._client, branch, params, request_id=request_id)
        else:
            answer = self._answer_that_fits(turn, params, request_id)
        try:
            await self._read(turn, entry, answer)
        except (RequestError, EngineError) as error:
            self._fail(turn, error)
        else:
            aborted = turn.stats.finish_reason is FinishReason.ABORT
            self._finish(turn, AnswerState.STOPPED if aborted else AnswerState.DONE)
            self._say_if_full(turn)

    async def _read(
        self, turn: Turn, entry: AnswerEntry, answer: AsyncGenerator[AnswerNews, None]
    ) -> None:
        async with contextlib.aclosing(answer) as stream:
            async for news in stream:
                first, delta = not turn.stats.output_tokens, news.delta
                turn.take(news, self._clock())
                self.tokens.take(turn.turn_id, delta)
                entry.feed(news.pieces[1])
                self.autosave.streamed(self.conversation, turn)
                if delta.finish_reason is FinishReason.ERROR:
                    raise delta.error or EngineError("the engine failed this request")
                if first:
                    self._flush()

    # a context that is full

    async def _answer_that_fits(
        self, turn: Turn, params: SamplingParams, request_id: str
    ) -> AsyncGenerator[AnswerNews, None]:
        """The answer to the path. What is too long for the context is asked again with less: first
        without `max_tokens`, so that the answer has what is left, then, where the user wants that,
        without the oldest turns."""
        chat, entries = self.conversation, self.transcript.entries
        left_out, too_many = chat.num_left_out, 0
        if chat.fits_itself and self._is_nearly_full(turn, params):
            await self._leave_out(turn, params)
        while True:
            answer = read_answer(self._client, chat.prompt(), params, request_id=request_id)
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
                if turn.is_bare and params.max_tokens is not None:
                    too_many = params.max_tokens
                    params = replace(params, max_tokens=None)
                elif not (turn.is_bare and chat.fits_itself) or not await self._leave_out(
                    turn, params, refused=True
                ):
                    chat.num_left_out = left_out  # it did not help
                    self.transcript.set_entries(entries)
                    raise

    def _room_wanted(self, params: SamplingParams) -> int:
        """Tokens that an answer should have."""
        return min(self._client.model.max_model_len // 4, params.max_tokens or ANSWER_TOKENS)

    def _is_nearly_full(self, turn: Turn, params: SamplingParams) -> bool:
        """Whether it is worth counting what the path takes."""
        before = turn.parent.stats.context_tokens if turn.parent is not None else 0
        asked = sum(len(message["content"]) for message in turn.messages())
        limit = self._client.model.max_model_len
        return bool(limit) and before + asked > limit - self._room_wanted(params)

    async def _leave_out(
        self, turn: Turn, params: SamplingParams, *, refused: bool = False
    ) -> bool:
        """Leave more of the oldest turns out, and say which. False if nothing more can be."""
        chat, last = self.conversation, len(self.conversation.turns) - 1
        before = min(chat.num_left_out, last)
        least = before + refused
        if least > last:
            return False
        wanted = await self._num_to_leave_out(least, last, params)
        if wanted is None:  # it cannot be counted here: try with a third less
            wanted = min(last, max(least, before + (last - before + 2) // 3)) if refused else before
        if wanted > before:
            chat.num_left_out = wanted
            self.save_settings()
            which = "Turn 1 is" if wanted == 1 else f"Turns 1-{wanted} are"
            self._say_above(turn, f"{which} no longer sent: the context is full.")
        return wanted > before

    async def _num_to_leave_out(self, least: int, last: int, params: SamplingParams) -> int | None:
        """The fewest turns without which there is room for an answer; None if the engine cannot
        count tokens, or tell how many it takes."""
        limit = self._client.model.max_model_len
        if not limit:
            return None
        room = limit - self._room_wanted(params)
        low, high = least, last
        while low < high:
            middle = (low + high) // 2
            try:
                fits = len(await self._client.tokenize(self.conversation.prompt(middle))) <= room
            except ContextLengthError:
                fits = False
            except (RequestError, EngineError):
                return None
            low, high = (low, middle) if fits else (middle + 1, high)
        return low

    def _say_above(self, turn: Turn, text: str) -> None:
        """A notice before a turn that is shown."""
        entries = list(self.transcript.entries)
        entries.insert(entries.index(self._entries[turn][0]), NoticeEntry(text))
        self.transcript.set_entries(entries)

    def _say_if_full(self, turn: Turn) -> None:
        """The answer has ended where the context does."""
        stats, limit = turn.stats, self._client.model.max_model_len
        is_full = 0 < limit <= stats.context_tokens + 1
        if stats.finish_reason is FinishReason.LENGTH and is_full:
            self.transcript.add(NoticeEntry(self._full_words(), hint=self._remedies()))

    def _full_words(self) -> str:
        limit = self._client.model.max_model_len
        most = f": the model reads {limit:,} tokens at most" if limit else ""
        return f"The context is full{most}."

    def _remedies(self) -> str:
        """What keeps the chat comes first."""
        fit, new = key_of(self, "chat.fit"), key_of(self, "chat.new")
        remedies = [f"{new} begins a new chat"]
        if self.conversation.turns and not self.conversation.fits_itself:
            remedies.insert(0, f"{fit} goes on without the oldest turns, which stay on the screen")
        if self.attached:
            remedies.append("/attach off leaves the files out")
        return "; ".join(remedies) + "."

    def fit(self, argument: str) -> None:
        """`/fit`, `/fit off`."""
        chat = self.conversation
        if argument not in ("", "off"):
            self.refuse("/fit goes on without the oldest turns, /fit off sends all of them")
            return
        chat.fits_itself = not argument
        if argument:
            chat.num_left_out = 0
            self.note("Every turn is sent again.")
        else:
            self.note("In a full context the oldest turns are not sent. `/fit off` ends that.")
        self.save_settings()
        self.status.repaint()

    def _finish(self, turn: Turn, state: AnswerState) -> None:
        if turn.state is not AnswerState.STREAMING:
            return  # it was stopped before its end was read
        turn.end(state)
        self.autosave.ended(self.conversation, turn)
        entry = self._entries[turn][1]
        entry.close()
        self.transcript.update(entry)
        self._streaming = self._worker = None
        self._flusher.pause()
        self.status.repaint()
        self.refresh_bindings()
        self.answer_ended(state)

    def answer_ended(self, state: AnswerState) -> None:
        """For what waits for it."""

    def _fail(self, turn: Turn, error: TermgenError) -> None:
        """Say what went wrong. Of a question without any answer nothing stays."""
        if turn.state is not AnswerState.STREAMING:
            return
        self._finish(turn, AnswerState.FAILED)
        hint = self._take_back(turn) if turn.is_bare else ""
        text = str(error)
        if isinstance(error, ContextLengthError):
            hint = f"{hint} {self._remedies()}".strip()
            text = self._full_words()
            if not self.conversation.turns or self.conversation.fits_itself:
                text = f"This message is too long. {text}"
        elif not self._client.is_healthy:
            leave = f"leave with {key_of(self, 'app.quit')} and start again"
            hint = f"{hint} The engine has stopped: {leave}.".strip()
        self.transcript.add(NoticeEntry(text, role="bad", sign="✗", hint=hint))

    def _take_back(self, turn: Turn) -> str:
        """Remove a turn without an answer; what was typed for it goes back to the prompt."""
        self.conversation.remove(turn)
        self.autosave.withdrew(self.conversation, turn)
        self.show_path()
        del self._entries[turn]
        replaced = turn.instead_of
        if replaced is not None and replaced.question == turn.question:
            return "The answer before is shown again."
        if replaced is None:
            self.quote_back(turn.question)
        else:
            self._begin_editing(replaced, turn.question)
        self.give_back(turn.question, turn.attachments)
        return "Your message is back in the prompt."

    def quote_back(self, text: str) -> None:
        """Put a question that was not answered back into the prompt, before what is there."""
        draft = self.prompt.text
        self.prompt.set_text(f"{text}\n{draft}" if draft.strip() else text)

    def _flush(self) -> None:
        """Draw what has arrived, unless the last drawing cost more than its share."""
        turn = self._streaming
        if turn is None or time.perf_counter() < self._next_flush_s:
            return
        started = time.perf_counter()
        self.transcript.update(self._entries[turn][1])
        self.status.repaint()
        spent = time.perf_counter() - started
        self._next_flush_s = started + spent / FLUSH_SHARE if spent > 0.02 else 0.0

    def stop_answer(self) -> None:
        """Keep the text that has come."""
        turn, worker = self._streaming, self._worker
        if turn is None:
            return
        if worker is not None:
            worker.cancel()  # closes the stream, which aborts the request
        self._finish(turn, AnswerState.STOPPED)

    def set_conversation(self, conversation: Conversation) -> None:
        """Show another one. What is being answered stops, and editing ends."""
        self.stop_answer()
        self.end_editing()
        self.conversation = conversation
        self._entries.clear()
        self.transcript.clear()
        self.show_path()
        self.transcript.to_end()

    def show_path(self) -> None:
        """Make the transcript show the path: all is replaced from where they part."""
        self.mark(None)
        turns = self.conversation.turns
        for turn in turns:
            if turn not in self._entries:
                self._entries[turn] = self._make_entries(turn)
        owners = {entry: turn for turn, pair in self._entries.items() for entry in pair}
        on_path = set(turns)
        kept = list(
            takewhile(
                lambda entry: entry not in owners or owners[entry] in on_path,
                self.transcript.entries,
            )
        )
        shown = {owners[entry] for entry in kept if entry in owners}
        rest = (entry for turn in turns if turn not in shown for entry in self._entries[turn])
        self.transcript.set_entries([*kept, *rest])
        self.status.repaint()

    def _make_entries(self, turn: Turn) -> tuple[QuestionEntry, AnswerEntry]:
        keys = partial(key_of, self)
        answer = AnswerEntry(turn, self._client.model, keys, clock=self._clock)
        answer.feed(turn.answer)
        if turn.state is not AnswerState.STREAMING:
            answer.close()
        return QuestionEntry(turn, keys), answer

    def mark(self, turn: Turn | None) -> None:
        """Put the cursor at a turn of the path, or back to the last one, which needs no mark."""
        for marked, there in ((self._cursor, False), (turn, True)):
            if marked is not None and marked in self._entries:
                question = self._entries[marked][0]
                question.is_marked = there
                self.transcript.update(question)
        self._cursor = turn

    def move_cursor(self, by: int) -> None:
        """Through the turns of the path; beyond the last one, the mark goes away."""
        turns = self.conversation.turns
        if not turns:
            return
        at = turns.index(self._cursor) if self._cursor is not None else len(turns)
        at = max(0, at + by)
        if at >= len(turns):
            self.mark(None)
            self.transcript.to_end()
            return
        self.mark(turns[at])
        question, answer = self._entries[turns[at]]
        self.transcript.bring_into_view(answer)
        self.transcript.bring_into_view(question)

    def switch_sibling(self, by: int) -> None:
        """Show what stands beside the turn at the cursor, with the path below it."""
        turn = self.cursor_turn
        if turn is None or len(turn.siblings) < 2:
            again, edit = key_of(self, "chat.retry"), key_of(self, "chat.edit")
            self.notify(f"there is one answer only; {again} or {edit} makes another")
        else:
            self.switch_turn(turn, by)

    def switch_turn(self, turn: Turn, by: int) -> None:
        """Show what stands beside this turn, with the path below it."""
        if self.is_streaming:
            self.say_streaming()
            return
        marked = self._cursor is turn or turn is not self.conversation.turns[-1]
        chosen = self.conversation.switch(turn, by)
        if chosen is None:
            return
        self.autosave.chose(self.conversation, chosen)
        self.show_path()
        if marked:
            self.mark(chosen)
            self.transcript.bring_into_view(self._entries[chosen][0])
        else:
            self.transcript.to_end()

    def regenerate(self) -> None:
        """Answer the question at the cursor again, beside the answer it has."""
        turn = self.cursor_turn
        if turn is None:
            self.notify("nothing to answer again yet", severity="warning")
            return
        self.stop_answer()
        self.ask(turn.question, turn.attachments, beside=turn)

    def look_at_tokens(self) -> None:
        """Open the lens on the answer at the cursor; a branch that it gives back is answered."""
        turn = self.cursor_turn
        if self.is_streaming:
            self.say_streaming()
        elif turn is None or not (turn.answer or self.tokens.get(turn.turn_id)):
            self.notify("no answer to look at yet", severity="warning")
        else:
            self._open_lens(turn)

    def _open_lens(self, turn: Turn) -> None:
        client, written = self._client, self.tokens.get(turn.turn_id)

        async def get_scores() -> TokenScores:
            if written is not None:
                return await score_written(client, written)
            prompt = self.conversation.prompt_with_answer(turn)
            return await score_text(client, prompt, turn.answer)

        def use(choice: Choice | None) -> None:
            if choice is None or turn not in self.conversation.turns:
                return
            if turn.form is not None:
                self.notify("an answer of a given form cannot be branched", severity="warning")
                return
            scores, index, token = choice
            whole = written is not None
            branch = branch_at(scores, index, token.token_id, token.data, whole=whole)
            self.ask(turn.question, turn.attachments, beside=turn, branch=branch)

        vocab_size = client.model.vocab_size
        self.app.push_screen(
            LensScreen(get_scores, params=self._params, vocab_size=vocab_size), use
        )

    def edit(self) -> None:
        """Put the question at the cursor into the prompt; sending it makes a branch."""
        turn = self.cursor_turn
        if turn is None:
            self.notify("nothing to edit yet", severity="warning")
            return
        self._begin_editing(turn, turn.question)
        self.give_back(turn.question, turn.attachments)
        self.prompt.focus()

    def _begin_editing(self, turn: Turn, text: str) -> None:
        if self.editing is None:
            self._draft, self._draft_files = self.prompt.text, self.attached
        self.editing = turn
        send, give_up = (brief_key_of(self, name) for name in ("prompt.send", "chat.stop"))
        self.label_prompt(f"edit · {send} asks it in a new branch · {give_up} gives up")
        self.prompt.set_text(text)
        self.refresh_bindings()

    def end_editing(self, *, typed: str = "") -> None:
        """The prompt holds a message again, as begun before the edit; `typed` goes on with it."""
        if self.editing is not None:
            self.editing = None
            self.refresh_bindings()
            self.label_prompt("")
            self.attach(self._draft_files)
            self.prompt.set_text(self._draft + typed)
            self._draft, self._draft_files = "", ()
