"""Incremental text equals one-shot text for any tokens; stop strings cut it exactly."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_texts import sample_texts
from sentencepiece_samples import sentencepiece_decoder
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import BPE, WordPiece

from termgen.engine.text.detokenizer import BytesDecoder, Detokenizer, StopAutomaton, WindowDecoder
from termgen.engine.text.tokenizer import Tokenizer
from termgen.engine.text.tokenizer_files import TokenizerParts

SEED = 77_001


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece-like: words with space marks, and a token for each byte."""
    pieces = ["<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a", "b", "你", "▁�", "�", "x▁y"]
    backend = Backend(BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    backend.add_special_tokens(["<s>"])
    backend.decoder = sentencepiece_decoder()
    return Tokenizer(TokenizerParts(backend=backend))


def metaspace_tokenizer() -> Tokenizer:
    """A decoder that does more than concatenate: the first token's space is dropped."""
    pieces = ["▁the", "▁a", "b", "▁", "é", "�", "▁你"]
    backend = Backend(BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return Tokenizer(TokenizerParts(backend=backend))


def wordpiece_tokenizer() -> Tokenizer:
    pieces = ["[UNK]", "un", "##able", "##s", "do", "n", "'", "t", ".", ",", "we"]
    backend = Backend(WordPiece(vocab={p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(TokenizerParts(backend=backend))


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    decoder = tokenizer.token_decoder(skip_special_tokens=skip)
    return [*(decoder.push(i) for i in ids), decoder.flush()]


class TestTokenDecoders:
    @pytest.mark.parametrize("skip", [True, False])
    def test_byte_level_equals_the_full_decode_on_random_ids(
        self, smollm2: Tokenizer, smollm2_gguf: Path, skip: bool
    ) -> None:
        from termgen.engine.text.gguf_tokenizer import read_gguf

        backend = read_gguf(smollm2_gguf).backend
        rng = random.Random(SEED)
        for _ in range(600):
            # low ids are special tokens and single bytes: broken characters of every kind
            top = rng.choice((300, smollm2.vocab_size))
            ids = [rng.randrange(top) for _ in range(rng.randint(0, 40))]
            expected = backend.decode(ids, skip_special_tokens=skip)
            assert "".join(pieces_of(smollm2, ids, skip=skip)) == expected, (SEED, ids)
            assert smollm2.decode(ids, skip_special_tokens=skip) == expected, (SEED, ids)

    def test_text_comes_back_and_no_piece_splits_a_character(self, smollm2: Tokenizer) -> None:
        num_exact = 0
        for text in sample_texts(SEED, 500):
            ids = smollm2.encode(text)
            pieces = pieces_of(smollm2, ids, skip=False)
            whole = smollm2.decode(ids, skip_special_tokens=False)
            assert "".join(pieces) == whole, (SEED, text)
            if whole == text and "\ufffd" not in text:
                num_exact += 1
                assert not any("\ufffd" in piece for piece in pieces), (SEED, text)
        assert num_exact > 400  # the vocabulary lacks a few bytes of unused characters

    def test_unfinished_character_at_the_end_is_one_replacement(self, smollm2: Tokenizer) -> None:
        ids = smollm2.encode("a👋")[:-1]
        pieces = pieces_of(smollm2, ids)
        assert pieces[0] == "a" and not any(pieces[1:-1])
        assert pieces[-1] == "\ufffd"
        assert "".join(pieces) == smollm2.decode(ids)

    @pytest.mark.parametrize(
        "make", [byte_fallback_tokenizer, metaspace_tokenizer, wordpiece_tokenizer]
    )
    def test_other_decoders_equal_their_full_decode(self, make: Callable[[], Tokenizer]) -> None:
        tokenizer = make()
        rng = random.Random(SEED)
        for _ in range(800):
            ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(0, 30))]
            assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids), (SEED, ids)

    def test_byte_fallback_equals_the_library_on_valid_text(self) -> None:
        tokenizer = byte_fallback_tokenizer()
        backend = tokenizer._backend
        rng = random.Random(SEED)
        for _ in range(200):
            ids = []
            for _ in range(rng.randint(1, 6)):
                char = rng.choice(("é", "你", "👋", "ש", "z"))
                ids += [1 + byte for byte in char.encode()]
                ids += rng.choices(range(257, tokenizer.vocab_size), k=rng.randint(0, 2))
            assert tokenizer.decode(ids) == backend.decode(ids), (SEED, ids)

    def test_window_decoder_keeps_a_short_window(self) -> None:
        lengths: list[int] = []

        def decode(ids: object) -> str:
            assert isinstance(ids, list)
            lengths.append(len(ids))
            return "".join(map(chr, ids))

        decoder = WindowDecoder(decode)
        assert "".join(decoder.push(ord("x")) for _ in range(500)) == "x" * 500
        assert max(lengths) <= 3
        # real replacement characters are shown in the end, however many there are
        text = "".join(decoder.push(0xFFFD) for _ in range(500))
        assert len(text) > 400 and max(lengths) < 100
        assert text + decoder.flush() == "\ufffd" * 500

    def test_ids_beyond_the_vocabulary_are_silent(self, smollm2: Tokenizer) -> None:
        # embeddings are often padded, so a model can sample such an id
        ids = [*smollm2.encode("hi"), smollm2.vocab_size + 5]
        assert "".join(pieces_of(smollm2, ids)) == "hi"
        assert smollm2.decode(ids) == "hi"


# -- stop strings ------------------------------------------------------------------------------


def run(
    text: str, stops: list[str], cuts: list[int], *, include: bool = False, min_tokens: int = 0
) -> tuple[list[str], str | None]:
    """Feed `text` in tokens ending at `cuts`. Returns the shown pieces and the stop string."""
    edges = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    tokens = {i: text[a:b].encode() for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False))}
    detokenizer = Detokenizer(
        BytesDecoder(tokens),
        stops=StopAutomaton(stops) if stops else None,
        include_stop=include,
        min_tokens=min_tokens,
    )
    pieces = []
    for token_id in tokens:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stop is not None:
            return pieces, detokenizer.stop
    pieces.append(detokenizer.finish())
    return pieces, None


def expected_cut(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """First stop string to be complete; of several that end together, the longest."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            stop = max(done, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def longest_partial(text: str, stops: list[str]) -> int:
    lengths = [n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])]
    return max(lengths, default=0)


small_text = st.text(alphabet="abcé", max_size=40)
stop_lists = st.lists(st.text(alphabet="abcé", min_size=1, max_size=5), min_size=1, max_size=4)


class TestStopStrings:
    @settings(max_examples=400, deadline=None)
    @given(small_text, stop_lists, st.lists(st.integers(0, 1000), max_size=20), st.booleans())
    def test_cut_does_not_depend_on_token_boundaries(
        self, text: str, stops: list[str], cuts: list[int], include: bool
    ) -> None:
        pieces, stop = run(text, stops, cuts, include=include)
        assert ("".join(pieces), stop) == expected_cut(text, stops, include=include)

    @settings(max_examples=300, deadline=None)
    @given(small_text, stop_lists)
    def test_holds_back_exactly_what_could_become_a_stop(self, text: str, stops: list[str]) -> None:
        shown, stop = expected_cut(text, stops, include=True)
        consumed = shown if stop else text
        detokenizer = Detokenizer(
            BytesDecoder({i: c.encode() for i, c in enumerate(consumed)}),
            stops=StopAutomaton(stops),
        )
        out = ""
        for i in range(len(consumed)):
            out += detokenizer.push(i)
            if detokenizer.stop is None:
                seen = consumed[: i + 1]
                assert len(seen) - len(out) == longest_partial(seen, stops)
                assert seen.startswith(out)

    def test_nothing_is_delayed_when_nothing_matches(self) -> None:
        pieces, _ = run("the quick fox", ["\nUser:"], list(range(13)))
        assert pieces == [*"the quick fox", ""]

    def test_stop_across_tokens_never_shows(self) -> None:
        pieces, stop = run("one\nUser: two", ["\nUser:"], [3, 4, 6, 9])
        assert ("".join(pieces), stop) == ("one", "\nUser:")

    def test_include_stop_keeps_it_and_nothing_after_it(self) -> None:
        pieces, stop = run("abcEND rest", ["END"], [4, 11], include=True)
        assert ("".join(pieces), stop) == ("abcEND", "END")

    def test_partial_match_is_flushed_at_the_end(self) -> None:
        pieces, stop = run("abcEN", ["END"], [1, 2, 3, 4])
        assert pieces[-1] == "EN" and stop is None

    def test_min_tokens_lets_early_stops_pass_as_text(self) -> None:
        text = "aXbXc"
        pieces, stop = run(text, ["X"], [1, 2, 3, 4], min_tokens=3)
        assert ("".join(pieces), stop) == ("aXb", "X")
        assert "".join(run(text, ["X"], [1, 2, 3, 4], min_tokens=5)[0]) == text

    def test_min_tokens_still_finds_a_longer_stop_that_starts_early(self) -> None:
        # "ab" is complete too early, but "abc" is complete in time
        pieces, stop = run("xabcd", ["ab", "abc"], [1, 2, 3, 4], min_tokens=4)
        assert ("".join(pieces), stop) == ("x", "abc")

    def test_stop_may_be_found_inside_a_character_sequence(self) -> None:
        pieces, stop = run("a👩‍👧b", ["👧"], [1, 2, 3])
        assert ("".join(pieces), stop) == ("a👩\u200d", "👧")

    def test_one_token_can_hold_several_stops(self) -> None:
        assert run("xxSTOPyyEND", ["END", "STOP"], [11]) == (["xx"], "STOP")

    def test_work_per_token_does_not_grow_with_the_output(self) -> None:
        def calls(count: int) -> int:
            """Python-level calls for the last of `count` tokens."""
            detokenizer = Detokenizer(
                BytesDecoder({0: b"ab ", 1: b"a"}), stops=StopAutomaton(["abc", "aab"])
            )
            for _ in range(count):
                detokenizer.push(0)
            seen = 0

            def profile(frame: object, event: str, arg: object) -> None:
                nonlocal seen
                seen += 1

            sys.setprofile(profile)
            try:
                detokenizer.push(0)
            finally:
                sys.setprofile(None)
            return seen

        assert calls(10) == calls(5000)
