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
        "f8",
        "find",
        "Find",
        show=False,
        id="chat.find",
        tooltip="The questions of this chat; type words to find them and their answers (/find)",
    ),
    Binding(
        "alt+d",
        "tree",
        "Branches",
        show=False,
        id="chat.tree",
        tooltip="The branches of this chat as a tree: edits and other answers (/tree)",
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
        "alt+g",
        "fit",
        "Leave out oldest turns",
        show=False,
        id="chat.fit",
        tooltip="When the context is full, go on without the oldest turns (/fit)",
    ),
    Binding(
        "alt+k",
        "context",
        "Context",
        show=False,
        id="chat.context",
        tooltip="What the context holds, and what is done when it is full (/context)",
    ),
    Binding(
        "alt+p",
        "prompts",
        "Kept prompts",
        show=False,
        id="chat.prompts",
        tooltip="Take a prompt that you keep; fill in its {{variables}} (/prompts)",
    ),
    Binding(
        "alt+v",
        "fork",
        "Fork",
        show=False,
        id="chat.fork",
        tooltip="Go on in a new chat, with all up to the last (or marked) question (/fork)",
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
        tooltip="Open or fold the thoughts and tool calls before an answer (or click)",
    ),
    Binding(
        "alt+m",
        "list_tools",
        "Tools",
        show=False,
        id="chat.mcp",
        tooltip="Where the model's tools come from, and whether they work (/mcp)",
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
        "alt+h",
        "tint_drafts",
        "Guessed text",
        show=False,
        id="chat.guessed",
        tooltip="Tint what came as guessed tokens, or no longer (/guessed)",
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

COPY_KEYS = [
    Binding(
        "alt+1",
        "copy_block(1)",
        "Copy code block",
        show=False,
        id="chat.copy_block_1",
        tooltip="Copy code block 1 of the last answer, alt+2 to alt+9 the next (a click, or /code)",
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
    _begins("beside", "alt+q", "Ask another model", "Ask another server the last question, too"),
    _begins("schema", "alt+j", "JSON schema", "Ask for answers as JSON of a schema"),
    _begins("regex", "alt+x", "Regular expression", "Ask for answers that match an expression"),
    _begins("choice", "alt+c", "Choice", "Ask for answers that are one of some"),
    _begins("compact", "alt+y", "Summarise", "Send a summary in place of the older turns"),
    _begins("rename", "alt+n", "Rename this chat", "Give this chat a name"),
    _begins("tag", "alt+t", "Tag this chat", "Add tags to this chat, to find it by"),
    _begins("export", "alt+w", "Export", "Write this chat to a file"),
    _begins("import", "alt+i", "Import", "Open a chat that was exported as JSON"),
]
"""Keys of commands that need an argument: they type the command's name into the prompt."""
