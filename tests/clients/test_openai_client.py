"""The openai package as the client: the one that most users will point at the server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from fake_engine import FakeEngine, GenerateCall, Script, make_model_info
from server_harness import ANSWER, MESSAGES, eventually, serving

from termgen.errors import EngineDeadError

USER: Any = MESSAGES


@asynccontextmanager
async def openai_client(
    engine: FakeEngine, *, api_key: str = "none", **config: Any
) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with serving(engine, **config) as server:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=api_key, max_retries=0, timeout=20
        ) as client:
            yield client


async def test_models() -> None:
    async with openai_client(FakeEngine(), served_model_name=("org/small",)) as client:
        listed = await client.models.list()
        assert [m.id for m in listed.data] == ["org/small"]
        one = await client.models.retrieve("org/small")
        assert one.id == "org/small" and one.owned_by == "termgen"
        assert one.model_extra is not None and one.model_extra["max_model_len"] == 4096


async def test_chat() -> None:
    engine = FakeEngine(script=Script(num_cached_tokens=3))
    async with openai_client(engine) as client:
        answer = await client.chat.completions.create(
            model="fake/model-1",
            messages=USER,
            n=2,
            temperature=0.3,
            stop=["never"],
            seed=5,
            logprobs=True,
            top_logprobs=2,
            max_completion_tokens=50,
            user="someone",
            extra_body={"top_k": 4, "min_p": 0.1, "include_timings": True},
        )
    assert [c.message.content for c in answer.choices] == [ANSWER, ANSWER]
    assert answer.choices[0].finish_reason == "stop"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(t.token for t in logprobs.content) == ANSWER
    assert b"".join(bytes(t.bytes or ()) for t in logprobs.content).decode() == ANSWER
    assert len(logprobs.content[0].top_logprobs) == 2
    usage = answer.usage
    assert usage is not None and usage.completion_tokens == 22
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert answer.model_extra is not None
    assert answer.model_extra["termgen"]["timings"][1]["e2e_s"] > 0
    params = engine.calls[0].params
    assert (params.top_k, params.min_p, params.seed, params.max_tokens) == (4, 0.1, 5, 50)


async def test_chat_stream() -> None:
    async with openai_client(FakeEngine()) as client:
        stream = await client.chat.completions.create(
            model="fake/model-1",
            messages=USER,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 11


async def test_the_stream_helper() -> None:
    async with openai_client(FakeEngine()) as client:
        async with client.chat.completions.stream(model="fake/model-1", messages=USER) as stream:
            deltas = [e.delta async for e in stream if e.type == "content.delta"]
            final = await stream.get_final_completion()
    assert "".join(deltas) == ANSWER
    assert final.choices[0].message.content == ANSWER


async def test_completions() -> None:
    async with openai_client(FakeEngine()) as client:
        answer = await client.completions.create(
            model="fake/model-1", prompt=["a", "b"], max_tokens=3, logprobs=1, echo=False
        )
        assert [c.text for c in answer.choices] == ["Hello, wor"] * 2
        assert answer.choices[1].logprobs is not None
        assert answer.choices[1].logprobs.text_offset == [0, 5, 6]
        stream = await client.completions.create(
            model="fake/model-1", prompt=[104, 105], max_tokens=20, stream=True
        )
        assert "".join([c.choices[0].text async for c in stream]) == ANSWER


async def test_leaving_a_stream_aborts_it() -> None:
    engine = FakeEngine(script=Script(hold_after=3))
    async with openai_client(engine) as client:
        stream = await client.chat.completions.create(
            model="fake/model-1", messages=USER, stream=True
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await eventually(lambda: not engine.live)
    assert len(engine.aborted) == 1


@pytest.mark.parametrize(
    ("kwargs", "error", "code"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": 9}, openai.BadRequestError, "invalid_value"),
        ({"tools": [{"type": "web"}]}, openai.BadRequestError, "unsupported_parameter"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded"),
    ],
)
async def test_errors_have_their_classes(
    kwargs: dict[str, Any], error: type[openai.APIStatusError], code: str
) -> None:
    engine = FakeEngine(model=make_model_info(max_model_len=100), clamps_max_tokens=False)
    async with openai_client(engine) as client:
        arguments = {"model": "fake/model-1", "messages": USER, **kwargs}
        for stream in (False, True):
            with pytest.raises(error) as caught:
                await client.chat.completions.create(**arguments, stream=stream)
            assert caught.value.code == code
            assert caught.value.type == "invalid_request_error"
            assert caught.value.request_id


async def test_an_overflow_is_told_in_words_that_libraries_look_for() -> None:
    engine = FakeEngine(model=make_model_info(max_model_len=10))
    async with openai_client(engine) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="fake/model-1", messages=USER)
    assert "context_length_exceeded" in str(caught.value)
    assert "maximum context length is" in str(caught.value)


async def test_keys() -> None:
    async with openai_client(FakeEngine(), api_key="whatever") as client:
        assert await client.models.list()
    engine = FakeEngine()
    async with serving(engine, api_key=("right",)) as server:
        for key, good in (("right", True), ("wrong", False)):
            async with openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key=key, max_retries=0
            ) as client:
                if good:
                    assert (await client.models.list()).data
                else:
                    with pytest.raises(openai.AuthenticationError) as caught:
                        await client.models.list()
                    assert caught.value.code == "invalid_api_key"


async def test_engine_failures() -> None:
    def script(call: GenerateCall) -> Script:
        streamed = call.params.seed == 1
        return Script(fail_after=2 if streamed else 0, error=EngineDeadError("the engine is gone"))

    async with openai_client(FakeEngine(script=script)) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="fake/model-1", messages=USER)
        assert (caught.value.status_code, caught.value.code) == (503, "engine_dead")
        stream = await client.chat.completions.create(
            model="fake/model-1", messages=USER, stream=True, seed=1
        )
        with pytest.raises(openai.APIError) as in_stream:
            async for _ in stream:
                pass
        assert in_stream.value.code == "engine_dead"
        assert "the engine is gone" in str(in_stream.value)


async def test_pings_do_not_disturb_the_client() -> None:
    engine = FakeEngine(script=Script(pieces=("a", "b"), first_delay_s=0.1, delay_s=0.1))
    async with openai_client(engine, sse_ping_interval=0.02) as client:
        stream = await client.chat.completions.create(
            model="fake/model-1", messages=USER, stream=True
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
    assert text == "ab"


async def test_embeddings() -> None:
    async with openai_client(FakeEngine()) as client:
        coded = await client.embeddings.create(model="fake/model-1", input=["a", "bc"])
        plain = await client.embeddings.create(
            model="fake/model-1", input=["a", "bc"], encoding_format="float"
        )
        assert [one.embedding for one in coded.data] == [
            pytest.approx(one.embedding) for one in plain.data
        ]
        assert (coded.usage.prompt_tokens, len(coded.data[0].embedding)) == (3, 8)
        few = await client.embeddings.create(model="fake/model-1", input=[[1, 2]], dimensions=3)
        assert len(few.data[0].embedding) == 3
        with pytest.raises(openai.BadRequestError, match="dimensions must be at most 8"):
            await client.embeddings.create(model="fake/model-1", input="a", dimensions=9)
