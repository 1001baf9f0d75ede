"""Sweeps: the knee, the loads chosen, the pages and plots of results."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

import pytest
from bench_runs import make_run

from termgen.bench import html_report, plots, sweep
from termgen.bench.html_report import Series, chart, cumulative, round_up
from termgen.bench.options import ServeOptions, SweepOptions
from termgen.bench.serve import ServeRun
from termgen.errors import ConfigError, EngineError


async def find(options: SweepOptions, capacity: float) -> tuple[sweep.SweepResult, list[Any]]:
    """Sweep a server whose throughput grows up to `capacity`, with a TTFT of 100 ms up to there."""
    asked: list[Any] = []

    async def run_step(step: ServeOptions, seed: int) -> ServeRun:
        asked.append((step, seed))
        rate = step.request_rate
        load = step.max_concurrency if rate is None or math.isinf(rate) else rate
        assert load is not None
        first = 0.1 if load <= capacity else 0.1 * load / capacity
        return make_run(step, first_s=[first] * step.num_prompts, apart_s=1 / min(load, capacity))

    return await sweep.run_sweep(options, run_step, seed=10), asked


async def test_a_sweep_over_clients_with_a_limit_narrows_the_gap() -> None:
    options = SweepOptions(goodput=("ttft:105",), sweep_refine=5)
    result, asked = await find(options, capacity=11)
    loads = [step.max_concurrency for step, _ in asked]
    assert loads[:5] == [1, 2, 4, 8, 16] and loads[5] == 12
    assert result.knee is not None and result.knee.load == 11 and not result.is_open
    assert [s.load for s in result.steps] == sorted(s.load for s in result.steps)
    assert len({seed for _, seed in asked}) == len(asked), "every step asks other prompts"
    assert all(step.num_prompts == max(32, 4 * step.max_concurrency) for step, _ in asked)
    assert "knee: 11 clients (90% of requests within ttft:105)" in sweep.summary(result)


async def test_a_kept_step_is_not_above_the_line_of_the_limit() -> None:
    """One request of twenty waits two seconds, which the rule of 90% allows."""

    async def run_step(step: ServeOptions, seed: int) -> ServeRun:
        count = step.num_prompts
        slow = 2.0 if step.max_concurrency == 1 else 0.3
        first = [slow if i % 20 == 0 else 0.05 * (step.max_concurrency or 1) for i in range(count)]
        return make_run(step, first_s=first)

    options = SweepOptions(goodput=("ttft:180",), num_prompts=40, sweep_to=4, sweep_refine=0)
    result = await sweep.run_sweep(options, run_step, seed=10)
    assert [step.is_kept for step in result.steps] == [True, True, False]
    lines = sweep.curve(result)
    assert lines[0] == "TTFT p90 (● kept, ○ too much)"
    places = {mark: [i for i, line in enumerate(lines[1:]) if mark in line] for mark in "●○┄"}
    assert max(places["○"]) < min(places["┄"]) <= min(places["●"])
    assert lines[1].lstrip().startswith("200 ms ┤")
    table = sweep.steps_table(result)
    assert "2.00 s" in table[1] and "50.0 ms" in table[1] and "ms" not in table[0]
    unlimited = replace(result, options=SweepOptions(num_prompts=40, sweep_to=4))
    assert sweep.curve(unlimited)[0].startswith("TTFT p99 ")


async def test_a_sweep_over_rates() -> None:
    options = SweepOptions(goodput=("ttft:101",), sweep_over="rate", sweep_refine=6)
    result, asked = await find(options, capacity=5.5)
    assert [step.request_rate for step, _ in asked][:4] == [1.0, 2.0, 4.0, 8.0]
    assert result.knee is not None and 5.3 <= result.knee.load <= 5.5
    assert asked[3][0].num_prompts == 80, "ten seconds' worth"


async def test_without_a_limit_throughput_decides() -> None:
    result, asked = await find(SweepOptions(), capacity=8)
    assert [step.max_concurrency for step, _ in asked] == [1, 2, 4, 8, 16]
    assert result.knee is not None and result.knee.load == 8
    document = sweep.document(result, result.steps[0].run, None)
    assert document["knee"] == 8 and not document["knee_is_beyond"]
    assert [level["is_kept"] for level in document["levels"]] == [True] * 4 + [False]
    assert document["levels"][0]["mean_ttft_ms"] == pytest.approx(100)


async def test_a_knee_outside_the_sweep_is_said() -> None:
    result, _ = await find(SweepOptions(sweep_to=4), capacity=100)
    assert result.is_open and "raise --sweep-to" in sweep.summary(result)
    tight = SweepOptions(goodput=("ttft:1",))
    result, asked = await find(tight, capacity=100)
    assert result.knee is None and len(asked) == 1
    assert "no knee: 1 client is too much" in sweep.summary(result)


async def test_a_step_without_an_answer_ends_the_sweep_and_loses_nothing() -> None:
    async def run_step(step: ServeOptions, seed: int) -> ServeRun:
        assert step.max_concurrency is not None
        if step.max_concurrency >= 8:
            raise EngineError("all 32 requests failed, the first with: 503")
        first = [0.1] * step.num_prompts
        return make_run(step, first_s=first, apart_s=1 / step.max_concurrency)

    for options in (SweepOptions(), SweepOptions(goodput=("ttft:105",))):
        result = await sweep.run_sweep(options, run_step, seed=1)
        assert [s.load for s in result.steps] == [1, 2, 4] and not result.is_open
        assert result.knee is not None and result.knee.load == 4
        words = "knee: 4 clients"
        assert words in sweep.summary(result) and "at 8 nothing could be" in sweep.summary(result)
        document = sweep.document(result, result.steps[0].run, None)
        assert document["failure"]["load"] == 8 and "503" in document["failure"]["error"]
        page = html_report.sweep_page(result)
        assert "<h2>Knee: 4 clients" in page and "all 32 requests failed" in page
    with pytest.raises(EngineError, match="503"):
        await sweep.run_sweep(SweepOptions(sweep_from=8), run_step, seed=1)


async def test_a_last_step_of_less_than_double_needs_its_part_of_the_gain() -> None:
    def server(gain: float) -> Any:
        """A server whose throughput rises by this much with each doubling of the load."""

        async def run_step(step: ServeOptions, seed: int) -> ServeRun:
            load = step.max_concurrency or 0
            return make_run(
                step, first_s=[0.0] * 400, gap_s=0.0, apart_s=1 / (1 + gain) ** math.log2(load)
            )

        return run_step

    options = SweepOptions(sweep_to=5, sweep_gain=20.0)  # 1 2 4 5
    result = await sweep.run_sweep(options, server(0.25), seed=1)
    assert [(s.load, s.is_kept) for s in result.steps][-1] == (5, True) and result.is_open
    result = await sweep.run_sweep(options, server(0.15), seed=1)
    assert [(s.load, s.is_kept) for s in result.steps] == [(1, True), (2, False)]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"request_rate": 4.0}, "use --sweep-over rate"),
        ({"max_concurrency": 4}, "use --sweep-to"),
        ({"sweep_over": "rate"}, "needs --goodput"),
        ({"sweep_from": 8.0, "sweep_to": 4.0}, "less than sweep_from"),
        ({"sweep_from": 0.5}, "at least 1 client"),
        ({"goodput": ("x:1",)}, "goodput takes"),
        ({"sweep_refine": 5}, "sweep_refine needs --goodput"),
        ({"sweep_attainment": 50.0}, "sweep_attainment needs --goodput"),
        ({"sweep_gain": 9.0, "goodput": ("ttft:1",)}, "sweep_gain goes without --goodput"),
        ({"burstiness": 0.5}, "burstiness is of arrivals at a rate"),
        ({"save_detailed": True}, "is for `bench serve`"),
    ],
)
def test_wrong_options_are_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SweepOptions(**values)


def test_a_sweep_over_rates_takes_bursts() -> None:
    options = SweepOptions(sweep_over="rate", goodput=("ttft:1",), burstiness=0.5)
    assert sweep.step_options(options, 3.0).burstiness == 0.5


def _svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.S)]


async def test_pages_are_whole_and_fetch_nothing() -> None:
    result, _ = await find(SweepOptions(goodput=("ttft:105",)), capacity=3)
    options = ServeOptions(goodput=("ttft:150",), label="<b>&x")
    run = make_run(options, first_s=[0.1, 0.2, 0.3])
    pages = html_report.sweep_page(result), html_report.serve_page(run)
    for page, count in zip(pages, (3, 7), strict=True):
        assert not re.search(r"<script|<link|<img|src=|href=|@import|url\(", page)
        svgs = _svgs(page)
        assert len(svgs) == count
        for name, low, high in (("cx", 64, 628), ("cy", 12, 220)):
            for svg in svgs:
                places = [float(c.get(name, "0")) for c in svg.iter("circle")]
                assert all(low <= p <= high for p in places)
    assert "&lt;b&gt;&amp;x" in pages[1] and "<b>" not in pages[1]
    assert "<td>298 ms</td>" in pages[1], "the p99"
    assert len(list(_svgs(pages[1])[0].iter("circle"))) == 3
    assert 'class="limit"' in pages[1]


def test_charts_scale_and_thin_out() -> None:
    assert [round_up(v) for v in (0, 0.45, 1, 1.2, 2.2, 4, 7, 1000)] == [
        *(1, 0.5, 1, 1.5, 3, 4, 8, 1000)
    ]
    many = Series("a", [(float(i), 1.0) for i in range(10_000)], is_dots=True)
    svg = ElementTree.fromstring(chart([many], x_title="x", y_title="y"))
    dots = list(svg.iter("circle"))
    assert 1500 < len(dots) <= 2001
    assert float(dots[0].get("cx", "")) == 64 and float(dots[-1].get("cx", "")) > 627
    assert cumulative([3.0, 1.0]) == [(1.0, 50.0), (3.0, 100.0)]


def test_plots_in_text() -> None:
    assert plots.sparkline([0, 4, 8]) == "▁▄█" and plots.sparkline([]) == ""
    assert plots.sparkline([0, 0]) == "▁▁"
    assert len(plots.sparkline(list(range(1000)), width=50)) == 50
    assert plots.bar(0.5, 4) == "██  " and plots.bar(2, 2) == "██"
    rows = plots.histogram([1.0] * 5 + [9.0] * 2, rows=4)
    assert [row.split()[-1] for row in rows] == ["5", "0", "0", "2"]
    assert rows[0].startswith("  1.00 ms to 3.00 ms ") and rows[3].startswith("  7.00 ms or more ")
    assert plots.histogram([]) == [] and plots.histogram([2100.0])[0].startswith("  2.10 s ")
    assert plots.histogram([100.0, 1470.4, 4690.0], rows=2)[1].startswith("   2.40 s or more")
    lines = plots.scatter(
        [(1, 1, "a"), (4, 10, "b")], title="t", x_title="x", limit=5, width=20, height=5
    )
    assert lines[1].startswith(" 10.0 ms ┤") and lines[5].startswith("    0 ms ┤")
    assert lines[1].endswith("b") and "┄" in lines[3] and "a" in lines[5]
