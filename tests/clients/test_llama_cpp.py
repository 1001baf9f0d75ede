"""GGUF files of real models against llama.cpp, token by token.

llama.cpp rounds the inputs of its products to 8 bits, which moves a log-probability of these small
models by up to 0.5; the engine does not. So texts may part where two tokens are as close as that.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from other_clients import printed_by_others

import termgen

LLAMA_CPP = """
import json, sys, xllamacpp

path, prompts, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
params = xllamacpp.CommonParams()
params.model.path = path
params.n_ctx, params.n_parallel, params.warmup = 1024, 1, False
params.cpuparams.n_threads = 1  # two would spin for each other where other tests run
server, answers = xllamacpp.Server(params), []
for prompt in prompts:
    body = dict(prompt=prompt, max_tokens=count, temperature=0, logprobs=5, ignore_eos=True)
    answer = server.handle_completions({**body, "cache_prompt": False})
    tokens = answer["choices"][0]["logprobs"]["content"]
    tops = [[(top["id"], top["logprob"]) for top in token["top_logprobs"]] for token in tokens]
    answers.append([answer["usage"]["prompt_tokens"], [token["id"] for token in tokens], tops])
print(json.dumps(answers))
"""
PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Grüße aus München: ",
    "1, 2, 3, 4, 5,",
    "The seven days of the week are Monday,",
    "Water boils at 100 degrees because",
    "import json\n\nwith open('a.json') as file:\n    data = json.",
)
TOKENS = 24
CLOSE = 0.75
"""Most that a log-probability differs, and two of them that may be ranked otherwise."""


def check(path: Path, *, least_common: int, **options: Any) -> None:
    """least_common: tokens up to where each text parts, in all."""
    theirs = printed_by_others(LLAMA_CPP, str(path), json.dumps(PROMPTS), str(TOKENS))
    params = termgen.SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=5, ignore_eos=True)
    with termgen.LLM(path, max_model_len=1024, kv_cache_gib=0.5, **options) as llm:
        ours = llm.generate(list(PROMPTS), params)
    differences = []
    for answer, (num_prompt_tokens, token_ids, tops) in zip(ours, theirs, strict=True):
        assert len(answer.prompt_token_ids) == num_prompt_tokens
        written = answer.outputs[0]
        for token, their_token, logprobs, their_top in zip(
            written.token_ids, token_ids, written.logprobs, tops, strict=True
        ):
            own = {key: value.logprob for key, value in logprobs.items()}
            other = dict(map(tuple, their_top))
            differences += [abs(own[key] - other[key]) for key in [token] if key in other]
            if token != their_token:
                gaps = (own[token] - own[their_token], other[their_token] - other[token])
                assert max(gaps) < CLOSE, (answer.prompt, gaps)
                break
    middle, high = median(differences), quantiles(differences, n=10)[-1]
    print(f"{path.name}: {len(differences)} common tokens, median {middle:.4f}, 90% {high:.4f}")
    assert len(differences) >= least_common
    assert middle < 0.03 and high < 0.15 and max(differences) < CLOSE


def test_smollm2_writes_what_llama_cpp_does(smollm2_gguf: Path) -> None:
    check(smollm2_gguf, least_common=90)


def test_gemma_writes_what_llama_cpp_does(gemma_gguf: Path) -> None:
    check(gemma_gguf, least_common=90)
