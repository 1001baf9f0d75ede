"""The conversation on screen: its path as entries of the transcript, and the worker that answers.

The text of an answer arrives on this loop token by token and is drawn at most `FLUSH_HZ` times a
second, less often when a frame costs much. A question that was not answered goes back to the
prompt, and one that is edited goes there first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count, takewhile
from typing import Any

from textual.timer import Timer
from textual.worker import Worker

from termgen.errors import ContextLengthError, EngineError, RequestError, TermgenError
from termgen.tools.calls import MAX_ROUNDS, ToolCall, run_rounds
from termgen.tools.request import ToolRequest
from termgen.tools.text import result_chars
from termgen.tools.toolbox import Toolbox
from termgen.tui.chat.asking import QuestionFiles, Settings
from termgen.tui.chat.fitting import Fitting
from termgen.tui.chat.lists.find_panel import FindPanel, find
from termgen.tui.chat.lists.tree_panel import TreePanel
from termgen.tui.chat.saved.autosave import Autosave
from termgen.tui.chat.saved.chat_records import all_turns, restored_params
from termgen.tui.chat.state.answer_branch import Branch, branch_at, read_branch
from termgen.tui.chat.state.answer_tokens import AnswerTokens, score_text, score_written
from termgen.tui.chat.state.attachments import Attachment
from termgen.tui.chat.state.context_policy import ContextPolicy
from termgen.tui.chat.state.conversation import AnswerState, Conversation, Turn, title_of
from termgen.tui.chat.state.thoughts import AnswerNews
from termgen.tui.chat.state.token_scores import TokenScores
from termgen.tui.chat.token_lens import Choice, LensScreen
from termgen.tui.chat.tool_turns import ToolTurns
from termgen.tui.chat.view import ChatView
from termgen.tui.chat.widgets.draft_tint import drafted_in
from termgen.tui.chat.widgets.entries import AnswerEntry, NoticeEntry, QuestionEntry
from termgen.tui.keys.keymap import brief_key_of
from termgen.tui.paint.sanitize import clean_line
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams

FLUSH_HZ = 15.0
FLUSH_SHARE = 0.25
"""Largest share of the thread's time that drawing the answer may take."""


class Dialogue:
    def __init__(
        self,
        view: ChatView,
        settings: Settings,
        files: QuestionFiles,
        autosave: Autosave,
        conversation: Conversation,
        *,
        toolbox: Toolbox,
        clock: Callable[[], float],
        on_asked: Callable[[Turn], None],
        on_ended: Callable[[AnswerState], None],
    ) -> None:
        """on_asked, on_ended: called with each new turn, and when its answer has ended."""
        self._view = view
        self._settings = settings
        self._files = files
        self._autosave = autosave
        self._clock = clock
        self._on_asked = on_asked
        self._on_ended = on_ended
        self.conversation = conversation
        self._entries: dict[Turn, tuple[QuestionEntry, AnswerEntry]] = {}
        self.marked: Turn | None = None
        """The turn under the cursor; None stands for the last one."""
        self._draft = ""
        self._draft_files: tuple[Attachment, ...] = ()
        """The prompt's files when an edit began; `_draft` is its text."""
        self.editing: Turn | None = None
        """The turn whose question is in the prompt, to be asked in its place."""
        self._streaming: Turn | None = None
        self._worker: Worker[None] | None = None
        self._flusher: Timer | None = None
        self._next_flush_s = 0.0
        self._request_ids = (f"chat-{number}" for number in count(1))
        self._said_left_out: tuple[str, tuple[str, ...]] = ("", ())
        """(session id, parameter names) of the last notice about parameters left out."""
        self.tokens = AnswerTokens()
        self.tool_turns = ToolTurns(
            view,
            toolbox,
            say=self._say_above,
            stop=self.stop_answer,
            on_change=self._calls_changed,
        )
        self._sent_tools: ToolRequest | None = None
        """The tools of the request that is streaming, or was last."""
        self.fitting = Fitting(
            view,
            settings,
            files,
            autosave,
            conversation=lambda: self.conversation,
            put_above=self._put_above,
            save=self.save_settings,
            tools_of=lambda: self.tool_turns.shower(self.conversation, settings.client.model),
            offered=lambda: self.tool_turns.offerer(self.conversation, settings.client.model),
            on_compacted=self._compacted,
        )

    def start(self) -> None:
        """Begin to draw answers. The screen calls it when it is mounted."""
        self.tool_turns.start()
        self._flusher = self._view.screen.set_interval(1 / FLUSH_HZ, self.flush, pause=True)

    @property
    def is_streaming(self) -> bool:
        """True while the model writes: an answer, or the summary of `/compact`."""
        return self._streaming is not None or self.fitting.is_compacting

    def say_streaming(self) -> None:
        """Say that an answer must end first."""
        stop = self._view.key("chat.stop")
        self._view.warn(f"an answer is being written; {stop} stops it")

    @property
    def current(self) -> Turn | None:
        """The turn that keys act on: the marked one, else the last."""
        if self.marked is not None:
            return self.marked
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
        """Stream the answer to a question.

        beside: the new turn takes its place, and that of the turns after it; None appends to the
        path. branch: the answer goes on from the beginning of that of `beside`.
        """
        turn = self.conversation.ask(
            question,
            now_s=self._clock(),
            beside=beside,
            model_id=self._settings.client.model.model_id,
        )
        turn.attachments, turn.form = attachments, self._settings.form
        if branch is not None:
            assert beside is not None
            turn.form, turn.num_kept_tokens = None, len(branch.kept_ids) + 1
            turn.thought, turn.rounds = replace(beside.thought), list(beside.rounds)
            if branch.is_whole:  # thoughts are read again from the kept tokens
                turn.thought.text, turn.thought.is_over = "", False
        self._streaming = turn
        limit = self._settings.client.model.max_model_len
        self.conversation.result_chars = result_chars(limit)
        self._autosave.asked(self.conversation, turn, self._settings.params, own=self._settings.own)
        self.show_path()
        params = self._sent_params()
        self._view.transcript.to_end()
        self._flush_while(True)
        self._view.screen.refresh_bindings()
        self._worker = self._view.start_worker("answer", self._answer, turn, params, branch)
        self._on_asked(turn)

    def _sent_params(self) -> SamplingParams:
        """The parameters that the server knows. A notice before the question names the others, once
        in a chat."""
        params, left_out = self._settings.sent()
        said = (self.conversation.session_id, left_out)
        if left_out and said != self._said_left_out:
            name, words = clean_line(self._settings.client.model.model_id), ", ".join(left_out)
            notice = NoticeEntry(f"Left out, as the server of {name} knows no {words}.")
            entries = self._view.transcript.entries
            self._view.transcript.set_entries([*entries[:-2], notice, *entries[-2:]])
        self._said_left_out = said
        return params

    async def _answer(self, turn: Turn, params: SamplingParams, branch: Branch | None) -> None:
        entry = self._entries[turn][1]
        try:
            if branch is not None:
                client, request_id = self._settings.client, next(self._request_ids)
                answer = read_branch(client, branch, params, request_id=request_id)
                await self._read(turn, entry, answer)
            else:
                await self._answer_in_rounds(turn, entry, params)
        except (RequestError, EngineError) as error:
            self._fail(turn, error)
        else:
            aborted = turn.stats.finish_reason is FinishReason.ABORT
            self._finish(turn, AnswerState.STOPPED if aborted else AnswerState.DONE)
            self.fitting.say_if_full(turn)

    async def _answer_in_rounds(
        self, turn: Turn, entry: AnswerEntry, params: SamplingParams
    ) -> None:
        """Ask until the model calls no more tools."""

        async def ask(offers: bool) -> Sequence[ToolCall]:
            await self._ask_once(turn, entry, params, offers=offers)
            calls = turn.calls_to_run()
            if calls:
                entry.end_round()
                self._calls_changed()
            return calls

        if not await run_rounds(ask, self.tool_turns.run):
            words = f"The model has called tools {MAX_ROUNDS} times in a row"
            self._view.note(f"{words}; its answer came without them.")

    async def _ask_once(
        self, turn: Turn, entry: AnswerEntry, params: SamplingParams, *, offers: bool
    ) -> None:
        """Stream one answer to the path, with the tools or, if they are refused, without."""
        while True:
            model = self._settings.client.model
            tools = self._sent_tools = await self.tool_turns.request_for(
                self.conversation, turn, model, offers=offers
            )
            try:
                request_id = next(self._request_ids)
                answer = self.fitting.answer(
                    self.conversation, turn, params, request_id=request_id, tools=tools
                )
                await self._read(turn, entry, answer)
                return
            except (RequestError, EngineError) as error:
                chat = self.conversation
                if not turn.is_waiting or not (
                    self.fitting.asks_again(chat, turn, error)
                    or self.tool_turns.asks_again(chat, turn, error, tools)
                ):
                    raise

    def _calls_changed(self) -> None:
        turn = self._streaming
        if turn is not None:
            self._autosave.streamed(self.conversation, turn)
            self._autosave.flush()  # a tool may run for long
            self._view.transcript.update(self._entries[turn][1])

    async def _read(
        self, turn: Turn, entry: AnswerEntry, answer: AsyncGenerator[AnswerNews, None]
    ) -> None:
        async with contextlib.aclosing(answer) as stream:
            async for news in stream:
                first, delta = not turn.stats.output_tokens, news.delta
                turn.take(news, self._clock())
                self.tokens.take(turn.turn_id, delta)
                entry.feed(news.pieces[1], drafted_in(news.pieces[1], delta))
                self._autosave.streamed(self.conversation, turn)
                if delta.finish_reason is FinishReason.ERROR:
                    raise delta.error or EngineError("the engine failed this request")
                if first:
                    self.flush()

    def _say_above(self, turn: Turn, text: str) -> None:
        """Add a notice before a shown turn."""
        self._put_above(turn, NoticeEntry(text))

    def _put_above(self, turn: Turn | None, notice: NoticeEntry) -> None:
        """Add a notice before a shown turn; None: at the end."""
        entries = list(self._view.transcript.entries)
        at = len(entries) if turn is None else entries.index(self._entries[turn][0])
        entries.insert(at, notice)
        self._view.transcript.set_entries(entries)

    def _compacted(self, is_stopped: bool) -> None:
        self._on_ended(AnswerState.STOPPED if is_stopped else AnswerState.DONE)

    # -- settings of the chat --------------------------------------------------------------

    def save_settings(self) -> None:
        """Save the settings, if the chat is saved at all: one without a question is not."""
        if self.conversation.turns:
            self._autosave.save_session(
                self.conversation, self._settings.params, own=self._settings.own
            )

    def restore_settings(self, given: Mapping[str, Any]) -> None:
        """Take settings from the command line, which override those of a resumed chat."""
        if "system_prompt" in given:
            self.conversation.system_prompt = given["system_prompt"]
        if "context_policy" in given:
            self.conversation.policy = ContextPolicy(given["context_policy"])
        self._settings.params = restored_params(given, self._settings.params)

    # -- the end of an answer --------------------------------------------------------------

    def _finish(self, turn: Turn, state: AnswerState) -> None:
        if turn.state is not AnswerState.STREAMING:
            return  # it was stopped before its last delta was read
        turn.end(state)
        self._autosave.ended(self.conversation, turn)
        entry = self._entries[turn][1]
        entry.close()
        self._view.transcript.update(entry)
        self._streaming = self._worker = None
        self._flush_while(False)
        self._view.status.repaint()
        self._view.screen.refresh_bindings()
        self.fitting.count()
        self._on_ended(state)

    def _fail(self, turn: Turn, error: TermgenError) -> None:
        """Show the error. A question without any answer is taken back."""
        if turn.state is not AnswerState.STREAMING:
            return
        self._finish(turn, AnswerState.FAILED)
        hint = self._take_back(turn) if turn.is_bare else ""
        text = str(error)
        if isinstance(error, ContextLengthError):
            hint = f"{hint} {self.fitting.remedies()}".strip()
            text = self.fitting.refusal(error)
        elif not self._settings.client.is_healthy:
            leave = f"leave with {self._view.key('app.quit')} and start again"
            hint = f"{hint} The engine has stopped: {leave}.".strip()
        self._view.note_fault(text, hint=hint)

    def _take_back(self, turn: Turn) -> str:
        """Remove a turn without an answer; its question goes back to the prompt."""
        self.conversation.remove(turn)
        self._autosave.withdrew(self.conversation, turn)
        self.show_path()
        del self._entries[turn]
        replaced = turn.instead_of
        if replaced is not None and replaced.question == turn.question:
            return "The answer before is shown again."
        if replaced is None:
            self.quote_back(turn.question)
        else:
            self._begin_editing(replaced, turn.question)
        self._files.give_back(turn.question, turn.attachments)
        return "Your message is back in the prompt."

    def quote_back(self, text: str) -> None:
        """Put an unanswered question back into the prompt, before the draft."""
        draft = self._view.prompt.text
        self._view.prompt.set_text(f"{text}\n{draft}" if draft.strip() else text)

    def _flush_while(self, is_streaming: bool) -> None:
        assert self._flusher is not None, "start() comes first"
        if is_streaming:
            self._flusher.resume()
        else:
            self._flusher.pause()

    def flush(self) -> None:
        """Draw the text that has arrived, unless the last drawing cost more than its share."""
        turn = self._streaming
        if turn is None or time.perf_counter() < self._next_flush_s:
            return
        started = time.perf_counter()
        self._view.transcript.update(self._entries[turn][1])
        self._view.status.repaint()
        spent = time.perf_counter() - started
        self._next_flush_s = started + spent / FLUSH_SHARE if spent > 0.02 else 0.0

    def stop_answer(self) -> None:
        """Stop the answer, whose text so far is kept, or the summary of `/compact`."""
        self.fitting.stop_compacting()
        turn, worker = self._streaming, self._worker
        if turn is None:
            return
        if worker is not None:
            worker.cancel()  # closes the stream, which aborts the request
        self._finish(turn, AnswerState.STOPPED)

    def stop_by_hand(self) -> None:
        """Stop what the model writes. A question that waited for a summary comes back."""
        turn, is_early = self._streaming, self.fitting.is_summarising
        self.stop_answer()
        if turn is not None and is_early and turn.is_bare:
            back = self._take_back(turn)
            self._view.note("The summary was stopped, and nothing was sent.", hint=back)

    def show(self, conversation: Conversation) -> None:
        """Show another conversation. A streaming answer stops, and editing ends."""
        self.stop_answer()
        self.end_editing()
        self.conversation = conversation
        self._entries.clear()
        self._view.transcript.clear()
        self.show_path()
        self.fitting.say_cut()
        self.fitting.count()
        self._view.transcript.to_end()

    def show_path(self) -> None:
        """Make the transcript show the path; entries up to the first difference stay."""
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
                self._view.transcript.entries,
            )
        )
        shown = {owners[entry] for entry in kept if entry in owners}
        rest = (entry for turn in turns if turn not in shown for entry in self._entries[turn])
        self._view.transcript.set_entries([*kept, *rest])
        self._view.status.repaint()

    def show_others(self, added: Sequence[Turn], changed: Sequence[Turn]) -> None:
        """Show the turns that another window has added to this chat or changed in it."""
        swapped: dict[object, QuestionEntry | AnswerEntry] = {}
        for turn in changed:
            if turn in self._entries:
                old, fresh = self._entries[turn], self._make_entries(turn)
                self._entries[turn] = fresh
                swapped |= {old[0]: fresh[0], old[1]: fresh[1]}
        transcript = self._view.transcript
        transcript.set_entries([swapped.get(entry, entry) for entry in transcript.entries])
        self.show_path()
        path = self.conversation.turns
        gone_on = [turn for turn in added if turn in path]
        if gone_on:
            number = "a turn" if len(gone_on) == 1 else f"{len(gone_on)} turns"
            self._say_above(gone_on[0], f"Another window has gone on with this chat: {number}.")
            transcript.to_end()
        for turn in added:
            beside = [sibling for sibling in turn.siblings if sibling in path]
            if turn in path or not beside:
                continue
            transcript.update(self._entries[beside[0]][1])
            before, after = (self._view.key(f"chat.sibling_{side}") for side in ("before", "after"))
            question = clean_line(title_of(turn.question))
            self._view.note(
                f"Another window has asked at the same place: {question!r}.",
                hint=f"It is a branch beside what is shown here: {before} {after}, or click ‹1/2›.",
            )
        self._view.screen.refresh_bindings()

    def answer_entry(self, turn: Turn) -> AnswerEntry:
        return self._entries[turn][1]

    def _make_entries(self, turn: Turn) -> tuple[QuestionEntry, AnswerEntry]:
        keys = self._view.key
        view, model = self._view, self._settings.client.model
        answer = AnswerEntry(
            turn, model, keys, clock=self._clock, has_tint=lambda: view.tints_drafts
        )
        answer.feed(turn.answer)
        if turn.state is not AnswerState.STREAMING:
            answer.close()
        return QuestionEntry(turn, keys), answer

    def mark(self, turn: Turn | None) -> None:
        """Put the cursor on a turn of the path; None: on the last one, without a mark."""
        for marked, there in ((self.marked, False), (turn, True)):
            if marked is not None and marked in self._entries:
                question = self._entries[marked][0]
                question.is_marked = there
                self._view.transcript.update(question)
        self.marked = turn

    def move_cursor(self, by: int) -> None:
        """Move the mark along the path; beyond the last turn it goes away."""
        turns = self.conversation.turns
        if not turns:
            return
        at = turns.index(self.marked) if self.marked is not None else len(turns)
        at = max(0, at + by)
        if at >= len(turns):
            self.mark(None)
            self._view.transcript.to_end()
            return
        self._go_to(turns[at])

    def _go_to(self, turn: Turn, words: str = "") -> None:
        """Mark a turn and bring it into view. words: what it was found by, marked in its text."""
        self.mark(turn)
        question, answer = self._entries[turn]
        self._view.transcript.bring_into_view(answer)
        self._view.transcript.bring_into_view(question)
        if words.strip():
            self._view.transcript.mark_words(words.split(), self._entries[turn])

    def find(self, wanted: str) -> None:
        """List the questions of the path, those with some words; mark the one that is chosen."""
        turns = self.conversation.turns
        if not turns:
            self._view.notify("nothing was asked in this chat yet")
            return
        marked = turns.index(self.marked) if self.marked is not None else None

        def go(found: tuple[int, str] | None) -> None:
            # An answer may have come meanwhile, or another chat.
            if found is not None and turns[found[0]] in self.conversation.turns:
                self._go_to(turns[found[0]], found[1])

        self._view.screen.app.push_screen(FindPanel(turns, wanted, marked), go)

    def go_to_words(self, words: str) -> None:
        """Go to the last turn of the path that has all of these words, if there is one; else say
        whether another branch has them."""
        turns = self.conversation.turns
        if words and (hits := find(turns, words)):
            self._go_to(turns[hits[-1].place], words)
        elif words and find(all_turns(self.conversation), words):
            key = self._view.key("chat.tree")
            self._view.note(
                "The words are on another branch of this chat.", hint=f"{key} lists them."
            )

    def open_tree(self, wanted: str) -> None:
        """List the turns of all branches, or those with some words; show the branch of the one that
        is chosen."""
        chat = self.conversation
        if not chat.turns:
            self._view.notify("nothing was asked in this chat yet")
            return

        def show(found: tuple[Turn, str] | None) -> None:
            # Another window may have removed it meanwhile, or another chat is open.
            if found is not None and self.conversation is chat and chat.has(found[0]):
                self._show_branch(*found)

        panel = TreePanel(chat.root, chat.turns, self.current, wanted)
        self._view.screen.app.push_screen(panel, show)

    def _show_branch(self, turn: Turn, words: str) -> None:
        if turn not in self.conversation.turns:
            if self.is_streaming:
                self.say_streaming()
                return
            for chosen in self.conversation.choose_path(turn):
                self._autosave.chose(self.conversation, chosen)
            self.show_path()
            self.fitting.count()
        if turn is self.conversation.turns[-1] and not words:
            self.mark(None)
            self._view.transcript.to_end()
        else:
            self._go_to(turn, words)

    def switch_sibling(self, by: int) -> None:
        """Show a sibling of the turn under the cursor, with the path below it."""
        turn = self.current
        if turn is None or len(turn.siblings) < 2:
            again, edit = self._view.key("chat.retry"), self._view.key("chat.edit")
            self._view.notify(f"there is one answer only; {again} or {edit} makes another")
        else:
            self.switch_turn(turn, by)

    def switch_turn(self, turn: Turn, by: int) -> None:
        """Show a sibling of this turn, with the path below it."""
        if self.is_streaming:
            self.say_streaming()
            return
        marked = self.marked is turn or turn is not self.conversation.turns[-1]
        chosen = self.conversation.switch(turn, by)
        if chosen is None:
            return
        self._autosave.chose(self.conversation, chosen)
        self.show_path()
        if marked:
            self.mark(chosen)
            self._view.transcript.bring_into_view(self._entries[chosen][0])
        else:
            self._view.transcript.to_end()

    def regenerate(self) -> None:
        """Answer the question under the cursor again, beside its present answer."""
        turn = self.current
        if turn is None:
            self._view.warn("nothing to answer again yet")
            return
        self.stop_answer()
        self.ask(turn.question, turn.attachments, beside=turn)

    def keep_answer(self, chat: Conversation, turn: Turn, answered: Turn) -> None:
        """Put an answer that was given beside the chat into it, beside that of a turn."""
        if self.conversation is not chat or not chat.has(turn) or self.is_streaming:
            self._view.warn("the chat has gone on: the answer is not kept")
            return
        chat.choose_path(turn)
        chat.put_beside(turn, answered)
        self._autosave.asked(chat, answered, self._settings.params, own=self._settings.own)
        self._autosave.ended(chat, answered)
        self.show_path()
        self._view.transcript.to_end()
        self.fitting.count()
        self._on_asked(answered)

    def look_at_tokens(self) -> None:
        """Open the token lens on the answer under the cursor; a branch chosen there is answered."""
        turn = self.current
        if self.is_streaming:
            self.say_streaming()
        elif turn is None or not (turn.answer or self.tokens.get(turn.turn_id)):
            self._view.warn("no answer to look at yet")
        else:
            self._open_lens(turn)

    def _open_lens(self, turn: Turn) -> None:
        client, written = self._settings.client, self.tokens.get(turn.turn_id)

        async def get_scores() -> TokenScores:
            if written is not None:
                return await score_written(client, written)
            prompt = self.conversation.prompt_with_answer(turn)
            if self._sent_tools is not None:
                prompt = self._sent_tools.prompt(prompt)
            return await score_text(client, prompt, turn.answer)

        def use(choice: Choice | None) -> None:
            if choice is None or turn not in self.conversation.turns:
                return
            if turn.form is not None:
                self._view.warn("an answer of a given form cannot be branched")
                return
            scores, index, token = choice
            whole = written is not None
            branch = branch_at(scores, index, token.token_id, token.data, whole=whole)
            self.ask(turn.question, turn.attachments, beside=turn, branch=branch)

        vocab_size = client.model.vocab_size
        self._view.screen.app.push_screen(
            LensScreen(get_scores, params=self._settings.params, vocab_size=vocab_size), use
        )

    def edit(self) -> None:
        """Put the question under the cursor into the prompt; sending it makes a branch."""
        turn = self.current
        if turn is None:
            self._view.warn("nothing to edit yet")
            return
        self._begin_editing(turn, turn.question)
        self._files.give_back(turn.question, turn.attachments)
        self._view.prompt.focus()

    def _begin_editing(self, turn: Turn, text: str) -> None:
        if self.editing is None:
            self._draft, self._draft_files = self._view.prompt.text, self._files.attached
        self.editing = turn
        names = ("prompt.send", "chat.stop")
        send, give_up = (brief_key_of(self._view.screen, name) for name in names)
        self._files.show_title(f"edit · {send} asks it in a new branch · {give_up} gives up")
        self._view.prompt.set_text(text)
        self._view.screen.refresh_bindings()

    @property
    def draft(self) -> str:
        """What the prompt holds, or held when the editing of a question began."""
        return self._view.prompt.text if self.editing is None else self._draft

    def end_editing(self, *, typed: str = "") -> None:
        """Bring back the draft from before the edit, with `typed` behind it."""
        if self.editing is not None:
            self.editing = None
            self._view.screen.refresh_bindings()
            self._files.show_title("")
            self._files.attach(self._draft_files)
            self._view.prompt.set_text(self._draft + typed)
            self._draft, self._draft_files = "", ()
