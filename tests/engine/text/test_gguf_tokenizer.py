"""The tokenizer of a GGUF file: equal to transformers' reading, and strict about bad metadata."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_reading import each_part_once
from sample_texts import sample_texts
from sentencepiece_samples import sentencepiece_backend

from termgen.engine.gguf.gguf_file import GGUFFile
from termgen.engine.text import gguf_tokenizer
from termgen.engine.text.gguf_tokenizer import (
    GPT4O_SPLIT,
    LLAMA3_SPLIT,
    QWEN2_SPLIT,
    QWEN35_SPLIT,
    SPACE_MARK,
    build_parts,
    read_gguf,
)
from termgen.engine.text.tokenizer import Tokenizer
from termgen.engine.text.tokenizer_files import TokenizerParts
from termgen.errors import CorruptFileError, ModelError, UnsupportedModelError

SEED = 20_240_607


@pytest.fixture
def ours(smollm2: Tokenizer) -> Tokenizer:
    return smollm2


@pytest.fixture(scope="session")
def theirs(smollm2_gguf: Path) -> Any:
    """transformers' reading of the same file; takes many seconds."""
    from transformers import AutoTokenizer

    with each_part_once():
        return AutoTokenizer.from_pretrained(
            str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name, local_files_only=True
        )


class TestEqualsTransformers:
    def test_encodes_and_decodes_alike(self, ours: Tokenizer, theirs: Any) -> None:
        texts = sample_texts(SEED, 3000)
        for text in texts:
            ids = ours.encode(text)
            assert ids == theirs.encode(text), (SEED, text)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip
                ), (SEED, text, skip)

    def test_special_tokens_are_the_same(self, ours: Tokenizer, theirs: Any) -> None:
        added = theirs.added_tokens_decoder
        assert ours.special_token_ids == {i for i, token in added.items() if token.special}
        assert ours.vocab_size == len(theirs)
        assert ours.bos_token_id == theirs.bos_token_id
        assert ours.eos_token_ids == (theirs.eos_token_id,)

    def test_renders_chats_alike(self, ours: Tokenizer, theirs: Any) -> None:
        # test_chat_forgery.py covers text that spells a special token
        spelled = [ours.token_text(i) for i in ours.special_token_ids]
        texts = [t for t in sample_texts(SEED + 1, 300) if not any(s in t for s in spelled)]
        for a, b in zip(texts[::2], texts[1::2], strict=False):
            messages = [
                {"role": "user", "content": a},
                {"role": "assistant", "content": b},
                {"role": "user", "content": "go on"},
            ]
            expected = theirs.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            assert ours.apply_chat_template(messages) == expected, (SEED, a, b)


def test_reads_the_real_file(ours: Tokenizer) -> None:
    assert ours.vocab_size == 49152
    assert ours.has_chat_template
    assert ours.encode("Hello world") == ours.encode("Hello world", add_special_tokens=False)
    assert ours.decode(ours.encode("naïve 你好 👋🏽")) == "naïve 你好 👋🏽"
    assert ours.token_text(2) == "<|im_end|>"


# -- byte-level vocabularies ----------------------------------------------------------------


def byte_level_metadata(pre: str = "gpt-2", **overrides: Any) -> dict[str, Any]:
    """A vocabulary of all bytes, a few merges and three special tokens."""
    from termgen.engine.text.tokenizer import BYTE_OF_CHAR

    tokens = list(BYTE_OF_CHAR)
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "123 4", "Ċ Ċ"]
    tokens += [m.replace(" ", "") for m in merges]
    types = [1] * len(tokens)
    special = ["<s>", "</s>", "<|im_end|>", "<tool>"]
    base = len(tokens)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + special,
        "tokenizer.ggml.token_type": [*types, 3, 3, 3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": base,
        "tokenizer.ggml.eos_token_id": base + 1,
    }
    metadata |= {f"tokenizer.ggml.{k}": v for k, v in overrides.items()}
    return {k: v for k, v in metadata.items() if v is not None}


def build(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(build_parts(metadata, source="test.gguf"))


def texts_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def test_pre_tokenizers_split_numbers_differently() -> None:
    assert texts_of(build(byte_level_metadata("gpt-2")), "1234") == ["1234"]
    assert texts_of(build(byte_level_metadata("llama-bpe")), "1234") == ["123", "4"]
    assert texts_of(build(byte_level_metadata("qwen2")), "1234") == ["1", "2", "3", "4"]
    assert texts_of(build(byte_level_metadata("tekken")), "1234") == ["1", "2", "3", "4"]
    assert texts_of(build(byte_level_metadata("llama4")), "1234") == ["123", "4"]


def test_split_expressions_are_those_transformers_uses() -> None:
    gguf = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    splits = gguf.GGUF_PRE_TOKENIZER_SPLITS
    assert splits["llama-bpe"] == LLAMA3_SPLIT
    assert splits["qwen2"] == QWEN2_SPLIT
    assert splits["llama4"] == splits["gpt-4o"] == GPT4O_SPLIT


def test_marks_belong_to_the_word_before_them() -> None:
    qwen3_5 = pytest.importorskip("transformers.models.qwen3_5.tokenization_qwen3_5")
    assert qwen3_5.PRETOKENIZE_REGEX == QWEN35_SPLIT
    metadata = byte_level_metadata(
        "qwen35", merges=["à ¥", "à¥ ģ", "k à¥ģ", "1 2", "Ġ k"], token_type=None
    )
    metadata["tokenizer.ggml.tokens"] += ["à¥", "à¥ģ", "kà¥ģ", "Ġk"]
    assert texts_of(build(metadata), "k\u0941 k12") == ["k\u0941", " k", "1", "2"]
    assert texts_of(build(metadata), "e\u0301") == texts_of(build(metadata), "\xe9"), "NFC"
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert texts_of(build(metadata), "k\u0941")[0] == "k"


def test_bos_follows_the_flag_and_else_the_vocabulary() -> None:
    def starts_with_bos(pre: str, flag: bool | None) -> bool:
        tokenizer = build(byte_level_metadata(pre, add_bos_token=flag))
        assert tokenizer.bos_token_id not in tokenizer.encode("a", add_special_tokens=False)
        return tokenizer.encode("a")[0] == tokenizer.bos_token_id

    assert not starts_with_bos("gpt-2", None)
    assert starts_with_bos("gpt-2", True)
    assert starts_with_bos("llama-bpe", None)
    assert not starts_with_bos("llama-bpe", False)


def test_the_end_of_a_message_ends_no_answer_of_several() -> None:
    def ends(architecture: str) -> tuple[int, ...]:
        metadata = byte_level_metadata("llama4", eom_token_id=3, eot_token_id=4)
        return build({**metadata, "general.architecture": architecture}).eos_token_ids[1:]

    assert ends("llama") == (4, 3)
    assert ends("muse-glimmer") == (4,)


def test_the_ends_of_an_answer_in_harmony() -> None:
    metadata = byte_level_metadata("gpt-4o")
    metadata["tokenizer.ggml.tokens"][-4:] = ["<|return|>", "<|end|>", "<|call|>", "<|channel|>"]
    metadata["tokenizer.ggml.token_type"][-4:] = [3, 3, 3, 3]
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    metadata |= {
        "general.architecture": "gpt-oss",
        "tokenizer.ggml.bos_token_id": None,
        "tokenizer.ggml.eos_token_id": last - 3,
        "tokenizer.ggml.eot_token_id": last - 2,
        "tokenizer.chat_template": "{{ '<|end|>' }}",
    }
    tokenizer = build(metadata)
    named = [tokenizer.token_text(i) for i in tokenizer.eos_token_ids]
    assert named == ["<|return|>", "<|call|>"]


def test_eos_is_appended_only_when_the_file_says_so() -> None:
    plain = build(byte_level_metadata())
    appending = build(byte_level_metadata(add_eos_token=True))
    assert appending.encode("a") == [*plain.encode("a"), plain.eos_token_ids[0]]


def test_control_tokens_are_special_and_user_defined_ones_are_not() -> None:
    tokenizer = build(byte_level_metadata())
    ids = tokenizer.encode("hello<|im_end|><tool>hello")
    assert [tokenizer.token_text(i) for i in ids] == ["hello", "<|im_end|>", "<tool>", "hello"]
    assert ids[1] in tokenizer.special_token_ids
    assert ids[2] not in tokenizer.special_token_ids
    assert tokenizer.decode(ids) == "hello<tool>hello"


def test_end_of_turn_token_of_the_template_ends_answers_too() -> None:
    metadata = byte_level_metadata()
    assert len(build(metadata).eos_token_ids) == 1
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}<|im_end|>"
    tokenizer = build(metadata)
    assert [tokenizer.token_text(i) for i in tokenizer.eos_token_ids] == ["</s>", "<|im_end|>"]


def test_token_with_characters_outside_the_byte_alphabet_is_matched_as_text() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<｜end▁of▁turn｜>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 3]
    tokenizer = build(metadata)
    ids = tokenizer.encode("a<｜end▁of▁turn｜>b")
    assert len(ids) == 3
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<｜end▁of▁turn｜>b"


def test_named_chat_template_for_tools() -> None:
    metadata = byte_level_metadata() | {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "with tools",
    }
    tokenizer = build(metadata)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(messages) == "plain"
    assert tokenizer.render_chat(messages, tools=[{"type": "function"}]) == "with tools"


# -- SentencePiece vocabularies ---------------------------------------------------------------


def sentencepiece_metadata(**overrides: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [2, 3, 3, *([6] * 256)]
    scores = [0.0] * len(tokens)
    pieces = ["▁", "h", "e", "l", "o", "<", "/", "s", ">", "▁h", "el", "lo", "▁hel", "▁hello", "ll"]
    tokens += pieces
    types += [1] * len(pieces)
    scores += [-float(i) for i in range(len(pieces))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    metadata |= {f"tokenizer.ggml.{k}": v for k, v in overrides.items()}
    return {k: v for k, v in metadata.items() if v is not None}


def test_sentencepiece_merges_follow_the_scores() -> None:
    tokenizer = build(sentencepiece_metadata())
    assert texts_of(tokenizer, "hello") == [" hello"]
    # `el` scores better than `ll`, so it is merged first
    assert texts_of(tokenizer, "ell") == [" ", "el", "l"]


def test_sentencepiece_adds_bos_and_the_space_it_takes_away_again() -> None:
    tokenizer = build(sentencepiece_metadata())
    ids = tokenizer.encode("hello")
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(tokenizer.encode("  hello ")) == "  hello "
    assert build(sentencepiece_metadata(add_bos_token=False)).encode("hello") == ids[1:]


def test_sentencepiece_without_space_prefix() -> None:
    tokenizer = build(sentencepiece_metadata(add_space_prefix=False))
    assert texts_of(tokenizer, "hello")[0] == "h"
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


def test_sentencepiece_falls_back_to_bytes() -> None:
    tokenizer = build(sentencepiece_metadata())
    for text in sample_texts(SEED, 400):
        if "<" in text or "\u2581" in text:
            continue
        assert tokenizer.decode(tokenizer.encode(text)) == text, (SEED, text)


def test_text_never_merges_into_a_control_token() -> None:
    tokenizer = build(sentencepiece_metadata())
    backend = build_parts(sentencepiece_metadata(), source="test").backend
    backend.encode_special_tokens = True
    assert 2 not in backend.encode("</s>", add_special_tokens=False).ids
    assert tokenizer.encode("</s>", add_special_tokens=False) == [2]


def test_sentencepiece_equals_the_same_model_written_as_tokenizer_json() -> None:
    """The layout of Llama 2, Mistral and TinyLlama folders, built here step by step."""
    metadata = sentencepiece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [("▁", "h"), ("e", "l"), ("l", "o"), ("▁h", "el"), ("▁hel", "lo"), ("l", "l")]
    backend = sentencepiece_backend(tokens, merges)
    tokenizer = build(metadata)
    for text in ["hello", " hello hell", "ello\nhello", "你好 hello", "héllo", "", "  "]:
        ids = backend.encode(text).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == backend.decode(ids), text


# -- Gemma's vocabularies ---------------------------------------------------------------------


def gemma_metadata(rng: random.Random) -> dict[str, Any]:
    """A vocabulary like Gemma 3's, with random words, each made of two earlier ones."""
    spaces, lines = [" " * n for n in range(2, 8)], ["\n" * n for n in range(1, 5)]
    user_defined = ["[multimodal]", *lines, *spaces, "<table>"]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<unused0>"]
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    letters = [SPACE_MARK, *"abcdé好<>/"]
    pieces = list(letters)
    while len(pieces) < 150:
        made = rng.choice(pieces) + rng.choice(pieces)
        if made not in pieces and len(made) < 9 and set(made) != {SPACE_MARK}:
            pieces.append(made)
    # Letters come last in the real vocabulary, and have the worst scores.
    words = pieces[len(letters) :] + letters
    tokens = [*special, *user_defined, *byte_tokens, *words]
    scores = [*[-1000.0] * (len(tokens) - len(words)), *(-float(i) for i in range(len(words)))]
    types = [*[3] * len(special), *[4] * len(user_defined), *[6] * 256, *[1] * len(words)]
    metadata: dict[str, Any] = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "padding_token_id": 0,
        "add_bos_token": True,
        "add_eos_token": False,
        "add_space_prefix": False,
    }
    return {"general.architecture": "gemma3"} | {
        f"tokenizer.ggml.{key}": value for key, value in metadata.items()
    }


def transformers_backend(metadata: dict[str, Any]) -> Any:
    """transformers' reading of the same metadata; it adds no bos here."""
    gguf = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    names = gguf.GGUF_TOKENIZER_MAPPING["tokenizer"]
    architecture = metadata["general.architecture"]
    keys = {name: metadata.get(f"tokenizer.{key}") for key, name in names.items()}
    found = {name: value for name, value in keys.items() if value is not None}
    return gguf.convert_gguf_tokenizer(architecture, found)[0]


def merges_of(tokenizer_json: str) -> list[list[str]]:
    merges: list[list[str]] = json.loads(tokenizer_json)["model"]["merges"]
    return merges


def test_gemma_vocabularies_equal_transformers() -> None:
    rng = random.Random(SEED)
    print("seed", SEED)
    bits = [*"abcdé好<>/xß", " ", " ", "  ", "   ", " " * 11, "\n", "\n\n", "\n" * 6, "<table>"]
    bits += [SPACE_MARK, "<start_of_turn>", "[multimodal]", "\t", "aab", "abab"]
    for _ in range(6):
        metadata = gemma_metadata(rng)
        given = {key: list(v) if isinstance(v, list) else v for key, v in metadata.items()}
        tokenizer, reference = build(metadata), transformers_backend(metadata)
        assert metadata == given
        assert tokenizer.encode("a")[0] == tokenizer.bos_token_id == 2
        # No text merges into byte tokens, which transformers' reading leaves to chance.
        theirs = merges_of(reference.to_str())
        assert merges_of(tokenizer.to_json()) == [m for m in theirs if "".join(m)[:3] != "<0x"]
        for _ in range(400):
            text = "".join(rng.choices(bits, k=rng.randrange(1, 25)))
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids == reference.encode(text, add_special_tokens=False).ids, text
            for skip in (True, False):
                decoded = tokenizer.decode(ids, skip_special_tokens=skip)
                assert decoded == reference.decode(ids, skip_special_tokens=skip), text


def test_spaces_of_a_gemma_vocabulary_are_merged_like_text() -> None:
    metadata = gemma_metadata(random.Random(SEED))
    tokenizer = build(metadata)
    assert texts_of(tokenizer, "   ") == ["   "]
    # The longest token is matched first, as a user-defined one, and would leave four behind seven.
    assert [len(token) for token in texts_of(tokenizer, " " * 11)] == [4, 7]
    newer = build(metadata | {"general.architecture": "gemma3n"})
    assert newer.to_json() == tokenizer.to_json()
    # A file that has both spellings keeps both.
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = [*tokens[:-1], SPACE_MARK * 2]
    assert build(metadata).vocab_size == len(tokens)


def gemma4_metadata(rng: random.Random) -> dict[str, Any]:
    """The same words with their merges, as files of Gemma 4 have them, and its markers."""
    given = gemma_metadata(rng)
    tokens = [t.replace(" ", SPACE_MARK) for t in given["tokenizer.ggml.tokens"]]
    tokens[5:7] = ["<turn|>", "<|tool_response>"]
    types = [
        1 if token.strip(SPACE_MARK + "\n") == "" else kind
        for token, kind in zip(tokens, given["tokenizer.ggml.token_type"], strict=True)
    ]
    types[6] = 4
    usable = {token for token, kind in zip(tokens, types, strict=True) if kind == 1}
    merges = [
        f"{token[:cut]} {token[cut:]}"
        for token in tokens
        for cut in range(1, len(token))
        if {token, token[:cut], token[cut:]} <= usable
    ]
    changed = {"model": "gemma4", "tokens": tokens, "token_type": types, "merges": merges}
    for key in ("pre", "scores", "add_space_prefix", "add_bos_token"):
        del given[f"tokenizer.ggml.{key}"]
    return (
        given
        | {"general.architecture": "gemma4"}
        | {f"tokenizer.ggml.{key}": value for key, value in changed.items()}
    )


def test_gemma4_vocabularies_equal_transformers() -> None:
    rng = random.Random(SEED)
    print("seed", SEED)
    bits = [*"abcdé好<>/xß", " ", " ", "  ", " " * 11, "\n", "\n\n", "\n" * 6, "<table>"]
    bits += [SPACE_MARK, "<turn|>", "<|tool_response>", "\t", "aab", "abab"]
    for _ in range(3):
        metadata = gemma4_metadata(rng)
        tokenizer, reference = build(metadata), transformers_backend(metadata)
        assert tokenizer.encode("a")[0] == tokenizer.bos_token_id == 2
        assert tokenizer.eos_token_ids == (1, 5, 6)
        assert merges_of(tokenizer.to_json()) == merges_of(reference.to_str())
        for _ in range(400):
            text = "".join(rng.choices(bits, k=rng.randrange(1, 25)))
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids == reference.encode(text, add_special_tokens=False).ids, text
            for skip in (True, False):
                decoded = tokenizer.decode(ids, skip_special_tokens=skip)
                assert decoded == reference.decode(ids, skip_special_tokens=skip), text
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(CorruptFileError, match=r"tokenizer\.ggml\.merges is empty or missing"):
        build(metadata)


# -- metadata that cannot be right ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        ({"model": None}, ModelError, "tokenizer.ggml.model"),
        ({"model": "bert"}, UnsupportedModelError, "bert"),
        ({"pre": "mystery"}, UnsupportedModelError, "mystery"),
        ({"pre": 7}, UnsupportedModelError, "7"),
        ({"tokens": []}, CorruptFileError, "tokens"),
        ({"tokens": [1, 2]}, CorruptFileError, "tokens"),
        ({"tokens": "abc"}, CorruptFileError, "tokens"),
        ({"token_type": [1]}, CorruptFileError, "token_type"),
        ({"merges": None}, CorruptFileError, "merges"),
        ({"merges": ["ab"]}, CorruptFileError, "merges"),
        ({"merges": ["q zz"]}, CorruptFileError, "merges"),
        ({"bos_token_id": 10**9}, CorruptFileError, "bos_token_id"),
        ({"eos_token_id": -1}, CorruptFileError, "eos_token_id"),
        ({"eos_token_id": "x"}, CorruptFileError, "eos_token_id"),
        ({"add_bos_token": "yes"}, CorruptFileError, "add_bos_token"),
    ],
)
def test_bad_metadata_is_one_clear_error(
    overrides: dict[str, Any], error: type[ModelError], words: str
) -> None:
    with pytest.raises(error) as raised:
        build(byte_level_metadata(**overrides))
    message = str(raised.value)
    assert words in message and "test.gguf" in message and "\n" not in message


@pytest.mark.parametrize("scores", [None, [0.0], ["a"]])
def test_sentencepiece_needs_a_score_per_token(scores: Any) -> None:
    with pytest.raises(CorruptFileError, match="scores"):
        build(sentencepiece_metadata(scores=scores))


def test_metadata_is_read_while_the_file_is_open(smollm2_gguf: Path) -> None:
    with GGUFFile.open(smollm2_gguf) as file:
        parts = build_parts(file.metadata, source="x")
    assert parts.backend.get_vocab_size() == 49152


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources of the tokenizers that are built, with an empty cache."""
    monkeypatch.setenv("TERMGEN_CACHE", str(tmp_path / "cache"))
    sources: list[str] = []
    build_anew = gguf_tokenizer.build_parts

    def build_parts(metadata: Mapping[str, Any], *, source: str) -> TokenizerParts:
        sources.append(source)
        return build_anew(metadata, source=source)

    monkeypatch.setattr(gguf_tokenizer, "build_parts", build_parts)
    return sources


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        add = {str: writer.add_string, list: writer.add_array, bool: writer.add_bool}
        add.get(type(value), writer.add_uint32)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("metadata", [byte_level_metadata, sentencepiece_metadata])
def test_a_tokenizer_is_built_once(
    builds: list[str], metadata: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    extra = {"tokenizer.chat_template": "{{ messages }}<|im_end|>", "tokenizer.ggml.add_x": 1}
    path = write_gguf(tmp_path / "a.gguf", metadata() | extra)
    built, kept = read_gguf(path), read_gguf(path)
    assert builds == [str(path)]
    assert kept.backend.to_str() == built.backend.to_str()
    for field in dataclasses.fields(TokenizerParts):
        if field.name != "backend":
            assert getattr(kept, field.name) == getattr(built, field.name), field.name
    ours, theirs = Tokenizer(built), Tokenizer(kept)
    assert ours.vocab_size == theirs.vocab_size == len(metadata()["tokenizer.ggml.tokens"])
    assert ours.encode("hello 123\n\n") == theirs.encode("hello 123\n\n")
    copy = tmp_path / "b.gguf"
    copy.write_bytes(path.read_bytes())
    read_gguf(copy)
    assert len(builds) == 1, "the same bytes under another name"


def test_a_tokenizer_is_kept_for_its_metadata_and_library(
    builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "a.gguf", byte_level_metadata())
    assert read_gguf(path).prefix_ids == ()
    write_gguf(path, byte_level_metadata(add_bos_token=True))
    assert read_gguf(path).prefix_ids == (read_gguf(path).bos_token_id,)
    assert len(builds) == 2
    monkeypatch.setattr(gguf_tokenizer.tokenizers, "__version__", "0.0")
    read_gguf(path)
    assert len(builds) == 3


def test_a_damaged_entry_is_built_anew(builds: list[str], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", byte_level_metadata())
    read_gguf(path)
    (entry,) = gguf_tokenizer._BUILT.folder.iterdir()
    entry.write_bytes(entry.read_bytes()[:-1])
    assert read_gguf(path).backend.get_vocab_size() and len(builds) == 2
