"""The public surface is `termgen.__all__`, cheap to import, and what the project files promise."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import termgen

ROOT = Path(__file__).resolve().parents[1]
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""SHA-256 of LICENSE-2.0.txt."""


def test_all_is_the_whole_surface_and_every_name_is_there() -> None:
    names = ["LLM", "PoolingKind", "PoolingParams", "SamplingParams", "StructuredOutputsParams"]
    names.append("__version__")
    assert termgen.__all__ == names
    for name in termgen.__all__:
        assert getattr(termgen, name) is not None
    assert set(termgen.__all__) <= set(dir(termgen))


def test_names_come_from_their_homes() -> None:
    from termgen.llm import LLM
    from termgen.vocabulary.sampling_params import SamplingParams

    assert termgen.LLM is LLM and termgen.SamplingParams is SamplingParams


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'AsyncLLM'"):
        termgen.AsyncLLM  # noqa: B018  # the lookup is the test


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert termgen.__version__ == project["version"]


def test_the_licence_is_the_one_that_the_project_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0" and project["license-files"] == ["LICENSE"]
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == APACHE_2, "LICENSE is not the unchanged text of apache.org"


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = (
        "import sys, termgen; termgen.SamplingParams(temperature=0.5);"
        "print(sorted({'torch', 'numpy', 'transformers', 'tokenizers'} & sys.modules.keys()))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert shown.stdout.strip() == "[]"


def lines_of(file: str) -> list[str]:
    lines = (ROOT / file).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    check_pins("constraints.txt", wanted)
    check_pins("constraints-clients.txt", lines_of("tests/other_clients.txt"))


def check_pins(file: str, wanted: list[str]) -> None:
    pins = dict(line.lower().split("==") for line in lines_of(file))
    for requirement in wanted:
        name = re.match(r"[\w-]+", requirement)
        assert name is not None
        key = name[0].lower()
        assert key in pins or key.replace("-", "_") in pins, f"{requirement} is not pinned"
    assert not any("+" in version for version in pins.values()), "no local version suffixes"


def test_ci_installs_and_tests_what_the_readme_says() -> None:
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    install, run = "install -c constraints.txt -e '.[test]'", "python -m pytest"
    assert f".venv/bin/pip {install} && .venv/bin/{run}" in readme
    others = "install -c constraints-clients.txt -r tests/other_clients.txt"
    assert f".venv-clients/bin/pip {others}" in readme
    assert "npm install --prefix tests/node" in readme
    ci = ci.replace("--quiet ", "").replace("--silent ", "")
    assert install in ci and others in ci and "npm install --prefix tests/node" in ci
    assert re.search(r'CLIENTS_PYTHON="\$clients/bin/python" .*/python" -m pytest', ci)


def test_the_public_ci_runs_the_same_script_on_the_oldest_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["check"]["steps"]
    assert steps[-1]["run"] == "bash .ci/run"
    [python] = [s["with"] for s in steps if s.get("uses", "").startswith("actions/setup-python")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={python['python-version']}"
