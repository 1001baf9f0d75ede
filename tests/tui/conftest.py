"""Screens under test never animate, and their styles are read once."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ["TEXTUAL_ANIMATIONS"] = "none"  # read when textual is imported
for name in ("NO_COLOR", "DISPLAY", "WAYLAND_DISPLAY", "TMUX"):  # nor reach a clipboard
    os.environ.pop(name, None)


@pytest.fixture(scope="session", autouse=True)
def _styles_read_once() -> Any:
    """Share parsed style sheets between apps. Each app would parse its style sheets again for every
    theme, which takes a seventh of the time; the result depends on the text and the colours alone,
    and is never changed."""
    from textual.css.stylesheet import Stylesheet

    read = Stylesheet._parse_rules
    known: dict[Any, Any] = {}

    def read_once(self: Stylesheet, *args: Any, **options: Any) -> Any:
        key = (tuple(self._variables.items()), args, tuple(options.items()))
        if key not in known:
            known[key] = read(self, *args, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", read_once)
        yield
