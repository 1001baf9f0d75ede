"""`termgen top --once`: the figures of a server in lines, or in JSON, without a screen."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from termgen.commands.exit_codes import OK
from termgen.errors import TermgenError
from termgen.tui.dashboard.state.draft_figures import draft_figures
from termgen.tui.dashboard.state.event_reader import EventReader
from termgen.tui.dashboard.state.limits import limit_of, why_slow_start
from termgen.tui.dashboard.state.store import DashboardView
from termgen.tui.feeds.attach import DEFAULT_URL, RemoteFeed
from termgen.tui.feeds.feed import StreamFeed
from termgen.tui.paint.formatting import count, percent, rate, took
from termgen.tui.paint.sanitize import clean_line
from termgen.vocabulary.device.expert_load import ExpertLoad
from termgen.vocabulary.time_spread import Spread

HZ = 20.0
WATCHED_S = 1.5
"""A rate is that of a full second."""
READ_S = 0.1


def run_once(
    urls: Sequence[str], *, key: str | None, as_json: bool, wait_s: float | None = None
) -> int:
    """Watch servers for a moment and print what they do. Several are a list in JSON, each with its
    `url`, and an `error` where it could not be watched; only if none could, that is an error."""
    if len(urls) <= 1:
        figures = asyncio.run(_watch(urls[0] if urls else DEFAULT_URL, key, wait_s))
        _print(figures if as_json else lines_of(figures))
        return OK
    found = asyncio.run(_watch_all(urls, key, wait_s))
    errors = [one for one in found if isinstance(one, TermgenError)]
    if len(errors) == len(urls):
        raise errors[0]
    shown: list[Any] = []
    for url, one in zip(urls, found, strict=True):
        error = one if isinstance(one, TermgenError) else None
        figures = {} if isinstance(one, TermgenError) else one
        if as_json:
            shown.append({"url": url, "error": str(error) if error else None, **figures})
        else:
            lines = [clean_line(f"✗ {error}")] if error else lines_of(figures)
            shown += [*([""] if shown else []), clean_line(url), *(f"  {line}" for line in lines)]
    _print(shown)
    return OK


def _print(shown: dict[str, Any] | list[Any]) -> None:
    """Lines as they are, figures as JSON."""
    if isinstance(shown, list) and all(isinstance(line, str) for line in shown):
        print("\n".join(shown))
    else:
        json.dump(shown, sys.stdout, indent=2)
        print()


async def _watch_all(
    urls: Sequence[str], key: str | None, wait_s: float | None
) -> list[dict[str, Any] | TermgenError]:
    """All at once: one that is not there holds up no other."""

    async def watch(url: str) -> dict[str, Any] | TermgenError:
        try:
            return await _watch(url, key, wait_s)
        except TermgenError as error:
            return error

    return await asyncio.gather(*map(watch, urls))


async def _watch(url: str, key: str | None, wait_s: float | None) -> dict[str, Any]:
    feed = await RemoteFeed.connect(url, hz=HZ, key=key, wait_s=wait_s)
    reader = EventReader(feed, feed.now_ns)
    try:
        end_ns = feed.now_ns() + round(WATCHED_S * 1e9)
        while feed.now_ns() < end_ns:
            await asyncio.sleep(READ_S)
            await reader.take()
        await reader.ask()
        return figures_of(feed, reader.store.view(feed.now_ns()), reader.trouble)
    finally:
        reader.close()
        await feed.close()


def figures_of(feed: StreamFeed, view: DashboardView, trouble: str) -> dict[str, Any]:
    """What is printed: times in ms, shares from 0 to 1, None where nothing is known."""
    model, snapshot = feed.model, view.snapshot
    limit = limit_of(view, model.memory)
    drafts = draft_figures(view.steps)
    spreads = {"ttft": view.ttft, "itl": view.gap, "step": view.step, "queue": view.queue}
    return {
        "healthy": not trouble,
        "trouble": trouble or None,
        "paused": snapshot is not None and snapshot.paused,
        "model": model.model_id,
        "device": model.device_name,
        "quantization": model.quantization,
        "running": view.num_running,
        "max_num_seqs": view.max_num_seqs,
        "waiting": view.num_waiting,
        "waiting_reason": (snapshot.waiting_reason if snapshot is not None else "") or None,
        "decode_tokens_per_s": round(view.decode_rate, 1),
        "prefill_tokens_per_s": round(view.prefill_rate, 1),
        "generation_tokens": view.generation_tokens,
        "prompt_tokens": view.prompt_tokens,
        "preemptions": view.num_preemptions,
        "kv_blocks": {
            "used": view.num_used_blocks,
            "cached": view.num_cached_blocks,
            "free": view.num_free_blocks,
        },
        "kv_usage": round(view.kv_usage, 4),
        "prefix_hit_rate": view.prefix_hit_rate,
        "latency_ms": {name: _rounded(spread) for name, spread in spreads.items()},
        "drafts": None if drafts is None else drafts.as_json(),
        "experts": None if snapshot is None else _experts(snapshot.experts),
        "limit": None if limit is None else {"cause": limit.cause, "words": limit.words},
        "slow_start": why_slow_start(view) or None,
    }


def _experts(load: ExpertLoad | None) -> dict[str, Any] | None:
    """The load of a mixture's experts; None where it is not counted."""
    if load is None:
        return None
    return {
        "experts": load.num_experts,
        "layers": len(load.peaks),
        "imbalance": round(load.imbalance, 3),
        "unused": round(load.unused_share, 4),
        "busiest": [int(expert) for expert in load.busiest],
        "peaks": [round(float(peak), 3) for peak in load.peaks],
    }


def _rounded(spread: Spread) -> dict[str, float | None]:
    return {
        name: None if value is None else round(value, 3) for name, value in spread._asdict().items()
    }


def lines_of(figures: dict[str, Any]) -> list[str]:
    """The figures as a person reads them. What a server says of itself is cleaned."""
    form = f", {figures['quantization']}" if figures["quantization"] else ""
    state = figures["trouble"] or ("paused" if figures["paused"] else "")
    places = f" of {count(figures['max_num_seqs'])}" if figures["max_num_seqs"] else ""
    waiting = f"{count(figures['waiting'])} waiting"
    if figures["waiting_reason"]:
        waiting += f" ({figures['waiting_reason']})"
    lines = [
        f"{figures['model']}{form} on {figures['device']}" + (f": {state}" if state else ""),
        f"{count(figures['running'])}{places} running, {waiting}",
        f"decode {rate(figures['decode_tokens_per_s'])} tok/s,"
        f" prefill {rate(figures['prefill_tokens_per_s'])} tok/s",
        f"KV {percent(figures['kv_usage'])} used,"
        f" prefix hits {percent(figures['prefix_hit_rate'])}",
    ]
    for name, spread in figures["latency_ms"].items():
        if spread["p50"] is not None:
            times = "/".join(took(spread[key]) for key in ("p50", "p95", "p99"))
            lines.append(f"{name} {times} (p50/95/99)")
    if figures["drafts"] is not None:
        lines += _draft_lines(figures["drafts"])
    if (experts := figures["experts"]) is not None:
        unused = f"{percent(experts['unused'])} of them had no token"
        lines.append(f"busiest expert {experts['imbalance']:.1f} times an even share, {unused}")
    if figures["limit"] is not None:
        lines.append(f"limited by {figures['limit']['cause']}: {figures['limit']['words']}")
    if figures["slow_start"] is not None:
        lines.append(figures["slow_start"])
    return [clean_line(line) for line in lines]


def _draft_lines(drafts: dict[str, Any]) -> list[str]:
    parts = []
    if drafts["tokens_per_step"] is not None:
        parts.append(f"{drafts['tokens_per_step']:.2f} tokens a step")
    if drafts["kept_share"] is not None:
        made = f"{rate(drafts['drafted_per_s'])} drafted, {rate(drafts['kept_per_s'])} kept"
        parts.append(f"{made}, {rate(drafts['given_up_per_s'])} given up a second")
    lines = [", ".join(parts)] if parts else []
    return [*lines, *([drafts["choice"]["words"]] if drafts["choice"] is not None else [])]
