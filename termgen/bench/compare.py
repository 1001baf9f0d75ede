"""`termgen bench compare A B`: how much faster or slower B is, and how sure that is.

Reads the files of `bench serve` and `bench latency` (and vLLM's, if they have single requests).
Requests, seconds or batches are drawn again and again from each file; the interval is where the
change lies in most of these draws (bootstrap). Knows nothing of servers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from termgen.bench.compare_options import CompareOptions
from termgen.errors import ConfigError

Floats = npt.NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""Of each row."""
DRAWN_AT_ONCE = 4_000_000
FEWEST_SAMPLES = 8
FEWEST_FOR_P99 = 100
"""With fewer an interval says nothing."""

STATISTICS: dict[str, Statistic] = {
    "mean": lambda rows: np.mean(rows, axis=1),
    "p50": lambda rows: np.percentile(rows, 50, axis=1),
    "p99": lambda rows: np.percentile(rows, 99, axis=1),
}
ALIKE = (
    *("bench", "backend", "model_id", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "seed", "engine_flags"),
)
"""What two files should have in common, beside the options and the machine."""
OPTIONS_ASIDE = frozenset(
    {"label", "save_result", "save_detailed", "result_dir", "result_filename", "output_html"}
    | {"output_json", "disable_tqdm", "base_url", "host", "port", *ALIKE}
)


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both files."""

    name: str
    unit: str
    before: float
    after: float
    interval: tuple[float, float]
    """Of the relative change: 0.02 is 2% more."""
    is_more_better: bool
    threshold: float

    @property
    def change(self) -> float:
        return self.after / self.before - 1 if self.before else 0.0

    @property
    def verdict(self) -> str:
        low, high = self.interval
        is_clear = low > 0 or high < 0
        if not is_clear or abs(self.change) < self.threshold:
            return "same"
        return "better" if (self.change > 0) == self.is_more_better else "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    changes: tuple[Change, ...]
    differences: tuple[str, ...]
    """Settings that are not alike."""

    @property
    def regressions(self) -> list[str]:
        return [c.name for c in self.changes if c.verdict == "worse"]

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": "compare",
            "changes": [
                {
                    "name": c.name,
                    "unit": c.unit,
                    "before": c.before,
                    "after": c.after,
                    "change": c.change,
                    "interval": list(c.interval),
                    "verdict": c.verdict,
                }
                for c in self.changes
            ],
            "regressions": self.regressions,
            "differences": list(self.differences),
        }

    def lines(self) -> list[str]:
        """The table."""
        width = max(len(f"{c.name}, {c.unit}") for c in self.changes)
        lines = [f"{'':<{width}}{'A':>12}{'B':>12}{'change':>10}   interval of the change"]
        for c in self.changes:
            low, high = c.interval
            name = f"{c.name}, {c.unit}"
            lines.append(
                f"{name:<{width}}{c.before:>12.2f}{c.after:>12.2f}{c.change:>+10.1%}"
                f"   {low:>+7.1%} .. {high:>+7.1%}  {c.verdict}"
            )
        return lines


def compare(options: CompareOptions) -> Comparison:
    """Raises `ConfigError` for files that cannot be read or compared."""
    first, second = read(options.before), read(options.after)
    samples = samples_of(first), samples_of(second)
    rng = np.random.default_rng(options.seed)
    changes = []
    for name, (unit, is_more_better, statistics, before) in samples[0].items():
        if name not in samples[1]:
            continue
        after = samples[1][name][3]
        for statistic in statistics:
            fewest = FEWEST_FOR_P99 if statistic == "p99" else FEWEST_SAMPLES
            if min(len(before), len(after)) < fewest:
                continue
            ratio = _change(before, after, STATISTICS[statistic], options, rng)
            values = [float(STATISTICS[statistic](x[None, :])[0]) for x in (before, after)]
            changes.append(
                Change(
                    f"{statistic} {name}",
                    unit,
                    values[0],
                    values[1],
                    ratio,
                    is_more_better,
                    options.threshold / 100,
                )
            )
    if not changes:
        raise ConfigError(
            f"{options.before} and {options.after} have no figure in common of which both have at "
            f"least {FEWEST_SAMPLES} samples; files of `bench serve` and `bench latency` do"
        )
    return Comparison(tuple(changes), tuple(differences(first, second)))


def _change(
    before: Floats,
    after: Floats,
    statistic: Statistic,
    options: CompareOptions,
    rng: np.random.Generator,
) -> tuple[float, float]:
    drawn = [_draws(x, statistic, options.resamples, rng) for x in (before, after)]
    ratios = drawn[1] / np.maximum(drawn[0], 1e-12) - 1
    tail = (100 - options.confidence) / 2
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return float(low), float(high)


def _draws(values: Floats, statistic: Statistic, count: int, rng: np.random.Generator) -> Floats:
    """[count] the statistic of as many samples of the same size, drawn with replacement."""
    rows = max(1, DRAWN_AT_ONCE // len(values))
    parts = []
    for start in range(0, count, rows):
        shape = (min(rows, count - start), len(values))
        parts.append(statistic(values[rng.integers(0, len(values), size=shape)]))
    return np.concatenate(parts)


Sample = tuple[str, bool, tuple[str, ...], Floats]
"""Unit, whether more is better, which statistics, the values."""


def samples_of(content: dict[str, Any]) -> dict[str, Sample]:
    """What can be drawn from a file, by name."""
    found: dict[str, Sample] = {}
    times = ("mean", "p50", "p99")
    if "latencies" in content:
        found["batch latency"] = ("s", False, ("mean", "p50"), _floats(content["latencies"]))
    if "ttfts" in content:
        first = _floats(content["ttfts"]) * 1e3
        found["ttft"] = ("ms", False, times, first)
        whole = _whole_ms(content, first)
        tokens = _floats(content.get("output_lens", []))
        if whole is not None and len(tokens) == len(first):
            several = tokens > 1
            gaps = (whole - first)[several] / (tokens[several] - 1)
            found["tpot"] = ("ms", False, times, gaps)
        if whole is not None:
            found["e2el"] = ("ms", False, times, whole)
    # the last second is not a whole one
    by_second = _floats(content.get("output_tokens_by_second", []))[:-1]
    if len(by_second):
        found["output throughput"] = ("tokens/s", True, ("mean",), by_second)
    return found


def _whole_ms(content: dict[str, Any], first_ms: Floats) -> Floats | None:
    if "e2els" in content:
        return _floats(content["e2els"]) * 1e3
    gaps = content.get("itls")  # vLLM's detailed files
    if not isinstance(gaps, list) or len(gaps) != len(first_ms):
        return None
    return first_ms + _floats([sum(g) for g in gaps]) * 1e3


def _floats(values: Any) -> Floats:
    return np.asarray(values, dtype=np.float64)


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Settings that differ, for a person to judge."""
    pairs = [(name, first.get(name), second.get(name)) for name in ALIKE]
    options = first.get("options") or {}, second.get("options") or {}
    names = sorted((options[0].keys() & options[1].keys()) - OPTIONS_ASIDE)
    pairs += [(name, options[0][name], options[1][name]) for name in names]
    machines = first.get("machine") or {}, second.get("machine") or {}
    pairs += [(name, machines[0].get(name), machines[1].get(name)) for name in ("cpu", "cores")]
    return [f"{name}: {a} in A, {b} in B" for name, a, b in pairs if a != b]


def read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a result of a bench: it must be a JSON object")
    try:
        samples_of(content)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not a result of a bench: {error}") from None
    return content
