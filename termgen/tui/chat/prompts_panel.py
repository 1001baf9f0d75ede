"""The prompts that the user keeps; those that have every word that is typed."""

from __future__ import annotations

from collections.abc import Sequence

from textual.binding import Binding
from textual.content import Content

from termgen.errors import RequestError
from termgen.tui.chat.dialogue import Dialogue
from termgen.tui.chat.lists.search_panel import SearchPanel
from termgen.tui.chat.state.doubts import Doubts
from termgen.tui.chat.state.prompt_library import (
    KeptPrompt,
    folder,
    keep,
    kept_prompts,
    unfilled,
)
from termgen.tui.chat.view import ChatView
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


class KeptPrompts:
    """`/prompts`, which takes a kept prompt or keeps a question."""

    def __init__(self, view: ChatView, dialogue: Dialogue, doubts: Doubts) -> None:
        self._view = view
        self._dialogue = dialogue
        self._doubts = doubts

    def run_command(self, argument: str) -> None:
        """`/prompts`: take a kept prompt; `/prompts save NAME`: keep the last (or marked)
        question."""
        word, _, name = argument.partition(" ")
        if word == "save":
            self._keep(name.strip())
            return
        kept = kept_prompts()
        if kept:
            self._view.screen.app.push_screen(PromptsPanel(kept, argument), self._use)
        else:
            where = clean_line(f"{folder()}")
            self._view.note(f"No prompt is kept yet: `/prompts save NAME`, or files in {where}.")

    def _use(self, kept: KeptPrompt | None) -> None:
        prompt = self._view.prompt
        if kept is not None:
            prompt.put_away()
            prompt.set_text(kept.text)
            prompt.select_variable()
            self._doubts.variables = unfilled(kept.text)
        prompt.focus()

    def _keep(self, name: str) -> None:
        turn = self._dialogue.current
        if turn is None:
            self._view.warn("there is no question to keep yet")
            return
        try:
            path = keep(name, turn.question)
        except RequestError as error:
            self._view.refuse(error)
        else:
            self._view.note(f"Kept as {clean_line(f'{path}')}.")


def _line(prompt: KeptPrompt) -> Content:
    name = (clean_line(prompt.name), "bold")
    return Content.assemble(name, (f"\n  {clean_line(prompt.text[:SHOWN_CHARS])}", "dim"))
