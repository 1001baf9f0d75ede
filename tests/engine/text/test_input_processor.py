"""Every request is completed and checked here, before the engine sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_samples import CHATML, make_tokenizer

from termgen.client import ChatPrompt, FillPrompt
from termgen.engine.text.input_processor import InputProcessor
from termgen.engine.text.tokenizer import Tokenizer, load_tokenizer
from termgen.errors import ContextLengthError, RequestError
from termgen.vocabulary.request import hash_blocks
from termgen.vocabulary.sampling_params import SamplingParams

TOKENIZER = make_tokenizer(CHATML)
MAX_LEN = 200


@pytest.fixture
def processor() -> InputProcessor:
    return InputProcessor(TOKENIZER, MAX_LEN, TOKENIZER.vocab_size)


@pytest.fixture
def bare() -> InputProcessor:
    return InputProcessor(None, MAX_LEN, vocab_size=50)


def user(text: str) -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": text}])


class TestPrompts:
    def test_text(self, processor: InputProcessor) -> None:
        request = processor.process("he said", SamplingParams())
        assert list(request.prompt_token_ids) == TOKENIZER.encode("he said")

    def test_token_ids(self, processor: InputProcessor) -> None:
        assert processor.process([1, 2, 3], SamplingParams()).prompt_token_ids == (1, 2, 3)
        assert processor.process((4,), SamplingParams()).prompt_token_ids == (4,)

    def test_chat(self, processor: InputProcessor) -> None:
        request = processor.process(user("hi <|im_end|>"), SamplingParams())
        expected = TOKENIZER.apply_chat_template([{"role": "user", "content": "hi <|im_end|>"}])
        assert list(request.prompt_token_ids) == expected

    def test_chat_options_reach_the_template(self) -> None:
        tokenizer = make_tokenizer(
            "{{ mood }}:{{ messages[0].content }}:{{ add_generation_prompt }}"
        )
        processor = InputProcessor(tokenizer, MAX_LEN, tokenizer.vocab_size)
        prompt = ChatPrompt(
            [{"role": "user", "content": "x"}],
            add_generation_prompt=False,
            template_kwargs={"mood": "calm"},
        )
        assert tokenizer.decode(processor.tokenize(prompt)) == "calm:x:False"

    def test_continuing_a_message(self, processor: InputProcessor) -> None:
        prompt = ChatPrompt(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so far"}],
            add_generation_prompt=False,
            continue_final_message=True,
        )
        assert TOKENIZER.decode(processor.tokenize(prompt)).endswith("so far")

    def test_tokenize_is_what_process_submits(self, processor: InputProcessor) -> None:
        for prompt in ("he", [1, 2], user("he")):
            ids = processor.process(prompt, SamplingParams()).prompt_token_ids
            assert processor.tokenize(prompt) == list(ids)

    @pytest.mark.parametrize(
        ("prompt", "words", "param"),
        [
            ("", "empty", "prompt"),
            ([], "empty", "prompt"),
            ([1, -1], "-1 is outside the vocabulary", "prompt"),
            ([1, 10**6], "1000000 is outside the vocabulary", "prompt"),
            ([1, True], "integers", "prompt"),
            ([1, "2"], "integers", "prompt"),
            ([1, 2.0], "integers", "prompt"),
            (5, "not int", "prompt"),
            ("half \ud800", "surrogate", "prompt"),
            (ChatPrompt([]), "empty", "messages"),
            (ChatPrompt([{"role": "cat", "content": "x"}]), "role", "messages"),
            (ChatPrompt([{"role": "user", "content": [{"type": "audio"}]}]), "audio", "messages"),
            (
                ChatPrompt([{"role": "user", "content": "x"}], True, True),
                "both",
                "continue_final_message",
            ),
            (user("half \ud800"), "surrogate", "messages"),
            (
                ChatPrompt([{"role": "user", "content": "x"}], template_kwargs={"messages": []}),
                "messages cannot",
                "chat_template_kwargs",
            ),
            (
                ChatPrompt(
                    [{"role": "user", "content": "x"}],
                    template_kwargs={"add_generation_prompt": True},
                ),
                "add_generation_prompt",
                "chat_template_kwargs",
            ),
        ],
    )
    def test_bad_prompts(
        self, processor: InputProcessor, prompt: Any, words: str, param: str
    ) -> None:
        with pytest.raises(RequestError, match=words) as raised:
            processor.process(prompt, SamplingParams())
        assert (raised.value.param, raised.value.status) == (param, 400)

    def test_tokens_the_model_has_no_row_for(self) -> None:
        processor = InputProcessor(TOKENIZER, MAX_LEN, vocab_size=TOKENIZER.vocab_size - 1)
        [last] = TOKENIZER.encode("</tool_response>")
        assert last == TOKENIZER.vocab_size - 1
        with pytest.raises(RequestError, match="outside the vocabulary"):
            processor.process("</tool_response>", SamplingParams())


class TestLengths:
    def test_max_tokens_defaults_to_what_the_context_leaves(
        self, processor: InputProcessor
    ) -> None:
        request = processor.process([1] * 30, SamplingParams())
        assert request.params.max_tokens == MAX_LEN - 30
        assert processor.process([1], SamplingParams(max_tokens=7)).params.max_tokens == 7

    def test_last_token_that_fits(self, processor: InputProcessor) -> None:
        request = processor.process([1] * (MAX_LEN - 1), SamplingParams())
        assert request.params.max_tokens == 1
        processor.process([1] * 150, SamplingParams(max_tokens=50))

    def test_prompt_that_leaves_no_room(self, processor: InputProcessor) -> None:
        with pytest.raises(ContextLengthError) as raised:
            processor.process([1] * MAX_LEN, SamplingParams())
        assert str(raised.value) == (
            "This model's maximum context length is 200 tokens. However, you requested 200 tokens"
            " in the prompt, which leaves no room for a completion. Please reduce the length of the"
            " prompt. (context_length_exceeded)"
        )
        assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "prompt")

    def test_prompt_and_completion_that_do_not_fit_together(
        self, processor: InputProcessor
    ) -> None:
        with pytest.raises(ContextLengthError) as raised:
            processor.process([1] * 150, SamplingParams(max_tokens=51))
        assert str(raised.value) == (
            "This model's maximum context length is 200 tokens. However, you requested 201 tokens"
            " (150 in the prompt, 51 in the completion). Please reduce the length of the prompt or"
            " completion. (context_length_exceeded)"
        )

    def test_chats_are_told_to_shorten_the_messages(self, processor: InputProcessor) -> None:
        with pytest.raises(ContextLengthError, match="length of the messages") as raised:
            processor.process(user("he " * 200), SamplingParams())
        assert raised.value.param == "messages"

    def test_min_tokens_is_checked_against_the_filled_in_maximum(
        self, processor: InputProcessor
    ) -> None:
        params = SamplingParams(min_tokens=60)
        assert processor.process([1] * 140, params).params.min_tokens == 60
        with pytest.raises(RequestError) as raised:
            processor.process([1] * 141, params)
        assert raised.value.param == "min_tokens"
        assert not isinstance(raised.value, ContextLengthError)

    @pytest.mark.parametrize(
        "prompt",
        [
            "a" * 50_000_000,
            user("a" * 50_000_000),
            ChatPrompt([{"role": "user", "content": [{"type": "text", "text": "a" * 50_000_000}]}]),
            ChatPrompt(
                [{"role": "user", "content": "x"}],
                template_kwargs={"tools": [{"function": {"description": "a" * 50_000_000}}]},
            ),
            ChatPrompt(
                [{"role": "assistant", "tool_calls": [{"arguments": {"a": "a" * 50_000_000}}]}]
            ),
            ChatPrompt([{"role": "assistant", "reasoning_content": "a" * 50_000_000}]),
        ],
        ids=["text", "chat", "parts", "tools", "calls", "reasoning"],
    )
    def test_hopeless_prompts_are_not_even_tokenised(
        self, prompt: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*args: object, **kwargs: object) -> None:
            raise AssertionError("tokenised")

        monkeypatch.setattr(Tokenizer, "encode", refuse)
        monkeypatch.setattr(Tokenizer, "encode_chat", refuse)
        with pytest.raises(ContextLengthError, match="at least"):
            InputProcessor(TOKENIZER, MAX_LEN, TOKENIZER.vocab_size).process(
                prompt, SamplingParams()
            )

    def test_a_short_prompt_is_measured_without_the_longest_token(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Finding it takes a look at each token, which is long for a large vocabulary."""

        def refuse(self: Tokenizer) -> int:
            raise AssertionError("looked for")

        monkeypatch.setattr(Tokenizer, "max_token_chars", property(refuse))
        processor = InputProcessor(TOKENIZER, MAX_LEN, TOKENIZER.vocab_size)
        assert processor.process("a" * (MAX_LEN - 1), SamplingParams(max_tokens=1))
        with pytest.raises(AssertionError, match="looked for"):
            processor.process("a" * MAX_LEN, SamplingParams())

    def test_long_tokens_are_no_reason_to_refuse(self, smollm2_gguf: Path) -> None:
        tokenizer = load_tokenizer(smollm2_gguf)
        text = "-" * 64 * 150  # one token for every 64 characters
        processor = InputProcessor(tokenizer, 200, tokenizer.vocab_size)
        assert len(processor.process(text, SamplingParams()).prompt_token_ids) < 200


class TestTruncation:
    @pytest.mark.parametrize("prompt", [[*range(20)], "he said so " * 9, user("he said " * 9)])
    def test_the_end_of_a_prompt_is_kept(self, processor: InputProcessor, prompt: Any) -> None:
        ids = processor.tokenize(prompt)
        for keep in (1, 7, len(ids) - 1, len(ids), len(ids) + 1):
            request = processor.process(prompt, SamplingParams(truncate_prompt_tokens=keep))
            assert list(request.prompt_token_ids) == ids[-keep:]
            assert request.params.max_tokens == MAX_LEN - min(keep, len(ids))

    @pytest.mark.parametrize(
        ("params", "num_kept"),
        [
            ({}, MAX_LEN - 1),
            ({"max_tokens": 50}, MAX_LEN - 50),
            ({"min_tokens": 60}, MAX_LEN - 60),
            ({"max_tokens": MAX_LEN - 1}, 1),
        ],
    )
    def test_what_the_answer_leaves_is_kept(
        self, processor: InputProcessor, params: dict[str, Any], num_kept: int
    ) -> None:
        ids = [n % 100 for n in range(3 * MAX_LEN)]
        cut = SamplingParams(**params, truncate_prompt_tokens=-1)
        assert list(processor.process(ids, cut).prompt_token_ids) == ids[-num_kept:]
        short = processor.process([5], cut).prompt_token_ids
        assert short == (5,)

    def test_texts_longer_than_the_context_are_read(self) -> None:
        processor = InputProcessor(TOKENIZER, MAX_LEN, TOKENIZER.vocab_size)
        text = "he said " * 5000
        kept = processor.process(text, SamplingParams(max_tokens=9, truncate_prompt_tokens=-1))
        assert list(kept.prompt_token_ids) == TOKENIZER.encode(text)[9 - MAX_LEN :]
        with pytest.raises(ContextLengthError):
            processor.process(text, SamplingParams(max_tokens=9))

    def test_hashes_are_those_of_the_kept_tokens(self) -> None:
        processor = InputProcessor(None, MAX_LEN, 50, hash_block_size=4)
        ids = [*range(30)]
        cut = processor.process(ids, SamplingParams(truncate_prompt_tokens=9))
        assert cut.block_hashes == processor.process(ids[-9:], SamplingParams()).block_hashes
        assert len(cut.block_hashes) == 2

    @pytest.mark.parametrize(
        ("prompt", "params", "words"),
        [
            ([1], {"truncate_prompt_tokens": MAX_LEN}, "at most 199"),
            ([1], {"truncate_prompt_tokens": -1, "max_tokens": MAX_LEN}, "200 leaves nothing"),
            (FillPrompt("a", "b"), {"truncate_prompt_tokens": 5}, "suffix"),
        ],
    )
    def test_faults(
        self, processor: InputProcessor, prompt: Any, params: dict[str, int], words: str
    ) -> None:
        with pytest.raises(RequestError, match=words) as raised:
            processor.process(prompt, SamplingParams(**params))  # type: ignore[arg-type]
        assert (raised.value.param, raised.value.status) == ("truncate_prompt_tokens", 400)


class TestWithoutTokenizer:
    def test_token_ids_pass(self, bare: InputProcessor) -> None:
        assert bare.process([49], SamplingParams()).prompt_token_ids == (49,)

    @pytest.mark.parametrize("prompt", ["text", user("text")])
    def test_text_does_not(self, bare: InputProcessor, prompt: Any) -> None:
        with pytest.raises(RequestError, match="without a tokenizer"):
            bare.process(prompt, SamplingParams())

    def test_stop_strings_need_one(self, bare: InputProcessor) -> None:
        with pytest.raises(RequestError, match="stop_token_ids") as raised:
            bare.process([1], SamplingParams(stop=("x",)))
        assert raised.value.param == "stop"
        bare.process([1], SamplingParams(stop_token_ids=(3,)))


class TestBadWords:
    def test_a_word_is_forbidden_alone_and_after_a_space(self, processor: InputProcessor) -> None:
        request = processor.process([1], SamplingParams(bad_words=("he", " he", "lo")))
        spelled = [TOKENIZER.decode(ids) for ids in request.bad_token_ids]
        assert spelled == ["he", " he", "lo", " lo"], "each once"
        assert processor.process([1], SamplingParams()).bad_token_ids == ()

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"bad_words": ["x y z " * 40]}, "1 to 32 are allowed"),
            ({"bad_words": ["\ud800"]}, "surrogate"),
        ],
    )
    def test_faults(self, processor: InputProcessor, options: dict[str, Any], words: str) -> None:
        with pytest.raises(RequestError, match=words) as raised:
            processor.process([1], SamplingParams(**options))
        assert raised.value.param == "bad_words"

    def test_something_must_be_left_to_draw(self) -> None:
        vocab_size = TOKENIZER.vocab_size
        processor = InputProcessor(TOKENIZER, MAX_LEN, vocab_size, eos_token_ids=(5,))
        (only,) = TOKENIZER.encode("h", add_special_tokens=False)
        for params in (
            SamplingParams(bad_words=("h",), allowed_token_ids=(only,)),
            SamplingParams(bad_words=("hhh",), allowed_token_ids=(only,)),
            SamplingParams(min_tokens=1, allowed_token_ids=(5,)),
            SamplingParams(min_tokens=1, allowed_token_ids=(7, 5), stop_token_ids=(7,)),
            SamplingParams(min_tokens=1, allowed_token_ids=(only, 5), bad_words=("h",)),
        ):
            with pytest.raises(RequestError, match="leave none") as raised:
                processor.process([1], params)
            assert raised.value.param == "allowed_token_ids"
        for params in (
            SamplingParams(allowed_token_ids=(5,)),
            SamplingParams(min_tokens=1, ignore_eos=True, allowed_token_ids=(5,)),
            SamplingParams(bad_words=("h",), allowed_token_ids=(only, 9)),
        ):
            processor.process([1], params)

    def test_they_need_a_tokenizer(self, bare: InputProcessor) -> None:
        with pytest.raises(RequestError, match="need a tokenizer"):
            bare.process([1], SamplingParams(bad_words=("x",)))


class TestRequestOptions:
    def test_a_priority_needs_a_scheduler_that_reads_it(self) -> None:
        processor = InputProcessor(None, MAX_LEN, vocab_size=50, has_priorities=False)
        assert processor.process([1], SamplingParams(), priority=0).priority == 0
        with pytest.raises(RequestError, match="--scheduling-policy") as raised:
            processor.process([1], SamplingParams(), priority=1)
        assert raised.value.param == "priority"

    def test_given_values_are_kept(self, processor: InputProcessor) -> None:
        request = processor.process(
            [1], SamplingParams(), request_id="mine", priority=-3, cache_salt="team-A_1"
        )
        assert (request.request_id, request.priority, request.cache_salt) == (
            "mine",
            -3,
            "team-A_1",
        )

    def test_ids_are_made_where_none_is_given(self, processor: InputProcessor) -> None:
        ids = {processor.process([1], SamplingParams()).request_id for _ in range(50)}
        assert len(ids) == 50

    @pytest.mark.parametrize(
        ("options", "param"),
        [
            ({"request_id": ""}, "request_id"),
            ({"request_id": "x" * 1000}, "request_id"),
            ({"priority": True}, "priority"),
            ({"priority": 1.5}, "priority"),
            ({"priority": 2**40}, "priority"),
            ({"cache_salt": ""}, "cache_salt"),
            ({"cache_salt": "x" * 129}, "cache_salt"),
            ({"cache_salt": "white space"}, "cache_salt"),
            ({"cache_salt": "salt\n"}, "cache_salt"),
        ],
    )
    def test_faults(self, processor: InputProcessor, options: dict[str, Any], param: str) -> None:
        with pytest.raises(RequestError) as raised:
            processor.process([1], SamplingParams(), **options)
        assert raised.value.param == param

    def test_stop_token_ids_must_be_in_the_vocabulary(self, processor: InputProcessor) -> None:
        with pytest.raises(RequestError, match="outside the vocabulary"):
            processor.process([1], SamplingParams(stop_token_ids=(10**6,)))


class TestClamping:
    """With `clamp_max_tokens` an answer gets the rest of the context instead of an error."""

    @pytest.mark.parametrize(("wanted", "given"), [(1000, MAX_LEN - 3), (5, 5), (None, 197)])
    def test_max_tokens_is_cut_to_the_room(self, wanted: int | None, given: int) -> None:
        clamping = InputProcessor(None, MAX_LEN, 50, clamps_max_tokens=True)
        request = clamping.process([1, 2, 3], SamplingParams(max_tokens=wanted))
        assert request.params.max_tokens == given

    def test_what_leaves_no_room_is_still_an_error(self) -> None:
        clamping = InputProcessor(None, MAX_LEN, 50, clamps_max_tokens=True)
        with pytest.raises(ContextLengthError):
            clamping.process([1] * MAX_LEN, SamplingParams(max_tokens=1))
        with pytest.raises(RequestError, match="exceeds the 197 tokens") as caught:
            clamping.process([1, 2, 3], SamplingParams(max_tokens=500, min_tokens=400))
        assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("salt", [None, "alice"])
def test_the_prompts_full_blocks_come_hashed(salt: str | None) -> None:
    ids = [5 + i % 40 for i in range(4 * 7 + 3)]
    for block_size in (4, 16):
        processor = InputProcessor(TOKENIZER, MAX_LEN, 50, hash_block_size=block_size)
        request = processor.process(ids, SamplingParams(), cache_salt=salt)
        expected: list[bytes] = []
        hash_blocks(np.asarray(ids, np.int32), block_size, expected, salt)
        assert request.block_hashes == tuple(expected) and len(expected) == len(ids) // block_size
    without = InputProcessor(TOKENIZER, MAX_LEN, 50).process(ids, SamplingParams())
    assert without.block_hashes == ()
