"""Wishes about thinking: how much effort, whether to think at all, how long.

Clients send them to every model. They become variables of the chat template where it reads such
ones; elsewhere they are taken all the same, and the answer's header names them as not used. A
value that no client means is an error at any rate.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from termgen.api.fields import Fields, is_int, wrong_type
from termgen.vocabulary.tool_format import ToolFormat

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")

VARIABLES = {
    "effort": ("reasoning_effort",),
    "thinks": ("enable_thinking", "thinking"),
    "budget": ("thinking_budget",),
}
"""What templates call each wish."""

HINT_VARIABLES = frozenset(name for names in VARIABLES.values() for name in names)

MAX_BUDGET = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Wish:
    field: str
    kind: str
    """A key of `VARIABLES`."""
    value: Any


def reader_of(tool_format: ToolFormat, chat_template: str | None) -> Callable[[str], bool]:
    """Says whether the template reads a variable. chat_template: the request's own, if any."""
    if chat_template is not None:
        return lambda name: re.search(rf"\b{name}\b", chat_template) is not None
    known = tool_format.template_variables
    return lambda name: known is None or name in known


def parse_hints(
    body: Fields, kwargs: dict[str, Any], reads: Callable[[str], bool]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The template's variables, and names of the fields that have no effect.

    kwargs: `chat_template_kwargs`, which win; wishes among them that are not read are left out.
    """
    unread = [name for name in kwargs if name in HINT_VARIABLES and not reads(name)]
    variables = {name: value for name, value in kwargs.items() if name not in unread}
    not_used = [f"chat_template_kwargs.{name}" for name in unread]
    for wish in _wishes(body):
        names = [name for name in VARIABLES[wish.kind] if reads(name)]
        for name in names:
            variables.setdefault(name, wish.value)
        used = bool(names)
        if wish.kind == "effort" and wish.value == "none":
            for name in filter(reads, VARIABLES["thinks"]):
                variables.setdefault(name, False)
                used = True
        if not used:
            not_used.append(wish.field)
    return variables, tuple(not_used)


def _wishes(body: Fields) -> list[_Wish]:
    wishes = []
    if (effort := _effort(body.take("reasoning_effort"), "reasoning_effort")) is not None:
        wishes.append(_Wish("reasoning_effort", "effort", effort))
    reasoning = body.object("reasoning")
    if reasoning is not None:
        if (effort := _effort(reasoning.take("effort"), "reasoning.effort")) is not None:
            wishes.append(_Wish("reasoning.effort", "effort", effort))
        if reasoning.take("enabled") is not None:
            wishes.append(_Wish("reasoning.enabled", "thinks", reasoning.boolean("enabled")))
        if (budget := reasoning.integer("max_tokens", low=0, high=MAX_BUDGET)) is not None:
            wishes.append(_Wish("reasoning.max_tokens", "budget", budget))
    if body.take("enable_thinking") is not None:
        wishes.append(_Wish("enable_thinking", "thinks", body.boolean("enable_thinking")))
    wishes += _thinking(body.take("thinking"))
    if (budget := body.integer("thinking_budget", low=0, high=MAX_BUDGET)) is not None:
        wishes.append(_Wish("thinking_budget", "budget", budget))
    think = body.take("think")
    if isinstance(think, bool):
        wishes.append(_Wish("think", "thinks", think))
    elif think is not None:
        if not isinstance(think, str) or think not in EFFORTS:
            raise wrong_type("think", f"true, false, {_listed(EFFORTS)}", think)
        wishes.append(_Wish("think", "effort", think))
    return wishes


def _effort(value: Any, name: str) -> str | None:
    if value is not None and (not isinstance(value, str) or value not in EFFORTS):
        raise wrong_type(name, _listed(EFFORTS), value)
    return value


def _thinking(value: Any) -> list[_Wish]:
    """Anthropic's object, or true and false."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [_Wish("thinking", "thinks", value)]
    if not isinstance(value, dict):
        raise wrong_type("thinking", "an object with a type", value)
    kind, budget = value.get("type"), value.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive", "auto"):
        raise wrong_type("thinking.type", "enabled, disabled or adaptive", kind)
    wishes = []
    if kind in ("enabled", "disabled"):
        wishes.append(_Wish("thinking", "thinks", kind == "enabled"))
    if budget is not None:
        if not is_int(budget) or not 1 <= budget <= MAX_BUDGET:
            raise wrong_type("thinking.budget_tokens", f"an integer, 1 to {MAX_BUDGET}", budget)
        wishes.append(_Wish("thinking.budget_tokens", "budget", budget))
    return wishes


def _listed(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
