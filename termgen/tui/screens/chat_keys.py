"""Keys of the chat: bindings, help and palette come from here."""

from __future__ import annotations

from textual.binding import Binding

KEYS = [
    Binding(
        "escape",
        "stop",
        "Stop",
        id="chat.stop",
        tooltip="Stop the answer and keep its text; give up an edit",
    ),
    Binding(
        "ctrl+l",
        "clear",
        "Clear",
        show=False,
        id="chat.clear",
        tooltip="Begin anew with the same system prompt",
    ),
    Binding(
        "ctrl+n",
        "new_chat",
        "New",
        id="chat.new",
        tooltip="Start over, with the system prompt the chat began with",
    ),
    Binding(
        "alt+r",
        "retry",
        "Retry",
        id="chat.retry",
        tooltip="Answer the last (or marked) question again, beside the answer it has",
    ),
    Binding(
        "alt+e",
        "edit",
        "Edit",
        key_display="M-e",
        id="chat.edit",
        tooltip="Edit the last (or marked) question; sending it makes a branch",
    ),
    Binding(
        "alt+left",
        "sibling(-1)",
        "Branch before",
        show=False,
        id="chat.sibling_before",
        tooltip="Show the answer or branch before this one",
    ),
    Binding(
        "alt+right",
        "sibling(1)",
        "Branch after",
        show=False,
        id="chat.sibling_after",
        tooltip="Show the answer or branch after this one",
    ),
    Binding(
        "alt+up",
        "move_cursor(-1)",
        "Mark earlier",
        show=False,
        id="chat.mark_earlier",
        tooltip="Mark an earlier question, for retry, edit and branches",
    ),
    Binding(
        "alt+down",
        "move_cursor(1)",
        "Mark later",
        show=False,
        id="chat.mark_later",
        tooltip="Mark the question after it",
    ),
    Binding(
        "y",
        "copy_answer",
        "Copy answer",
        show=False,
        id="chat.copy",
        tooltip="Copy the last answer (outside the prompt; /copy inside)",
    ),
    Binding("i", "focus_prompt", "Write", show=False, id="chat.write", tooltip="To the prompt"),
    Binding(
        "f2,2",
        "app.show('dashboard')",
        "Engine",
        id="chat.engine",
        tooltip="Watch the engine (2 outside the prompt)",
    ),
    Binding(
        "shift+pageup,ctrl+up",
        "scroll_transcript(-1)",
        "Page up",
        show=False,
        id="chat.page_up",
        tooltip="Scroll the transcript up",
    ),
    Binding(
        "shift+pagedown,ctrl+down",
        "scroll_transcript(1)",
        "Page down",
        show=False,
        id="chat.page_down",
        tooltip="Scroll the transcript down",
    ),
]
