"""Text to tokens without holding anybody up.

The tokenizers library keeps Python's lock while it encodes one text, and gives it back while it
encodes several. Half a megabyte takes half a second: no stream and no engine step would go on.
"""

from __future__ import annotations

from typing import Any

LONG_TEXT_CHARS = 1024
"""Less is done before anybody notices, and sooner without a thread."""


def encode_text(backend: Any, text: str, *, add_special_tokens: bool) -> Any:
    """`backend.encode`, as an `Encoding`."""
    if len(text) < LONG_TEXT_CHARS:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def encode_ids(backend: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """The ids alone, of a long text in a third of the time: places in it are not kept."""
    if len(text) < LONG_TEXT_CHARS:
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
    return list(backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
