"""Bench results as a table, and as JSON with the machine and settings they were measured with."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from termgen.client import ModelInfo
from termgen.config import EngineConfig
from termgen.errors import ConfigError

PACKAGES = ("termgen", "torch", "transformers", "numpy", "tokenizers")

NOTE = (
    "greedy; every request runs to its full length (ignore_eos); tokens become text as for any "
    "client unless skip_tokenizer_init is set"
)


class Result(Protocol):
    """The result of `latency` or `throughput`."""

    def as_json(self) -> dict[str, Any]: ...
    def rows(self) -> list[tuple[str, str]]: ...


def table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Two aligned columns under a title."""
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    return "\n".join([title, "-" * len(title), *lines])


def draft_figures(drafted: float, kept: float, made: float) -> dict[str, float]:
    """The share of the guessed tokens that stayed, and how many tokens a step gave a request, its
    first one included. made: output tokens."""
    found = {"kept_share": kept / drafted} if drafted else {}
    if made > kept:  # a step gives one token more than the guesses that stayed
        found["tokens_per_step"] = made / (made - kept)
    return found


def draft_rows(figures: Mapping[str, float], drafted: float) -> list[tuple[str, str]]:
    """Rows of a table about `draft_figures`."""
    rows = []
    if "kept_share" in figures:
        words = f"{figures['kept_share']:.1%} of {drafted:,.0f}"
        rows.append(("guessed tokens kept", words))
    if "tokens_per_step" in figures:
        rows.append(("tokens a step", f"{figures['tokens_per_step']:.2f} for each request in it"))
    return rows


def summary(name: str, model: ModelInfo, result: Result) -> str:
    quantization = f", {model.quantization}" if model.quantization else ""
    where = (
        ("model", model.model_id),
        ("weights", f"{model.dtype}{quantization}"),
        ("device", f"{model.device_name} ({model.device})"),
    )
    return table(f"termgen bench {name}", [*result.rows(), *where]) + f"\n\n({NOTE})"


def document(
    name: str, model: ModelInfo, result: Result, *, config: EngineConfig, options: Any
) -> dict[str, Any]:
    """The JSON object: figures at top level, then everything needed to repeat the run."""
    return {
        **result.as_json(),
        "bench": name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "note": NOTE,
        "options": dataclasses.asdict(options),
        "engine_config": dataclasses.asdict(config),
        "model": {
            "id": model.model_id,
            "root": model.root,
            "architecture": model.architecture,
            "dtype": model.dtype,
            "quantization": model.quantization,
            "device": model.device,
            "device_name": model.device_name,
            "max_model_len": model.max_model_len,
            "num_blocks": model.num_blocks,
            "block_size": model.block_size,
        },
        "machine": machine(),
        "versions": versions(),
        "git_sha": git_sha(),
    }


def check_writable(path: str | None, *, name: str = "output_json") -> None:
    """Check before the measurement, not after it. `name`: of the setting. Raises `ConfigError`."""
    if path is None:
        return
    folder = Path(path).resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).is_dir():
        raise ConfigError(f"{name}: {path} cannot be written", param=name)


def write(path: str, content: Mapping[str, Any], *, name: str = "output_json") -> None:
    """Write JSON atomically: a reader never sees half a file. Raises `ConfigError`."""
    write_text(path, json.dumps(content, indent=2) + "\n", name=name)


def write_text(path: str, text: str, *, name: str) -> None:
    """Write a file atomically. `name`: of the setting. Raises `ConfigError`."""
    target = Path(path)
    partial = target.with_name(target.name + ".part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(
            f"{name}: {path} cannot be written: {error.strerror}", param=name
        ) from None


def machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # run from a source tree without installing
            continue
    return found


def git_sha() -> str | None:
    """Commit of the source tree, with `-dirty` for local changes; None when installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        shown = subprocess.run(
            [
                "git",
                "-C",
                str(root),
                "describe",
                "--always",
                "--dirty",
                "--abbrev=40",
                "--exclude=*",
            ],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.stdout.strip() or None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
