"""Which tools the requests of a chat offer to its model, and how tools are listed. No Textual.

A model whose template knows no tools, or a server that refuses them, is asked without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from termgen.client import ModelInfo
from termgen.errors import ContextLengthError, EngineError, RequestError
from termgen.tools.request import ToolRequest, tool_request
from termgen.tools.toolbox import Offered, Provider, Toolbox
from termgen.tui.chat.state.conversation import Conversation, Turn
from termgen.tui.chat.state.full_context import WithTools, unchanged
from termgen.tui.paint.sanitize import clean_line

START_WAIT_S = 10.0
"""Longest wait for tools that are not known yet, before a question is sent without them."""
MAX_LISTED = 40
"""Names of tools that are listed of each provider."""


class ToolOffers:
    def __init__(self, toolbox: Toolbox, say: Callable[[Turn, str], None]) -> None:
        """say: shows a notice about a turn."""
        self._toolbox = toolbox
        self._say = say
        self._refusing: set[str] = set()
        """Ids of models that were found to take no tools."""
        self._unenforced: set[str] = set()
        """Ids of models for which the tools' schemas make no grammar."""
        self._made: tuple[object, ModelInfo, ToolRequest] | None = None
        """The last request's tools, model and result: making one takes milliseconds."""

    async def request_for(
        self, chat: Conversation, turn: Turn, model: ModelInfo, *, offers: bool
    ) -> ToolRequest | None:
        """What the next request of a turn sends; None where no tool is or was ever in this chat.

        offers: False where the model has called enough.
        """
        offered: Sequence[Offered] = ()
        # an answer of a given form has no room for calls
        if offers and turn.form is None and self._takes_tools(turn, model):
            await self._toolbox.wait(START_WAIT_S)
            offered = self._toolbox.offered
        if not offered and not any(each.rounds for each in chat.turns):
            return None
        return self._request(offered, model)

    def shower(self, chat: Conversation, model: ModelInfo) -> WithTools:
        """Puts the calls of the chat, where there are any, into a prompt that offers no tools."""
        if any(turn.rounds for turn in chat.turns):
            return tool_request((), model).prompt
        return unchanged

    def offerer(self, chat: Conversation, model: ModelInfo) -> WithTools:
        """Puts the tools that were offered last into a prompt, and the calls of the chat."""
        if self._made is not None and self._made[1] is model:
            return self._made[2].prompt
        return self.shower(chat, model)

    def _request(self, offered: Sequence[Offered], model: ModelInfo) -> ToolRequest:
        made = self._made
        if made is None or made[0] is not offered or made[1] is not model:
            enforces = model.model_id not in self._unenforced
            request = tool_request(offered, model, enforces=enforces)
            made = self._made = (offered, model, request)
        return made[2]

    def _takes_tools(self, turn: Turn, model: ModelInfo) -> bool:
        """Whether the model can be offered any; says once if not."""
        if self._toolbox.is_empty or model.model_id in self._refusing:
            return False
        if model.reads_calls or model.tool_format.knows_tools:
            return True
        name = clean_line(model.model_id)
        self._refusing.add(model.model_id)
        self._say(turn, f"The chat template of {name} knows no tools; it answers without them.")
        return False

    def asks_again(
        self,
        chat: Conversation,
        turn: Turn,
        error: RequestError | EngineError,
        request: ToolRequest | None,
    ) -> bool:
        """True if a request that failed is to be sent again: with less of the results if the
        context is full, without the grammar of a model here, or to a server without tools."""
        if turn.rounds and isinstance(error, ContextLengthError):
            return chat.cut_results()
        if request is None or not request.may_call:
            return False
        model, param = request.model, getattr(error, "param", None) or ""
        is_of_tools = param.startswith("tools")
        if model.reads_calls:  # servers have their own words
            is_of_tools |= "tool" in str(error).lower()
        if is_of_tools and request.is_enforced and model.model_id not in self._unenforced:
            self._unenforced.add(model.model_id)
            self._made = None
            return True
        if is_of_tools and model.reads_calls:
            self._refusing.add(model.model_id)
            name, reason = clean_line(model.model_id), clean_line(str(error))
            self._say(turn, f"{name} takes no tools and answers without them: {reason}")
            return True
        return False


def described(toolbox: Toolbox, provider: Provider | None = None) -> str:
    """Where tools come from, whether that works, and their names; of one provider or of all."""
    providers = toolbox.providers if provider is None else (provider,)
    return "\n".join(_described(toolbox, one) for one in providers)


def _described(toolbox: Toolbox, provider: Provider) -> str:
    offered = [one.name for one in toolbox.offered if one.provider == provider.name]
    lines = [f"{provider.name}: {provider.state}"]
    if offered:
        more = len(offered) - MAX_LISTED
        end = f" and {more} more" if more > 0 else ""
        lines.append(f"  {', '.join(offered[:MAX_LISTED])}{end}")
    beginning = f"{provider.name}_"
    for name, reason in list(toolbox.left_out.items())[:MAX_LISTED]:
        if name.startswith(beginning):
            lines.append(f"  {name} is not offered: {reason}")
    return "\n".join(map(clean_line, lines))
