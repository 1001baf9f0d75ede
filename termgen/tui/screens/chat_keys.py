"""Keys of the chat: bindings, help and palette come from here.

Single letters act in browse mode only; the chat screen gives them to the prompt otherwise.
"""

from __future__ import annotations

from textual.binding import Binding

KEYS = [
    Binding(
        "escape",
        "stop",
        "Stop",
        id="chat.stop",
        tooltip="Stop the answer; else give up an edit; else browse the chat",
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
        show=False,
        id="chat.new",
        tooltip="Start over, with the system prompt the chat began with",
    ),
    Binding(
        "ctrl+b",
        "sessions",
        "Chats",
        id="chat.sessions",
        tooltip="List, search and open earlier chats",
    ),
    Binding(
        "alt+r,r",
        "retry",
        "Retry",
        id="chat.retry",
        tooltip="Answer the last (or marked) question again, beside the answer it has",
    ),
    Binding(
        "alt+e,e",
        "edit",
        "Edit",
        show=False,
        id="chat.edit",
        tooltip="Edit the last (or marked) question; sending it makes a branch",
    ),
    Binding(
        "alt+left,h",
        "sibling(-1)",
        "Branch before",
        show=False,
        id="chat.sibling_before",
        tooltip="Show the answer or branch before this one",
    ),
    Binding(
        "alt+right,l",
        "sibling(1)",
        "Branch after",
        show=False,
        id="chat.sibling_after",
        tooltip="Show the answer or branch after this one",
    ),
    Binding(
        "alt+up,k",
        "move_cursor(-1)",
        "Mark earlier",
        show=False,
        id="chat.mark_earlier",
        tooltip="Mark an earlier question, for retry, edit and branches",
    ),
    Binding(
        "alt+down,j",
        "move_cursor(1)",
        "Mark later",
        show=False,
        id="chat.mark_later",
        tooltip="Mark the question after it",
    ),
    Binding(
        "c,y",
        "copy_answer",
        "Copy answer",
        show=False,
        id="chat.copy",
        tooltip="Copy the last (or marked) answer (in browse mode; /copy in the prompt)",
    ),
    Binding(
        "alt+z",
        "take_back",
        "Take back",
        show=False,
        id="chat.take_back",
        tooltip="Put the last message that waits to be sent back into the prompt (or up)",
    ),
    Binding(
        "alt+f",
        "fit",
        "Leave out oldest turns",
        show=False,
        id="chat.fit",
        tooltip="When the context is full, go on without the oldest turns (/fit)",
    ),
    Binding(
        "f2",
        "app.show('dashboard')",
        "Engine",
        id="chat.engine",
        tooltip="Watch the engine",
    ),
    Binding(
        "f5",
        "app.models",
        "Model",
        show=False,
        id="chat.models",
        tooltip="Choose another model (/model)",
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
