"""Themes from files, and the palette made of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.color import Color
from textual.theme import BUILTIN_THEMES
from tui_harness import shipped_themes

from termgen.errors import ConfigError
from termgen.tui.paint.palette import ROLES, Palette
from termgen.tui.paint.spans import Row
from termgen.tui.themes import theme_files as themes
from termgen.tui.themes.colour_check import (
    BLINDNESS,
    HIGH,
    READABLE,
    alike_roles,
    contrast,
    distance,
    simulate,
    weak_roles,
)
from termgen.tui.themes.theme_files import ThemeError, load_all, load_theme, parse_theme
from termgen.tui.themes.theme_shelf import ThemeShelf

MINIMAL = {
    "name": "mine",
    "colors": {"primary": "#0af", "foreground": "#ddd", "background": "#111"},
}
SHIPPED = sorted(path.stem for path in shipped_themes().glob("*.toml"))


def palette_of(path: Path) -> Palette:
    theme = load_theme(path)
    return Palette({**theme.to_color_system().generate(), **theme.variables})


def test_the_shipped_folder_is_found() -> None:
    assert themes.shipped_folder() == shipped_themes()
    assert {"termgen-dark", "termgen-light", "termgen-contrast", "termgen-colourblind"} <= set(
        SHIPPED
    )
    assert len(SHIPPED) >= 8


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_themes_can_be_read(name: str) -> None:
    path = shipped_themes() / f"{name}.toml"
    assert load_theme(path).name == name
    limits = {"readable": HIGH, "faint": READABLE} if "contrast" in name else {}
    assert [str(weak) for weak in weak_roles(palette_of(path), **limits)] == []


def test_the_colour_blind_theme_keeps_its_roles_apart() -> None:
    safe = palette_of(shipped_themes() / "termgen-colourblind.toml")
    assert [str(alike) for alike in alike_roles(safe)] == []
    assert len(list(alike_roles(palette_of(shipped_themes() / "termgen-dark.toml")))) > 3


def test_contrast_and_simulation_know_their_ends() -> None:
    black, white = Color(0, 0, 0), Color(255, 255, 255)
    assert contrast(black, white) == pytest.approx(21.0)
    assert contrast(Color.parse("#767676"), white) == pytest.approx(4.54, abs=0.01)
    assert distance(black, white) == pytest.approx(1.0, abs=0.001)
    assert distance(white, white) == 0
    red, green = Color.parse("#a00000"), Color.parse("#606000")
    for kind in BLINDNESS:
        for grey in (black, white):
            assert distance(simulate(grey, kind), grey) < 0.02
    seen = [distance(simulate(red, kind), simulate(green, kind)) for kind in BLINDNESS]
    assert seen[1] < distance(red, green) / 3, "red and green are alike with deuteranopia"
    assert seen[2] > distance(red, green) / 2, "and differ with tritanopia"


def test_what_is_hard_to_read_is_named() -> None:
    theme = parse_theme({**MINIMAL, "roles": {"muted": "#222222"}}, source="x")
    palette = Palette({**theme.to_color_system().generate(), **theme.variables})
    assert "`muted` on `background` has a contrast of 1.2, and needs 4.5" in [
        str(weak) for weak in weak_roles(palette)
    ]


@pytest.mark.parametrize("name", ["nord", "textual-light", "textual-dark", "gruvbox"])
def test_any_textual_theme_gives_every_role(name: str) -> None:
    theme = BUILTIN_THEMES[name]
    palette = Palette({**theme.to_color_system().generate(), **theme.variables})
    for role in ROLES:
        palette.style(role)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": ""}, "`name` is missing"),
        ({"dark": "yes"}, "`dark` must be true or false"),
        ({"colours": {}}, "unknown key 'colours'"),
        ({"colors": {"primary": "#fff"}}, "[colors] needs `foreground`"),
        ({"colors": {"primary": "#ggg"}}, "'#ggg' is not a colour"),
        ({"colors": {"primry": "#fff"}}, "[colors] has no `primry`"),
        ({"colors": 3}, "[colors] must be a table"),
        ({"roles": {"prefil": "#fff"}}, "[roles] has no `prefil`"),
        ({"roles": {"prefill": 3}}, "[roles] prefill must be a colour in quotes"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ThemeError) as error:
        parse_theme({**MINIMAL, **change}, source="mine.toml")
    assert str(error.value) == f"mine.toml: {reason}" or reason in str(error.value)
    assert str(error.value).startswith("mine.toml: ")


def test_roles_override_what_is_derived() -> None:
    theme = parse_theme({**MINIMAL, "roles": {"prefill": "#123456"}}, source="x")
    palette = Palette({**theme.to_color_system().generate(), **theme.variables})
    assert palette.color("prefill").hex == "#123456"
    assert palette.color("decode").hex == "#00AAFF"


def test_a_broken_file_leaves_the_others(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('name = "bad"\ndark = maybe\n')
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "huge.toml").write_text("#" * 70_000)
    (tmp_path / "good.toml").write_text(
        'name = "good"\n[colors]\nprimary = "red"\nforeground = "white"\nbackground = "black"\n'
    )
    loaded, errors = load_all(shipped_themes(), tmp_path, tmp_path / "missing")
    assert set(SHIPPED) | {"good"} == set(loaded)
    assert [str(error).split(":")[0] for error in errors] == [
        "bad.toml",
        "binary.toml",
        "huge.toml",
    ]
    assert "line 2" in str(errors[0])
    assert str(errors[1]) == "binary.toml: is not UTF-8 text"
    with pytest.raises(ThemeError, match="^gone.toml: No such file or directory$"):
        load_theme(tmp_path / "gone.toml")


def test_a_users_theme_replaces_one_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "dark.toml").write_text(
        'name = "termgen-dark"\n[colors]\nprimary = "#abcdef"\nforeground = "#fff"\n'
        'background = "#000"\n'
    )
    loaded, _ = load_all(shipped_themes(), tmp_path)
    assert loaded["termgen-dark"].primary == "#abcdef"


def test_a_name_is_checked_before_the_screen(tmp_path: Path) -> None:
    folders = (shipped_themes(), tmp_path)
    for name in (None, "termgen-light", "nord"):
        themes.check_name(name, *folders)
    with pytest.raises(ConfigError, match="theme must be one of .*termgen-dark.*, not 'nope'$"):
        themes.check_name("nope", *folders)
    (tmp_path / "mine.toml").write_text('name = "mine"\ndark = 3\n')
    with pytest.raises(ConfigError, match="not loaded: mine.toml: `dark` must be true or false"):
        themes.check_name("mine", *folders)


def test_palette_parses_roles_with_background_and_flags() -> None:
    palette = Palette({"foreground": "#eeeeee", "background": "#111111", "surface": "#222222"})
    style = palette.style("text@code/bu")
    assert style.bold and style.underline and not style.italic
    assert style.bgcolor is not None and style.bgcolor.triplet is not None
    assert style.bgcolor.triplet.hex == "#222222"
    assert palette.style("text@code/bu") is style
    with pytest.raises(KeyError):
        palette.style("no-such-role")


def test_strips_are_as_wide_as_asked() -> None:
    palette = Palette({})
    row: Row = (("日本", "text"), ("x", "muted/b"))
    assert palette.strip(row, 8).cell_length == 8
    assert palette.strip(row, 8).text == "日本x   "
    assert palette.strip(row, 3).cell_length == 3


def write_theme(path: Path, primary: str, name: str = "mine") -> None:
    path.write_text(
        f'name = "{name}"\n[colors]\nprimary = "{primary}"\nforeground = "#fff"\n'
        'background = "#000"\n'
    )


def test_files_are_read_again_when_they_are_saved(tmp_path: Path) -> None:
    path, shelf = tmp_path / "mine.toml", ThemeShelf(tmp_path, tmp_path / "missing")
    assert shelf.poll() == ([], [])
    write_theme(path, "#112233")
    fresh, errors = shelf.poll()
    assert [theme.primary for theme in fresh] == ["#112233"] and not errors
    assert shelf.poll() == ([], [])
    path.write_text("name = 3\n")
    fresh, errors = shelf.poll()
    assert not fresh and [str(error) for error in errors] == ["mine.toml: `name` is missing"]
    write_theme(tmp_path / "other.toml", "#445566", name="other")
    fresh, errors = shelf.poll()
    assert [theme.name for theme in fresh] == ["other"] and not errors, "told once"
    write_theme(path, "#112234")
    assert [theme.primary for theme in shelf.poll()[0]] == ["#112234"]
    path.unlink()
    assert shelf.poll() == ([], [])
