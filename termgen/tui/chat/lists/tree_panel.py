"""The branches of a chat as a tree: every wording of a question and every answer to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from textual.binding import Binding
from textual.content import Content

from termgen.tui.chat.lists.find_panel import words_pattern
from termgen.tui.chat.lists.search_panel import SearchPanel
from termgen.tui.chat.state.conversation import Turn
from termgen.tui.keys.keymap import brief_key_of
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.spans import cut, row_width

SHOWN_CHARS = 200
BOX_SHARE, MOST_BOX_WIDTH, BOX_EDGES = 0.92, 100, 7
"""The box's share of the screen, its largest width, and what its frame and scrollbar take: as in
the style sheet."""
MOST_INDENT_SHARE = 0.4
AGAIN = "↻ "
"""Before an answer to a question that was asked before, in the same words."""


class Node(NamedTuple):
    turn: Turn
    indent: str
    """What connects it with the node above."""
    words: str
    """The beginning of its question; for another answer to the same question that of the answer."""
    answer: str
    """The beginning of the answer; empty where `words` is that."""


def tree_of(root: Turn) -> list[Node]:
    """The turns below `root`, parents before their children. A turn with a single child goes on
    below itself, so only branches are indented."""
    nodes: list[Node] = []
    waiting = _children(root, "")
    while waiting:
        turn, indent, below = waiting.pop()
        nodes.append(_node(turn, indent))
        waiting += _children(turn, below)
    return nodes


def _children(turn: Turn, indent: str) -> list[tuple[Turn, str, str]]:
    """(child, its indent, the indent below it), the last child first."""
    children = turn.children
    if len(children) == 1:
        return [(children[0], indent, indent)]
    found = [(child, f"{indent}├ ", f"{indent}│ ") for child in children]
    if found:
        found[-1] = (children[-1], f"{indent}└ ", f"{indent}  ")
    return found[::-1]


def _node(turn: Turn, indent: str) -> Node:
    answer = _beginning(turn.answer)
    asked_before = {other.question for other in turn.siblings[: turn.place]}
    if turn.question in asked_before:
        return Node(turn, indent, AGAIN + (answer or "no answer"), "")
    return Node(turn, indent, _beginning(turn.question), answer)


def _beginning(text: str) -> str:
    return clean_line(" ".join(text[:SHOWN_CHARS].split()))


def node_line(node: Node, width: int, *, is_shown: bool) -> Content:
    """One line of at most `width` cells. is_shown: the turn is on the path."""
    indent, most = node.indent, int(width * MOST_INDENT_SHARE)
    if len(indent) > most:  # of a deep branch its end counts
        indent = "…" + indent[len(indent) - most + 1 :]
    sign = ("● ", "bold") if is_shown else ("○ ", "dim")
    left = max(1, width - len(indent) - 2)
    words = cut(node.words, left)
    room = left - row_width(((words, ""),)) - 2
    answer = f"  {cut(node.answer, room)}" if node.answer and room > 4 else ""
    return Content.assemble(
        (indent, "dim"), sign, (words, "bold" if is_shown else ""), (answer, "dim")
    )


class TreePanel(SearchPanel[tuple[Turn, str]]):
    """Gives back a turn, and the words that it was found by."""

    BINDINGS = [
        Binding("up", "move(-1)", "Above", id="tree.above", tooltip="The turn above"),
        Binding("alt+d,down", "move(1)", "Below", id="tree.below", tooltip="The turn below"),
        Binding(
            "escape",
            "dismiss",
            "Close",
            id="tree.close",
            tooltip="Close, and stay on the branch that is shown",
        ),
    ]
    MAX_CHARS = 200

    def __init__(
        self, root: Turn, path: Collection[Turn], marked: Turn | None, wanted: str = ""
    ) -> None:
        """path: the turns that are shown. marked: the one to begin at. wanted: words to begin
        with."""
        super().__init__("tree", wanted)
        self._all = tree_of(root)
        self._shown = set(path)
        self._marked = marked

    def words(self) -> tuple[str, str, str]:
        close = brief_key_of(self, "tree.close")
        return "branches of this chat", f"⏎ shows it · ● shown now · {close} close", "search"

    def find(self, wanted: str) -> tuple[Sequence[tuple[tuple[Turn, str], Content]], int]:
        """With words, the turns that have them all, in the question or the answer."""
        patterns = words_pattern(wanted)
        box = min(MOST_BOX_WIDTH, int(self.app.size.width * BOX_SHARE))
        found = [
            node
            for node in self._all
            if all(p.search(node.turn.question) or p.search(node.turn.answer) for p in patterns)
        ]
        lines = [
            (
                (node.turn, wanted),
                node_line(node, box - BOX_EDGES, is_shown=node.turn in self._shown),
            )
            for node in found
        ]
        turns = [node.turn for node in found]
        return lines, turns.index(self._marked) if self._marked in turns else 0
