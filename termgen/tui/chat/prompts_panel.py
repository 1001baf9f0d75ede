"""The prompts that the user keeps; those that have every word that is typed."""

from __future__ import annotations

from collections.abc import Sequence

from textual.binding import Binding
from textual.content import Content

from termgen.tui.chat.search_panel import SearchPanel
from termgen.tui.chat.state.prompt_library import KeptPrompt
from termgen.tui.keys.keymap import brief_key_of
from termgen.tui.paint.sanitize import clean_line

SHOWN_CHARS = 300


class PromptsPanel(SearchPanel[KeptPrompt]):
    """Gives back a prompt."""

    BINDINGS = [
        Binding("up", "move(-1)", "Before", id="prompts.before", tooltip="The prompt before"),
        Binding("alt+p,down", "move(1)", "Next", id="prompts.next", tooltip="The next prompt"),
        Binding(
            "escape",
            "dismiss",
            "Close",
            id="prompts.close",
            tooltip="Close, and keep what the prompt has",
        ),
    ]
    MAX_CHARS = 200

    def __init__(self, prompts: Sequence[KeptPrompt], wanted: str = "") -> None:
        super().__init__("prompts", wanted)
        self._prompts = prompts

    def words(self) -> tuple[str, str, str]:
        following, close = (brief_key_of(self, f"prompts.{name}") for name in ("next", "close"))
        return "kept prompts", f"⏎ take it · {following} next · {close} close", "search"

    def find(self, wanted: str) -> tuple[Sequence[tuple[KeptPrompt, Content]], int]:
        words = wanted.lower().split()
        hits = [
            prompt
            for prompt in self._prompts
            if all(word in f"{prompt.name}\n{prompt.text}".lower() for word in words)
        ]
        return [(hit, _line(hit)) for hit in hits], 0


def _line(prompt: KeptPrompt) -> Content:
    name = (clean_line(prompt.name), "bold")
    return Content.assemble(name, (f"\n  {clean_line(prompt.text[:SHOWN_CHARS])}", "dim"))
