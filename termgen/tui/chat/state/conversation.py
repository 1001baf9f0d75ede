"""A chat as data: a tree of turns, the path through it that is shown and sent, and the figures of
each answer. No Textual.

Answering a question again and editing it both put a turn beside the old one. Of the turns under one
parent one is chosen; from the first turn on, the chosen ones are the path.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, groupby
from typing import Any
from uuid import uuid4

from termgen.client import ChatPrompt, TokenDelta
from termgen.config import UIConfig
from termgen.tools.calls import CUT_WORDS, CallState, ToolCall, take_pieces
from termgen.tools.text import LEAST_RESULT_CHARS, MAX_RESULT_CHARS
from termgen.tui.chat.state.attachments import Attachment, with_files
from termgen.tui.chat.state.context_policy import ALL, ContextPolicy, Cut
from termgen.tui.chat.state.labels import Labels
from termgen.tui.chat.state.thoughts import AnswerNews, Thought
from termgen.tui.chat.state.tool_rounds import ToolRound
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

CHAT_DEFAULTS: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.95}
"""Defaults for models without sampling defaults of their own."""
RATE_WINDOW_S = 2.0
PRUNED_CHARS = 80
"""Characters of a tool's result that are sent when results are shortened for room."""
MAX_TITLE_CHARS = 80


class AnswerState(enum.Enum):
    STREAMING = "streaming"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(slots=True)
class AnswerStats:
    """Figures of one answer, from its deltas as they arrive."""

    sent_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    finish_reason: FinishReason | None = None
    ended_s: float = 0.0
    earlier_tokens: int = 0
    """Those of `output_tokens` that were written in earlier rounds, before tools were called."""
    earlier_s: float = 0.0
    """`seconds_of_output` of the earlier rounds."""
    _first_s: float = 0.0
    _paused_s: float = 0.0
    """Time between the rounds: of tools, and of prompts read again."""
    _is_paused: bool = False
    _recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=512))

    def update(self, delta: TokenDelta, now_s: float) -> None:
        self.prompt_tokens = delta.num_prompt_tokens or self.prompt_tokens
        self.cached_tokens = delta.num_cached_tokens or self.cached_tokens
        written = self.earlier_tokens + delta.num_output_tokens
        if self._is_paused and written > self.output_tokens:
            self._paused_s, self._is_paused = self._paused_s + now_s - self.ended_s, False
        self.output_tokens = max(self.output_tokens, written)
        if self.output_tokens and self.ttft_s is None:
            self._first_s, self.ttft_s = now_s, now_s - self.sent_s
        self._recent.append((now_s, self.output_tokens))
        if not self._is_paused:
            self.ended_s = now_s
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            is_first = not self.earlier_tokens
            if is_first and delta.timings is not None and delta.timings.first_token_ns:
                self.ttft_s = delta.timings.ttft_s

    def end_round(self) -> None:
        """Another request follows, whose prompt has what was written so far."""
        self.earlier_tokens, self.earlier_s = self.output_tokens, self.seconds_of_output
        self._is_paused = True

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens - self.earlier_tokens

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first, over the whole answer."""
        elapsed = self.ended_s - self._first_s - self._paused_s
        return (
            (self.output_tokens - 1) / elapsed if self.output_tokens > 1 and elapsed > 0 else None
        )

    @property
    def seconds_of_output(self) -> float:
        """Seconds from the first token to the latest."""
        return self.ended_s - self._first_s - self._paused_s if self.output_tokens else 0.0

    def live_rate(self, now_s: float) -> float | None:
        """Tokens per second over the last two seconds."""
        points = [point for point in self._recent if now_s - point[0] <= RATE_WINDOW_S]
        if len(points) < 2 or points[-1][0] <= points[0][0]:
            return self.decode_rate
        return (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])


@dataclass(slots=True, eq=False)
class Turn:
    """A question and its answer. Its children are the questions that were asked after it."""

    question: str
    answer: str = ""
    """The model's text without its thoughts, not cleaned for the screen."""
    state: AnswerState = AnswerState.STREAMING
    stats: AnswerStats = field(default_factory=lambda: AnswerStats(time.perf_counter()))
    thought: Thought = field(default_factory=Thought)
    rounds: list[ToolRound] = field(default_factory=list)
    """What came before the answer where the model called tools."""
    calls: list[ToolCall] = field(default_factory=list)
    """Calls that the model writes now, to be the end of a round."""
    attachments: tuple[Attachment, ...] = ()
    form: StructuredOutputsParams | None = None
    """Form that the answer must have."""
    turn_id: str = field(default_factory=lambda: uuid4().hex)
    asked_s: float = field(default_factory=time.time)
    """Wall-clock time, seconds."""
    model_id: str = ""
    """The model that answers; empty where it is not known."""
    num_kept_tokens: int = 0
    """Tokens taken over from the beginning of another answer."""
    cut: Cut | None = None
    """What is left out of requests for the questions after this turn; None: as before it."""
    parent: Turn | None = field(default=None, repr=False)
    children: list[Turn] = field(default_factory=list, repr=False)
    chosen: Turn | None = field(default=None, repr=False)
    """The child on the path."""
    instead_of: Turn | None = field(default=None, repr=False)
    """The turn that was on the path when this one was put beside it."""

    @property
    def siblings(self) -> Sequence[Turn]:
        """This turn and those beside it, in the order they were asked."""
        return self.parent.children if self.parent is not None else (self,)

    @property
    def place(self) -> int:
        return self.siblings.index(self)

    @property
    def is_edited(self) -> bool:
        """True if the question differs from that of the first sibling."""
        return self.question != self.siblings[0].question

    @property
    def is_bare(self) -> bool:
        """Nothing of an answer has come, nor of the thoughts before it."""
        has_begun = self.stats.output_tokens if self.num_kept_tokens else self.answer
        return not (has_begun or self.thought.text or self.rounds or self.calls)

    @property
    def num_result_chars(self) -> int:
        """Characters of all results of tools."""
        return sum(len(call.result) for one in self.rounds for call in one.calls)

    @property
    def is_waiting(self) -> bool:
        """Nothing has come of the request that was sent last."""
        return not (self.answer or self.thought.text or self.calls)

    def take(self, news: AnswerNews, now_s: float) -> None:
        """More of the answer, or of the thoughts before it."""
        stats = self.stats
        stats.update(news.delta, now_s)
        self.answer += news.pieces[1]
        take_pieces(self.calls, news.calls)
        self.thought.take(
            news.pieces,
            num_tokens=stats.output_tokens - stats.earlier_tokens,
            seconds=stats.seconds_of_output - stats.earlier_s,
        )

    def end_round(self) -> Sequence[ToolCall]:
        """Make what was written so far, with its calls, a round; returns the calls."""
        self.thought.is_over = True
        calls = self.calls
        self.rounds.append(ToolRound(self.answer.strip(), self.thought, calls))
        self.answer, self.thought, self.calls = "", Thought(), []
        self.stats.end_round()
        return calls

    def calls_to_run(self) -> Sequence[ToolCall]:
        """The calls of the answer that was written last, which is a round then; none where it has
        none, or was cut off in them."""
        if self.calls and self.stats.finish_reason is not FinishReason.STOP:
            for call in self.calls:
                call.end(CallState.FAILED, CUT_WORDS)
        if not self.calls or self.calls[0].state.is_over:
            return ()
        return self.end_round()

    def end(self, state: AnswerState) -> None:
        if self.calls:
            self.end_round()
        for one in self.rounds:
            for call in one.calls:
                call.cancel()
        self.state = state
        self.thought.is_over = True

    def messages(self, result_chars: int = MAX_RESULT_CHARS) -> list[dict[str, Any]]:
        """The turn's messages for the model. The template decides whether thoughts are kept.
        result_chars: how much of a tool's result the model is shown."""
        given: list[dict[str, Any]] = [
            {"role": "user", "content": with_files(self.question, self.attachments)}
        ]
        for one in self.rounds:
            given += one.messages(result_chars)
        if self.answer:
            given.append({"role": "assistant", "content": self.answer})
            if self.thought.text:
                given[-1]["reasoning_content"] = self.thought.text
        return given


class Conversation:
    """The turns of one chat and its system prompt."""

    def __init__(self, *, system_prompt: str | None = None, session_id: str | None = None) -> None:
        self.system_prompt = system_prompt
        self.session_id = session_id or uuid4().hex
        self.folder = ""
        """The folder that it was begun in, where a client has named one."""
        self.title = ""
        """Taken from the first question until the chat is renamed."""
        self.labels = Labels()
        self.policy = ContextPolicy.ASK
        """What is done when the context is full."""
        self.is_summary_off = False
        """A summary was of no use: turns are left out without one until the user acts."""
        self.result_chars = MAX_RESULT_CHARS
        """How much of a tool's result the present model is shown."""
        self.root = Turn("", state=AnswerState.DONE)
        """Above the first turns; never shown nor sent."""

    @property
    def turns(self) -> list[Turn]:
        """The path."""
        path = []
        turn = self.root.chosen
        while turn is not None:
            path.append(turn)
            turn = turn.chosen
        return path

    def ask(
        self, question: str, *, now_s: float, beside: Turn | None = None, model_id: str = ""
    ) -> Turn:
        """A new turn at the end of the path, or in place of `beside` and all that follows it."""
        end = self.turns[-1] if self.root.chosen is not None else self.root
        parent = end if beside is None else beside.parent
        assert parent is not None, "the root is not a turn"
        turn = Turn(question, stats=AnswerStats(now_s), model_id=model_id, parent=parent)
        turn.instead_of = parent.chosen
        self.title = self.title or title_of(question)
        parent.children.append(turn)
        parent.chosen = turn
        return turn

    @property
    def cut(self) -> Cut:
        """What the next question's request leaves out."""
        return _last_cut(self.turns)

    def cut_for(self, path: Sequence[Turn]) -> Cut:
        """What the request for the last turn of a path leaves out."""
        return _last_cut(path[:-1]).within(len(path))

    def choose(self, policy: ContextPolicy) -> list[Turn]:
        """Take a policy. To ask is to leave nothing out on any path; returns the turns that this
        has changed."""
        self.policy, self.is_summary_off = policy, False
        changed, waiting = [], [self.root] if policy is ContextPolicy.ASK else []
        while waiting:
            turn = waiting.pop()
            waiting += turn.children
            if turn.cut is not None:
                turn.cut = None
                changed.append(turn)
        return changed

    @property
    def num_left_out(self) -> int:
        return self.cut.num_left_out

    def cut_results(self) -> bool:
        """Show the model half as much of each tool's result; False if that is too little."""
        if self.result_chars // 2 < LEAST_RESULT_CHARS:
            return False
        self.result_chars //= 2
        return True

    def switch(self, turn: Turn, by: int) -> Turn | None:
        """Choose the sibling so many places on, with the path below it; None if there is none."""
        place = turn.place + by
        if turn.parent is None or not 0 <= place < len(turn.siblings):
            return None
        turn.parent.chosen = turn.siblings[place]
        return turn.parent.chosen

    def choose_path(self, turn: Turn) -> list[Turn]:
        """Put a turn on the path, with what is chosen below it; returns the turns that were chosen
        instead of others, the last first."""
        changed: list[Turn] = []
        while turn.parent is not None:
            if turn.parent.chosen is not turn:
                turn.parent.chosen = turn
                changed.append(turn)
            turn = turn.parent
        return changed

    def has(self, turn: Turn) -> bool:
        """True if a turn is in the tree."""
        while turn.parent is not None and turn in turn.parent.children:
            turn = turn.parent
        return turn is self.root

    def remove(self, turn: Turn) -> None:
        """Take a turn out, with all below it. On the path, the one that it replaced comes back."""
        parent, place = turn.parent, turn.place
        assert parent is not None, "the root is not a turn"
        parent.children.remove(turn)
        for sibling in parent.children:
            if sibling.instead_of is turn:
                sibling.instead_of = turn.instead_of
        if parent.chosen is turn:
            nearest = parent.children[max(0, place - 1)] if parent.children else None
            parent.chosen = turn.instead_of or nearest
        if not self.root.children:
            self.title = ""

    def prompt(self, cut: Cut | None = None) -> ChatPrompt:
        """The prompt for the path, whose last turn is to be answered. cut: what to leave out
        instead of what is left out now."""
        return ChatPrompt(self.messages(self.turns, cut))

    def prompt_for(self, turn: Turn) -> ChatPrompt:
        """The prompt for a turn below one of the tree, or below the root."""
        return ChatPrompt(self.messages(self._path_to(turn)))

    def _path_to(self, turn: Turn) -> list[Turn]:
        path = [turn]
        while path[-1].parent is not self.root:
            assert path[-1].parent is not None, "it is in the tree"
            path.append(path[-1].parent)
        return path[::-1]

    def put_beside(self, turn: Turn, answered: Turn) -> None:
        """Put a turn that was answered elsewhere in the place of one on the path."""
        parent = turn.parent
        assert parent is not None, "the root is not a turn"
        answered.parent, answered.instead_of = parent, parent.chosen
        parent.children.append(answered)
        parent.chosen = answered

    def prompt_with_answer(self, turn: Turn) -> ChatPrompt:
        """Everything said up to the end of this turn's answer, on which could be gone on."""
        messages = self.messages(self._path_to(turn))
        return ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True)

    def messages(self, path: Sequence[Turn], cut: Cut | None = None) -> list[dict[str, Any]]:
        """A question that got no answer is one message with the next: roles must take turns. The
        system prompt and the last turn are never left out, a summary is the system prompt's end."""
        cut = self.cut_for(path) if cut is None else cut.within(len(path))
        messages: list[dict[str, Any]] = []
        system = [self.system_prompt] if self.system_prompt else []
        if cut.summary is not None:
            system.append(cut.summary.message)
        if system:
            messages.append({"role": "system", "content": "\n\n".join(system)})
        sent = (
            turn.messages(PRUNED_CHARS if index < cut.pruned else self.result_chars)
            for index, turn in enumerate(path)
            if cut.sends(index)
        )
        for message in chain.from_iterable(sent):
            is_next = messages and messages[-1]["role"] == message["role"] == "user"
            if is_next:
                messages[-1]["content"] += "\n\n" + message["content"]
            else:
                messages.append(message)
        return messages

    @property
    def last_answer(self) -> str | None:
        return next((turn.answer for turn in reversed(self.turns) if turn.answer), None)

    @property
    def context_tokens(self) -> int:
        turns = self.turns
        return turns[-1].stats.context_tokens if turns else 0

    def check_integrity(self) -> None:
        """Every turn is its parent's child, and what is chosen is there to be chosen."""
        waiting = [self.root]
        while waiting:
            turn = waiting.pop()
            assert (turn.chosen is None) == (not turn.children)
            assert turn.chosen is None or turn.chosen in turn.children
            assert all(child.parent is turn for child in turn.children)
            assert turn.instead_of is None or turn.instead_of in turn.siblings
            waiting += turn.children


def _last_cut(path: Sequence[Turn]) -> Cut:
    return next((turn.cut for turn in reversed(path) if turn.cut is not None), ALL)


def title_of(question: str) -> str:
    """The first line that is not blank, as a title."""
    first = next((line for line in question.splitlines() if line.strip()), "")
    return " ".join(first.split())[:MAX_TITLE_CHARS]


def sampling_params(model_defaults: Mapping[str, Any], ui: UIConfig) -> SamplingParams:
    """The user's settings over the model's own over ours."""
    known = {f.name for f in fields(SamplingParams)}
    given = {k: v for k, v in model_defaults.items() if k in known and v is not None}
    values = dict(given) if "temperature" in given else {**CHAT_DEFAULTS, **given}
    for name in ("temperature", "top_p", "max_tokens"):
        chosen = getattr(ui, name)
        if chosen is not None:
            values[name] = chosen
    return SamplingParams(**values)


class PromptHistory:
    """Earlier prompts, walked with up and down; what was being typed is kept at the end."""

    def __init__(self, limit: int = 500) -> None:
        self._entries: deque[str] = deque(maxlen=limit)
        self._back = 0
        self._draft = ""

    def add(self, text: str) -> None:
        if text and (not self._entries or self._entries[-1] != text):
            self._entries.append(text)
        self.reset()

    def add_earlier(self, texts: Sequence[str]) -> None:
        """Put in front what was written before all of these, as far as there is room."""
        merged = [text for text, _ in groupby([*texts, *self._entries])]
        self._entries = deque(merged, maxlen=self._entries.maxlen)

    def reset(self) -> None:
        self._back, self._draft = 0, ""

    def newest_first(self) -> list[str]:
        """Each once."""
        return list(dict.fromkeys(reversed(self._entries)))

    def older(self, current: str) -> str | None:
        """The prompt before the one shown, None when there is none."""
        if self._back >= len(self._entries):
            return None
        if self._back == 0:
            self._draft = current
        self._back += 1
        return self._entries[-self._back]

    def newer(self) -> str | None:
        if self._back == 0:
            return None
        self._back -= 1
        return self._entries[-self._back] if self._back else self._draft
