"""Makes room in the context of a chat's model: what the next request leaves out. No Textual.

Turns are left out in blocks, so that most questions after it find what is sent in the prefix cache.
A server that counts no tokens is measured by the last answer's figures, and one that does not say
what it reads by the request that it refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from termgen.client import ChatPrompt, EngineClient, prompt_chars
from termgen.errors import ContextLengthError, EngineDeadError, EngineError, RequestError
from termgen.tui.chat.state.context_policy import (
    BLOCK_SHARE,
    FIRST_SHARE,
    KEPT_SHARE,
    SUMMARY_SHARE,
    TAIL_SHARE,
    ContextPolicy,
    Cut,
    Summary,
    Window,
)
from termgen.tui.chat.state.conversation import PRUNED_CHARS, Conversation, Turn
from termgen.tui.chat.state.summary import (
    MIN_TOKENS,
    REPLACED_SHARE,
    SPARE_TOKENS,
    SummaryWish,
    Write,
    fault_of,
    order_messages,
    tidied,
)

TOKENS_PER_CHAR = 0.3
"""Where the server has counted nothing yet."""
MORE_THAN_ANY = 1 << 40
"""Tokens of a prompt too long to be counted."""
COUNTED_FROM = 0.9
"""Share of what may be sent from which on it is counted: until then the last figures will do."""
LEAST_FREED = 0.2
"""Share of the context that a summary must make free."""

TOO_LITTLE = "there is too little to summarise"
"""No fault of the model's: another question may do."""

WithTools = Callable[[ChatPrompt], ChatPrompt]


def unchanged(prompt: ChatPrompt) -> ChatPrompt:
    """The prompt, where there are no tools."""
    return prompt


class MessageTooLong(ContextLengthError):
    """A question that the model could not read even alone."""

    def __init__(self, num_tokens: int, limit: int, *, is_exact: bool = True) -> None:
        """limit: 0 where it is not known."""
        about = "" if is_exact else "about "
        most = f"{limit:,} at most" if limit else "less"
        super().__init__(
            f"With the system prompt it has {about}{num_tokens:,} tokens; the model reads {most}."
        )


@dataclass(frozen=True, slots=True)
class Change:
    """What is left out from now on, and why a summary is not part of it."""

    before: Cut
    after: Cut
    fault: str = ""

    @property
    def is_one(self) -> bool:
        return self.after != self.before


class Sizes:
    """Tokens of prompts: counted by the engine, or estimated from the last answer's figures."""

    def __init__(self, client: EngineClient, chat: Conversation, with_tools: WithTools) -> None:
        self._client = client
        self._chat = chat
        self._with_tools = with_tools
        self._known: dict[Cut, int] = {}
        self.is_exact = True

    async def of(self, cut: Cut) -> int:
        """Tokens of the path's prompt with this left out."""
        if cut not in self._known:
            self._known[cut] = await self.count(self._with_tools(self._chat.prompt(cut)))
        return self._known[cut]

    async def count(self, prompt: ChatPrompt) -> int:
        if self.is_exact:
            try:
                return len(await self._client.tokenize(prompt))
            except ContextLengthError:
                return MORE_THAN_ANY
            except EngineDeadError:
                raise
            except (RequestError, EngineError):
                self.is_exact = False
                self._known.clear()
        return round(prompt_chars(prompt) * self._tokens_per_char)

    @property
    def _tokens_per_char(self) -> float:
        path = self._chat.turns
        for at in range(len(path) - 1, -1, -1):
            stats = path[at].stats
            if stats.prompt_tokens and not path[at].rounds:
                messages = self._chat.messages(path[: at + 1])
                return stats.context_tokens / max(1, prompt_chars(ChatPrompt(messages)))
        return TOKENS_PER_CHAR


async def least_that_fits(
    size_of: Callable[[int], Awaitable[int]], room: int, low: int, high: int
) -> int:
    """The least number, from `low` to `high`, whose size is at most `room`; else `high`."""
    while low < high:
        middle = (low + high) // 2
        fits = await size_of(middle) <= room
        low, high = (low, middle) if fits else (middle + 1, high)
    return low


class FullContext:
    """The context of one question: the last turn of the path, or the next one after it."""

    def __init__(
        self,
        client: EngineClient,
        chat: Conversation,
        *,
        max_tokens: int | None,
        with_tools: WithTools = unchanged,
        with_calls: WithTools = unchanged,
        is_asked: bool = True,
    ) -> None:
        """with_tools: what the question's request makes of a prompt. with_calls: the same for a
        request that offers no tools. is_asked: the last turn of the path is the question; False: it
        is answered already."""
        self._chat = chat
        self._path = path = chat.turns
        self._last = len(path) - 1
        self._max_tokens = max_tokens
        self._with_calls = with_calls
        self.before = (chat.cut_for(path) if is_asked else chat.cut).within(len(path))
        self.sizes = Sizes(client, chat, with_tools)
        self._limit = client.model.max_model_len

    async def is_full(self, policy: ContextPolicy) -> bool:
        """True if an answer would have too little room; False where that is not known."""
        if not self._limit:
            return False
        window = Window.of(self._limit, self._max_tokens)
        return await self.sizes.of(self.before) > window.trigger(policy)

    async def check_question(self) -> None:
        """Raise `MessageTooLong` if the question does not fit without all other turns."""
        alone = await self._size_alone()
        if self._limit and self.sizes.is_exact and self._limit <= alone < MORE_THAN_ANY:
            raise MessageTooLong(alone, self._limit)

    async def say_too_long(self) -> None:
        """Raise `MessageTooLong`: the server has refused the question without all other turns."""
        alone = await self._size_alone()
        if alone < MORE_THAN_ANY:
            raise MessageTooLong(alone, self._limit, is_exact=self.sizes.is_exact)

    async def _size_alone(self) -> int:
        return await self.sizes.of(replace(self.before, first=0, upto=self._last, summary=None))

    async def make_room(
        self, policy: ContextPolicy, *, refused: bool = False, write: Write | None = None
    ) -> Change:
        """Leave out as much as the policy says. refused: the request as it is was too long.

        write: has the model write a summary; None: do without.
        """
        now = await self.sizes.of(self.before)
        window = Window.of(self._limit or now, self._max_tokens)
        if refused and now <= window.room:  # the server has another opinion of what fits
            window = Window.of(now, self._max_tokens)
        goal = window.goal(now)
        cut = await self._with_results_shortened(self.before, goal)
        if cut != self.before and await self.sizes.of(cut) <= goal:
            return Change(self.before, cut)
        fault = ""
        if policy is ContextPolicy.SUMMARISE and write is not None:
            summed = await self._summarised(cut, window, write, kept=self._kept(window))
            if isinstance(summed, Cut):
                freed = now - await self.sizes.of(summed)
                if freed >= int(window.size * LEAST_FREED):
                    return Change(self.before, summed)
                summed = "it makes too little room"
            fault = "" if summed == TOO_LITTLE else summed
        keeps_first = policy is ContextPolicy.ENDS and await self._has_small_first(window)
        cut = await self._dropped(cut, window, goal, first=int(keeps_first))
        return Change(self.before, cut, fault)

    async def compact(self, write: Write, focus: str) -> Change:
        """Put a summary in place of the older turns, however full the context is."""
        now = await self.sizes.of(self.before)
        window = Window.of(self._limit or now, self._max_tokens)
        kept = min(self._kept(window), now // 2)
        cut = await self._summarised(self.before, window, write, kept=kept, focus=focus)
        if isinstance(cut, str):
            return Change(self.before, self.before, cut)
        if await self.sizes.of(cut) >= now:
            return Change(self.before, self.before, "it makes no room")
        return Change(self.before, cut)

    @staticmethod
    def _kept(window: Window) -> int:
        return int(window.size * KEPT_SHARE)

    async def _with_results_shortened(self, cut: Cut, goal: int) -> Cut:
        """Shorten results of tools, the oldest first, as far as it takes."""
        holders = [
            index + 1
            for index in range(cut.pruned, self._last)
            if cut.sends(index) and _has_long_results(self._path[index])
        ]
        if not holders:
            return cut

        async def size_of(place: int) -> int:
            return await self.sizes.of(replace(cut, pruned=holders[place]))

        place = await least_that_fits(size_of, goal, 0, len(holders) - 1)
        return replace(cut, pruned=holders[place])

    async def _has_small_first(self, window: Window) -> bool:
        if self._last < 2 or (self.before.upto and not self.before.first):
            return False
        without, beside = Cut(upto=self._last), Cut(first=1, upto=self._last)
        size = await self.sizes.of(beside) - await self.sizes.of(without)
        return size <= int(window.size * FIRST_SHARE)

    async def _dropped(self, cut: Cut, window: Window, goal: int, *, first: int) -> Cut:
        """Leave out a block of turns; if the question is too long for one, what it needs."""

        def at(upto: int) -> Cut:
            return replace(cut, first=min(first, upto), upto=upto)

        if await self.sizes.of(at(self._last)) > goal:
            goal = window.room
        if await self.sizes.of(at(self._last)) > goal:
            cut, first = replace(cut, summary=None), 0
        low = min(self._last, max(cut.upto, first))
        upto = await least_that_fits(lambda upto: self.sizes.of(at(upto)), goal, low, self._last)
        return at(upto)

    async def _summarised(
        self, cut: Cut, window: Window, write: Write, *, kept: int, focus: str = ""
    ) -> Cut | str:
        """The cut with a summary, or why there is none."""
        first = int(await self._has_small_first(window))

        def at(upto: int) -> Cut:
            return replace(cut, first=first, upto=upto, summary=None)

        begin = max(first, cut.upto)
        if begin >= self._last:
            return TOO_LITTLE
        alone = await self.sizes.of(at(self._last))
        kept = min(kept, alone + int(window.size * TAIL_SHARE))
        upto = await least_that_fits(
            lambda upto: self.sizes.of(at(upto)), kept, begin + 1, self._last
        )
        replaced = await self.sizes.of(cut) - await self.sizes.of(at(upto))
        most = min(int(replaced * REPLACED_SHARE), int(window.size * SUMMARY_SHARE))
        if most < MIN_TOKENS:
            return TOO_LITTLE
        known = cut.summary
        number = known.first if known is not None and known.last == cut.upto else begin + 1
        summarised = self._chat.messages(self._path[:upto], cut)

        def asked(max_tokens: int) -> ChatPrompt:
            order = order_messages(summarised, max_tokens=max_tokens, focus=focus)
            return self._with_calls(ChatPrompt(order))

        room = (self._limit or MORE_THAN_ANY) - await self.sizes.count(asked(most)) - SPARE_TOKENS
        most = min(most, room)
        if most < MIN_TOKENS:
            return "the context has no room to write it in"
        wish = SummaryWish(
            asked(most),
            first=number,
            last=upto,
            max_tokens=most,
            most_output=min(room, max(most, int(window.size * BLOCK_SHARE))),
        )
        try:
            draft = await write(wish)
        except EngineDeadError:
            raise
        except (RequestError, EngineError) as error:
            return f"it could not be written ({error})"
        source = "\n".join(  # not the summary before, which the next one may repeat
            str(message["content"] or "") for message in summarised if message["role"] != "system"
        )
        if fault := fault_of(draft, source):
            return fault
        summed = replace(at(upto), summary=Summary(tidied(draft.text), number, upto))
        return await self._fault_of_size(summed, window, most) or summed

    async def _fault_of_size(self, cut: Cut, window: Window, most: int) -> str:
        assert cut.summary is not None
        was_exact = self.sizes.is_exact
        total = await self.sizes.of(cut)
        if was_exact and not self.sizes.is_exact:
            return "the model takes no system message for it"
        if total - await self.sizes.of(replace(cut, summary=None)) > most:
            return "it is too long"
        if total > window.room:
            return TOO_LITTLE
        return ""


async def make_room(
    client: EngineClient,
    chat: Conversation,
    *,
    max_tokens: int | None,
    with_tools: WithTools = unchanged,
    with_calls: WithTools = unchanged,
    write: Write | None = None,
    refused: bool = False,
) -> Change | None:
    """Make room for the path's last question, if that is the chat's policy: what is left out is set
    in the turn before it. None where nothing was to be done. Raises `MessageTooLong`."""
    path, policy = chat.turns, chat.policy
    if policy is ContextPolicy.SUMMARISE and (write is None or chat.is_summary_off):
        policy = ContextPolicy.DROP
    if not refused and not _is_nearly_full(client, chat, path, policy, max_tokens):
        return None
    context = FullContext(
        client, chat, max_tokens=max_tokens, with_tools=with_tools, with_calls=with_calls
    )
    if not refused and not await context.is_full(policy):
        return None
    await context.check_question()
    if policy is ContextPolicy.ASK or len(path) < 2:
        return None
    change = await context.make_room(policy, refused=refused, write=write)
    chat.is_summary_off |= bool(change.fault)
    if change.is_one:
        cut_holder(path).cut = change.after
    elif refused:
        await context.say_too_long()
    return change


def _is_nearly_full(
    client: EngineClient,
    chat: Conversation,
    path: Sequence[Turn],
    policy: ContextPolicy,
    max_tokens: int | None,
) -> bool:
    """True if the path may be too long, so that its tokens are worth counting."""
    limit, turn = client.model.max_model_len, path[-1]
    if not limit or policy is ContextPolicy.ASK:
        return False
    before = turn.parent.stats.context_tokens if turn.parent is not None else 0
    asked = sum(len(message["content"]) for message in turn.messages(chat.result_chars))
    return before + asked > Window.of(limit, max_tokens).trigger(policy) * COUNTED_FROM


def _has_long_results(turn: Turn) -> bool:
    return any(len(call.result) > PRUNED_CHARS for one in turn.rounds for call in one.calls)


def cut_holder(path: Sequence[Turn], *, is_asked: bool = True) -> Turn:
    """The turn after which a cut holds: the one before the question."""
    return path[-2] if is_asked else path[-1]
