"""Log-probabilities over HTTP with a real engine: of answers, of prompts, of echoes.

lm-eval's local-completions must compute the same from them as transformers does.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from real_server import serving_tiny
from server_harness import read_events
from transformers import AutoModelForCausalLM, PreTrainedModel

PROMPTS = [
    "The keys and values of every layer are kept",
    "voilà, ça marche; 你好 🎉 and so on",
    "def main(): return [value for value in range(10)]",
]


@pytest.fixture(scope="module")
def reference(tiny_llama_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()


@torch.inference_mode()
def log_softmax(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """[T - 1, V]: row i is the model's prediction for position i + 1."""
    return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def check_echo(logprobs: dict[str, Any], ids: list[int], expected: torch.Tensor) -> None:
    """The first len(ids) entries against transformers; the floats of both lists are the same."""
    values, tops = logprobs["token_logprobs"], logprobs["top_logprobs"]
    assert values[0] is None and tops[0] is None
    for i in range(1, len(ids)):
        row = expected[i - 1]
        assert math.isclose(values[i], float(row[ids[i]]), abs_tol=1e-3)
        name = logprobs["tokens"][i]
        assert tops[i][name] == values[i]
        assert math.isclose(max(tops[i].values()), float(row.max()), abs_tol=1e-3)
        is_greedy = int(row.argmax()) == ids[i]
        assert (values[i] == max(tops[i].values())) == is_greedy


async def test_an_echo_has_the_log_likelihoods_of_the_prompt(
    tiny_llama_dir: Path, reference: PreTrainedModel
) -> None:
    async with serving_tiny(tiny_llama_dir, dtype="float32") as (client, engine):
        prompts = [await engine.tokenize(prompt) for prompt in PROMPTS]
        body = {"prompt": prompts, "echo": True, "logprobs": 2, "temperature": 0, "seed": 1}
        for max_tokens in (0, 1, 4):
            answer = await client.post("/v1/completions", json={**body, "max_tokens": max_tokens})
            assert answer.status_code == 200, answer.text
            for ids, choice in zip(prompts, answer.json()["choices"], strict=True):
                logprobs = choice["logprobs"]
                assert len(logprobs["tokens"]) == len(ids) + max_tokens or max_tokens == 4
                check_echo(logprobs, ids, log_softmax(reference, ids))
                assert "prompt_logprobs" not in choice
                offsets = logprobs["text_offset"]
                assert offsets[0] == 0 and offsets == sorted(offsets)
            usage = answer.json()["usage"]
            assert usage["prompt_tokens"] == sum(map(len, prompts))
            assert max_tokens or usage["completion_tokens"] == 0


async def test_offsets_of_an_echo_point_into_the_text(tiny_llama_dir: Path) -> None:
    async with serving_tiny(tiny_llama_dir, dtype="float32") as (client, _):
        body = {"echo": True, "logprobs": 0, "temperature": 0, "max_tokens": 6}
        for prompt in PROMPTS:
            answer = await client.post("/v1/completions", json={"prompt": prompt, **body})
            choice = answer.json()["choices"][0]
            text, logprobs = choice["text"], choice["logprobs"]
            assert text.startswith(prompt) and logprobs["tokens"][0] == "<s>"
            pairs = zip(logprobs["tokens"][1:], logprobs["text_offset"][1:], strict=True)
            for token, offset in pairs:
                if not token.startswith("bytes:"):
                    assert text[offset : offset + len(token)] == token, (token, offset)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_streamed_echo_equals_a_whole_one(tiny_llama_dir: Path, n: int) -> None:
    async with serving_tiny(tiny_llama_dir, max_num_batched_tokens=16, max_num_seqs=4) as made:
        client, _ = made
        body = {"prompt": PROMPTS, "echo": True, "logprobs": 1, "max_tokens": 5, "n": n, "seed": 3}
        whole = (await client.post("/v1/completions", json=body)).json()
        streamed = await client.post("/v1/completions", json={**body, "stream": True})
        parts: dict[int, list[Any]] = {}
        for event in read_events(streamed.content):
            for choice in event["choices"]:
                parts.setdefault(choice["index"], []).append(choice)
        assert sorted(parts) == list(range(len(PROMPTS) * n))
        for choice in whole["choices"]:
            chunks = parts[choice["index"]]
            assert "".join(c["text"] for c in chunks) == choice["text"]
            for key, wanted in choice["logprobs"].items():
                got = [value for c in chunks if c["logprobs"] for value in c["logprobs"][key]]
                if key in ("tokens", "text_offset"):
                    assert got == wanted
                else:
                    assert len(got) == len(wanted)


async def test_prompt_logprobs_on_both_endpoints(
    tiny_llama_dir: Path, reference: PreTrainedModel
) -> None:
    async with serving_tiny(tiny_llama_dir, dtype="float32") as (client, engine):
        ids = await engine.tokenize(PROMPTS[0])
        common = {"max_tokens": 2, "prompt_logprobs": 3, "n": 2, "return_token_ids": True}
        text = await client.post("/v1/completions", json={"prompt": PROMPTS[0], **common})
        chat = await client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": PROMPTS[0]}], **common},
        )
        choices = text.json()["choices"]
        assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"]
        chat_ids = chat.json()["prompt_token_ids"]
        for got, tokens in (
            (choices[0]["prompt_logprobs"], ids),
            (chat.json()["prompt_logprobs"], chat_ids),
        ):
            expected = log_softmax(reference, tokens)
            assert got[0] is None and len(got) == len(tokens)
            for i in range(1, len(tokens)):
                own = got[i][str(tokens[i])]
                assert math.isclose(own["logprob"], float(expected[i - 1][tokens[i]]), abs_tol=1e-3)
                better = int((expected[i - 1] > expected[i - 1][tokens[i]]).sum())
                assert abs(own["rank"] - 1 - better) <= 1, "but for ties to rounding"
                assert 3 <= len(got[i]) <= 4


async def test_ids_are_checked_against_the_vocabulary(tiny_llama_dir: Path) -> None:
    async with serving_tiny(tiny_llama_dir) as (client, _):
        for field, value in (
            ("logit_bias", {"512": 1}),
            ("allowed_token_ids", [3, 512]),
            ("stop_token_ids", [512]),
            ("priority", 1),
        ):
            body = {"prompt": "x", "max_tokens": 2, field: value}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 400, field
            assert answer.json()["error"]["param"] == field
        forbidden = {"prompt": "x", "max_tokens": 9, "temperature": 1.5, "seed": 5}
        free = (await client.post("/v1/completions", json=forbidden)).json()["choices"][0]["text"]
        words = [word for word in free.split() if word.isascii()] or [free[:2]]
        body = {**forbidden, "bad_words": words}
        cut = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        assert cut != free
        only = {**forbidden, "allowed_token_ids": [40, 41], "return_token_ids": True}
        ids = (await client.post("/v1/completions", json=only)).json()["choices"][0]["token_ids"]
        assert set(ids) <= {40, 41} and len(ids) == 9
