"""The HTTP implementation of `EngineClient`, against termgen's own server and scripted foreign
ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable

import pytest
from fake_engine import FakeEngine, GenerateCall, Script
from foreign_server import chunk, done
from remote_harness import CHAT, PARAMS, connected, read_all, text_of
from server_harness import eventually, serving

from termgen.client import TokenDelta
from termgen.errors import (
    ConfigError,
    ContextLengthError,
    EngineError,
    RequestError,
)
from termgen.remote.client import RemoteClient
from termgen.remote.models import normal_url
from termgen.remote.stream import AnswerReader
from termgen.remote.wire import CHAT_PATH, Dialect, build_call
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

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
    # before the end too: the status line shows them during the stream
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
        truncate_prompt_tokens=40,
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
        # parameters that are off are sent as off: the model's default may differ
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
