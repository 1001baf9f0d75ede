"""What the context holds: tokens of the system prompt, files and history, and what leaving turns
out has cost. No Textual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from termgen.client import ChatPrompt, EngineClient
from termgen.errors import EngineDeadError, EngineError, RequestError
from termgen.tui.chat.state.attachments import with_name
from termgen.tui.chat.state.context_policy import Window
from termgen.tui.chat.state.conversation import Conversation, Turn
from termgen.tui.chat.state.full_context import TOKENS_PER_CHAR, Sizes, WithTools, unchanged

MAX_REMEMBERED = 1000
"""Texts whose tokens are remembered."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What was read again at the last time that more was left out."""

    number: int
    """Number of the turn that was asked then, from 1."""
    tokens: int
    num_turns: int
    """Turns from the time before, or from the beginning."""

    @property
    def per_turn(self) -> int:
        return round(self.tokens / self.num_turns)


@dataclass(frozen=True, slots=True)
class Meter:
    """Tokens in the context of a chat."""

    limit: int
    """What the model reads at most; 0 where that is not known."""
    answer: int
    """Kept free for an answer, where the policy keeps any."""
    total: int
    system: int = 0
    summary: int = 0
    tools: int = 0
    files: int = 0
    cost: Cost | None = None
    is_exact: bool = True
    """False: the server counts no tokens, and some figures are estimates."""

    @property
    def history(self) -> int:
        """Questions, answers and the template's own text."""
        return max(0, self.total - self.system - self.summary - self.tools - self.files)

    @property
    def parts(self) -> list[tuple[str, int]]:
        """Names and tokens of the parts that there are, and of what is free."""
        found = [("system prompt", self.system)]
        found += [("summary", self.summary)] if self.summary else []
        found += [("tools", self.tools)] if self.tools else []
        found += [("files", self.files), ("history", self.history)]
        return [*found, ("free", self.free)] if self.limit else found

    @property
    def free(self) -> int:
        return max(0, self.limit - self.total)

    @property
    def share(self) -> float:
        return self.total / self.limit if self.limit else 0.0


class MeterReader:
    """Counts the parts of a context, each text once."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def clear(self) -> None:
        """Forget all counts, as another model has other tokens."""
        self._known.clear()

    async def read(
        self,
        client: EngineClient,
        chat: Conversation,
        *,
        max_tokens: int | None,
        with_tools: WithTools = unchanged,
        with_calls: WithTools = unchanged,
    ) -> Meter:
        """Raises `EngineDeadError`."""
        path, cut, limit = chat.turns, chat.cut, client.model.max_model_len
        sizes = Sizes(client, chat, with_tools)
        sent = [turn for index, turn in enumerate(path) if cut.sends(index)]
        files = [with_name(file) for turn in sent for file in turn.attachments]
        summary = cut.summary.message if cut.summary is not None else ""
        counts = [await self._count(client, text) for text in (chat.system_prompt, summary, *files)]
        is_exact = all(number is not None for number in counts)
        texts = [chat.system_prompt or "", summary, *files]
        system, summed, *of_files = (
            round(len(text) * TOKENS_PER_CHAR) if number is None else number
            for text, number in zip(texts, counts, strict=True)
        )
        tools = 0
        if with_tools is not with_calls:
            one = ChatPrompt([{"role": "user", "content": "x"}])
            tools = await sizes.count(with_tools(one)) - await sizes.count(with_calls(one))
        total = system + summed + tools
        if path:
            last = path[-1].stats
            is_known = last.prompt_tokens and cut == chat.cut_for(path)
            total = last.context_tokens if is_known else await sizes.of(cut)
        return Meter(
            limit=limit,
            answer=Window.of(limit, max_tokens).answer,
            total=total,
            system=system,
            summary=summed,
            tools=max(0, tools),
            files=sum(of_files),
            cost=cost_of(path),
            is_exact=is_exact and sizes.is_exact,
        )

    async def _count(self, client: EngineClient, text: str | None) -> int | None:
        """Tokens of a text; None where the server does not count them."""
        if not text:
            return 0
        if text not in self._known:
            try:
                ids = await client.tokenize(text, add_special_tokens=False)
            except EngineDeadError:
                raise
            except (RequestError, EngineError):
                return None
            while len(self._known) >= MAX_REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[text] = len(ids)
        return self._known[text]


def cost_of(path: Sequence[Turn]) -> Cost | None:
    """What the last turn before which more was left out has read."""
    holders = [index for index, turn in enumerate(path[:-1]) if turn.cut is not None]
    if not holders:
        return None
    stats = path[holders[-1] + 1].stats
    before = holders[-2] if len(holders) > 1 else -1
    read = max(0, stats.prompt_tokens - stats.cached_tokens)
    return Cost(holders[-1] + 2, read, holders[-1] - before) if read else None


def meter_words(meter: Meter) -> list[str]:
    """What the parts come to, and what was read again when turns were left out."""
    about = "" if meter.is_exact else "about "
    lines = [
        f"The model reads {meter.limit:,} tokens, {about}{meter.total:,} are taken. When turns are "
        f"left out, {meter.answer:,} are kept free for the answer."
    ]
    if not meter.limit:
        lines = [f"The server does not say how much its model reads; {meter.total:,} are taken."]
    if not meter.is_exact:
        lines.append("The server counts no tokens: parts are estimates.")
    cost = meter.cost
    if cost is None:
        return [*lines, "Nothing was left out yet, so nothing was read again."]
    turns = "the one turn" if cost.num_turns == 1 else f"each of the {cost.num_turns} turns"
    return [
        *lines,
        f"Leaving turns out before turn {cost.number} made it read {cost.tokens:,} tokens: "
        f"{cost.per_turn:,} for {turns} up to then.",
    ]


def meter_lines(meter: Meter) -> list[str]:
    """The parts, a line each, and what they come to."""
    width = max(len(name) for name, _ in meter.parts)
    return [*(f"{name:<{width}} {tokens:>9,}" for name, tokens in meter.parts), *meter_words(meter)]
