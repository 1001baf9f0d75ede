"""Prometheus metrics of compiling grammars, read from the engine when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from termgen.vocabulary.grammar_times import BOUNDS_S, GrammarTotals


class GrammarMetrics(Collector):
    def __init__(self, model: str, totals: Callable[[], GrammarTotals]) -> None:
        self._model = model
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        totals = self._totals()
        times = HistogramMetricFamily(
            "termgen_grammar_compile_seconds",
            "Compiling what answers must look like; what is cached is not compiled again",
            labels=["model"],
        )
        names = [*map(floatToGoString, BOUNDS_S), "+Inf"]
        buckets = list(zip(names, accumulate(totals.counts), strict=True))
        times.add_metric([self._model], buckets, totals.seconds)
        yield times
        failures = CounterMetricFamily(
            "termgen_grammar_compile_failures",
            "Grammars that did not compile, by the code of the error",
            labels=["model", "reason"],
        )
        for reason, count in sorted(totals.failures.items()):
            failures.add_metric([self._model, reason], count)
        yield failures
