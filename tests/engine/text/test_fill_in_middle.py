"""Prompts with a gap, in the format of each model family."""

from __future__ import annotations

import pytest
from chat_samples import CHATML, make_backend, make_tokenizer
from sentencepiece_samples import sentencepiece_backend
from tokenizers import AddedToken, processors

from termgen.client import FillPrompt
from termgen.engine.text.input_processor import InputProcessor
from termgen.engine.text.tokenizer import Tokenizer
from termgen.engine.text.tokenizer_files import TokenizerParts
from termgen.errors import ContextLengthError, RequestError
from termgen.vocabulary.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams

GAP = FillPrompt("def f(he):", "  return he")
LAYOUTS = {
    "qwen": "<|fim_prefix|>{p}<|fim_suffix|>{s}<|fim_middle|>",
    "starcoder": "<fim_prefix>{p}<fim_suffix>{s}<fim_middle>",
    "santacoder": "<fim-prefix>{p}<fim-suffix>{s}<fim-middle>",
    "deepseek": "<｜fim▁begin｜>{p}<｜fim▁hole｜>{s}<｜fim▁end｜>",
    "codestral": "[SUFFIX]{s}[PREFIX]{p}",
}
TOKENS = {
    "qwen": ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>"],
    "starcoder": ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    "santacoder": ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    "deepseek": ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
    "codestral": ["[SUFFIX]", "[PREFIX]", "[MIDDLE]"],
}


def with_tokens(tokens: list[str], *, bos: bool = False) -> Tokenizer:
    backend = make_backend()
    # Qwen's are added tokens that are not special
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    bos_id = backend.token_to_id("<s>")
    return Tokenizer(
        TokenizerParts(backend=backend, bos_token_id=bos_id, prefix_ids=(bos_id,) if bos else ())
    )


@pytest.mark.parametrize("family", LAYOUTS)
@pytest.mark.parametrize("bos", [False, True])
def test_a_gap_is_written_as_the_family_has_it(family: str, bos: bool) -> None:
    tokenizer = with_tokens(TOKENS[family], bos=bos)
    text = LAYOUTS[family].format(p=GAP.prefix, s=GAP.suffix)
    ids = tokenizer.encode_fill(GAP.prefix, GAP.suffix)
    assert ids == tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == ("<s>" if bos else "") + text
    assert ids[-1] == tokenizer.encode(TOKENS[family][2])[-1] or family == "codestral"


def code_llama() -> Tokenizer:
    """A vocabulary like SentencePiece's: a space is put before every text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", *"abcdefghij", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    backend = sentencepiece_backend(pieces, merges)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    marks = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    backend.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in marks])
    return Tokenizer(TokenizerParts(backend=backend, bos_token_id=1))


def test_code_llama_has_no_space_before_the_suffix() -> None:
    tokenizer = code_llama()

    def id_of(token: str) -> int:
        return next(i for i in range(400) if tokenizer._backend.id_to_token(i) == token)

    ids = tokenizer.encode_fill("ab", "ab\n")
    wanted = ["<s>", "▁<PRE>", "▁ab", "▁<SUF>", "ab", "<0x0A>", "▁<MID>"]
    assert ids == [id_of(token) for token in wanted]
    processor = InputProcessor(tokenizer, 100, tokenizer.vocab_size)
    request = processor.process(FillPrompt("ab", "ab\n"), SamplingParams())
    assert list(request.prompt_token_ids) == ids
    assert request.params.stop_token_ids == (id_of("▁<EOT>"),)


def test_answers_end_where_the_gap_is_full() -> None:
    tokenizer = with_tokens(TOKENS["qwen"])
    processor = InputProcessor(tokenizer, 200, tokenizer.vocab_size)
    ends = tuple(tokenizer.encode("<|fim_pad|><|file_sep|>"))
    for given, wanted in (((), ends), ((5, ends[0]), (5, *ends)), (range(128), range(128))):
        params = SamplingParams(stop_token_ids=tuple(given))
        got = processor.process(GAP, params).params.stop_token_ids
        assert got == tuple(wanted) and len(got) <= MAX_STOP_TOKEN_IDS
        assert processor.process("he", params).params.stop_token_ids == tuple(given)
    assert processor.process(GAP, SamplingParams(ignore_eos=True)).params.stop_token_ids == ()
    small = InputProcessor(tokenizer, 200, ends[1])  # the model lacks rows of the vocabulary
    assert small.process(GAP, SamplingParams()).params.stop_token_ids == ends[:1]


def test_what_cannot_be_filled() -> None:
    plain = make_tokenizer(CHATML)
    for tokenizer, gap, param in (
        (plain, GAP, "suffix"),
        (with_tokens(TOKENS["qwen"][:2]), GAP, "suffix"),
        (None, GAP, "suffix"),
        (with_tokens(TOKENS["qwen"]), FillPrompt("he", "\ud800"), "suffix"),
        (with_tokens(TOKENS["qwen"]), FillPrompt("\ud800", "he"), "prompt"),
    ):
        with pytest.raises(RequestError) as caught:
            InputProcessor(tokenizer, 200, 1000).process(gap, SamplingParams())
        assert caught.value.param == param
    processor = InputProcessor(with_tokens(TOKENS["qwen"]), 200, 1000)
    with pytest.raises(ContextLengthError):
        processor.process(FillPrompt("x", "y" * 10**6), SamplingParams())
    empty = processor.process(FillPrompt("", "he"), SamplingParams())
    assert len(empty.prompt_token_ids) == 4
