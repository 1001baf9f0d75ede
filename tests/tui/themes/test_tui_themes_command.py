"""`termgen themes`: the list, the check of a file, and the template of a new one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from termgen.commands import cli
from termgen.tui.paint.palette import ROLES, VARIABLE_PREFIX
from termgen.tui.themes import themes_command
from termgen.tui.themes.theme_files import load_theme, shipped_folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(themes_command, "user_folder", lambda: tmp_path / "themes")
    return tmp_path / "themes"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["themes", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_list_names_every_theme_and_what_is_broken(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    folder.mkdir()
    (folder / "bad.toml").write_text("name = 3\n")
    run(capsys, "new", "mine")
    code, out, err = run(capsys)
    assert code == 0
    assert "termgen-dark (default)" in out and "termgen-contrast-light" in out and "nord" in out
    assert re.search(rf"^mine +dark +{re.escape(str(folder / 'mine.toml'))}$", out, re.M)
    assert err == "termgen: not usable: bad.toml: `name` is missing\n"


@pytest.mark.parametrize("like", ["termgen-dark", "termgen-riso", "termgen-16", "gruvbox"])
def test_a_new_theme_is_a_good_file_in_every_line(
    capsys: pytest.CaptureFixture[str], folder: Path, like: str
) -> None:
    code, out, _ = run(capsys, "new", "mine", "--like", like)
    path = folder / "mine.toml"
    assert code == 0 and out.startswith(f"{path}\n")
    assert run(capsys, "check", str(path))[1].startswith("mine: a ")
    path.write_text(re.sub(r"^# (?=[a-z-]+ = )", "", path.read_text(), flags=re.M))
    theme = load_theme(path)
    assert {VARIABLE_PREFIX + role for role in ROLES} <= set(theme.variables)
    assert theme.ansi == (like == "termgen-16")
    if like == "termgen-riso":
        assert theme.variables["tg-prefill"] == "#c8175e" and not theme.dark


def test_nothing_is_written_over(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    folder.mkdir()
    (folder / "mine.toml").write_text("# precious\n")
    for name, reason in (
        ("mine", "exists already"),
        ("termgen-dark", "there is a theme 'termgen-dark' already"),
        ("../x", "a theme is named by letters, digits, - and _, not '../x'"),
    ):
        code, out, err = run(capsys, "new", name)
        assert (code, out) == (2, "") and reason in err and err.count("\n") == 1
    assert (folder / "mine.toml").read_text() == "# precious\n"
    assert "no theme 'nope' to begin with" in run(capsys, "new", "a", "--like", "nope")[2]


def test_check_says_what_is_wrong_and_what_is_weak(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "x.toml"
    colors = '[colors]\nprimary = "#fff"\nforeground = "#fff"\nbackground = "#000"\n'
    path.write_text(f'name = "x"\n{colors}[roles]\nlink = "#111111"\n')
    code, out, _ = run(capsys, "check", str(path))
    assert code == 0 and f"1 of {len(ROLES)} roles set" in out
    assert "hard to read: `link` on `background` has a contrast of 1.1, and needs 4.5" in out
    assert "look alike with deuteranopia" in out
    path.write_text(f'name = "x"\n{colors}[roles]\nlnk = "#111111"\n')
    code, out, err = run(capsys, "check", str(path))
    assert (code, out, err) == (2, "", "termgen: error: x.toml: [roles] has no `lnk`\n")
    assert "x.toml" not in run(capsys, "check", str(shipped_folder() / "termgen-dark.toml"))[1]
    assert "gone.toml" in run(capsys, "check", str(tmp_path / "gone.toml"))[2]
