"""Keys of what a chat can do beside asking."""

from __future__ import annotations

from textual.binding import Binding

TOOL_KEYS = [
    Binding(
        "ctrl+r",
        "search_history",
        "Search prompts",
        show=False,
        id="chat.history",
        tooltip="Search earlier prompts",
    ),
    Binding(
        "ctrl+t",
        "fold_thoughts",
        "Thoughts",
        show=False,
        id="chat.thoughts",
        tooltip="Open or fold the thoughts before an answer (or click)",
    ),
    Binding(
        "f3",
        "sampling",
        "Sampling",
        show=False,
        id="chat.sampling",
        tooltip="Temperature, top_p, seed and the others",
    ),
    Binding(
        "f4",
        "edit_system",
        "System prompt",
        show=False,
        id="chat.system",
        tooltip="Write the system prompt: instructions for the model",
    ),
    Binding(
        "alt+l,t",
        "tokens",
        "Tokens",
        show=False,
        id="chat.tokens",
        tooltip="How likely the answer's tokens were; branch from one of them",
    ),
    Binding(
        "alt+o,o",
        "links",
        "Links",
        show=False,
        id="chat.links",
        tooltip="List the links of the last (or marked) answer, to open or copy one",
    ),
]


def _begins(name: str, key: str, title: str, tooltip: str) -> Binding:
    return Binding(
        key,
        f"begin_command('{name}')",
        title,
        show=False,
        id=f"chat.{name}",
        tooltip=f"{tooltip} (/{name})",
    )


COMMAND_KEYS = [
    _begins("attach", "alt+a", "Attach a file", "Send a text file with the next question"),
    _begins("save", "alt+s", "Save code block", "Write a code block to a new file"),
    _begins("schema", "alt+j", "JSON schema", "Ask for answers as JSON of a schema"),
    _begins("regex", "alt+x", "Regular expression", "Ask for answers that match an expression"),
    _begins("choice", "alt+c", "Choice", "Ask for answers that are one of some"),
    _begins("rename", "alt+n", "Rename this chat", "Give this chat a name"),
    _begins("export", "alt+w", "Export", "Write this chat to a file"),
    _begins("import", "alt+i", "Import", "Open a chat that was exported as JSON"),
]
"""Of commands that want an argument: the key writes their beginning into the prompt."""
COPY_KEYS = [
    Binding(
        "alt+1",
        "copy_block(1)",
        "Copy code block",
        show=False,
        id="chat.copy_block_1",
        tooltip="Copy code block 1 of the last answer, 2 to 9 likewise (or click, or /code)",
    ),
    *(
        Binding(
            f"alt+{n}",
            f"copy_block({n})",
            f"Copy code block {n}",
            show=False,
            id=f"chat.copy_block_{n}",
            tooltip=f"Copy code block {n} of the last answer",
        )
        for n in range(2, 10)
    ),
]
