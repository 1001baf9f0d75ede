"""Pin and tags of a chat, by which its owner finds it again. Plain data, no Textual."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from termgen.errors import RequestError

SIGN = "#"
"""Before a tag where one is shown or searched for."""
MAX_TAGS, MAX_TAG_CHARS = 20, 32
PINNED, TAGS = "pinned", "tags"
"""Keys in the parameters of a chat's record; the store has tables for them."""
_TAG = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True, slots=True)
class Labels:
    is_pinned: bool = False
    tags: tuple[str, ...] = ()
    """Sorted, each once."""

    def with_tags(self, add: Iterable[str], remove: Iterable[str]) -> Labels:
        """Raises RequestError for too many."""
        tags = tuple(sorted({*self.tags, *add} - set(remove)))
        if len(tags) > MAX_TAGS:
            raise RequestError(f"a chat has at most {MAX_TAGS} tags, not {len(tags)}", param="tag")
        return replace(self, tags=tags)

    def as_params(self) -> dict[str, Any]:
        """Entries of a record's parameters; none for a chat without labels."""
        pinned: dict[str, Any] = {PINNED: True} if self.is_pinned else {}
        return pinned | ({TAGS: list(self.tags)} if self.tags else {})


def labels_of(params: Mapping[str, Any]) -> Labels:
    """Labels among a record's parameters. An export made by hand may hold anything there: what is
    no tag is left out."""
    given = params.get(TAGS)
    tags = {tag.casefold() for tag in given if _is_tag(tag)} if isinstance(given, list) else set()
    return Labels(params.get(PINNED) is True, tuple(sorted(tags)[:MAX_TAGS]))


def parse_tags(argument: str) -> tuple[list[str], list[str]]:
    """`NAME -NAME ...`: tags to add and to remove. Raises RequestError naming one that is none."""
    add: list[str] = []
    remove: list[str] = []
    for word in argument.split():
        name = word.removeprefix("-").removeprefix(SIGN).casefold()
        if not _is_tag(name):
            raise RequestError(
                f"/tag: {word} is no tag: letters, digits, `_`, `-` and `.`, at most "
                f"{MAX_TAG_CHARS} of them",
                param="tag",
            )
        (remove if word.startswith("-") else add).append(name)
    return add, remove


def split_search(text: str) -> tuple[list[str], list[str]]:
    """Beginnings of tags (`#wo`) and words of a search."""
    words = text.split()
    tags = [word.removeprefix(SIGN).casefold() for word in words if word.startswith(SIGN)]
    return tags, [word for word in words if not word.startswith(SIGN)]


def has_tags(tags: Sequence[str], wanted: Sequence[str]) -> bool:
    """True if for each wanted beginning there is a tag."""
    return all(any(tag.startswith(beginning) for tag in tags) for beginning in wanted)


def tag_words(tags: Sequence[str]) -> str:
    return " ".join(SIGN + tag for tag in tags)


def _is_tag(value: object) -> bool:
    is_text = isinstance(value, str) and len(value) <= MAX_TAG_CHARS
    return is_text and _TAG.fullmatch(str(value)) is not None
