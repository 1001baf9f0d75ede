"""Imports allowed between folders: the engine's halves meet only in the messages of `step.py`.

`ROOMS` names the rooms of the house, most of them one folder (the longest matching prefix counts).
`MAY_IMPORT` lists what a room may import of termgen, at the top of a file, inside a function or for
typing only; `HOMES` and `LAZY` do the same for libraries. A module outside every room fails the
test until the table gives it one. No imports run in a circle, neither between files nor between
folders.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "termgen"
MOST_MODULES = 20
MOST_FLOORS = 7

ROOMS: dict[str, tuple[str, ...]] = {
    "vocabulary": ("errors", "config", "vocabulary", "client"),
    "system": ("system",),
    "files": ("library", "engine.gguf"),
    "grammar": ("engine.grammar",),
    "schedule": ("engine.schedule",),
    "text": ("engine.text",),
    "device config": ("engine.device.config",),
    "native": ("engine.device.native",),
    "sampling": ("engine.device.sampling",),
    "kernels": ("engine.device.kernels",),
    "attention": ("engine.device.attention",),
    "recurrent": ("engine.device.recurrent",),
    "layers": ("engine.device.layers",),
    "quantization": ("engine.device.quantization",),
    "host experts": ("engine.device.host_experts",),
    "models": ("engine.device.models",),
    "loader": ("engine.device.loader",),
    "drafting": ("engine.device.drafting",),
    "runner": ("engine.device.runner", "engine.device"),
    "executor": ("engine.loop.executor",),
    "loop": ("engine.loop",),
    "api": ("api",),
    "tools": ("tools",),
    "agent": ("agent",),
    "web": ("web",),
    "serving": ("server", "serving"),
    "clients": ("bench", "remote"),
    "trace": ("trace",),
    "chats": ("tui.chat.state", "tui.chat.saved", "tui.chat.asked", "tui.paint.sanitize"),
    "tui": ("tui",),
    "offline": ("llm",),
    "commands": ("__init__", "__main__", "commands", "engine.__init__"),
}
DEVICE = {room for room, (first, *_) in ROOMS.items() if first.startswith("engine.device.")}

GROUND = {"vocabulary", "system"}
MAY_IMPORT: dict[str, set[str]] = {
    "vocabulary": set(),
    "system": {"vocabulary"},
    "files": {"vocabulary"},
    "grammar": GROUND,
    "schedule": {"vocabulary", "grammar"},
    "text": {*GROUND, "files", "grammar"},
    "device config": {"vocabulary"},
    "native": {"files"},
    "sampling": {"vocabulary"},
    "kernels": {"vocabulary", "sampling"},
    "attention": {"device config", "vocabulary", "native", "kernels", "recurrent"},
    "recurrent": {"kernels"},
    "layers": {"device config", "native", "kernels"},
    "quantization": {"vocabulary", "files", "native", "kernels", "layers"},
    "host experts": {"vocabulary", "native", "kernels", "layers", "quantization"},
    "models": {"vocabulary", "device config", "kernels", "attention", "recurrent", "layers"},
    "loader": {
        *("vocabulary", "files", "device config", "attention"),
        *("layers", "quantization", "models"),
    },
    "drafting": {"vocabulary", "sampling", "attention", "kernels"},
    "runner": {"vocabulary", "files", *DEVICE - {"runner"}},
    "executor": {*GROUND, "loader", "runner"},
    "loop": {*GROUND, "files", "grammar", "schedule", "text", "executor"},
    "api": {"vocabulary"},
    "tools": {*GROUND, "api"},
    "web": {*GROUND, "tools"},
    "serving": {*GROUND, "api"},
    "clients": {*GROUND, "api"},
    "trace": {"vocabulary"},
    "chats": {*GROUND, "api", "tools"},
    "tui": {*GROUND, "api", "tools", "trace", "chats"},
    "agent": {*GROUND, "api", "tools", "chats"},
    "offline": {*GROUND, "files", "text", "loop"},
    "commands": set(ROOMS),
}
"""The rooms that a room may import. There is no cycle: each is below the rooms that import it."""

HOMES: dict[str, set[str]] = {
    "torch": {*DEVICE - {"device config"}, "executor"},
    "triton": {"kernels"},
    "llvmlite": {"native"},
    "safetensors": {"loader"},
    "transformers": {"text", "models", "loader"},
    "flashinfer": {"attention"},
    "flash_attn": {"attention"},
    "tokenizers": {"text"},
    "starlette": {"serving"},
    "uvicorn": {"serving"},
    "prometheus_client": {"serving"},
    "textual": {"tui"},
    "mcp": {"tools"},
    "mcp_types": {"tools"},
    "httpx2": {"tools"},
    "anyio": {"tools"},
    "aiohttp": {"web"},
    "textual_serve": {"web"},
    "rich": {"tui"},
    "acp": {"agent", "commands"},
}
"""The rooms that may import a library: running a model, its text, serving and painting each have
one home."""

WITHOUT_NUMPY = ("errors", "config", "system")
"""Modules that a program loads before it knows what it will do."""

LAZY: dict[str, set[str]] = {
    "files": {"huggingface_hub", "httpx"},
    "text": {"transformers"},
    "models": {"transformers"},
    "loader": {"transformers"},
    "attention": {"flashinfer", "flash_attn"},
    "tools": {"mcp", "mcp_types", "httpx2", "anyio", "pydantic"},
    "executor": {"torch"},
    "commands": {"acp"},
}
"""Libraries that only a function may import, so that a start does not load them before use."""


@dataclass(frozen=True)
class Import:
    importer: str
    target: str
    line: int
    at_import: bool
    """True if the import runs with its module: neither in a function nor for typing only."""


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


def room_of(module: str) -> str | None:
    matches = [
        (len(prefix), room)
        for room, prefixes in ROOMS.items()
        for prefix in prefixes
        if module == prefix or module.startswith(prefix + ".")
    ]
    return max(matches)[1] if matches else None


def find_breaches(package: Path) -> list[str]:
    """One line for each import that the tables forbid, and for each module without a room."""
    modules, imports = read_own_imports() if package == PACKAGE else read_imports(package)
    breaches = [f"{m} has no place in ROOMS" for m in sorted(modules) if room_of(m) is None]
    for found in imports:
        room = room_of(found.importer)
        if room is None:
            continue
        where = f"{found.importer}:{found.line} imports {found.target}"
        if found.target == "termgen" or found.target.startswith("termgen."):
            target = room_of(found.target.removeprefix("termgen").lstrip(".") or "__init__")
            if target is not None and target != room and target not in MAY_IMPORT[room]:
                breaches.append(f"{where}: {room} may not see {target}")
            continue
        library = found.target.split(".")[0]
        is_light = found.importer.split(".")[0] in WITHOUT_NUMPY
        if room not in HOMES.get(library, {room}) or (is_light and library == "numpy"):
            breaches.append(f"{where}: never in {room}")
        elif found.at_import and library in LAZY.get(room, set()):
            breaches.append(f"{where}: in {room} only inside a function")
    return breaches


@functools.cache
def read_own_imports() -> tuple[set[str], list[Import]]:
    return read_imports(PACKAGE)


def test_the_import_rule_holds() -> None:
    assert find_breaches(PACKAGE) == []


def test_the_tables_are_about_modules_that_exist() -> None:
    modules, _ = read_own_imports()
    for prefixes in ROOMS.values():
        for prefix in prefixes:
            assert any(m == prefix or m.startswith(prefix + ".") for m in modules), prefix
    assert ROOMS.keys() == MAY_IMPORT.keys()
    assert set(ROOMS) >= set().union(*HOMES.values(), LAZY)


def test_no_room_can_come_back_to_itself() -> None:
    assert list(TopologicalSorter(MAY_IMPORT | {"commands": set()}).static_order())


def find_circles(package: Path) -> list[list[str]]:
    """One circle of imports between files and one between folders, where there are any.

    A package's `__init__` belongs to its own folder. The doors at the top of termgen/ are a folder
    of front ends and vocabulary at once, and count as files alone.
    """
    modules, imports = read_own_imports() if package == PACKAGE else read_imports(package)
    packages = {module_name(path, package) for path in package.rglob("__init__.py")}

    def folder_of(module: str) -> str:
        is_package = module in packages or module.endswith("__init__")
        return module.removesuffix(".__init__") if is_package else module.rpartition(".")[0]

    files: dict[str, set[str]] = {}
    folders: dict[str, set[str]] = {}
    for found in imports:
        target = found.target.removeprefix("termgen.")
        if target == found.importer or target not in modules:
            continue
        files.setdefault(found.importer, set()).add(target)
        ends = folder_of(found.importer), folder_of(target)
        if all(ends) and ends[0] != ends[1]:
            folders.setdefault(ends[0], set()).add(ends[1])
    circles = []
    for graph in (files, folders):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circles.append(error.args[1])
    return circles


def test_no_imports_run_in_a_circle() -> None:
    assert find_circles(PACKAGE) == []


@pytest.mark.parametrize(
    ("sources", "circle"),
    [
        ({"a/x.py": "import termgen.a.y", "a/y.py": "import termgen.a.x"}, {"a.x", "a.y"}),
        (
            {"a/x.py": "import termgen.b.y", "b/y.py": "", "b/z.py": "import termgen.a.x"},
            {"a", "b"},
        ),
        (
            {"a/x.py": "def f():\n    import termgen.a.b.y", "a/b/y.py": "import termgen.a.x"},
            {"a.x", "a.b.y"},
        ),
    ],
)
def test_a_planted_circle_is_found(
    tmp_path: Path, sources: dict[str, str], circle: set[str]
) -> None:
    package = tmp_path / "termgen"
    for file, source in sources.items():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(source)
    assert circle in [set(found) for found in find_circles(package)]


def test_no_folder_is_too_full() -> None:
    """A person can take in twenty names at a glance."""
    counts = Counter(path.parent for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
    assert {str(folder): n for folder, n in counts.items() if n > MOST_MODULES} == {}


@pytest.mark.parametrize(
    ("file", "source", "words"),
    [
        ("engine/schedule/x.py", "import torch", "never in schedule"),
        ("engine/schedule/x.py", "def f():\n    import torch.nn", "never in schedule"),
        (
            "engine/schedule/x.py",
            "from termgen.engine.device.runner import model_runner",
            "not see runner",
        ),
        (
            "engine/schedule/x.py",
            "from termgen.engine.device import runner",
            "may not see runner",
        ),
        (
            "engine/device/runner/x.py",
            "from termgen.engine.schedule.kv_cache import KV",
            "may not see schedule",
        ),
        (
            "engine/device/models/y.py",
            "import termgen.engine.schedule.x",
            "may not see schedule",
        ),
        ("engine/device/kernels/x.py", "import termgen.engine.device.layers.y", "not see layers"),
        ("engine/device/config/x.py", "import torch", "never in device config"),
        ("engine/device/layers/x.py", "import triton", "never in layers"),
        ("vocabulary/request.py", "from termgen.system.x import X", "may not see system"),
        ("engine/loop/executor.py", "import torch", "only inside a function"),
        ("engine/text/tokenizer.py", "import transformers", "only inside a function"),
        ("tui/app.py", "def f():\n    import torch", "never in tui"),
        ("tui/app.py", "from termgen.engine.schedule.scheduler import S", "may not see schedule"),
        ("tui/app.py", "from termgen.server import run_server", "may not see serving"),
        ("tui/chat/state/x.py", "import textual", "never in chats"),
        ("tui/chat/saved/x.py", "from termgen.tui.app import A", "chats may not see tui"),
        ("server.py", "from termgen.engine.loop.engine import AsyncEngine", "may not see loop"),
        ("bench/x.py", "from termgen import LLM", "may not see commands"),
        ("bench/x.py", "import importlib\nimportlib.import_module('termgen.llm')", "see offline"),
        ("commands/cli.py", "import textual", "never in commands"),
        ("config.py", "import numpy as np", "never in vocabulary"),
        ("novelty.py", "", "novelty has no place"),
        (
            "engine/schedule/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
            "    from termgen.engine.device.runner.x import Y",
            "may not see runner",
        ),
    ],
)
def test_a_planted_breach_is_found(tmp_path: Path, file: str, source: str, words: str) -> None:
    package = tmp_path / "termgen"
    for name in (
        "engine/schedule/kv_cache.py",
        "engine/device/runner/model_runner.py",
        "engine/__init__.py",
        file,
    ):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    (package / "engine" / "device" / "runner" / "__init__.py").write_text("")
    if room_of(file.removesuffix(".py").replace("/", ".")) is not None:
        assert find_breaches(package) == [], "clean before the breach is planted"
    (package / file).write_text(source)
    breaches = find_breaches(package)
    assert len(breaches) == 1 and words in breaches[0], breaches


def test_allowed_imports_pass(tmp_path: Path) -> None:
    package = tmp_path / "termgen"
    sources = {
        "engine/loop/executor.py": "def f():\n    import torch, termgen.engine.device.runner.x",
        "engine/device/runner/x.py": "import torch\nfrom termgen.vocabulary.step import StepPlan",
        "engine/text/tokenizer.py": "import tokenizers\ndef f():\n    import transformers",
        "tui/app.py": "import textual\nfrom termgen.client import EngineClient",
        "commands/cli.py": "def f():\n    from termgen.tui.app import TermgenApp",
    }
    for file, source in sources.items():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(source)
    assert find_breaches(package) == []


def test_the_house_has_few_floors() -> None:
    """Rooms on the longest way down, the device half counted as one."""
    house: dict[str, set[str]] = {}
    for room, below in (MAY_IMPORT | {"commands": set(ROOMS) - {"commands"}}).items():
        name = "device" if room in DEVICE else room
        names = {"device" if other in DEVICE else other for other in below}
        house.setdefault(name, set()).update(names - {name})
    floors: dict[str, int] = {}
    for name in TopologicalSorter(house).static_order():
        floors[name] = 1 + max((floors[other] for other in house[name]), default=0)
    assert max(floors.values()) <= MOST_FLOORS, floors


def modules_of(*rooms: str) -> list[str]:
    """Full names of every module in these rooms."""
    modules, _ = read_own_imports()
    return [f"termgen.{m}".removesuffix(".__init__") for m in modules if room_of(m) in rooms]


@pytest.mark.parametrize(
    ("rooms", "absent"),
    [
        (
            ("vocabulary", "files", "grammar", "schedule", "text", "executor", "loop"),
            {"torch", "transformers"},
        ),
        (("tui",), {"torch", "transformers", "starlette", "uvicorn", "mcp"}),
        (("chats",), {"torch", "transformers", "textual", "rich", "starlette", "mcp"}),
        (("api", "serving"), {"torch", "transformers", "textual"}),
        (("clients",), {"torch", "transformers", "textual", "starlette"}),
        (("tools",), {"torch", "transformers", "textual", "starlette", "mcp", "httpx2"}),
    ],
)
def test_what_really_gets_loaded(rooms: tuple[str, ...], absent: set[str]) -> None:
    """The tables read source; this checks what the interpreter loads."""
    names = sorted(modules_of(*rooms))
    script = (
        f"import importlib, sys\nfor m in {names!r}: importlib.import_module(m)\n"
        f"print(sorted({absent!r} & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip() == "[]"


def test_a_server_elsewhere_loads_no_screen() -> None:
    script = (
        "import sys\nfrom termgen.commands.remote_command import RemoteHolder, RemoteTarget\n"
        "RemoteHolder(RemoteTarget('http://127.0.0.1:9'))\n"
        "print(sorted({'textual', 'torch'} & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip() == "[]"
