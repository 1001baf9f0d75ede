"""Warm-up reaches every kernel variant that serving does, seen without a GPU.

`variants_without_gpu` runs in a process of its own: the interpreter, in which the other tests run
kernels, has no variants.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from termgen.engine.runner.warm_up import size_classes

PROGRAM = Path(__file__).with_name("variants_without_gpu.py")


def reach(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps(cases)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_serving_reaches_no_variant_that_warm_up_did_not(
    tiny_model_dir: Callable[[str], Path],
) -> None:
    seed = 11
    print("seed", seed)
    settings = {"max_num_batched_tokens": 1100, "max_model_len": 512, "skip_tokenizer_init": True}
    common = {"seed": seed, "graphs": True}
    cases = [
        {  # odd sizes: nothing that is cut from a buffer by rows stays aligned
            **common,
            "folder": str(tiny_model_dir("llama", vocab_size=5001)),
            "settings": {**settings, "max_num_seqs": 19},
            "batches": list(range(1, 20)),
            "num_blocks": 45,
        },
        {
            **common,
            "folder": str(tiny_model_dir("mistral")),
            "settings": {**settings, "max_num_seqs": 6},
            "batches": list(range(1, 7)),
            "num_blocks": 120,
            "graphs": False,
        },
        {  # more rows than the plans of attention are compiled for at least
            **common,
            "folder": str(tiny_model_dir("qwen3")),
            "settings": {**settings, "max_num_seqs": 301},
            "batches": [3, 257, 301],
            "num_blocks": 330,
        },
    ]
    results = reach(cases)
    assert any(found["num_preemptions"] for found in results)
    for case, found in zip(cases, results, strict=True):
        assert not found["late"], (case, found["late"])
        assert found["modes"] == (["FULL", "NONE"] if case["graphs"] else ["NONE"])
        assert len(found["kernels"]) == 14, found["kernels"]
        assert found["largest_step"] >= 1024 or case is cases[0]
        assert found["prefix_hit_tokens"]


def test_size_classes_are_the_powers_of_two_and_the_limit() -> None:
    assert size_classes(1) == [1]
    assert size_classes(19) == [1, 2, 4, 8, 16, 19]
    assert size_classes(64) == [1, 2, 4, 8, 16, 32, 64]
