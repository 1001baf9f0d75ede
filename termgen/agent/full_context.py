"""A session whose context is full: what its policy leaves out of what is sent, and the words."""

from __future__ import annotations

from collections.abc import Callable

from termgen.client import EngineClient
from termgen.tui.chat.state.context_policy import (
    CHOSEN_WORDS,
    FIT_USAGE,
    FIT_WORDS,
    ContextPolicy,
    cut_notice,
    turns_words,
)
from termgen.tui.chat.state.conversation import Conversation, Turn
from termgen.tui.chat.state.full_context import cut_holder, make_room
from termgen.tui.chat.state.summary import Draft, SummaryWish, read_draft
from termgen.tui.chat.state.tool_offers import ToolOffers
from termgen.vocabulary.sampling_params import SamplingParams

FULL_WORDS = (
    "The chat has filled the model's context: /fit goes on without the oldest turns, a new session "
    "begins another chat."
)


def fit(chat: Conversation, argument: str) -> tuple[str, list[Turn]]:
    """`/fit` with or without an argument; returns the words for the user, and turns that are other
    than before."""
    policy = FIT_WORDS.get(argument)
    if policy is None:
        return f"{FIT_USAGE}.", []
    return CHOSEN_WORDS[policy], chat.choose(policy)


def full_words(chat: Conversation) -> str:
    """What to do about a context that is full; empty where the policy has done all it can."""
    return FULL_WORDS if chat.policy is ContextPolicy.ASK else ""


class Room:
    """Makes room for one question, before it is sent and after it was refused."""

    def __init__(
        self,
        client: EngineClient,
        chat: Conversation,
        offers: ToolOffers,
        next_id: Callable[[], str],
        say: Callable[[str], None],
    ) -> None:
        """next_id: an id for each request. say: shows words that are not the model's."""
        self._client = client
        self._chat = chat
        self._offers = offers
        self._next_id = next_id
        self._say = say
        path = chat.turns
        self.holder: Turn = cut_holder(path) if len(path) > 1 else path[-1]
        """The turn that has what is left out."""
        self._before = self.holder.cut
        self._may_write = True
        """No summary was made for this question yet."""

    async def make(self, params: SamplingParams, *, refused: bool) -> bool:
        """Leave more out, and say so. False if there is nothing more, or it is not wanted. Raises
        ContextLengthError for a question that is too long alone."""
        chat, client = self._chat, self._client

        async def write(wish: SummaryWish) -> Draft:
            self._may_write = False
            self._say(f"The model summarises {turns_words(wish.first, wish.last)}.")
            return await read_draft(
                client, wish, params, request_id=self._next_id(), show=lambda *_: None
            )

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
            self._say(f"The model's summary is not used: {change.fault}.")
        if change.is_one:
            is_new = change.after.summary != change.before.summary
            self._say("\n".join(filter(None, cut_notice(change.after, is_new=is_new))))
        return change.is_one

    def undo(self) -> None:
        """Send what was sent before: leaving more out did not help."""
        self.holder.cut = self._before

    @property
    def is_other(self) -> bool:
        """True if something else is left out than before."""
        return self.holder.cut != self._before
