"""The values in /metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

MODEL = {"model": "fake/model-1"}


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """(name, labels) -> value, read by the library's own strict parser."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[f"termgen_{name}", frozenset({**MODEL, **labels}.items())]
