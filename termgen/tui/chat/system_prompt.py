"""The system prompt of the chat: shown, set and removed by `/system` and in its panel."""

from __future__ import annotations

from termgen.tui.chat.dialogue import Dialogue
from termgen.tui.chat.panels import SystemPromptPanel
from termgen.tui.chat.view import ChatView


class SystemPrompt:
    def __init__(self, view: ChatView, dialogue: Dialogue) -> None:
        self._view = view
        self._dialogue = dialogue

    @property
    def text(self) -> str | None:
        return self._dialogue.conversation.system_prompt

    def set(self, text: str | None) -> None:
        self._dialogue.conversation.system_prompt = text
        self._dialogue.save_settings()

    def run_command(self, argument: str) -> None:
        """`/system`: show, set or remove the system prompt."""
        if argument == "off":
            self.set(None)
            self._view.note("The system prompt is removed.")
        elif argument:
            self.set(argument)
            self._view.note(f"System prompt: {argument}")
        elif self.text:
            self._view.note(f"System prompt: {self.text}")
        else:
            key = self._view.key("chat.system")
            self._view.note(f"There is no system prompt. `/system TEXT` or {key} sets one.")

    def open_panel(self) -> None:
        def use(text: str | None) -> None:
            if text is not None:
                self.set(text or None)
                self._view.notify("system prompt set" if text else "no system prompt")

        self._view.screen.app.push_screen(SystemPromptPanel(self.text or ""), use)
