"""Embeddings of 64 short texts, one at a time and together: `benchmarks/embeddings.py [MODEL]`.

Times are the best of three. Without MODEL, a tiny one with random weights is made up.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from made_up_models import write_config

from termgen import LLM

NUM_TEXTS = 64
NUM_RUNS = 3


def best_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(NUM_RUNS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def measure(model: str, num_tokens: int, **options: Any) -> str:
    rng = np.random.default_rng(0)
    texts = [rng.integers(5, 250, num_tokens).tolist() for _ in range(NUM_TEXTS)]
    options |= {"max_num_seqs": NUM_TEXTS, "max_model_len": 256, "enable_prefix_caching": False}
    with LLM(model, **options) as llm:
        llm.embed(texts)
        alone = best_s(lambda: [llm.embed([text]) for text in texts])
        together = best_s(lambda: llm.embed(texts))
    return (
        f"{num_tokens:3} tokens: one at a time {1000 * alone:7.1f} ms,"
        f" together {1000 * together:7.1f} ms, {alone / together:4.1f} times as fast"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2, 4, 12])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model = asked.model or str(write_config(Path(place)))
        options: dict[str, Any] = {"device": asked.device}
        if asked.model is None:
            options |= {"load_format": "dummy", "skip_tokenizer_init": True}
        for num_tokens in asked.tokens:
            print(measure(model, num_tokens, **options))


if __name__ == "__main__":
    main()
