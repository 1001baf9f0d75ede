"""lm-eval's own `local-completions` against the server with SmolLM2, on a task made here.

Its results must be the log-likelihoods that transformers computes from the same file.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from server_harness import serving

from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.engine.text.gguf_tokenizer import read_gguf

QUESTIONS = [
    ("The capital of France is", [" Paris", " Rome", " made of cheese"]),
    ("Water boils at one hundred degrees", [" Celsius", " 摄氏度", " of the 🎉 moon"]),
    ("def add(a, b):\n    return", [" a + b", " print('Grüße')"]),
]
TASK = """
task: toy
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def task_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task and the cache of the data sets library."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    lines = [json.dumps({"question": q, "choices": c}) for q, c in QUESTIONS]
    (tmp_path / "toy.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "toy.yaml").write_text(TASK.format(file=tmp_path / "toy.jsonl"))
    return tmp_path


def save_tokenizer(gguf: Path, folder: Path) -> Path:
    """The tokenizer of the file, for lm-eval, which tokenises by itself."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=read_gguf(gguf).backend, eos_token="<|im_end|>"
    ).save_pretrained(folder)
    return folder


def evaluate(url: str, tokenizer: Path, tasks: Path) -> list[dict[str, Any]]:
    """lm-eval's samples, each with `doc`, `arguments` and `resps`."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    results = simple_evaluate(
        model="local-completions",
        model_args={
            "model": "smollm2",
            "base_url": f"{url}/v1/completions",
            "tokenizer": str(tokenizer),
            "num_concurrent": 3,
            "max_length": 512,
        },
        tasks=["toy"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    samples: list[dict[str, Any]] = results["samples"]["toy"]
    return samples


@torch.inference_mode()
def direct(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    ids = torch.tensor([context + continuation])
    scores = model(ids).logits[0, :-1].log_softmax(-1)[len(context) - 1 :]
    wanted = torch.tensor(continuation)
    is_greedy = bool((scores.argmax(-1) == wanted).all())
    return float(scores.gather(1, wanted[:, None]).sum()), is_greedy


@pytest.mark.filterwarnings("ignore")  # of lm-eval and of its dependencies
async def test_its_log_likelihoods_are_those_of_transformers(
    smollm2_gguf: Path, smollm2_reference: Any, task_folder: Path
) -> None:
    tokenizer = save_tokenizer(smollm2_gguf, task_folder / "tokenizer")
    engine = await AsyncEngine.start(
        EngineConfig(model=str(smollm2_gguf), device="cpu", dtype="float32", max_model_len=512)
    )
    try:
        async with serving(engine, served_model_name=("smollm2",)) as server:
            samples = await asyncio.to_thread(evaluate, server.url, tokenizer, task_folder)
        assert len(samples) == len(QUESTIONS)
        num_compared = 0
        for sample in samples:
            pairs = zip(sample["arguments"], sample["resps"], strict=True)
            for (context, continuation), response in pairs:
                (got, got_greedy), *_ = response
                whole = await engine.tokenize(context + continuation)
                start = await engine.tokenize(context)
                assert whole[: len(start)] == start, "lm-eval splits the pair here too"
                wanted, is_greedy = direct(smollm2_reference, start, whole[len(start) :])
                assert got == pytest.approx(wanted, abs=1e-3), (context, continuation)
                assert got_greedy == is_greedy
                num_compared += 1
        assert num_compared == sum(len(choices) for _, choices in QUESTIONS)
    finally:
        await engine.shutdown()
