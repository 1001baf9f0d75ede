"""`termgen bench compare A B`: how much faster or slower B is, and how sure that is.

Reads the files of `bench serve` and `bench latency` (and vLLM's detailed ones). Intervals are
bootstrapped: requests, seconds or batches are drawn with replacement from each file. Times cover
answered requests only; the share of failed ones is compared separately. Knows nothing of servers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from termgen.bench.options import CompareOptions
from termgen.config import MAX_INT
from termgen.errors import ConfigError
from termgen.vocabulary.durations import took

Floats = npt.NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""Rows of samples -> one value per row."""
DRAWN_AT_ONCE = 4_000_000
FEWEST_SAMPLES = 8
FEWEST_FOR_P99 = 100
"""With fewer samples the interval is meaningless."""
FAILED = "failed requests"
MS = {"ms": 1.0, "s": 1000.0}
"""Milliseconds by unit of time."""
SAME_SHARE = 0.02
"""Largest difference of the shares of cached tokens that counts as none."""

STATISTICS: dict[str, Statistic] = {
    "mean": lambda rows: np.mean(rows, axis=1),
    "p50": lambda rows: np.percentile(rows, 50, axis=1),
    "p99": lambda rows: np.percentile(rows, 99, axis=1),
}
ALIKE = (
    *("bench", "backend", "model_id", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "seed", "engine_flags"),
)
"""Keys on which two files should agree, beside the options and the machine."""
OPTIONS_ASIDE = frozenset(
    {"label", "save_result", "save_detailed", "result_dir", "result_filename", "output_html"}
    | {"output_json", "disable_tqdm", "watch", "base_url", "host", "port", *ALIKE}
)


@dataclass(frozen=True, slots=True)
class Change:
    """One figure, compared between the two files."""

    name: str
    unit: str
    before: float
    after: float
    interval: tuple[float, float]
    """Confidence interval of the change."""
    is_more_better: bool
    threshold: float
    is_share: bool = False
    """The values are percentages of the requests."""

    @property
    def change(self) -> float:
        """Relative: 0.02 is 2% more. For shares the difference: 0.02 is two of 100 requests."""
        if self.is_share:
            return (self.after - self.before) / 100
        return self.after / self.before - 1 if self.before else 0.0

    @property
    def title(self) -> str:
        return self.name if self.unit in MS else f"{self.name}, {self.unit}"

    def words(self, value: float) -> str:
        """A value as tables show it: a time with its own unit."""
        return took(value * MS[self.unit]) if self.unit in MS else f"{value:.2f}"

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
    """Settings that differ."""

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
                    "change_is_difference": c.is_share,
                    "interval": list(c.interval),
                    "verdict": c.verdict,
                }
                for c in self.changes
            ],
            "regressions": self.regressions,
            "differences": list(self.differences),
        }

    def lines(self) -> list[str]:
        width = max(len(c.title) for c in self.changes)
        lines = [f"{'':<{width}}{'A':>12}{'B':>12}{'change':>10}   interval of the change"]
        for c in self.changes:
            low, high = c.interval
            sign = " pt" if c.is_share else "%"
            change = f"{c.change * 100:+.1f}{sign}"
            ends = [f"{end * 100:+.1f}{sign}" for end in (low, high)]
            lines.append(
                f"{c.title:<{width}}{c.words(c.before):>12}{c.words(c.after):>12}{change:>10}"
                f"   {ends[0]:>7} .. {ends[1]:>7}  {c.verdict}"
            )
        return lines


def compare(options: CompareOptions) -> Comparison:
    """Raises `ConfigError` for files that cannot be read or compared."""
    first, second = read(options.before), read(options.after)
    samples = samples_of(first), samples_of(second)
    rng = np.random.default_rng(options.seed)
    failed = _failed_change(first, second, options, rng)
    changes = [] if failed is None else [failed]
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
    if all(c.name == FAILED and c.verdict == "same" for c in changes):
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
    """[count] the statistic of `count` resamples of the same size, drawn with replacement."""
    rows = max(1, DRAWN_AT_ONCE // len(values))
    parts = []
    for start in range(0, count, rows):
        shape = (min(rows, count - start), len(values))
        parts.append(statistic(values[rng.integers(0, len(values), size=shape)]))
    return np.concatenate(parts)


def _failed_change(
    first: dict[str, Any],
    second: dict[str, Any],
    options: CompareOptions,
    rng: np.random.Generator,
) -> Change | None:
    """Change of the share of failed requests; None if a file lacks it or has too few requests.

    The threshold is 0: a server that fails requests answers the others sooner.
    """
    counts = [failures_of(content) for content in (first, second)]
    if counts[0] is None or counts[1] is None:
        return None
    shares, drawn = [], []
    for failed, total in (counts[0], counts[1]):
        if total < FEWEST_SAMPLES:
            return None
        shares.append(failed / total)
        drawn.append(rng.binomial(total, failed / total, size=options.resamples) / total)
    tail = (100 - options.confidence) / 2
    low, high = np.percentile(drawn[1] - drawn[0], [tail, 100 - tail])
    before, after = (100 * share for share in shares)
    interval = (float(low), float(high))
    return Change(FAILED, "%", before, after, interval, False, threshold=0.0, is_share=True)


def failures_of(content: dict[str, Any]) -> tuple[int, int] | None:
    """(failed requests, all requests); None if the file does not say."""
    if "completed" not in content or not ("failed" in content or "num_prompts" in content):
        return None
    done = int(content["completed"])
    failed = int(content["failed"]) if "failed" in content else int(content["num_prompts"]) - done
    if done < 0 or failed < 0 or done + failed > MAX_INT:
        raise ValueError(f"{done} requests completed and {failed} failed")
    return failed, done + failed


Sample = tuple[str, bool, tuple[str, ...], Floats]
"""(unit, more is better, statistics, values)."""


def samples_of(content: dict[str, Any]) -> dict[str, Sample]:
    """The figures of a file that have single samples, by name."""
    found: dict[str, Sample] = {}
    times = ("mean", "p50", "p99")
    if "latencies" in content:
        found["batch latency"] = ("s", False, ("mean", "p50"), _floats(content["latencies"]))
    if "ttfts" in content:
        first = _floats(content["ttfts"]) * 1e3
        answered = _answered(content, len(first))
        found["ttft"] = ("ms", False, times, first[answered])
        whole = _whole_ms(content, first)
        tokens = _floats(content.get("output_lens", []))
        if whole is not None and len(tokens) == len(first):
            several = answered & (tokens > 1)
            gaps = (whole - first)[several] / (tokens[several] - 1)
            found["tpot"] = ("ms", False, times, gaps)
        if whole is not None:
            found["e2el"] = ("ms", False, times, whole[answered])
    # the last second is incomplete
    by_second = _floats(content.get("output_tokens_by_second", []))[:-1]
    if len(by_second):
        found["output throughput"] = ("tokens/s", True, ("mean",), by_second)
    return found


def _answered(content: dict[str, Any], count: int) -> npt.NDArray[np.bool_]:
    """[count] true where the request succeeded: vLLM's arrays have zeros for failed requests."""
    answered = np.ones(count, dtype=bool)
    tokens = _floats(content.get("output_lens", []))
    if len(tokens) == count:
        answered &= tokens > 0
    errors = content.get("errors")
    if "e2els" not in content and isinstance(errors, list) and len(errors) == count:
        answered &= np.array([not error for error in errors], dtype=bool)
    return answered


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
    """Settings that differ, as lines of text."""
    pairs = [(name, first.get(name), second.get(name)) for name in ALIKE]
    options = _settings(first, "options"), _settings(second, "options")
    names = sorted((options[0].keys() & options[1].keys()) - OPTIONS_ASIDE)
    pairs += [(name, options[0][name], options[1][name]) for name in names]
    machines = _settings(first, "machine"), _settings(second, "machine")
    pairs += [(name, machines[0].get(name), machines[1].get(name)) for name in ("cpu", "cores")]
    found = [f"{name}: {a} in A, {b} in B" for name, a, b in pairs if a != b]
    shares = _cached_share(first), _cached_share(second)
    if shares[0] is not None and shares[1] is not None and abs(shares[0] - shares[1]) > SAME_SHARE:
        found.append(
            f"prompt tokens found in the prefix cache: {shares[0]:.1%} in A, {shares[1]:.1%} in B, "
            "so the times to first token are of different work"
        )
    return found


def _cached_share(content: dict[str, Any]) -> float | None:
    """Share of the prompts' tokens that were in the prefix cache; None if the file lacks it."""
    cached, total = content.get("total_cached_tokens"), content.get("total_input_tokens")
    is_known = isinstance(cached, int) and isinstance(total, int) and total > 0
    return cached / total if is_known else None  # type: ignore[operator]


def _settings(content: dict[str, Any], name: str) -> dict[str, Any]:
    """The object under this key; other programs may store something else there."""
    found = content.get(name)
    return found if isinstance(found, dict) else {}


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
        failures_of(content)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is not a result of a bench: {error}") from None
    return content
