"""What a request with tools sends, and how its answer is read, for a model here or a server.

The same code as that of the server: `api.tools` says how a template shows tools and which grammar
keeps arguments to their schemas, and has the parser of the model's calls. A server elsewhere gets
the tools as they are, and takes the calls out of the text itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from termgen.api.tool_calls import CallArguments, CallParser, CallStart, Content, Part, Reasoning
from termgen.api.tools import Tools, constrain, new_parser, parse_tools, show_tools
from termgen.client import CallPiece, ChatPrompt, ModelInfo
from termgen.tools.history import before_template, merged_users
from termgen.tools.toolbox import Offered
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.structured_outputs import StructuredOutputsParams
from termgen.vocabulary.tool_format import ToolFormat, ToolStyle


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The tools of one request, perhaps none."""

    model: ModelInfo
    tools: Tools
    grammar: StructuredOutputsParams | None = None
    """What the text must follow where a call begins."""

    @property
    def may_call(self) -> bool:
        return self.tools.may_call

    @property
    def is_enforced(self) -> bool:
        """True where arguments are held to the tools' schemas, here or by the server."""
        return self.grammar is not None or any(one.strict for one in self.tools.functions)

    @property
    def reads_text(self) -> bool:
        """True where calls stand in the text, which `parser` takes apart."""
        return self.may_call and not self.model.reads_calls

    def prompt(self, prompt: ChatPrompt) -> ChatPrompt:
        """The prompt with the tools, and with the calls and results in it as the model's template
        takes them."""
        tool_format = ToolFormat(knows_tools=True)
        if not self.model.reads_calls:
            tool_format = self.model.tool_format
        messages = [dict(message) for message in prompt.messages]
        if tool_format.knows_tools:
            messages = before_template(messages, tool_format)
        shown, variables = show_tools(messages, self.tools, tool_format)
        if not tool_format.knows_tools:
            shown = tuple(merged_users(shown))
        return replace(
            prompt, messages=shown, template_kwargs={**prompt.template_kwargs, **variables}
        )

    def params(self, params: SamplingParams) -> SamplingParams:
        """The parameters, with a grammar that calls must follow where the model's style has one."""
        if not self.reads_text:
            return params
        skips = params.skip_special_tokens and not self.tools.needs_special_tokens
        return replace(params, structured_outputs=self.grammar, skip_special_tokens=skips)

    def parser(self, prompt_ids: Sequence[int]) -> CallParser:
        assert self.reads_text
        return new_parser(self.tools, prompt_ids)


def tool_request(
    offered: Sequence[Offered], model: ModelInfo, *, enforces: bool = True
) -> ToolRequest:
    """enforces: False leaves out the grammar, for schemas that make none. Raises `RequestError`."""
    functions = [one.function for one in offered]
    tool_format = model.tool_format
    if model.reads_calls:
        if enforces and model.holds_calls:
            functions = [
                {**one, "function": {**one["function"], "strict": True}} for one in functions
            ]
        tool_format = ToolFormat(knows_tools=True)
        tools = parse_tools(functions, None, tool_format, parallel=True, strict=False)
        return ToolRequest(model, tools)
    strict = enforces and tool_format.new_parser is None  # only then there is a grammar
    # the templates of this style take one call in a message
    parallel = tool_format.style is not ToolStyle.LLAMA or tool_format.new_parser is not None
    tools = parse_tools(functions, None, tool_format, parallel=parallel, strict=strict)
    grammar = constrain(tools, None) if tools.may_call else None
    return ToolRequest(model, replace(tools, is_formed=grammar is not None), grammar)


def divided(parts: Sequence[Part]) -> tuple[str, str, tuple[CallPiece, ...]]:
    """Thoughts, text and calls among the parts of an answer."""
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    text = "".join(part.text for part in parts if isinstance(part, Content))
    calls: list[CallPiece] = []
    for part in parts:
        if isinstance(part, CallStart):
            calls.append(CallPiece(part.index, part.name))
        elif isinstance(part, CallArguments):
            calls.append(CallPiece(part.index, "", part.text))
    return thought, text, tuple(calls)
