"""What limits the engine now, and the figures that say so.

Time that the device works is split by what its steps did; time that it waited although there was
work is the host's. A queue comes before both: who waits in it gains by nothing else. The use that
the driver reports is no evidence: it counts time when anything ran at all.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from termgen.tui.dashboard.state.store import DashboardView
from termgen.tui.paint.formatting import count, percent, plural, took
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.memory_ledger import MemoryLedger, size
from termgen.vocabulary.time_spread import LONG_MS

WINDOW_NS = 2_000_000_000
"""Steps that ended within it speak for now."""
HOST_SHARE = 0.2
"""The device waits for the host this share of the time, at least, before that is the limit."""
SAMPLING_SHARE = 0.4
"""The same for what follows the model in a step on a CPU."""
PROMPTS_SHARE = 0.5
MEMORY_SHARE = 0.6
"""Steps that read at this part of the memory's own rate, at least, wait for the memory."""
CREDIBLE_SHARE = 1.1
"""More says that less is read than was reckoned, as where a cache holds it."""
CLIENTS_SHARE = 0.5
"""Requests whose output is not read, of those that run."""
LATE_SHARE = 0.05
"""Rows without a token, as the masks of their grammars were late, of those with one."""
WAITING_SHARE = 0.5
"""Requests waited at the end of this share of the steps, at least, before a queue is the limit: one
that empties is none."""
QUEUED_SHARE = 0.5
"""Time in the queue, of the time to the first token, that explains the latter."""
PLACES, BLOCKS, GRAMMAR = (
    "all places taken",
    "not enough free KV blocks",
    "the mask of its grammar takes long",
)
"""Reasons for which the first request of the queue waits, as a snapshot says them."""
Numbers = npt.NDArray[np.float64]


class Limit(NamedTuple):
    cause: str
    """places, KV blocks, clients, grammars, host, sampling, prompts, memory, or decodes."""
    brief: str
    """The cause with its figure, for a narrow screen."""
    words: str
    """The evidence, as a sentence."""
    figures: str = ""
    """The same in fewer words, where the sentence is long."""


class _Steps(NamedTuple):
    """A value for each of the latest steps, of times in us. Arrays, as a frame has hundreds."""

    ended_ns: Numbers
    started_ns: Numbers
    num_waiting: Numbers
    num_late_masks: Numbers
    num_sampled_tokens: Numbers
    num_decode_rows: Numbers
    num_prefill_tokens: Numbers
    idle_us: Numbers
    schedule_us: Numbers
    launch_us: Numbers
    apply_us: Numbers
    sample_us: Numbers
    mask_us: Numbers

    @property
    def busy_us(self) -> Numbers:
        return np.maximum(0.0, self.ended_ns - self.started_ns) / 1e3


_VALUES: itemgetter[Any] = itemgetter(*map(StepRecord._fields.index, _Steps._fields))


def limit_of(view: DashboardView, memory: MemoryLedger | None) -> Limit | None:
    """None while nothing runs. memory: of the model, where it is known."""
    snapshot = view.snapshot
    if view.is_idle or (snapshot is not None and snapshot.paused):
        return None
    steps = _recent(view)
    if steps is None:
        return None
    busy = steps.busy_us
    total = float(busy.sum())
    return (
        _queue(view, steps)
        or _clients(view)
        or _grammars(steps, total)
        or _host(steps, total)
        or _sampling(steps, total)
        or _prompts(view, steps, busy, total)
        or _decodes(view, steps, busy, memory)
    )


def why_slow_start(view: DashboardView) -> str:
    """A sentence on the time to the first token, where most of it was spent in the queue."""
    ttft, queue = view.ttft.p95, view.queue.p95
    if ttft is None or queue is None or queue < max(LONG_MS, QUEUED_SHARE * ttft):
        return ""
    waited = f"{count(view.queued.num_long)} of {plural(view.queued.num, 'request')}"
    return f"TTFT is up to {took(ttft)} because {waited} waited, up to {took(min(queue, ttft))}"


def _recent(view: DashboardView) -> _Steps | None:
    """The steps of the window; the last one alone where it took longer than that."""
    steps = view.steps_so_far
    first = len(steps)
    while first and steps[first - 1].applied_ns > view.now_ns - WINDOW_NS:
        first -= 1
    chosen = steps[first:] or steps[-1:]
    return _Steps(*np.array(list(map(_VALUES, chosen)), np.float64).T) if chosen else None


def _queue(view: DashboardView, steps: _Steps) -> Limit | None:
    reason = view.snapshot.waiting_reason if view.snapshot is not None else ""
    num_waiting = view.num_waiting
    if not num_waiting or (steps.num_waiting > 0).mean() < WAITING_SHARE:
        return None
    wait = f"{count(num_waiting)} {'waits' if num_waiting == 1 else 'wait'}"
    if reason == PLACES:
        places = count(view.max_num_seqs or view.num_running)
        return Limit("places", f"places, {wait}", f"{wait} for a place: all {places} are taken")
    if reason == BLOCKS:
        words = f"{wait} for some, {percent(view.kv_usage)} of them are in use"
        return Limit("KV blocks", f"KV blocks, {wait}", words)
    if reason == GRAMMAR:
        words = f"{wait}: the first one's grammar is not ready"
        return Limit("grammars", "grammars", words)
    return None  # a prompt that is next, or was kept by the budget of a step


def _clients(view: DashboardView) -> Limit | None:
    running = [row for row in view.requests if row.state in ("prefill", "decode", "unread")]
    num_unread = sum(row.state == "unread" for row in running)
    if not num_unread or num_unread < CLIENTS_SHARE * len(running):
        return None
    part = f"{count(num_unread)} of {plural(len(running), 'running request')}"
    words = f"the clients of {part} take no output"
    figures = f"{part} not read"
    return Limit("clients", f"clients, {count(num_unread)} unread", words, figures)


def _grammars(steps: _Steps, busy_us: float) -> Limit | None:
    """Late masks are counted since the start: those of the window begin after its first step."""
    late = float(steps.num_late_masks[-1] - steps.num_late_masks[0])
    share = late / (late + float(steps.num_sampled_tokens[1:].sum())) if late > 0 else 0.0
    if share >= LATE_SHARE:
        words = f"late masks, for {percent(share)} of the tokens"
        return Limit("grammars", f"grammars {percent(share)}", words)
    waited, spent = float(steps.mask_us.sum()), busy_us + float(steps.idle_us.sum())
    share = waited / spent if spent else 0.0
    if share < HOST_SHARE:
        return None
    words = f"the engine waits for masks {percent(min(1.0, share))} of the time"
    return Limit("grammars", f"grammars {percent(min(1.0, share))}", words)


def _host(steps: _Steps, busy_us: float) -> Limit | None:
    idle = float(steps.idle_us.sum())
    share = idle / (idle + busy_us) if idle else 0.0
    if share < HOST_SHARE:
        return None
    times = (steps.schedule_us, steps.launch_us, steps.apply_us)
    plan, launch, apply = (took(float(each.mean()) / 1e3) for each in times)
    words = (
        f"the device waits for the host {percent(share)} of the time; "
        f"a step takes it {plan} to plan, {launch} to launch, {apply} to apply"
    )
    mean = took(sum(float(each.mean()) for each in times) / 1e3)
    figures = f"waited for {percent(share)} of the time, {mean} a step"
    return Limit("host", f"host {percent(share)}", words, figures)


def _sampling(steps: _Steps, busy_us: float) -> Limit | None:
    """On a CPU, where a step's parts are known."""
    share = float(steps.sample_us.sum()) / busy_us if busy_us else 0.0
    if share < SAMPLING_SHARE:
        return None
    words = f"sampling and grammars take {percent(share)} of a step"
    return Limit("sampling", f"sampling {percent(share)}", words)


def _prompts(view: DashboardView, steps: _Steps, busy: Numbers, total: float) -> Limit | None:
    tokens = steps.num_prefill_tokens
    is_mixed = tokens > 0
    if not is_mixed.any() or not total:
        return None
    mixed, plain = busy[is_mixed], busy[~is_mixed]
    if len(plain):  # what a step takes beyond one without prompts
        spent = np.maximum(0.0, mixed - _median(plain))
    else:
        spent = mixed * tokens / (tokens + steps.num_decode_rows)
    share = float(spent.sum()) / total
    if share < PROMPTS_SHARE:
        return None
    budget = view.max_num_batched_tokens
    num_tokens = count(float(tokens[is_mixed].mean())) + (f" of {count(budget)}" if budget else "")
    words = f"prompts take {percent(share)} of the device's time, {num_tokens} tokens a step"
    figures = f"{percent(share)} of the time, {num_tokens} tokens a step"
    return Limit("prompts", f"prompts {percent(share)}", words, figures)


def _decodes(
    view: DashboardView, steps: _Steps, busy: Numbers, memory: MemoryLedger | None
) -> Limit:
    """A step of decodes reads weights, and the keys and values of those who run. Blocks that they
    share are counted once, and read by each."""
    is_plain = steps.num_prefill_tokens == 0
    has_plain = bool(is_plain.any())
    if not has_plain:
        is_plain = ~is_plain
    usual_us = _median(busy[is_plain])
    usual = took(usual_us / 1e3)
    num_rows = round(_median(steps.num_decode_rows[is_plain]))
    words, figures = f"a step of {plural(num_rows, 'request')} takes {usual}", ""
    if memory is not None and memory.host_experts is not None:
        words += f"; {memory.host_experts}"
        return Limit("decodes", f"decodes, {usual} a step", words)
    if memory is None or not usual_us:
        return Limit("decodes", f"decodes, {usual} a step", words, figures)
    cached, reads = round(view.kv_usage * memory.kv_cache_bytes), memory.reads
    weights = memory.weights_bytes if reads is None else round(reads.of_step(num_rows))
    rate = (weights + cached) / usual_us * 1e6
    words += f", for {size(weights)} of weights and {size(cached)} of keys and"
    words += f" values: {rate / 1e9:,.0f} GB/s"
    figures = f"{usual} a step, {size(weights + cached)} at {rate / 1e9:,.0f} GB/s"
    share = rate / reads.bytes_per_s if reads is not None and reads.bytes_per_s else 0.0
    if not 0.0 < share < CREDIBLE_SHARE:
        return Limit("decodes", f"decodes, {usual} a step", words, figures)
    words += f", {percent(share)} of what the memory can do"
    figures += f", {percent(share)}"
    if share < MEMORY_SHARE or not has_plain:
        return Limit("decodes", f"decodes, {usual} a step", words, figures)
    return Limit("memory", f"memory {percent(share)}", words, figures)


def _median(values: Numbers) -> float:
    """The upper one of two. Much cheaper than numpy's for a few values."""
    return float(np.sort(values)[len(values) // 2])
