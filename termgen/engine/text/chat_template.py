"""A model's chat template: checks messages, renders them to text.

Templates are Jinja programs that come with the model. They run in a sandbox with transformers'
settings and helpers, so that they render the same text; output and repetition are capped. An
exception of a template becomes a `RequestError` on `messages`. Knows no tokens: chat_encoding.py
encodes the text safely.
"""

from __future__ import annotations

import json
import re
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
"""A rendered chat has at most factor * input characters + this many characters."""

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
"""Exceptions of running a template."""

BOUNDED_FILTERS = frozenset(
    "capitalize count d default dictsort e escape first float int items join last length list lower"
    " map reject rejectattr replace reverse safe select selectattr sort string strip title tojson"
    " trim unique upper".split()
)
BOUNDED_METHODS = frozenset(
    "append capitalize count endswith find get index isdigit items join keys lower lstrip pop"
    " removeprefix removesuffix replace rsplit rstrip split splitlines startswith strip title upper"
    " values".split()
)
BOUNDED_FUNCTIONS = frozenset("dict namespace raise_exception strftime_now".split())
MAX_CONSTANT = 10_000
"""Largest number in a bounded template."""
UNRELATED = "?"
"""Placeholder for a loop over the tools inside another loop."""
MAX_LOOPS = 4
"""Nesting limit of loops that each iterate over a part of the outer loop's item."""

GROWING = frozenset({"replace", "join"})
"""Filters and methods whose result may be as long as the product of two texts' lengths."""


def template_error(message: str) -> RequestError:
    return RequestError(message, param="messages")


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, *, whose: str = "the model's chat template") -> None:
        """whose: its name in error messages."""
        self.source = source
        self._whose = whose
        environment = _environment()
        try:
            tree = environment.parse(source)
            self.literal_text = _literal_text(tree)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
            """Names that the template reads."""
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
    """A sandbox that also refuses expressions whose result alone would exhaust memory."""

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
    # Jinja's own filter escapes HTML characters, which is wrong in a prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def is_bounded(source: str) -> bool:
    """True if the template's work is bounded by the size of the chat, about linearly.

    This holds for nearly all models' templates. Decided on the parsed tree without evaluating
    anything, as even compiling a template evaluates its constant expressions. Considered unbounded:
    products, powers and formatted texts, functions and filters that take sizes, ranges other than
    up to a length, loops over a whole list inside another loop, recursive macros, and texts
    concatenated from concatenated texts. Raises the parser's exceptions.
    """
    return _Bounds().hold(_environment().parse(source))


class _Bounds:
    """Walks one tree."""

    def __init__(self) -> None:
        self._assigned: set[str] = set()
        """Names and namespace attributes that the template assigns."""
        self._macros: set[str] = set()
        """Macros whose definition is complete."""

    def hold(self, tree: nodes.Template) -> bool:
        for node in _all(tree, nodes.Assign, nodes.AssignBlock):
            self._assigned.update(_targets(node.target))
        return self._is_fine(tree, ())

    def _is_fine(self, node: nodes.Node, loops: tuple[str, ...]) -> bool:
        """loops: variables of the enclosing loops, those of one loop joined by blanks."""
        match node:
            case nodes.For():
                if not self._is_fine_loop(node, loops):
                    return False
                is_related = not loops or not _reads(node.iter, "tools")
                loops = (*loops, " ".join(_targets(node.target)) if is_related else UNRELATED)
            case nodes.Macro():
                fine = not any(self._calls_macro(call) for call in node.find_all(nodes.Call))
                fine = fine and all(self._is_fine(one, loops) for one in node.iter_child_nodes())
                self._macros.add(node.name)
                return fine and not loops
            case nodes.Mul() | nodes.Pow() | nodes.CallBlock() | nodes.FilterBlock():
                return False
            case nodes.Mod() if not isinstance(_constant(node.right), int):
                return False
            case nodes.Mod() if isinstance(node.left, nodes.Const | nodes.Concat | nodes.Add):
                return False
            case nodes.Const() if isinstance(node.value, int | float):
                return abs(node.value) <= MAX_CONSTANT
            case nodes.Filter() if not _is_fine_filter(node):
                return False
            case nodes.Call() if not self._is_fine_call(node):
                return False
            case nodes.Assign() | nodes.AssignBlock() if self._num_assigned_in(node) > 1:
                return False
            case nodes.Assign() if any(map(self._calls_macro, _all(node.node, nodes.Call))):
                return False
        return all(self._is_fine(child, loops) for child in node.iter_child_nodes())

    def _is_fine_loop(self, node: nodes.For, loops: tuple[str, ...]) -> bool:
        if node.recursive or len(loops) >= MAX_LOOPS:
            return False
        if not loops:
            return True
        if any(one.items for one in _all(node.iter, nodes.List, nodes.Tuple)):
            return False
        around = {name for names in loops for name in names.split()}
        names = {name.name for name in _all(node.iter, nodes.Name)}
        if names == {"tools"}:
            return UNRELATED not in loops
        return bool(names) and names <= around

    def _is_fine_call(self, node: nodes.Call) -> bool:
        called = node.node
        if isinstance(called, nodes.Getattr):
            if called.attr == "replace" and not all(map(_is_const, node.args)):
                return False
            if called.attr == "join" and not _is_const(called.node):
                return False
            return called.attr in BOUNDED_METHODS
        if not isinstance(called, nodes.Name):
            return False
        if called.name == "range":
            return all(self._is_length(argument) for argument in node.args)
        if called.name == "strftime_now":
            return not any(re.search("[0-9]|^$", str(_constant(one) or "")) for one in node.args)
        if self._calls_macro(node):
            inner = [call for one in node.args for call in _all(one, nodes.Call)]
            return not any(map(self._calls_macro, inner))
        return called.name in BOUNDED_FUNCTIONS

    def _calls_macro(self, node: nodes.Call) -> bool:
        return isinstance(node.node, nodes.Name) and node.node.name in self._macros

    def _is_length(self, node: nodes.Node) -> bool:
        match node:
            case nodes.Const() | nodes.Filter(name="length" | "count"):
                return True
            case nodes.Add() | nodes.Sub():
                return self._is_length(node.left) and self._is_length(node.right)
            case nodes.Neg():
                return self._is_length(node.node)
            case nodes.Getattr(node=nodes.Name(name="loop")):
                return True
        return False

    def _num_assigned_in(self, node: nodes.Assign | nodes.AssignBlock) -> int:
        """How often a previously assigned value goes into the text or list that this builds."""
        parts = node.body if isinstance(node, nodes.AssignBlock) else [node.node]
        joined: list[nodes.Node] = []
        for part in parts:
            if isinstance(node, nodes.AssignBlock):
                joined.append(part)
            else:
                joined += _all(part, nodes.Concat, nodes.Add, nodes.List, nodes.Tuple, nodes.Dict)
                joined += [call for call in _all(part, nodes.Call) if _grows(call)]
                joined += [one for one in _all(part, nodes.Filter) if one.name in GROWING]
        return max((self._num_assigned_below(one) for one in joined), default=0)

    def _num_assigned_below(self, node: nodes.Node) -> int:
        attributes = [one for one in _all(node, nodes.Getattr) if isinstance(one.node, nodes.Name)]
        bases = {id(one.node) for one in attributes}
        names = [one for one in _all(node, nodes.Name) if id(one) not in bases]
        found = [one for one in names if one.name in self._assigned and one.ctx == "load"]
        for one in attributes:
            if not self._assigned.isdisjoint((one.node.name, f"{one.node.name}.{one.attr}")):
                found.append(one)
        return len(found)


def _is_fine_filter(node: nodes.Filter) -> bool:
    """True if bounded: filters that repeat an argument or call others need constant arguments."""
    arguments = [*node.args, *(keyword.value for keyword in node.kwargs)]
    if node.name in ("join", "replace", "tojson") and not all(map(_is_const, arguments)):
        return False
    if node.name == "map" and node.args:
        return _constant(node.args[0]) in BOUNDED_FILTERS - {"join", "map", "replace"}
    return node.name in BOUNDED_FILTERS


def _is_const(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const)


def _constant(node: nodes.Node) -> Any:
    """The value of a constant node, else None."""
    return node.value if isinstance(node, nodes.Const) else None


def _reads(node: nodes.Node, name: str) -> bool:
    return any(one.name == name for one in _all(node, nodes.Name))


def _grows(call: nodes.Call) -> bool:
    return isinstance(call.node, nodes.Getattr) and call.node.attr in GROWING


def _all(node: nodes.Node, *kinds: type[Any]) -> list[Any]:
    """All nodes of these kinds in the subtree, the root included."""
    return [*([node] if isinstance(node, kinds) else []), *node.find_all(kinds)]


def _targets(node: nodes.Node) -> list[str]:
    names = [name.name for name in _all(node, nodes.Name)]
    return names + [f"{ref.name}.{ref.attr}" for ref in _all(node, nodes.NSRef)]


def _literal_text(tree: nodes.Template) -> str:
    """The template's own text and string constants, which it may write.

    Joined with NUL, so that neighbours cannot form a word together.
    """
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    texts += [n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)]
    return "\0".join(texts)


def _line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.split("\n", 1)[0]


def select_template(templates: Mapping[str, str], variables: Mapping[str, Any]) -> str:
    """Name of the template for this request: `tool_use` if it exists and tools are given."""
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
