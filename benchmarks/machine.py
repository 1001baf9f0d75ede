"""The machine of a benchmark, and its report. Imports nothing heavy."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = ("termgen", "torch", "transformers", "numpy", "xllamacpp", "accelerate")


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


def write_report(args: argparse.Namespace, facts: dict[str, Any], results: Any) -> None:
    """Write settings and results to the file that `--output-json` names, if given."""
    if args.output_json is not None:
        settings = {k: v for k, v in vars(args).items() if k != "output_json"}
        report = {"machine": facts, "settings": settings, "results": results}
        args.output_json.write_text(json.dumps(report, indent=1) + "\n")


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
