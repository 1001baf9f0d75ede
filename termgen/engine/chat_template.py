"""A model's chat template: checks messages, renders them to text.

Templates are Jinja programs that come with the model. They run in a sandbox with the same settings
and helpers that transformers gives them, so that they render the same text; output and repetition
are capped. What a template raises is a `RequestError` on `messages`. Knows no tokens: turning the
text into ids without letting a message forge a special token is chat_encoding.py's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.utils import Namespace

from termgen.errors import RequestError

OUTPUT_CAP_FACTOR = 4
OUTPUT_CAP_CONSTANT = 65_536
"""A rendered chat has at most factor * input characters + constant characters."""

MAX_POWER_BITS = 4096

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What running somebody's template can raise."""


def template_error(message: str) -> RequestError:
    return RequestError(message, param="messages")


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, *, whose: str = "the model's chat template") -> None:
        """whose: how faults call it."""
        self.source = source
        self._whose = whose
        environment = _environment()
        try:
            tree = environment.parse(source)
            self.literal_text = _literal_text(tree)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
            """Names that it reads."""
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise template_error(f"{whose} is broken: {_line(error)}") from error

    def render(self, variables: Mapping[str, Any], *, num_input_chars: int) -> str:
        """The prompt text. `variables` must be plain JSON data: see `plain`."""
        cap = OUTPUT_CAP_FACTOR * num_input_chars + OUTPUT_CAP_CONSTANT
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(**variables):
                length += len(part)
                if length > cap:
                    raise template_error(
                        f"{self._whose} wrote more than {cap} characters for"
                        f" {num_input_chars} characters of input"
                    )
                parts.append(part)
        except TEMPLATE_ERRORS as error:
            raise template_error(f"{self._whose} refuses these messages: {_line(error)}") from error
        return "".join(parts)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Also refuses expressions whose one result would exhaust memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                if left.bit_length() * max(right, 0) > MAX_POWER_BITS:
                    raise SecurityError("number too large")
        else:
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                    if len(sequence) * count > OUTPUT_CAP_CONSTANT:
                        raise SecurityError("repetition too long")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; for prompts it only groups."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """A template namespace without underscore names, which could reach interpreter internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _environment() -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _make_dict
    environment.globals["namespace"] = _SafeNamespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a prompt must not have.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _literal_text(tree: nodes.Template) -> str:
    """Everything the template itself may write: its text and its string constants.

    Joined with NUL, so that no word appears that only two neighbours spell together.
    """
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    texts += [n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)]
    return "\0".join(texts)


def _line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.split("\n", 1)[0]


def select_template(templates: Mapping[str, str], variables: Mapping[str, Any]) -> str:
    """Name of the template for this request: `tool_use` where there is one and tools are given."""
    if variables.get("tools") and "tool_use" in templates:
        return "tool_use"
    if "default" not in templates:
        raise template_error(
            f"this model has no default chat template, only {', '.join(sorted(templates))}"
        )
    return "default"


def last_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Content of the final assistant message, for a prompt that continues it."""
    final = messages[-1]
    content = final.get("content")
    if final["role"] != "assistant" or not isinstance(content, str):
        raise RequestError(
            "continue_final_message needs an assistant message with text at the end",
            param="continue_final_message",
        )
    return content
