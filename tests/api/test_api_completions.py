"""Text completions: prompt forms in, chunks and responses out."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import make_model_info

from termgen.api.completions import (
    CompletionRequest,
    CompletionStream,
    completion_response,
    parse_completion,
)
from termgen.api.fields import resolve_model, served_names
from termgen.api.logprobs import TextLogprobs
from termgen.api.models import model_list
from termgen.client import FillPrompt, TokenDelta, TokenLogprob
from termgen.errors import RequestError
from termgen.vocabulary.request import FinishReason


def parse(prompt: Any = "hi", **fields: Any) -> CompletionRequest:
    return parse_completion({"prompt": prompt, **fields}, model="m", defaults={})


def answer(text: str, index: int = 0, **fields: Any) -> TokenDelta:
    args: dict[str, Any] = {
        "token_ids": (1,),
        "logprobs": None,
        "finish_reason": FinishReason.LENGTH,
        "stop_reason": None,
        "num_prompt_tokens": 3,
        "num_cached_tokens": 1,
        "num_output_tokens": 1,
    }
    return TokenDelta(request_id="r", index=index, text=text, **{**args, **fields})


def logprob(
    text: str, raw: bytes | None = None, value: float = -1.0, token_id: int = 1, top: Any = ()
) -> TokenLogprob:
    raw = text.encode() if raw is None else raw
    return TokenLogprob(
        token_id=token_id, token=text, token_bytes=raw, logprob=value, rank=1, top=top
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [(1, 2, 3)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
        (["x"] * 128, ["x"] * 128),
    ],
)
def test_prompt_forms(prompt: Any, prompts: list[Any]) -> None:
    assert [job.prompt for job in parse(prompt).jobs] == prompts


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        [],
        {},
        5,
        True,
        [True, False],
        [1.5],
        [-1],
        [2**31],
        ["a", 1],
        ["a", [1]],
        [[1], []],
        [[1], ["a"]],
        [[[1]]],
        ["x"] * 129,
        [[1]] * 129,
    ],
)
def test_bad_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse(prompt)
    assert caught.value.param == "prompt"


def test_fan_out_is_bounded() -> None:
    assert parse(["x"] * 128, n=8).num_choices == 1024
    with pytest.raises(RequestError) as caught:
        parse(["x"] * 128, n=9)
    assert caught.value.param == "n"


def test_no_tokens_are_allowed_only_with_an_echo() -> None:
    request = parse(echo=True, max_tokens=0)
    assert not request.jobs[0].generates
    assert parse(echo=True).jobs[0].generates
    with pytest.raises(RequestError) as caught:
        parse(max_tokens=0)
    assert caught.value.param == "max_tokens"
    assert parse(echo=True, max_tokens=0, min_tokens=0)
    with pytest.raises(RequestError, match=r"exceeds max_tokens \(0\)") as caught:
        parse(echo=True, max_tokens=0, min_tokens=1)
    assert caught.value.param == "min_tokens"


def test_choices_are_numbered_over_all_prompts() -> None:
    request = parse(["a", "b"], n=2, echo=True)
    answers = [answer(f"-{i}", index=i % 2) for i in range(4)]
    response = completion_response(request, answers, ["a", "b"])
    assert [c["index"] for c in response["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in response["choices"]] == ["a-0", "a-1", "b-2", "b-3"]
    assert response["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 4,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert response["object"] == "text_completion"


def test_usage_counts_the_drafts_of_all_choices_where_there_were_some() -> None:
    request = parse("a", n=3)
    counts = {"num_draft_tokens": 9, "num_accepted_tokens": 4}
    answers = [answer("x", index=0, **counts), answer("y", index=1), answer("z", index=2, **counts)]
    usage = completion_response(request, answers, ["a"])["usage"]
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": 8,
        "rejected_prediction_tokens": 10,
    }
    usage = completion_response(request, answers[1:2] * 3, ["a"])["usage"]
    assert "completion_tokens_details" not in usage


def test_a_stream_echoes_once_per_choice() -> None:
    request = parse("hi", stream=True, echo=True, n=2)
    stream = CompletionStream(request, ["hi"])
    chunks = stream.feed(0, answer("", finish_reason=None))
    chunks += stream.feed(0, answer("x", finish_reason=None))
    chunks += stream.feed(0, answer("y"))
    chunks += stream.feed(1, answer("z", index=1))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "hixy", 1: "hiz"}
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, "length", "length"]
    assert "stop_reason" in chunks[-1]["choices"][0]


def test_held_back_tokens_wait_for_their_text() -> None:
    stream = CompletionStream(parse("hi", stream=True, logprobs=1), [""])
    held = answer("", finish_reason=None, logprobs=(logprob("a"),), token_ids=(8,))
    assert stream.feed(0, held) == []
    (chunk,) = stream.feed(0, answer("ab", logprobs=(logprob("b"),), token_ids=(9,)))
    assert chunk["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
    assert "token_ids" not in chunk["choices"][0]


def test_who_wants_token_ids_gets_each_at_once() -> None:
    stream = CompletionStream(parse("hi", stream=True, return_token_ids=True), [""])
    (chunk,) = stream.feed(0, answer("", finish_reason=None, token_ids=(8,)))
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["token_ids"]) == ("", [8])
    (chunk,) = stream.feed(0, answer("ab", token_ids=(9,)))
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["token_ids"]) == ("ab", [9])


def test_logprobs_in_parallel_lists() -> None:
    build = TextLogprobs(num_top=2, tokens_as_ids=False)
    top = ((1, "a", b"a", -0.5), (2, "b", b"b", -1.5))
    first = build.build([logprob("a", value=-0.5, top=top), logprob("c", value=-3.0, top=top)])
    assert first == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -3.0],
        "tokens": ["a", "c"],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"a": -0.5, "b": -1.5, "c": -3.0}],
    }
    assert build.build([logprob("d")])["text_offset"] == [2], "offsets go on over chunks"
    only_chosen = TextLogprobs(num_top=0, tokens_as_ids=False).build([logprob("a")])
    assert only_chosen["top_logprobs"] is None


def test_pieces_of_a_character_are_told_apart_by_their_bytes() -> None:
    build = TextLogprobs(num_top=2, tokens_as_ids=False)
    wave = "👋".encode()
    top = ((5, "�", wave[:2], -0.5), (6, "�", wave[2:], -0.7))
    made = build.build(
        [
            logprob("�", wave[:2], -0.5, 5, top),
            logprob("�", wave[2:], -0.7, 6, top),
            logprob("!", top=((1, "!", b"!", -1.0),)),
        ]
    )
    assert made["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\x91\\x8b", "!"]
    assert made["top_logprobs"][0] == {"bytes:\\xf0\\x9f": -0.5, "bytes:\\x91\\x8b": -0.7}
    assert made["text_offset"] == [0, 0, 1], "counted in characters of the text"


def test_model_names() -> None:
    info = make_model_info()
    assert served_names(info, ()) == ("fake/model-1",)
    names = served_names(info, ("a", "b"))
    assert resolve_model(None, names) == "a"
    assert resolve_model("b", names) == "b"
    with pytest.raises(RequestError) as caught:
        resolve_model("fake/model-1", names)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    listed = model_list((name, info) for name in names)["data"]
    assert [m["id"] for m in listed] == ["a", "b"]
    assert all(m["root"] == "/models/fake" and m["max_model_len"] == 4096 for m in listed)


def test_a_suffix_makes_a_gap() -> None:
    request = parse(["a", "b"], suffix="c")
    assert [job.prompt for job in request.jobs] == [FillPrompt("a", "c"), FillPrompt("b", "c")]
    for nothing in (None, ""):
        assert parse("a", suffix=nothing).jobs[0].prompt == "a"


@pytest.mark.parametrize(
    "fields", [{"suffix": 5}, {"suffix": "x", "echo": True}, {"suffix": "x", "prompt": [1, 2]}]
)
def test_a_suffix_that_has_no_gap_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**{"prompt": "a", **fields})
    assert caught.value.param == "suffix"


def test_an_echo_is_of_the_whole_prompt() -> None:
    assert parse(echo=True, truncate_prompt_tokens=None).echo
    with pytest.raises(RequestError, match="echo") as caught:
        parse(echo=True, truncate_prompt_tokens=5)
    assert caught.value.param == "truncate_prompt_tokens"
