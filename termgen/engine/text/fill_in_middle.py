"""Prompts with a gap: the tokens that tell a model what stands before and behind its text.

Models that were trained to fill gaps have tokens of their own for this, whose names and order are
those of their families. Whether a model can is read from its vocabulary. Used by the tokenizer;
knows no tokenizer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

PREFIX = "{prefix}"
SUFFIX = "{suffix}"
"""Where the text before the gap and that behind it go."""


@dataclass(frozen=True, slots=True)
class _Family:
    layout: tuple[str, ...]
    """Tokens and the two texts, in the order in which the model has seen them."""
    ends: tuple[str, ...] = ()
    """What the model may write when the gap is full, besides its end-of-sequence token."""


FAMILIES = (
    _Family(  # Qwen, CodeGemma, Granite
        ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    _Family(  # StarCoder
        ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),
        ("<|endoftext|>", "<fim_pad>", "<file_sep>"),
    ),
    _Family(  # SantaCoder
        ("<fim-prefix>", PREFIX, "<fim-suffix>", SUFFIX, "<fim-middle>"),
        ("<|endoftext|>", "<fim-pad>"),
    ),
    _Family(("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>")),  # DeepSeek
    _Family(("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"), ("▁<EOT>",)),  # Code Llama
    _Family(("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX)),  # Codestral
)


@dataclass(frozen=True, slots=True)
class FillTokens:
    """How one vocabulary marks a gap."""

    layout: tuple[int | str, ...]
    """Token ids, and `PREFIX` and `SUFFIX`."""
    ends: tuple[int, ...]

    def prompt_ids(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        texts = {PREFIX: prefix, SUFFIX: suffix}
        ids: list[int] = []
        for item in self.layout:
            ids += [item] if isinstance(item, int) else texts[item]
        return ids


def find_fill_tokens(id_of: Callable[[str], int | None]) -> FillTokens | None:
    """What a vocabulary has, None for a model that fills no gaps. id_of: the id of a token."""
    for family in FAMILIES:
        marks = [name for name in family.layout if name not in (PREFIX, SUFFIX)]
        ids = {name: token_id for name in marks if (token_id := id_of(name)) is not None}
        if len(ids) == len(marks):
            ends = [id_of(name) for name in family.ends]
            return FillTokens(
                layout=tuple(ids.get(name, name) for name in family.layout),
                ends=tuple(token_id for token_id in ends if token_id is not None),
            )
    return None
