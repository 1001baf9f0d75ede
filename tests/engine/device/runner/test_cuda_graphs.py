"""CUDA graphs on a GPU: recorded steps give the tokens of eager ones and replay on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mixed_load import run_mixed_load

from termgen.config import EngineConfig
from termgen.engine.device.sampling.logprobs import gather_logprobs
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu
ModelDir = Callable[..., Path]
MAX_NUM_SEQS = 20


def make_engine(folder: Path, **options: object) -> SyncEngine:
    settings: dict[str, object] = {
        "dtype": "float32",
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 200,
        "max_model_len": 128,
        "skip_tokenizer_init": True,
        **options,
    }
    return SyncEngine(EngineConfig(model=str(folder), device="cuda", **settings))  # type: ignore[arg-type]


def add(engine: SyncEngine, name: str, prompt: tuple[int, ...], **params: object) -> None:
    request = GenerationRequest(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(ignore_eos=True, **params),  # type: ignore[arg-type]
    )
    engine.add(request)


def mixed_load(engine: SyncEngine, seed: int) -> tuple[dict[str, list[int]], list[StepRecord]]:
    return run_mixed_load(engine, seed, num_requests=40, longest_prompt=89, most_tokens=37)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen3",
        "mistral",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_moe",
        "qwen3_moe",
        "gpt_oss",
        "llama4_text",
        "muse_glimmer",
    ],
)
def test_recorded_steps_give_the_tokens_of_eager_ones(
    family: str, tiny_model_dir: ModelDir
) -> None:
    seed = 7
    print(f"seed {seed}")
    folder = tiny_model_dir(family)
    eager, steps = mixed_load(make_engine(folder, enforce_eager=True), seed)
    assert {s.graph_mode for s in steps} == {"NONE"}
    recorded, steps = mixed_load(make_engine(folder), seed)
    assert recorded == eager
    full = [s for s in steps if s.graph_mode == "FULL"]
    assert any(s.num_prefill_tokens and s.num_decode_rows for s in full)
    assert any(not s.num_prefill_tokens for s in full)
    reference, _ = mixed_load(make_engine(folder, attention_backend="torch_reference"), seed)
    assert recorded == reference
    synchronous, _ = mixed_load(make_engine(folder, async_scheduling=False), seed)
    assert synchronous == recorded
    few = 30 if family == "gemma4_moe" else 9  # its layers of two geometries share no blocks
    small, steps = mixed_load(make_engine(folder, num_gpu_blocks_override=few), seed)
    assert steps[-1].num_preemptions > 0
    assert small == recorded


@pytest.mark.parametrize(
    ("mode", "family", "decodes", "prompts"),
    [
        ("piecewise", "qwen3", {"PIECEWISE"}, {"PIECEWISE"}),
        ("piecewise", "gemma3_text", {"PIECEWISE"}, {"PIECEWISE"}),
        ("piecewise", "muse_glimmer", {"PIECEWISE"}, {"PIECEWISE"}),
        ("piecewise", "llama4_text", {"PIECEWISE"}, {"PIECEWISE"}),
        ("full_and_piecewise", "qwen3_moe", {"FULL"}, {"PIECEWISE"}),
        ("full_decode_only", "llama", {"FULL"}, {"NONE"}),
    ],
)
def test_every_mode_gives_the_tokens_of_eager_steps(
    mode: str, family: str, decodes: set[str], prompts: set[str], tiny_model_dir: ModelDir
) -> None:
    seed = 12
    print(f"seed {seed}")
    folder = tiny_model_dir(family)
    eager, _ = mixed_load(make_engine(folder, enforce_eager=True), seed)
    recorded, steps = mixed_load(make_engine(folder, cudagraph_mode=mode, debug=True), seed)
    assert recorded == eager
    assert {s.graph_mode for s in steps if not s.num_prefill_tokens} == decodes
    assert {s.graph_mode for s in steps if s.num_prefill_tokens} == prompts
    assert any(s.num_prefill_tokens and s.num_decode_rows for s in steps)
    assert not any(s.graph_reason for s in steps if s.graph_mode != "NONE")


def test_attention_that_cannot_be_recorded_runs_between_pieces(tiny_model_dir: ModelDir) -> None:
    seed = 3
    print(f"seed {seed}")
    folder = tiny_model_dir("llama")
    eager, _ = mixed_load(make_engine(folder, enforce_eager=True), seed)
    engine = make_engine(folder, attention_backend="torch_reference")
    pieces, steps = mixed_load(engine, seed)
    assert pieces == eager
    why = "torch_reference attention cannot be recorded"
    assert {(s.graph_mode, s.graph_reason) for s in steps} == {("PIECEWISE", why)}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_whole_steps_and_pieces_agree_to_the_bit_at_one_padded_shape(
    temperature: float, tiny_model_dir: ModelDir
) -> None:
    outputs = []
    for mode, expected in (("piecewise", "PIECEWISE"), ("full_and_piecewise", "FULL")):
        engine = make_engine(tiny_model_dir("qwen3"), dtype="bfloat16", cudagraph_mode=mode)
        ring = engine.core.bus.subscribe()
        for i in range(8):
            prompt = tuple(range(3 + i, 9 + 2 * i))
            add(engine, str(i), prompt, max_tokens=60, temperature=temperature, seed=i)
        tokens: dict[str, list[int]] = {}
        while engine.has_unfinished:
            for delta in engine.step():
                assert delta.error is None, delta.error
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        outputs.append(tokens)
        records = [r for r in ring.drain() if isinstance(r, StepRecord)]
        decodes = [r for r in records if not r.num_prefill_tokens]
        assert {r.graph_mode for r in decodes} == {expected}
        assert {(r.num_decode_rows, r.num_padded_tokens) for r in decodes} == {(8, 0)}
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_recorded_steps_over_a_cache_below_16_bits(tiny_model_dir: ModelDir, kind: str) -> None:
    seed = 8
    print(f"seed {seed}")
    folder = tiny_model_dir("llama", head_dim=32)
    eager, _ = mixed_load(make_engine(folder, kv_cache_dtype=kind, enforce_eager=True), seed)
    recorded, steps = mixed_load(make_engine(folder, kv_cache_dtype=kind), seed)
    assert recorded == eager
    assert any(s.graph_mode == "FULL" and s.num_prefill_tokens for s in steps)
    exact, _ = mixed_load(make_engine(folder), seed)
    assert recorded != exact, "it should show somewhere"


def test_every_decode_batch_is_replayed(tiny_model_dir: ModelDir) -> None:
    engine = make_engine(tiny_model_dir("llama"))
    ring = engine.core.bus.subscribe()
    for batch in range(1, MAX_NUM_SEQS + 1):
        for i in range(batch):
            add(engine, f"{batch} {i}", (5, 6, 7), max_tokens=6, temperature=float(i % 2))
        while engine.has_unfinished:
            engine.step()
    decodes = [r for r in ring.drain() if isinstance(r, StepRecord) and r.num_prefill_tokens == 0]
    assert {r.num_decode_rows for r in decodes} == set(range(1, MAX_NUM_SEQS + 1))
    assert all(r.graph_mode == "FULL" for r in decodes)


UNUSUAL: list[dict[str, object]] = [
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5, "frequency_penalty": -0.5, "top_p": 0.9},
    {"min_tokens": 90, "stop_token_ids": (5, 6)},
    {"logit_bias": {7: 3.0, 8: -100.0}},
    {"allowed_token_ids": tuple(range(3, 200))},
    {"logprobs": 0},
    {"logprobs": 5, "repetition_penalty": 1.3},
    {"logprobs": 20},
]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_steps_of_any_sampling_are_recorded_and_draw_what_eager_ones_do(
    temperature: float, tiny_model_dir: ModelDir
) -> None:
    """Kernels against the torch sampler too: both engines have the same model, in float32."""
    outputs = []
    for kind in ("recorded", "eager", "torch"):
        engine = make_engine(
            tiny_model_dir("llama"), enforce_eager=kind != "recorded", debug=kind == "recorded"
        )
        runner = engine.core.executor._runner  # type: ignore[attr-defined]
        if kind == "torch":
            runner.fused_sampler, runner.state.fused = None, False
            runner._gather = gather_logprobs
            runner.graphs = runner.make_graphs(runner.graphs.dispatcher)
        ring = engine.core.bus.subscribe()
        for i, params in enumerate([*UNUSUAL, {}]):
            prompt = tuple(range(3 + i, 9 + 2 * i))
            add(engine, str(i), prompt, max_tokens=90, temperature=temperature, seed=i, **params)
        told: dict[str, list[int]] = {}
        while engine.has_unfinished:
            for delta in engine.step():
                assert delta.error is None, delta.error
                told.setdefault(delta.request_id, []).extend(delta.token_ids)
                for entry in delta.logprobs or ():
                    assert entry.rank >= 1 and entry.logprob < 1e-4
                    assert len(entry.top) == UNUSUAL[int(delta.request_id)]["logprobs"]
        outputs.append(told)
        steps = [r for r in ring.drain() if isinstance(r, StepRecord)]
        modes = {r.graph_mode for r in steps}
        assert modes == ({"FULL"} if kind == "recorded" else {"NONE"})
        assert steps[-1].num_late_compiles == 0 or kind == "torch"
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("params", [{}, *UNUSUAL, {"logprobs": 20, "frequency_penalty": 0.5}])
def test_a_replayed_step_of_an_unchanged_batch_uploads_nothing(
    params: dict[str, object], tiny_model_dir: ModelDir
) -> None:
    from torch.profiler import ProfilerActivity, profile

    # One block holds a whole sequence, so no step needs a new one. Two steps are in flight: the
    # profiler sees as many launches as steps.
    engine = make_engine(tiny_model_dir("llama"), block_size=128, run_ahead_ms=0)
    for i in range(5):
        add(engine, str(i), (5, 6, 7), max_tokens=100, temperature=0.0, **params)
    for _ in range(10):
        engine.step()
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as trace:
        for _ in range(10):
            engine.step()
        torch.cuda.synchronize()
    counts: dict[str, int] = {}
    for event in trace.events():
        counts[event.name] = counts.get(event.name, 0) + 1
    launches = sum(n for name, n in counts.items() if name.startswith("cudaGraphLaunch"))
    others = {
        name: n
        for name, n in counts.items()
        if "LaunchKernel" in name or ("Memcpy" in name and "HtoD" in name)
    }
    assert launches == 10, counts
    assert not others, others
    # The graphs write tokens and log-probabilities to the host's memory themselves.
    to_host = sum(n for name, n in counts.items() if "Memcpy" in name and "DtoH" in name)
    assert (to_host, counts.get("cudaMemcpyAsync", 0)) == (0, 0), counts
