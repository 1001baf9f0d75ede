"""Long messages that spell control tokens: masked, shortened and encoded at little cost."""

from __future__ import annotations

import re
from typing import Any

import pytest
from chat_samples import QWEN, SPECIAL, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from termgen.engine.text import chat_encoding
from termgen.engine.text.chat_encoding import PIECE_CHARS, Chat, Mask

ALPHABET = "<|>"


def masked(text: str) -> tuple[Mask, str]:
    mask = Mask(ALPHABET, ALPHABET, None, avoid=text)
    chat = Chat([{"role": "user", "content": text}], {}, True, None, len(text))
    return mask, mask.apply(chat).messages[0]["content"]


@given(st.text("<|>ab \ue000", max_size=60))
@settings(deadline=None)
def test_a_shortened_text_knows_where_its_characters_lay(text: str) -> None:
    mask, hidden = masked(text)
    short, place_of = mask.shorten(hidden)
    assert mask.undo(hidden) == text
    assert mask.undo(short) == re.sub(r"([<|>])[<|>]+", r"\1", text)
    assert [hidden[place_of(i)] for i in range(len(short))] == list(short)
    assert place_of(len(short)) == len(text)


def test_long_texts_are_masked_to_the_end() -> None:
    text = "a<|b" * PIECE_CHARS
    mask, hidden = masked(text)
    assert len(hidden) == len(text) and not set(hidden) & set(ALPHABET)
    assert mask.undo(hidden) == text
    assert mask.shorten(hidden)[0].count("a") == PIECE_CHARS


def test_thousands_of_spelled_tokens_stay_text_and_are_not_multiplied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = make_tokenizer(QWEN)
    encode, sizes = chat_encoding.encode_text, []

    def counting(backend: Any, text: str, *, add_special_tokens: bool) -> Any:
        encoding = encode(backend, text, add_special_tokens=add_special_tokens)
        sizes.append(len(encoding))
        return encoding

    monkeypatch.setattr(chat_encoding, "encode_text", counting)
    text = "".join(SPECIAL) * 400 + "Ende é"
    messages = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(messages)
    clean = tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    special = tokenizer.special_token_ids
    assert [i for i in ids if i in special] == [i for i in clean if i in special]
    rendered = tokenizer.render_chat(messages)
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered
    assert max(sizes) <= len(ids), "a private character for each would be three tokens for each"
