"""The HTTP twin of the engine, against termgen's own server and against hand-made foreign ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_engine import FakeEngine, GenerateCall, Script
from foreign_server import ForeignServer, chunk, done, event, foreign_server
from server_harness import eventually, serving

from termgen.client import ChatPrompt, FillPrompt, TokenDelta
from termgen.engine.request import FinishReason
from termgen.engine.sampling_params import SamplingParams
from termgen.engine.structured_outputs import StructuredOutputsParams
from termgen.errors import (
    ConfigError,
    ContextLengthError,
    EngineError,
    OverloadedError,
    RequestError,
)
from termgen.remote.client import RemoteClient
from termgen.remote.models import normal_url
from termgen.remote.stream import AnswerReader
from termgen.remote.wire import CHAT_PATH, Dialect, build_call

CHAT = ChatPrompt([{"role": "user", "content": "hi"}])
PARAMS = SamplingParams(temperature=0.5)


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncGenerator[RemoteClient, None]:
    client = await RemoteClient.connect(url, **options)
    try:
        yield client
    finally:
        await client.aclose()


async def read_all(client: RemoteClient, params: SamplingParams = PARAMS) -> list[TokenDelta]:
    return [delta async for delta in client.generate(CHAT, params)]


def text_of(deltas: list[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


# a termgen server


async def test_a_termgen_server_answers_as_its_engine_does() -> None:
    engine = FakeEngine(script=Script(num_cached_tokens=3))
    async with serving(engine) as server, connected(server.url + "/v1/") as client:
        assert client.dialect is Dialect.TERMGEN
        assert client.model.model_id == engine.model.model_id
        assert client.model.max_model_len == engine.model.max_model_len
        deltas = await read_all(client)
        here = [delta async for delta in engine.generate(CHAT, PARAMS)]
    assert text_of(deltas) == text_of(here)
    assert [t for d in deltas for t in d.token_ids] == [t for d in here for t in d.token_ids]
    last, own = deltas[-1], here[-1]
    assert last.finish_reason is FinishReason.STOP
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    for name in ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens"):
        assert getattr(last, name) == getattr(own, name), name
    assert last.timings is not None and own.timings is not None
    assert 0 < last.timings.ttft_s <= last.timings.e2e_s < 5
    # before the end too: the status line shows them while it streams
    assert deltas[2].num_prompt_tokens == own.num_prompt_tokens
    counts = [delta.num_output_tokens for delta in deltas]
    assert counts == sorted(counts)


async def test_every_parameter_reaches_a_termgen_server() -> None:
    engine = FakeEngine()
    params = SamplingParams(
        temperature=0.25,
        top_p=0.5,
        top_k=7,
        min_p=0.125,
        seed=3,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        stop=("x", "y"),
        stop_token_ids=(4,),
        ignore_eos=True,
        max_tokens=9,
        min_tokens=2,
        logprobs=2,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        logit_bias={5: 1.5},
        allowed_token_ids=(1, 2),
        bad_words=("no",),
    )
    async with serving(engine) as server, connected(server.url) as client:
        deltas = await read_all(client, params)
        assert engine.calls[-1].params == params
        for form in (
            StructuredOutputsParams(regex="a+"),
            StructuredOutputsParams(choice=("a", "b")),
            StructuredOutputsParams(json={"type": "object"}),
            StructuredOutputsParams(json_object=True),
        ):
            await read_all(client, SamplingParams(structured_outputs=form))
            got = engine.calls[-1].params.structured_outputs
            assert got is not None and (got.kind, got.value) == (form.kind, form.value)
        # what is off is said to be off: the model may have a default of its own
        await read_all(client, SamplingParams())
        assert engine.calls[-1].params == SamplingParams()
    first = next(delta for delta in deltas if delta.logprobs)
    assert first.logprobs is not None and first.logprobs[0].token_id == first.token_ids[0]
    assert len(first.logprobs[0].top) == 2


async def test_raw_prompts_and_tokens() -> None:
    engine = FakeEngine()
    async with serving(engine) as server, connected(server.url) as client:
        deltas = [d async for d in client.generate("Once upon", PARAMS)]
        assert engine.calls[-1].prompt == "Once upon" and text_of(deltas).startswith("Hello")
        ids = [5, 6]
        _ = [d async for d in client.generate(ids, PARAMS)]
        assert engine.calls[-1].prompt == tuple(ids) or engine.calls[-1].prompt == ids
        assert await client.tokenize("abc") == await engine.tokenize("abc")
        assert await client.tokenize(CHAT) == await engine.tokenize(CHAT)
        assert await client.detokenize([104, 105]) == "hi"
        assert await client.token_texts([104, 105]) == ["h", "i"]


@pytest.mark.parametrize("how", ["close", "abort", "cancel"])
async def test_stopping_stops_the_server(how: str) -> None:
    engine = FakeEngine(script=Script(hold_after=3))
    async with serving(engine) as server, connected(server.url) as client:
        deltas: list[TokenDelta] = []

        async def read() -> None:
            async with contextlib.aclosing(client.generate(CHAT, PARAMS, request_id="mine")) as s:
                async for delta in s:
                    deltas.append(delta)
                    if how == "close" and len(deltas) == 3:
                        return

        reading = asyncio.create_task(read())
        await eventually(lambda: len(deltas) == 3)
        if how == "abort":
            assert await client.abort("mine")
        if how == "cancel":
            reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await eventually(lambda: bool(engine.aborted))
        assert not await client.abort("mine")
    last = deltas[-1]
    if how == "abort":
        assert last.finish_reason is FinishReason.ABORT and last.num_output_tokens == 3


async def test_a_refusal_of_a_termgen_server_keeps_its_kind() -> None:
    def script(call: GenerateCall) -> Script:
        return Script(raises=ContextLengthError("too long", param="messages"))

    async with serving(FakeEngine(script=script)) as server, connected(server.url) as client:
        with pytest.raises(ContextLengthError, match="too long"):
            await read_all(client)
    engine = FakeEngine(script=Script(fail_after=2, error=EngineError("out of memory")))
    async with serving(engine) as server, connected(server.url) as client:
        with pytest.raises(EngineError, match="broke the answer off: out of memory"):
            await read_all(client)


async def test_keys() -> None:
    async with serving(FakeEngine(), api_key=("k",), admin_key=("a",)) as server:
        with pytest.raises(RequestError, match="wants an API key: give --api-key") as missing:
            await RemoteClient.connect(server.url)
        assert missing.value.status == 401
        with pytest.raises(RequestError, match="refuses the API key"):
            await RemoteClient.connect(server.url, api_key="wrong")
        with pytest.raises(ConfigError, match="api_key must be ASCII"):
            await RemoteClient.connect(server.url, api_key="schlüssel")
        async with connected(server.url, api_key="k") as client:
            assert text_of(await read_all(client))
            with pytest.raises(RequestError, match="refuses the API key"):
                await client.pause()


async def test_control_of_a_termgen_server() -> None:
    engine = FakeEngine()
    async with serving(engine, api_key=("k",), admin_key=("a",)) as server:
        async with connected(server.url, api_key="k", admin_key="a") as client:
            await client.pause("keep")
            assert client.is_paused
            await client.resume()
            await client.sleep(2, "wait")
            assert client.sleep_level == 2
            await client.wake_up()
            assert await client.reset_prefix_cache(force=True)
            assert (client.is_paused, client.sleep_level) == (False, 0)
            assert await client.why_unhealthy() is None
            engine.healthy = False
            assert "stopped" in str(await client.why_unhealthy())
    assert engine.controls == [
        "pause keep",
        "resume",
        "sleep 2 wait",
        "wake_up",
        "reset_prefix_cache force",
    ]


# foreign servers


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


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://[", "http://a:b@x", ""])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        normal_url(url)


def test_urls_as_people_give_them() -> None:
    for text in ("box:8000", "http://box:8000/", "http://box:8000/v1/", "box:8000/v1"):
        assert normal_url(text) == "http://box:8000"
    assert normal_url("https://x.example/api/v1") == "https://x.example/api"


def test_events_cut_anywhere_are_read_the_same() -> None:
    raw = b"".join([chunk("Grü"), b": ping\r\n\r\n", chunk("ße", finish="length"), done()])
    whole = _reader()
    expected = [d.text for d in whole.feed(raw)]
    for size in (1, 3, 7):
        reader = _reader()
        parts = [raw[i : i + size] for i in range(0, len(raw), size)]
        assert [d.text for part in parts for d in reader.feed(part)] == expected == ["Grü", "ße"]
        assert reader.end()[-1].finish_reason is FinishReason.LENGTH
    with pytest.raises(EngineError, match="event without an end"):
        reader = _reader()
        for _ in range(20):
            reader.feed(b"data: " + b"x" * 2**20)


def _reader(clock: Callable[[], int] = lambda: 5) -> AnswerReader:
    return AnswerReader("r", 1, True, 0, clock)


def test_the_path_of_a_chat() -> None:
    call = build_call(CHAT, PARAMS, model="m", dialect=Dialect.OPENAI)
    assert call.path == CHAT_PATH and json.dumps(call.body)
