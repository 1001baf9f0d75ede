"""A chat whose context is full: the lines that say what is no longer sent, `/fit` and `/compact`.

`Dialogue` streams every answer through it. What is left out is decided without a screen, in
`state.full_context`; this asks for it, shows it, saves it, and has the model write summaries.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from itertools import count

from textual.worker import Worker

from termgen.errors import ContextLengthError, EngineError, RequestError, TermgenError
from termgen.tools.request import ToolRequest
from termgen.tui.chat.asking import QuestionFiles, Settings
from termgen.tui.chat.context_panel import ContextPanel
from termgen.tui.chat.saved.autosave import Autosave
from termgen.tui.chat.state.context_meter import Meter, MeterReader
from termgen.tui.chat.state.context_policy import (
    CHOSEN_WORDS,
    FIT_USAGE,
    FIT_WORDS,
    FULL,
    ContextPolicy,
    Cut,
    cut_notice,
    turns_words,
)
from termgen.tui.chat.state.conversation import Conversation, Turn
from termgen.tui.chat.state.full_context import (
    Change,
    FullContext,
    MessageTooLong,
    WithTools,
    cut_holder,
    make_room,
    unchanged,
)
from termgen.tui.chat.state.summary import Draft, SummaryWish, read_draft
from termgen.tui.chat.state.thoughts import AnswerNews, read_answer
from termgen.tui.chat.view import ChatView
from termgen.tui.chat.widgets.entries import NoticeEntry
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams

SHOW_S = 0.1
"""Shortest time between two drawings of a summary that is written."""


class Fitting:
    def __init__(
        self,
        view: ChatView,
        settings: Settings,
        files: QuestionFiles,
        autosave: Autosave,
        *,
        conversation: Callable[[], Conversation],
        put_above: Callable[[Turn | None, NoticeEntry], None],
        save: Callable[[], None],
        tools_of: Callable[[], WithTools],
        offered: Callable[[], WithTools],
        on_compacted: Callable[[bool], None],
    ) -> None:
        """conversation: the one on the screen. put_above: adds a notice above a turn, or at the
        end. save: saves the settings of the chat. tools_of: puts the calls of the chat into a
        prompt that offers no tools. offered: puts in the tools, too. on_compacted: called when
        `/compact` has ended, with whether it was stopped."""
        self._view = view
        self._settings = settings
        self._files = files
        self._autosave = autosave
        self._conversation = conversation
        self._put_above = put_above
        self._save = save
        self._tools_of = tools_of
        self._offered = offered
        self._on_compacted = on_compacted
        self._tried: Turn | None = None
        """The question before which a summary was tried last: once for each."""
        self._compacting: Worker[None] | None = None
        self._reader = MeterReader()
        self.meter: Meter | None = None
        """What the context held when it was counted last."""
        self._request_ids = (f"summary-{number}" for number in count(1))
        self.is_summarising = False
        """The model writes a summary, before an answer or for `/compact`."""

    @property
    def is_compacting(self) -> bool:
        return self._compacting is not None

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
        without `max_tokens`, so that the answer has the rest of the context, then, if that is the
        chat's policy, without some of the older turns."""
        entries, too_many = self._view.transcript.entries, 0
        holder = cut_holder(chat.turns) if len(chat.turns) > 1 else turn
        held = holder.cut
        shown = unchanged if tools is None else tools.prompt
        room = partial(self._make_room, chat, turn, params.max_tokens, shown)
        try:
            await room(refused=False)
            while True:
                answer = read_answer(
                    self._settings.client,
                    shown(chat.prompt()),
                    params,
                    request_id=request_id,
                    tools=tools,
                )
                try:
                    async with contextlib.aclosing(answer) as stream:
                        async for news in stream:
                            if too_many:
                                words = f"max_tokens {too_many} is more than the context leaves"
                                self._say(turn, f"{words}; the answer may take what is left.")
                                too_many = 0
                            yield news
                    return
                except ContextLengthError:
                    if turn.is_waiting and params.max_tokens is not None:
                        too_many = params.max_tokens
                        params = replace(params, max_tokens=None)
                    elif not turn.is_waiting or not await room(refused=True):
                        raise
        except ContextLengthError:
            if turn.is_waiting:  # it did not help
                self._hold(chat, holder, held)
                self._view.transcript.set_entries(entries)
            raise

    async def _make_room(
        self,
        chat: Conversation,
        turn: Turn,
        max_tokens: int | None,
        with_tools: WithTools,
        *,
        refused: bool,
    ) -> bool:
        """Leave more out, with a notice. False if there is nothing more, or it is not wanted."""
        change = await make_room(
            self._settings.client,
            chat,
            max_tokens=max_tokens,
            with_tools=with_tools,
            with_calls=self._tools_of(),
            write=partial(self._write, turn) if self._tried is not turn else None,
            refused=refused,
        )
        if change is None:
            return False
        if change.fault:
            self._say(
                turn,
                f"The model's summary is not used: {change.fault}.",
                hint="From here on turns are left out without one; /compact tries again.",
            )
        if change.is_one:
            self._autosave.changed(chat, cut_holder(chat.turns))
            self._view.status.repaint()
            self._say_change(turn, change)
        return change.is_one

    def asks_again(self, chat: Conversation, turn: Turn, error: TermgenError) -> bool:
        """True if a question is to be sent again without the summary, as the model's template on a
        server elsewhere takes no system message."""
        cut = chat.cut_for(chat.turns)
        if cut.summary is None or chat.system_prompt or "system" not in str(error).lower():
            return False
        chat.is_summary_off = True
        self._hold(chat, cut_holder(chat.turns), replace(cut, summary=None))
        self._say(turn, "The model takes no system message: the summary is no longer sent.")
        return True

    def _hold(self, chat: Conversation, holder: Turn, cut: Cut | None) -> None:
        if holder.cut != cut:
            holder.cut = cut
            self._autosave.changed(chat, holder)
            self._view.status.repaint()

    def _say(self, turn: Turn | None, text: str, *, hint: str = "") -> None:
        self._put_above(turn, NoticeEntry(text, hint=hint))

    def _say_change(self, turn: Turn | None, change: Change, *, why: str = FULL) -> None:
        before, after = change.before, change.after
        if after.pruned > before.pruned:
            which = turns_words(1, after.pruned)
            self._say(turn, f"Results of tools in {which} are sent shortened: the context is full.")
        if replace(before, pruned=0) != replace(after, pruned=0):
            is_new = after.summary != before.summary
            text, hint = cut_notice(after, is_new=is_new, why=why)
            self._say(turn, text, hint=hint)

    def say_cut(self) -> None:
        """Say of a chat that is opened what of it is not sent."""
        chat = self._conversation()
        cut = chat.cut
        if 0 < cut.pruned < len(chat.turns):
            which = turns_words(1, cut.pruned)
            self._say(chat.turns[cut.pruned], f"Results of tools in {which} are sent shortened.")
        if cut.num_left_out and cut.upto < len(chat.turns):
            text, hint = cut_notice(cut, is_new=cut.summary is not None, why="")
            self._say(chat.turns[cut.upto], text, hint=hint)

    # -- summaries -------------------------------------------------------------------------

    async def _write(self, turn: Turn | None, wish: SummaryWish) -> Draft:
        """Have the model write a summary, with a notice that shows it as it grows."""
        self._tried = turn
        entry = NoticeEntry("")
        self._put_above(turn, entry)
        shown_s = 0.0
        which, stop = turns_words(wish.first, wish.last), self._view.key("chat.stop")

        def show(text: str, num_tokens: int) -> None:
            nonlocal shown_s
            now_s = time.perf_counter()
            if num_tokens and now_s - shown_s < SHOW_S:
                return
            shown_s = now_s if num_tokens else 0.0
            words = f"The model summarises {which}: {num_tokens:,} tokens. {stop} stops it."
            entry.show(words, hint=text)
            self._view.transcript.update(entry)

        self.is_summarising = True
        try:
            show("", 0)
            return await read_draft(
                self._settings.client,
                wish,
                self._settings.sent()[0],
                request_id=next(self._request_ids),
                show=show,
            )
        finally:
            self.is_summarising = False
            left = [one for one in self._view.transcript.entries if one is not entry]
            self._view.transcript.set_entries(left)

    def compact(self, focus: str) -> None:
        """`/compact [FOCUS]`: have the older turns summarised now."""
        chat = self._conversation()
        if len(chat.turns) < 2:
            self._view.notify("there is nothing to summarise yet")
            return
        chat.is_summary_off = False
        self._compacting = self._view.start_worker("compact", self._compact, chat, focus)
        self._view.screen.refresh_bindings()

    async def _compact(self, chat: Conversation, focus: str) -> None:
        holder = cut_holder(chat.turns, is_asked=False)
        context = FullContext(
            self._settings.client,
            chat,
            max_tokens=self._settings.params.max_tokens,
            with_tools=self._tools_of(),
            with_calls=self._tools_of(),
            is_asked=False,
        )
        try:
            change = await context.compact(partial(self._write, None), focus)
        except (RequestError, EngineError) as error:
            change = Change(context.before, context.before, str(error))
        if self._conversation() is chat:
            if change.is_one:
                self._hold(chat, holder, change.after)
                self._say_change(None, change, why="")
            else:
                hint = "Everything is sent as before."
                self._view.note(f"There is no summary: {change.fault}.", hint=hint)
        self._end_compacting(is_stopped=False)

    def stop_compacting(self) -> None:
        """Give `/compact` up; everything is sent as before."""
        if self._compacting is not None:
            self._compacting.cancel()
            self._view.note("The summary was stopped; everything is sent as before.")
            self._end_compacting(is_stopped=True)

    def _end_compacting(self, *, is_stopped: bool) -> None:
        self._compacting = None
        self.count()
        self._view.screen.refresh_bindings()
        self._view.status.repaint()
        self._on_compacted(is_stopped)

    # -- the meter -------------------------------------------------------------------------

    def count(self) -> None:
        """Count anew what the context holds, for the status line."""
        self._view.start_worker("meter", self._count, exclusive=True)

    async def _count(self) -> None:
        chat = self._conversation()
        try:
            meter = await self._read_meter()
        except TermgenError:  # a dead engine: the chat says so
            return
        if self._conversation() is chat:
            self.meter = meter if chat.turns else None
            self._view.status.repaint()

    async def _read_meter(self) -> Meter:
        return await self._reader.read(
            self._settings.client,
            self._conversation(),
            max_tokens=self._settings.params.max_tokens,
            with_tools=self._offered(),
            with_calls=self._tools_of(),
        )

    def forget_counts(self) -> None:
        """Another model answers, which has other tokens."""
        self._reader.clear()
        self._conversation().is_summary_off = False
        self.count()

    def open_panel(self) -> None:
        """`/context`: show what the context holds, and choose what is done when it is full."""
        chat = self._conversation()

        def use(policy: ContextPolicy | None) -> None:
            if policy is not None and self._conversation() is chat and policy is not chat.policy:
                self.set_policy(policy)

        self._view.screen.app.push_screen(ContextPanel(self._read_meter, chat.policy), use)

    # -- words and commands ----------------------------------------------------------------

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

    def refusal(self, error: TermgenError) -> str:
        """Why a question was refused that was taken back already."""
        if isinstance(error, MessageTooLong):
            return f"This message is too long. {error}"
        chat, text = self._conversation(), self._full_words()
        too_long = not chat.turns or chat.policy is not ContextPolicy.ASK
        return f"This message is too long. {text}" if too_long else text

    def remedies(self) -> str:
        """Remedies for a full context, first those that keep the chat."""
        chat = self._conversation()
        fit, new = self._view.key("chat.fit"), self._view.key("chat.new")
        remedies = [f"{new} begins a new chat"]
        if chat.turns and chat.policy is ContextPolicy.ASK:
            remedies.insert(0, f"{fit} goes on without the oldest turns, which stay on the screen")
        if self._files.attached:
            remedies.append("/attach off leaves the files out")
        return "; ".join(remedies) + "."

    def fit(self, argument: str) -> None:
        """`/fit`: choose what is left out of a full context; `/fit off`: send all again."""
        policy = FIT_WORDS.get(argument)
        if policy is None:
            self._view.refuse(FIT_USAGE)
        else:
            self.set_policy(policy)

    def set_policy(self, policy: ContextPolicy) -> None:
        """Choose what is done from now on. To ask is to send everything again."""
        chat = self._conversation()
        for turn in chat.choose(policy):
            self._autosave.changed(chat, turn)
        end = "" if policy is ContextPolicy.ASK else " `/fit off` ends that."
        self._view.note(CHOSEN_WORDS[policy] + end)
        self._save()
        self.count()
