"""The client of other servers: their fields, dialects, streams and faults."""

from __future__ import annotations

import pytest
from foreign_server import ForeignServer, chunk, done, event, foreign_server
from remote_harness import CHAT, PARAMS, connected, read_all, text_of

from termgen.client import ChatPrompt, FillPrompt, TokenDelta
from termgen.errors import (
    ConfigError,
    EngineError,
    OverloadedError,
    RequestError,
)
from termgen.remote.client import RemoteClient
from termgen.remote.models import RemoteModel, model_info
from termgen.remote.wire import Dialect, build_call
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.structured_outputs import StructuredOutputsParams


async def test_a_foreign_server_gets_nothing_but_openais_fields() -> None:
    async with foreign_server(chunk("Hel"), chunk("lo", finish="stop"), done()) as server:
        async with connected(server.url) as client:
            assert client.dialect is Dialect.OPENAI and client.model.max_model_len == 0
            deltas = await read_all(client, SamplingParams(temperature=0.5, stop=("x",), seed=1))
            assert text_of(deltas) == "Hello" and deltas[-1].num_output_tokens == 2
            assert deltas[-1].timings is not None and deltas[-1].timings.first_token_ns
            assert server.bodies[-1] == {
                "model": "m1",
                "messages": [{"role": "user", "content": "hi"}],
                "stream": True,
                "stream_options": {"include_usage": True},
                "temperature": 0.5,
                "top_p": 1.0,
                "stop": ["x"],
                "seed": 1,
            }
            for name, value in {
                "top_k": 5,
                "min_p": 0.1,
                "repetition_penalty": 1.1,
                "ignore_eos": True,
                "bad_words": ("x",),
                "structured_outputs": StructuredOutputsParams(regex="a"),
            }.items():
                with pytest.raises(RequestError, match=f"{name} is not part of OpenAI") as refused:
                    await read_all(client, SamplingParams(**{name: value}))  # type: ignore[arg-type]
                assert refused.value.param == name
            assert len(server.bodies) == 1, "refused before anything is sent"
            for what in (client.tokenize("x"), client.pause(), client.detokenize([1])):
                with pytest.raises(EngineError, match=r"has no /(tokenize|pause|detokenize)"):
                    await what
            with pytest.raises(EngineError, match="cannot show its engine"):
                client.events()
            with pytest.raises(EngineError, match="cannot show its engine"):
                await client.snapshot()


def test_other_dialects() -> None:
    params = SamplingParams(top_k=5, min_p=0.1, repetition_penalty=1.1)
    gap = build_call(FillPrompt("a", "b"), PARAMS, model="m", dialect=Dialect.OPENAI)
    assert not gap.is_chat and (gap.body["prompt"], gap.body["suffix"]) == ("a", "b")
    body = build_call(CHAT, params, model="m", dialect=Dialect.LLAMA_CPP).body
    assert (body["top_k"], body["min_p"], body["repeat_penalty"]) == (5, 0.1, 1.1)
    with pytest.raises(RequestError, match="ignore_eos"):
        build_call(CHAT, SamplingParams(ignore_eos=True), model="m", dialect=Dialect.LLAMA_CPP)
    body = build_call(CHAT, params, model="m", dialect=Dialect.VLLM, cache_salt="s").body
    assert (body["top_k"], body["cache_salt"]) == (5, "s") and "include_timings" not in body
    for prompt, name in (
        (ChatPrompt(CHAT.messages, continue_final_message=True), "continue_final_message"),
        (ChatPrompt(CHAT.messages, template_kwargs={"a": 1}), "chat_template_kwargs"),
    ):
        with pytest.raises(RequestError, match=name):
            build_call(prompt, PARAMS, model="m", dialect=Dialect.OPENAI)


async def test_usage_reasoning_and_timings_of_others() -> None:
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "prompt_tokens_details": None}
    times = {"prompt_n": 11, "prompt_ms": 100.0, "predicted_n": 7, "predicted_ms": 400.0}
    frames = (
        event({"choices": [{"index": 0, "delta": {"reasoning_content": "so"}}]}),
        event({"choices": [{"index": 0, "delta": {"reasoning_content": "…"}}]}),
        chunk("yes"),
        chunk("", finish="content_filter"),
        event({"choices": [], "usage": usage, "timings": times}),
    )
    async with foreign_server(*frames, owner="llamacpp") as server:  # no [DONE] either
        async with connected(server.url) as client:
            deltas = await read_all(client)
    assert text_of(deltas) == "<think>\nso…\n</think>\n\nyes"
    last = deltas[-1]
    assert (last.num_prompt_tokens, last.num_output_tokens) == (11, 7)
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "content_filter")
    assert last.timings is not None
    assert (last.timings.ttft_s, last.timings.e2e_s) == pytest.approx((0.1, 0.5))


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ((chunk("a"), b"\x00\xff junk"), "broke the answer off in the middle"),
        ((chunk("a"), b"data: \x00\xff{{\n\n"), "no event of a chat"),
        ((b"data: [1, 2]\n\n",), "no event of a chat"),
        ((event({"choices": "abc"}),), "no event of a chat"),
        ((event({"choices": [{"delta": {"content": 5}}]}),), "no event of a chat"),
        ((event({"choices": [{"index": 9, "delta": {}}]}),), "no event of a chat"),
        ((event({"choices": [], "usage": {"prompt_tokens": "x"}}),), "no event of a chat"),
        ((chunk("a"), event({"error": {"message": "GPU\nfell off"}})), "off: GPU fell off"),
        ((event({"error": "plain words"}),), "off: plain words"),
        ((chunk("a"), None), "was lost"),
        ((chunk("a"), done()), "broke the answer off in the middle"),
    ],
)
async def test_a_stream_that_goes_wrong_is_one_line(
    frames: tuple[bytes | None, ...], words: str
) -> None:
    async with foreign_server(*frames) as server, connected(server.url) as client:
        got: list[TokenDelta] = []
        with pytest.raises(EngineError, match=words) as failed:
            async for delta in client.generate(CHAT, PARAMS):
                got.append(delta)
        assert "\n" not in str(failed.value)
        assert text_of(got) == ("a" if chunk("a") in frames else "")


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind", "words"),
    [
        (404, {}, b"<html>no</html>", EngineError, "has no /v1/chat/completions"),
        (404, {}, b'{"detail": "Not Found"}', EngineError, "has no /v1/chat/completions"),
        (404, {}, b'{"error": {"message": "no model m1"}}', RequestError, "no model m1"),
        (429, {"Retry-After": "7"}, b"", OverloadedError, "too busy: .*; try again in 7 s"),
        (429, {}, b'{"error": {"message": "Quota."}}', OverloadedError, "too busy: Quota$"),
        (400, {}, b'{"error": {"message": "top_k: no"}}', RequestError, "^top_k: no"),
        (422, {}, b'{"detail": [{"msg": "bad n"}]}', RequestError, "bad n"),
        (500, {}, b"\xff\xfe", EngineError, "failed with status 500: Internal Server Error"),
        (503, {}, b'{"error": "Loading model"}', EngineError, "cannot answer now: Loading"),
        (307, {"Location": "http://x/"}, b"", EngineError, "sends us on to http://x/"),
        (200, {"Content-Type": "text/html"}, b"<p>", EngineError, "does not stream"),
    ],
)
async def test_refusals(
    status: int, headers: dict[str, str], body: bytes, kind: type[Exception], words: str
) -> None:
    def answer(server: ForeignServer) -> bytes:
        return server.response(status, headers, body)

    async with foreign_server(answer=answer) as server, connected(server.url) as client:
        with pytest.raises(kind, match=words):
            await read_all(client)


async def test_servers_that_are_not_there_or_not_servers() -> None:
    async with foreign_server() as server:
        gone = server.url
    with pytest.raises(EngineError, match="no server at http://127.0.0.1"):
        await RemoteClient.connect(gone)
    for models, words in (
        (b"<html>", "sent no JSON object"),
        (b'{"data": []}', "lists no model"),
        (b'{"data": [{"id": 5}, "x"]}', "lists no model"),
    ):
        async with foreign_server(models=models) as server:
            with pytest.raises(EngineError, match=words):
                await RemoteClient.connect(server.url)
    async with foreign_server(done()) as server:
        with pytest.raises(ConfigError, match="has no 'other', only m1"):
            await RemoteClient.connect(server.url, model="other")
        async with connected(server.url) as client:
            await server.aclose()
            with pytest.raises(EngineError, match="no server at"):
                await read_all(client)


@pytest.mark.parametrize("dialect", Dialect)
def test_only_given_parameters_are_sent_where_the_server_has_defaults(dialect: Dialect) -> None:
    params = SamplingParams(temperature=0.3, max_tokens=9)
    bodies = [
        build_call(CHAT, params, model="m", dialect=dialect, given=given).body
        for given in ((), ("temperature",), None)
    ]
    assert [body.get("temperature") for body in bodies] == [None, 0.3, 0.3]
    assert [body.get("top_p") for body in bodies] == [None, None, 1.0]
    assert [("top_k" in body) for body in bodies] == [False, False, dialect.knows_all]
    assert {body["max_tokens"] for body in bodies} == {9}


@pytest.mark.parametrize(
    ("url", "owner", "counts"),
    [
        ("http://127.0.0.1:8000", "termgen", True),
        ("http://localhost:8000", "vllm", True),
        ("http://[::1]:8000", "termgen", True),
        ("http://127.0.0.1:8080", "llamacpp", False),
        ("http://gpu.example:8000", "termgen", False),
        ("https://192.168.1.2", "vllm", False),
    ],
)
def test_texts_are_counted_on_this_machine_alone(url: str, owner: str, counts: bool) -> None:
    assert model_info(url, RemoteModel("m", owner, 4096)).counts_tokens is counts
