"""The whole path, over a socket, with a real engine on a tiny random model."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from lengths import scaled
from real_server import serving_tiny
from server_harness import chat_text, completion_text, read_events

from termgen.engine.loop.engine import AsyncEngine

WORDS = "the model reads a prompt and 👋 writes Grüße über 你好 to everyone while it waits".split()


async def settled(engine: AsyncEngine) -> Any:
    """A snapshot once nothing runs."""
    async with asyncio.timeout(20):
        while True:
            snapshot = await engine.snapshot()
            if snapshot.num_running == snapshot.num_waiting == 0:
                return snapshot
            await asyncio.sleep(0.01)


def random_body(rng: random.Random) -> dict[str, Any]:
    content = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12)))
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": rng.randint(1, 24),
        "seed": rng.randrange(10**6),
        "temperature": rng.choice((0, 0.7, 1.5)),
        "ignore_eos": rng.random() < 0.5,
        "logprobs": True,
        "top_logprobs": rng.randint(0, 3),
        "n": rng.choice((1, 1, 2)),
    }
    if rng.random() < 0.5:
        body["stop"] = rng.sample(["e", "th", "ü", "ing", "\n", "好", " a"], k=2)
    return body


async def ask_both_ways(
    client: httpx.AsyncClient, body: dict[str, Any]
) -> tuple[dict[str, Any], list[Any]]:
    whole = await client.post("/v1/chat/completions", json=body)
    assert whole.status_code == 200, whole.text
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = await client.post("/v1/chat/completions", json={**body, **options})
    return whole.json(), read_events(streamed.content)


def assert_same_answer(
    body: dict[str, Any], whole: dict[str, Any], events: list[Any], *, is_exact: bool
) -> None:
    """is_exact: every number must agree to the last digit; otherwise rounding by another batch is
    allowed."""
    for choice in whole["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        text = "".join(p["delta"].get("content", "") for p in parts)
        assert text == choice["message"]["content"], body
        assert parts[-1]["finish_reason"] == choice["finish_reason"], body
        assert parts[-1]["stop_reason"] == choice["stop_reason"], body
        streamed = [t for p in parts if p["logprobs"] for t in p["logprobs"]["content"]]
        wanted = choice["logprobs"]["content"]
        if is_exact:
            assert json.dumps(streamed) == json.dumps(wanted), body
            continue
        assert len(streamed) == len(wanted)
        for a, b in zip(streamed, wanted, strict=True):
            assert (a["token"], a["bytes"]) == (b["token"], b["bytes"])
            values = [[x["logprob"], *(t["logprob"] for t in x["top_logprobs"])] for x in (a, b)]
            assert values[0] == pytest.approx(values[1], abs=1e-3)
    usage, of_stream = whole["usage"], events[-1]["usage"]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[key] == of_stream[key], body


async def test_streamed_answers_equal_whole_ones_byte_for_byte(tiny_llama_dir: Path) -> None:
    """Every number is compared too, so requests run one at a time; the next test sends many at
    once."""
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    # One at a time and without cached prompts, so that both ways compute the same batches.
    async with serving_tiny(tiny_llama_dir, enable_prefix_caching=False) as (client, _):
        for _ in range(scaled(60)):
            body = {**random_body(rng), "n": 1}
            whole, events = await ask_both_ways(client, body)
            assert_same_answer(body, whole, events, is_exact=True)


async def test_streamed_answers_equal_whole_ones_among_others(tiny_llama_dir: Path) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    async with serving_tiny(tiny_llama_dir) as (client, engine):
        for _ in range(2):
            bodies = [random_body(rng) for _ in range(50)]
            answers = await asyncio.gather(*(ask_both_ways(client, body) for body in bodies))
            for body, (whole, events) in zip(bodies, answers, strict=True):
                assert_same_answer(body, whole, events, is_exact=False)
        snapshot = await settled(engine)
        assert snapshot.num_used_blocks == 0


async def test_a_priority_is_taken_by_the_policy_that_reads_it(tiny_llama_dir: Path) -> None:
    body = {"prompt": "Hello", "max_tokens": 2, "priority": -4}
    async with serving_tiny(tiny_llama_dir, scheduling_policy="priority") as (client, _):
        assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_text_and_token_ids_ask_for_the_same(tiny_llama_dir: Path) -> None:
    async with serving_tiny(tiny_llama_dir) as (client, engine):
        prompt = "What the user sees is text"
        ids = await engine.tokenize(prompt)
        common = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
        as_text = await client.post("/v1/completions", json={"prompt": prompt, **common})
        as_ids = await client.post("/v1/completions", json={"prompt": [ids, ids], **common})
        first = as_text.json()["choices"][0]
        assert first["prompt_token_ids"] == ids
        assert len(first["token_ids"]) == as_text.json()["usage"]["completion_tokens"]
        for choice in as_ids.json()["choices"]:
            assert choice["text"] == first["text"]
            assert choice["token_ids"] == first["token_ids"]
        echoed = await client.post(
            "/v1/completions", json={"prompt": ids[1:], "echo": True, "max_tokens": 0}
        )
        assert echoed.json()["choices"][0]["text"] == prompt
        streamed = await client.post(
            "/v1/completions", json={"prompt": prompt, "stream": True, **common}
        )
        assert completion_text(read_events(streamed.content)) == first["text"]


async def test_a_repeated_prompt_comes_from_the_cache(tiny_llama_dir: Path) -> None:
    async with serving_tiny(tiny_llama_dir) as (client, _):
        body = {"prompt": list(range(10, 90)), "max_tokens": 4, "temperature": 0}
        first = (await client.post("/v1/completions", json=body)).json()
        again = (await client.post("/v1/completions", json=body)).json()
        salted = (await client.post("/v1/completions", json={**body, "cache_salt": "s"})).json()
        cached = [
            a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, again, salted)
        ]
        assert cached[0] == 0 and cached[1] >= 64 and cached[2] == 0
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        metrics = (await client.get("/metrics")).text
        assert 'termgen_prefix_cache_hits_total{model="tiny"} 0.0' not in metrics
        assert 'termgen_request_success_total{finished_reason="length",model="tiny"} 3.0' in metrics
        assert 'termgen_engine_step_seconds_count{model="tiny",phase="device"} 0.0' not in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_frees_the_blocks(tiny_llama_dir: Path, stream: bool) -> None:
    """The request is in the queue (there are only two slots), in prefill or in decode."""
    async with serving_tiny(tiny_llama_dir, max_num_seqs=2) as (client, engine):
        body = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "stream": stream}

        async def ask_and_leave(delay_s: float) -> None:
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(delay_s)
            asking.cancel()
            await asyncio.wait((asking,))

        await asyncio.gather(*(ask_and_leave(0.01 * i) for i in range(1, 8)))
        snapshot = await settled(engine)
        assert snapshot.num_used_blocks == 0
        good = await client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3})
        assert good.status_code == 200


async def test_faults_found_behind_the_server(tiny_llama_dir: Path) -> None:
    async with serving_tiny(tiny_llama_dir) as (client, engine):
        user = {"role": "user", "content": "x"}
        for path, body, code in (
            ("completions", {"prompt": [5] * 300}, "context_length_exceeded"),
            ("completions", {"prompt": [5000]}, "invalid_value"),
            ("completions", {"prompt": "x", "stop_token_ids": [5000]}, "invalid_value"),
            ("chat/completions", {"messages": [user], "min_tokens": 255}, "invalid_value"),
        ):
            for stream in (False, True):
                response = await client.post(f"/v1/{path}", json={**body, "stream": stream})
                assert response.status_code == 400, response.text
                assert response.json()["error"]["code"] == code
        assert (await engine.snapshot()).num_used_blocks == 0


async def test_a_long_conversation_in_one_connection(tiny_llama_dir: Path) -> None:
    async with serving_tiny(tiny_llama_dir) as (client, _):
        messages: list[dict[str, str]] = []
        for turn in range(4):
            messages.append({"role": "user", "content": f"Question {turn}?"})
            body = {"messages": messages, "max_tokens": 8, "stream": True, "seed": turn}
            response = await client.post("/v1/chat/completions", json=body)
            messages.append(
                {"role": "assistant", "content": chat_text(read_events(response.content))}
            )
        assert len(messages) == 8


async def test_health_and_models_of_a_real_engine(tiny_llama_dir: Path) -> None:
    async with serving_tiny(tiny_llama_dir) as (client, engine):
        assert (await client.get("/health")).json() == {"status": "ok"}
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny", 256)
        assert Path(model["root"]).is_dir()
        await engine.shutdown()
        assert (await client.get("/health")).status_code == 503


async def test_max_tokens_is_clamped_and_the_answer_says_so(tiny_llama_dir: Path) -> None:
    ask = {"prompt": [5] * 250, "max_tokens": 300, "ignore_eos": True}
    async with serving_tiny(tiny_llama_dir) as (client, _):
        for body in (ask, {**ask, "stream": True}, {**ask, "prompt": [[5] * 250, [5] * 9]}):
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            if "stream" not in body:
                assert answer.json()["choices"][0]["finish_reason"] == "length"
                assert answer.headers["x-termgen-max-tokens"] == "6"
            else:
                assert answer.headers["x-termgen-max-tokens"] == "6"
                assert len(read_events(answer.content)) >= 1
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        answer = await client.post("/v1/chat/completions", json=chat)
        assert "x-termgen-max-tokens" not in answer.headers
        answer = await client.post("/v1/completions", json={**ask, "prompt": [5] * 256})
        assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_truncated_prompt_counts_the_tokens_kept(
    tiny_llama_dir: Path, stream: bool
) -> None:
    ids = [random.Random(5).randrange(3, 90) for _ in range(40)]
    options = {"stream_options": {"include_usage": True}} if stream else {}
    body = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "stream": stream, **options}
    async with serving_tiny(tiny_llama_dir) as (client, _):

        async def ask(path: str, **fields: Any) -> tuple[str, dict[str, Any]]:
            answer = await client.post(path, json={**body, **fields})
            assert answer.status_code == 200, answer.text
            events = read_events(answer.content) if stream else [answer.json()]
            text = "".join(c.get("text", "") for event in events for c in event["choices"])
            return text, events[-1]["usage"]

        cut, usage = await ask("/v1/completions", prompt=ids, truncate_prompt_tokens=11)
        alone, of_rest = await ask("/v1/completions", prompt=ids[-11:])
        assert cut == alone != ""
        assert usage["prompt_tokens"] == of_rest["prompt_tokens"] == 11
        chat = {"messages": [{"role": "user", "content": "the model reads " * 2000}]}
        _, usage = await ask("/v1/chat/completions", **chat, truncate_prompt_tokens=-1)
        models = (await client.get("/v1/models")).json()["data"]
        assert usage["prompt_tokens"] == models[0]["max_model_len"] - 5
        _, usage = await ask("/v1/chat/completions", **chat, truncate_prompt_tokens=17)
        assert usage["prompt_tokens"] == 17
        for fields in ({"truncate_prompt_tokens": 10**6}, {"truncate_prompt_tokens": 0}):
            refused = await client.post("/v1/completions", json={**body, "prompt": "x", **fields})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


async def test_a_model_that_fills_no_gaps_says_so(tiny_llama_dir: Path) -> None:
    async with serving_tiny(tiny_llama_dir) as (client, _):
        for stream in (False, True):
            body = {"prompt": "x", "suffix": "y", "stream": stream}
            error = (await client.post("/v1/completions", json=body)).json()["error"]
            assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_may_refuse_what_the_context_does_not_hold(
    tiny_llama_dir: Path, stream: bool
) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 300}
    async with serving_tiny(tiny_llama_dir, clamp_max_tokens=False) as (client, engine):
        for path, body in (
            ("chat/completions", chat),
            ("messages", chat),
            ("responses", {"input": "x", "max_output_tokens": 300}),
            ("completions", {"prompt": "x", "max_tokens": 300}),
        ):
            answer = await client.post(f"/v1/{path}", json={**body, "stream": stream})
            assert answer.status_code == 400, answer.text
            assert "context_length_exceeded" in answer.text
            assert "x-termgen-max-tokens" not in answer.headers
        assert (await engine.snapshot()).num_used_blocks == 0


async def test_chats_cut_max_tokens_to_the_context(tiny_llama_dir: Path) -> None:
    body = {"max_tokens": 32000, "messages": [{"role": "user", "content": "x"}]}
    async with serving_tiny(tiny_llama_dir) as (client, _):
        hints = {"thinking": {"type": "enabled", "budget_tokens": 9}}
        answer = await client.post("/v1/messages", json={**body, **hints})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-termgen-not-used"] == "thinking, thinking.budget_tokens"
        usage = answer.json()["usage"]
        assert int(answer.headers["x-termgen-max-tokens"]) == 256 - usage["input_tokens"]
        response = {"input": "x", "max_output_tokens": 32000, "reasoning": {"effort": "high"}}
        answer = await client.post("/v1/responses", json=response)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-termgen-not-used"] == "reasoning.effort"
        for more in ({}, {"stream": True}, {"max_completion_tokens": 31000}):
            answer = await client.post("/v1/chat/completions", json={**body, **more})
            assert answer.status_code == 200, answer.text
            room = 256 - usage["input_tokens"] - usage["cache_read_input_tokens"]
            assert answer.headers["x-termgen-max-tokens"] == str(room)


async def test_logits_that_are_no_numbers_end_one_request_with_an_error(
    tiny_llama_dir: Path,
) -> None:
    """A finite weight can overflow in one request alone; here a row of the embedding is NaN."""
    async with serving_tiny(tiny_llama_dir) as (client, engine):
        good, bad = [7, 8, 9], [7, 8, 10]
        model = engine.parts.core.executor._runner.model  # type: ignore[attr-defined]
        with torch.inference_mode():
            model.embedding.method.weight[bad[-1]] = torch.nan
        usual = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logit_bias": {"10": -100}}

        async def complete(**body: Any) -> httpx.Response:
            return await client.post("/v1/completions", json={**usual, **body})

        def text(reply: httpx.Response) -> str:
            return str(reply.json()["choices"][0]["text"])

        alone = text(await complete(prompt=good))
        for asked in ({}, {"n": 2}, {"logprobs": 1}, {"echo": True}):
            beside, failed = await asyncio.gather(
                complete(prompt=good), complete(prompt=bad, **asked)
            )
            assert text(beside) == alone
            error = failed.json()["error"]
            assert (failed.status_code, error["code"]) == (500, "corrupted_logits"), failed.text
            assert error["type"] == "server_error" and "not finite" in error["message"]
        # A request with two prompts has one answer, so the good prompt's choice is lost too.
        assert (await complete(prompt=[good, bad])).status_code == 500
        assert (await complete(prompt=bad, stream=True)).status_code == 500  # before any token
        late = await complete(prompt=good, stream=True, logit_bias={"10": 100})  # after the first
        streamed = read_events(late.text)
        assert late.status_code == 200 and len(streamed) > 1
        assert streamed[-1]["error"]["code"] == "corrupted_logits"
        metrics = (await client.get("/metrics")).text
        [line] = [one for one in metrics.splitlines() if one.startswith("termgen_corrupted_req")]
        assert float(line.split()[-1]) >= 7
        assert (await client.get("/health")).status_code == 200
        assert text(await complete(prompt=good)) == alone
