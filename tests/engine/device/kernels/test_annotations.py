"""Only functions that Triton compiles lack types: mypy is configured to accept that here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import termgen.engine.device.kernels

FILES = sorted(Path(termgen.engine.device.kernels.__file__).parent.rglob("*.py"))


def find_untyped(source: str) -> list[str]:
    """Names of functions that are neither kernels nor annotated in full."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        if any(ast.unparse(d).startswith(("triton.jit", "gluon.jit")) for d in node.decorator_list):
            continue
        every = node.args
        args = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
        untyped = [a for a in args if a and not a.annotation and a.arg not in ("self", "cls")]
        if untyped or node.returns is None:
            found.append(node.name)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_launchers_are_annotated(file: Path) -> None:
    assert find_untyped(file.read_text(encoding="utf-8")) == []


def test_an_untyped_launcher_is_found() -> None:
    assert find_untyped("@triton.jit\ndef kernel(x, N: tl.constexpr): ...") == []
    assert find_untyped("def launch(x: int, y) -> None: ...") == ["launch"]
    assert find_untyped("def launch(*x: int, **y: int): ...") == ["launch"]
