"""The machine of a benchmark, its arguments and its report. Imports nothing heavy."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PACKAGES = ("termgen", "torch", "transformers", "numpy", "xllamacpp", "accelerate")


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser described by a module's first line, with the flag that `write_report` reads."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--output-json", type=Path, help="write machine, settings and results here")
    return parser


def write_report(
    args: argparse.Namespace, results: Any, facts: dict[str, Any] | None = None
) -> None:
    """Write settings and results to the file that `--output-json` names, if given.

    facts: those of before the run, if the load of the machine then counts.
    """
    if args.output_json is not None:
        settings = {k: v for k, v in vars(args).items() if k != "output_json"}
        report = {"machine": facts or machine_facts(), "settings": settings, "results": results}
        args.output_json.write_text(json.dumps(report, indent=1, default=str) + "\n")


def machine_facts() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": memory_gib(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: v for name in PACKAGES if (v := package_version(name)) is not None},
        "load_average": os.getloadavg(),
    }


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def memory_gib() -> float:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return round(pages / 2**30, 1)


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name()


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Their number, p50, p99 and maximum; NaN without any."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0} | dict.fromkeys(("p50", "p99", "max"), float("nan"))
    last = len(ordered) - 1
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    at = {name: ordered[min(last, int(len(ordered) * share))] for name, share in shares.items()}
    return {"count": len(ordered), **at}


def print_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """A table; the names in the first row are its heads."""
    texts = [{name: _text(value) for name, value in row.items()} for row in rows]
    heads = list(texts[0]) if texts else []
    widths = [max(len(head), *(len(row.get(head, "")) for row in texts)) for head in heads]
    for row in ({head: head for head in heads}, *texts):
        cells = zip(heads, widths, strict=True)
        print("  ".join(f"{row.get(head, ''):>{width}}" for head, width in cells), flush=True)


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
