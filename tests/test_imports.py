"""Who may import whom. The two halves of the engine never meet but in `step.py`'s messages.

`GROUPS` gives every module a place (the longest matching prefix counts), and `MAY_IMPORT` says what
a place may see of termgen, whether at the top of a file, inside a function or for typing only.
`NEVER` and `NEVER_AT_IMPORT` do the same for libraries. A new module that matches nothing fails the
test until the table says where it belongs.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "termgen"

GROUPS: dict[str, tuple[str, ...]] = {
    "errors": ("errors", "durations"),
    "config": ("config", "setting_types"),
    "vocabulary": (
        "engine.__init__",
        "engine.sampling_params",
        "engine.structured_outputs",
        "engine.token_mask",
        "engine.tool_format",
        "engine.request",
        "engine.step",
        "engine.events",
        "engine.delivery",
        "engine.grammar_times",
        "engine.memory_ledger",
        "engine.gguf_file",
        "engine.gguf_bytes",
        "engine.startup_phases",
    ),
    "client": ("client", "telemetry", "helper_process", "turns", "waiting"),
    "catalog": ("catalog", "fetch", "local_models"),
    "host": ("engine",),  # whatever of the engine is not named elsewhere
    "device": (
        "engine.runner",
        "engine.attention",
        "engine.models",
        "engine.layers",
        "engine.sampling",
        "engine.loader",
        "engine.quantization",
        "engine.kernels",
    ),
    "executor": ("engine.executor",),
    "core": ("engine.core", "engine.pulse", "engine.sleep"),
    "engine": ("engine.engine", "engine.sync_engine", "engine.startup"),
    "api": ("api",),
    "server": ("server", "serving"),
    "bench": ("bench",),
    "remote": ("remote",),
    "tui": ("tui",),
    "root": (
        "__init__",
        "__main__",
        "cli",
        "arguments",
        "settings",
        "progress",
        "launch",
        "bench_command",
        "bench_watch",
        "generate",
        "generate_format",
        "models_command",
        "model_shelf",
        "top_command",
        "remote_command",
        "inline_command",
        "llm",
        "exit_codes",
    ),
}

FRONT_END = {"errors", "config", "vocabulary", "client"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "vocabulary": {"errors", "config"},
    "client": {"errors", "vocabulary"},
    "catalog": {"errors"},
    "host": {"errors", "config", "vocabulary", "client"},
    "device": {"errors", "config", "vocabulary"},
    "executor": {"errors", "config", "vocabulary", "device"},
    "core": {"errors", "config", "vocabulary", "host", "executor"},
    "engine": {*FRONT_END, "catalog", "host", "device", "executor", "core"},
    "api": FRONT_END,
    "server": {*FRONT_END, "api"},
    "bench": {*FRONT_END, "api"},
    "remote": FRONT_END,
    "tui": {*FRONT_END, "api"},
    "root": set(GROUPS),
}

HEAVY = frozenset({"torch", "triton", "transformers", "tokenizers", "numpy", "textual", "rich"})
SERVING = frozenset({"starlette", "uvicorn", "prometheus_client"})
SCREEN = frozenset({"textual", "rich"})
DEVICE = frozenset({"torch", "triton", "safetensors"})

NEVER: dict[str, frozenset[str]] = {
    "errors": HEAVY | SERVING | DEVICE,
    "config": HEAVY | SERVING | DEVICE,
    "vocabulary": DEVICE | SERVING | SCREEN | {"transformers"},
    "client": DEVICE | SERVING | SCREEN | {"transformers"},
    "catalog": DEVICE | SERVING | SCREEN | {"transformers"},
    "host": DEVICE | SCREEN,
    "device": SERVING | SCREEN | {"tokenizers"},
    "executor": SERVING | SCREEN | {"transformers", "tokenizers"},
    "core": DEVICE | SERVING | SCREEN | {"transformers", "tokenizers"},
    "engine": DEVICE | SERVING | SCREEN | {"transformers", "tokenizers"},
    "api": DEVICE | SERVING | SCREEN | {"transformers", "tokenizers"},
    "server": DEVICE | SCREEN | {"transformers", "tokenizers"},
    "bench": DEVICE | SCREEN | {"transformers", "tokenizers"},
    "remote": DEVICE | SERVING | SCREEN | {"transformers", "tokenizers"},
    "tui": DEVICE | SERVING | {"transformers", "tokenizers"},
    "root": DEVICE | SERVING | SCREEN | {"transformers", "tokenizers"},
}
"""Libraries a place must not import anywhere. What runs a model, serves or paints has one home."""

NEVER_AT_IMPORT: dict[str, frozenset[str]] = {
    "catalog": HEAVY | {"huggingface_hub", "httpx"},
    "host": frozenset({"transformers"}),
    "device": frozenset({"transformers", "flashinfer", "flash_attn"}),
    "executor": DEVICE,
}
"""Libraries that only a function may import, so that nobody pays for them before it is called."""


@dataclass(frozen=True)
class Import:
    importer: str
    target: str
    line: int
    at_import: bool
    """Runs when the module is imported: neither in a function nor for typing only."""


def module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts if len(parts) == 1 or parts[-1] != "__init__" else parts[:-1])


def read_imports(package: Path) -> tuple[set[str], list[Import]]:
    """Every module below `package` (a folder named termgen), and every import in them."""
    files = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    if (package / "engine" / "__init__.py").exists():
        files["engine.__init__"] = files.pop("engine")
    found = []
    for name, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for node, at_import in _walk(tree, at_import=True):
            for target in _targets(node, set(files)):
                found.append(Import(name, target, getattr(node, "lineno", 0), at_import))
    return set(files), found


def _walk(node: ast.AST, *, at_import: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield child, at_import
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.body:
                yield statement, False
                yield from _walk(statement, at_import=False)
            for statement in child.orelse:
                yield statement, at_import
                yield from _walk(statement, at_import=at_import)
        else:
            yield from _walk(child, at_import=at_import and not is_function)


def _targets(node: ast.AST, modules: set[str]) -> list[str]:
    """Full names a node imports; `from termgen.x import y` is termgen.x.y if that is a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: imports are absolute"
        base = node.module or ""
        names = [f"{base}.{alias.name}" for alias in node.names]
        if names == ["termgen.__version__"]:  # a constant; the package itself loads nothing
            return []
        return sorted({n if n.removeprefix("termgen.") in modules else base for n in names})
    if isinstance(node, ast.Call):
        called = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
        first = node.args[0] if called.endswith("import_module") and node.args else None
        return [first.value] if isinstance(first, ast.Constant) else []
    return []


def group_of(module: str) -> str | None:
    matches = [
        (len(prefix), group)
        for group, prefixes in GROUPS.items()
        for prefix in prefixes
        if module == prefix or module.startswith(prefix + ".")
    ]
    return max(matches)[1] if matches else None


def find_breaches(package: Path) -> list[str]:
    """One line for each import that the tables forbid, and for each module without a place."""
    modules, imports = read_own_imports() if package == PACKAGE else read_imports(package)
    breaches = [f"{m} has no place in GROUPS" for m in sorted(modules) if group_of(m) is None]
    for found in imports:
        group = group_of(found.importer)
        if group is None:
            continue
        where = f"{found.importer}:{found.line} imports {found.target}"
        if found.target == "termgen" or found.target.startswith("termgen."):
            target = group_of(found.target.removeprefix("termgen").lstrip(".") or "__init__")
            if target is not None and target != group and target not in MAY_IMPORT[group]:
                breaches.append(f"{where}: {group} may not see {target}")
            continue
        library = found.target.split(".")[0]
        if library in NEVER[group]:
            breaches.append(f"{where}: never in {group}")
        elif found.at_import and library in NEVER_AT_IMPORT.get(group, frozenset()):
            breaches.append(f"{where}: in {group} only inside a function")
    return breaches


@functools.cache
def read_own_imports() -> tuple[set[str], list[Import]]:
    return read_imports(PACKAGE)


def test_the_import_rule_holds() -> None:
    assert find_breaches(PACKAGE) == []


def test_the_tables_are_about_modules_that_exist() -> None:
    modules, _ = read_own_imports()
    for prefixes in GROUPS.values():
        for prefix in prefixes:
            assert any(m == prefix or m.startswith(prefix + ".") for m in modules), prefix
    assert GROUPS.keys() == MAY_IMPORT.keys() == NEVER.keys()


@pytest.mark.parametrize(
    ("file", "source", "words"),
    [
        ("engine/scheduler.py", "import torch", "never in host"),
        ("engine/scheduler.py", "def f():\n    import torch.nn", "never in host"),
        ("engine/scheduler.py", "from termgen.engine.runner import model_runner", "not see device"),
        ("engine/scheduler.py", "from termgen.engine import runner", "may not see device"),
        ("engine/runner/x.py", "from termgen.engine.kv_cache import KV", "may not see host"),
        ("engine/layers/x.py", "import termgen.engine.scheduler", "may not see host"),
        ("engine/request.py", "from termgen.client import X", "may not see client"),
        ("engine/executor.py", "import torch", "only inside a function"),
        ("engine/tokenizer.py", "import transformers", "only inside a function"),
        ("tui/app.py", "def f():\n    import torch", "never in tui"),
        ("tui/app.py", "from termgen.engine.scheduler import S", "may not see host"),
        ("tui/app.py", "from termgen.server import run_server", "may not see server"),
        ("server.py", "from termgen.engine.engine import AsyncEngine", "may not see engine"),
        ("bench/x.py", "from termgen import LLM", "may not see root"),
        ("bench/x.py", "import importlib\nimportlib.import_module('termgen.llm')", "see root"),
        ("cli.py", "import textual", "never in root"),
        ("config.py", "import numpy as np", "never in config"),
        ("novelty.py", "", "novelty has no place"),
        (
            "engine/scheduler.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
            "    from termgen.engine.runner.x import Y",
            "may not see device",
        ),
    ],
)
def test_a_planted_breach_is_found(tmp_path: Path, file: str, source: str, words: str) -> None:
    package = tmp_path / "termgen"
    for name in ("engine/kv_cache.py", "engine/runner/model_runner.py", "engine/__init__.py", file):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    (package / "engine" / "runner" / "__init__.py").write_text("")
    if group_of(file.removesuffix(".py").replace("/", ".")) is not None:
        assert find_breaches(package) == [], "clean before the breach is planted"
    (package / file).write_text(source)
    breaches = find_breaches(package)
    assert len(breaches) == 1 and words in breaches[0], breaches


def test_allowed_imports_pass(tmp_path: Path) -> None:
    package = tmp_path / "termgen"
    sources = {
        "engine/executor.py": "def start():\n    import torch\n    import termgen.engine.runner.x",
        "engine/runner/x.py": "import torch\nfrom termgen.engine.step import StepPlan",
        "engine/tokenizer.py": "import tokenizers\ndef f():\n    import transformers",
        "tui/app.py": "import textual\nfrom termgen.client import EngineClient",
        "cli.py": "def f():\n    from termgen.tui.app import TermgenApp",
    }
    for file, source in sources.items():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(source)
    assert find_breaches(package) == []


def modules_of(*groups: str) -> list[str]:
    """Full names of every module in these groups."""
    modules, _ = read_own_imports()
    return [f"termgen.{m}".removesuffix(".__init__") for m in modules if group_of(m) in groups]


@pytest.mark.parametrize(
    ("groups", "absent"),
    [
        (("vocabulary", "client", "host", "executor", "core"), {"torch", "transformers"}),
        (("tui",), {"torch", "transformers", "starlette", "uvicorn"}),
        (("api", "server"), {"torch", "transformers", "textual"}),
        (("bench", "remote"), {"torch", "transformers", "textual", "starlette"}),
    ],
)
def test_what_really_gets_loaded(groups: tuple[str, ...], absent: set[str]) -> None:
    """The tables read source; this asks the interpreter."""
    names = sorted(modules_of(*groups))
    script = (
        f"import importlib, sys\nfor m in {names!r}: importlib.import_module(m)\n"
        f"print(sorted({absent!r} & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip() == "[]"
