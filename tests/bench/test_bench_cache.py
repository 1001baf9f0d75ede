"""Repeated load tests of a real engine: none finds another's prompts in the prefix cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_runs import make_run
from fake_engine import FakeEngine
from real_server import serving_tiny
from server_harness import serving
from test_bench_serve import SHAPE, at_once, measure

from termgen.bench.compare import compare
from termgen.bench.options import CompareOptions, ServeOptions
from termgen.bench.serve import ServeBench, document
from termgen.bench.server_api import ServedModel, ServerApi

REPEATED: dict[str, dict[str, Any]] = {
    "random": {"random_input_len": 64, "random_output_len": 4},
    "prefix-repetition": {
        "prefix_repetition_prefix_len": 64,
        "prefix_repetition_suffix_len": 16,
        "prefix_repetition_num_prefixes": 2,
        "prefix_repetition_output_len": 4,
    },
}


@pytest.mark.parametrize("dataset", REPEATED)
async def test_a_repeated_run_finds_the_cache_as_the_first_did(
    tiny_llama_dir: Path, dataset: str
) -> None:
    load = {"dataset_name": dataset, "num_prompts": 6, "max_concurrency": 1, **REPEATED[dataset]}
    async with serving_tiny(tiny_llama_dir) as (client, _):
        url = str(client.base_url).rstrip("/")
        runs = [await measure(url, seed=3, **load) for _ in range(3)]
        salt = '{"cache_salt": "mine"}'
        shared = [await measure(url, seed=3, extra_body=salt, **load) for _ in range(2)]
    shares = [run.cached_share for run in runs]
    assert len(set(shares)) == 1, shares
    assert shares[0] == 0.0 if dataset == "random" else (shares[0] or 0.0) > 0.4
    assert not [w for run in runs for w in run.warnings() if "prefix cache" in w]
    assert (shared[1].cached_share or 0.0) > 0.7, "a salt of the user's is kept"
    said = [w for w in shared[1].warnings() if "the server had these prompts before" in w]
    assert len(said) == (dataset == "random")


async def test_only_servers_that_know_a_salt_get_one() -> None:
    async with ServerApi("http://127.0.0.1:9", api_key=None) as api:
        for owner, has_salt in (("termgen", True), ("vllm", True), ("llamacpp", False)):
            bench = ServeBench(api, ServedModel("m", owner, 9), [], ServeOptions())
            assert ("cache_salt" in bench._fields()) == has_salt
    engine = FakeEngine(script=at_once)
    async with serving(engine) as server:
        await measure(server.url, num_warmups=1, **SHAPE)
        await measure(server.url, num_warmups=1, **SHAPE)
    salts = [call.cache_salt for call in engine.calls]
    first, second = set(salts[:7]), set(salts[7:])
    assert len(first) == len(second) == 1 and first != second and None not in first


def test_files_with_unlike_caches_are_said_to_be_unlike(tmp_path: Path) -> None:
    run = make_run(ServeOptions(), first_s=[0.1] * 20)
    paths = []
    for name, cached in (("a", 0), ("b", 2), ("c", 100)):
        content = document(run, None)
        paths.append(str(tmp_path / f"{name}.json"))
        Path(paths[-1]).write_text(json.dumps(content | {"total_cached_tokens": cached}))
    alike = compare(CompareOptions(before=paths[0], after=paths[1]))
    assert alike.differences == ()
    unlike = compare(CompareOptions(before=paths[0], after=paths[2]))
    (line,) = unlike.differences
    assert line.startswith("prompt tokens found in the prefix cache: 0.0% in A, 71.4% in B")
