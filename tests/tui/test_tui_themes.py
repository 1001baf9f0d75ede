"""Themes from files, and the palette made of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.color import Color
from textual.theme import BUILTIN_THEMES
from tui_harness import shipped_themes

from termgen.errors import ConfigError
from termgen.tui import themes
from termgen.tui.palette import ROLES, Palette
from termgen.tui.spans import Row
from termgen.tui.themes import ThemeError, load_all, load_theme, parse_theme

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


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_themes_are_complete_and_readable(name: str) -> None:
    path = shipped_themes() / f"{name}.toml"
    assert load_theme(path).name == name
    palette = palette_of(path)
    background = palette.color("background")
    for role, least in (("text", 7.0), ("muted", 4.0), ("accent", 4.0), ("bad", 4.0)):
        assert contrast(palette.color(role), background) >= least, role
    for role in ("prefill", "decode", "kv-active", "kv-shared", "kv-cached"):
        assert contrast(palette.color(role), background) >= 2.5, role


def test_high_contrast_is_high() -> None:
    palette = palette_of(shipped_themes() / "termgen-contrast.toml")
    background = palette.color("background")
    for role in ROLES - {"background", "surface", "code", "select", "border", "kv-free"}:
        assert contrast(palette.color(role), background) >= 7.0, role


@pytest.mark.parametrize("name", ["nord", "textual-light", "textual-dark", "gruvbox"])
def test_any_textual_theme_gives_every_role(name: str) -> None:
    theme = BUILTIN_THEMES[name]
    palette = Palette({**theme.to_color_system().generate(), **theme.variables})
    for role in ROLES:
        palette.style(role)


def contrast(one: Color, other: Color) -> float:
    """The ratio of WCAG 2."""

    def luminance(color: Color) -> float:
        parts = [
            c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in color.normalized
        ]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


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
