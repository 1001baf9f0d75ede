"""The box of tools: names of their own, what is left out, slow providers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from tool_samples import ListedTools, make_tool

from termgen.tools.toolbox import Tool, Toolbox


def names(box: Toolbox) -> list[str]:
    return [one.name for one in box.offered]


def test_names_are_unique_and_fit_apis() -> None:
    box = Toolbox(
        [
            ListedTools(
                "a", [make_tool("b_c"), make_tool("b c"), make_tool("b/c"), make_tool("é")]
            ),
            ListedTools("a_b", [make_tool("c"), make_tool("x" * 300)]),
        ]
    )
    assert names(box)[:4] == ["a_b_c", "a_b_c_2", "a_b_c_3", "a__"]
    assert names(box)[4] == "a_b_c_4"
    assert len(names(box)[5]) == 128
    assert box.find("a_b_c_4").provider == "a_b"
    assert box.find("b_c") is None


def test_a_hundred_tools_are_offered_and_too_many_are_named() -> None:
    box = Toolbox([ListedTools("many", [make_tool(f"t{i}") for i in range(130)])])
    assert len(box.offered) == 128
    assert list(box.left_out) == ["many_t128", "many_t129"]
    assert "128" in box.left_out["many_t128"]


def test_a_schema_that_is_none_leaves_out_its_tool_only() -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(100):
        deep = {"type": "object", "properties": {"x": deep}}
    bad = {"type": "object", "properties": {"x": {"type": 3}}}
    listed = [make_tool("one"), make_tool("deep", schema=deep), make_tool("two")]
    box = Toolbox([ListedTools("s", [*listed, make_tool("bad", schema=bad)])])
    assert names(box)[:2] == ["s_one", "s_two"]
    assert "s_deep" in box.left_out and "\n" not in box.left_out["s_deep"]


def test_descriptions_are_bounded_and_have_no_control_codes() -> None:
    tool = make_tool("t", description="\x1b[31mred\x07" + "x" * 9000)
    function = Toolbox([ListedTools("s", [tool])]).offered[0].function["function"]
    assert function["description"].startswith("\\x1b[31mred\\x07x")
    assert len(function["description"]) == 4000


def test_tools_that_change_are_seen() -> None:
    provider = ListedTools("s", [make_tool("one")])
    box = Toolbox([provider])
    first = box.offered
    assert box.offered is first, "made once"
    provider.tools = [make_tool("one"), make_tool("two")]
    assert names(box) == ["s_one", "s_two"]


async def test_a_slow_provider_holds_up_no_other() -> None:
    class Slow(ListedTools):
        async def start(self) -> None:
            await asyncio.sleep(60)
            self.tools = [make_tool("late")]

    class Late(ListedTools):
        tools: Sequence[Tool] = ()

        async def start(self) -> None:
            self.tools = [make_tool("here")]

    box = Toolbox([Slow("slow", []), Late("quick", [])])
    box.start()
    started = time.monotonic()
    await box.wait(0.05)
    assert names(box) == ["quick_here"]
    await asyncio.wait_for(box.close(), 20)
    assert time.monotonic() - started < 5
