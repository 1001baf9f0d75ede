"""A program that lists the kernel variants reached by warm-up and by serving, without a GPU.

It gives Triton a simulated GPU. Every launcher then binds its arguments as it would on a real one,
alignment and divisibility included, and asks for the variant they choose; the request is recorded
instead of launched. The kernels' outputs stay unwritten, so the steps are those of a real scheduler
with made-up tokens.

Argument: a JSON list of cases. Prints a JSON list: for each case the variants reached, and as
`late` those that serving reached and warm-up had not, with the step that reached them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from termgen.config import EngineConfig
from termgen.engine.device import kernels
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.attention.triton_paged import TritonPagedAttention
from termgen.engine.device.config.cache_spec import group_layers
from termgen.engine.device.kernels.compilation import Missing, collect_missing
from termgen.engine.device.kernels.gemm.small_gemm_config import SmallGemmConfig
from termgen.engine.device.layers.linear import Build, LinearSpec
from termgen.engine.device.layers.triton_ops import SmallBatchLinears, TritonOps
from termgen.engine.device.models import registry
from termgen.engine.device.runner import build, model_runner, resolve, warm_up
from termgen.engine.device.runner.dispatch import (
    CudaGraphDispatcher,
    decode_sizes,
    mixed_sizes,
    piecewise_sizes,
)
from termgen.engine.device.runner.make_attention import attention_shapes
from termgen.engine.device.runner.request_state import RequestState
from termgen.engine.device.runner.warm_up import dummy_run
from termgen.engine.loop.core import EngineCore
from termgen.engine.schedule.kv_cache import KVCacheManager
from termgen.engine.schedule.scheduler import Scheduler, SchedulerConfig
from termgen.engine.schedule.state_cache import StateCache
from termgen.vocabulary.model_info import GraphStatus
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import StepPlan, StepResult
from termgen.vocabulary.token_mask import IntArray, faults_of

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.2, "min_p": 0.1},
    {"temperature": 0.7, "frequency_penalty": 0.5, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "min_tokens": 3},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 20, "min_tokens": 2},
    {"temperature": 0.6, "logit_bias": {7: 2.5}, "allowed_token_ids": range(3, 400)},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


class AnyToken:
    """A grammar and its own matcher, for endless answers."""

    num_words = 200
    is_slow = False
    is_ended = False

    def start(self, *, ends_at_eos: bool) -> AnyToken:
        return self

    def accept(self, token_id: int) -> bool:
        return True

    def take_forced(self, most: int) -> list[int]:
        return []

    @staticmethod
    def fill_all(
        matchers: Sequence[Any], bits: IntArray, *, in_this_thread: bool
    ) -> list[BaseException | None]:
        return faults_of(lambda matcher, mask: matcher.fill(mask), matchers, bits)

    def fill(self, bits: IntArray) -> None:
        bits[:] = -1


def pretend_a_gpu() -> None:
    """Make Triton compile for a Hopper GPU, and our own code take the CPU for one with kernels."""
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )
    why_not = kernels.why_unusable
    for module in list(sys.modules.values()):
        if getattr(module, "why_unusable", None) is why_not:
            module.why_unusable = lambda device, dtype=None: ""  # type: ignore[attr-defined]
    RequestState.await_masks = await_by_kernel  # type: ignore[method-assign]
    JITFunction._pack_args = pack_once(JITFunction._pack_args)


def pack_once(pack: Any) -> Any:
    """Triton's description of a variant, made once: most of the time of 80,000 launches otherwise.
    Types, alignments, constants and options decide it, which are Triton's own key, too."""
    packed: dict[Any, Any] = {}

    def lookup(kernel: Any, backend: Any, kwargs: Any, bound: Any, kinds: Any, options: Any) -> Any:
        key = kernel, tuple(kinds), str(options)
        if key not in packed:
            packed[key] = pack(kernel, backend, kwargs, bound, kinds, options)
        return packed[key]

    return lookup


def await_by_kernel(
    state: RequestState, slots: torch.Tensor, num_tokens: torch.Tensor
) -> torch.Tensor:
    from termgen.engine.device.kernels.sampling.await_masks import await_masks

    return await_masks(slots, num_tokens, state)


def small_gemm_choice(num_rows: int, spec: LinearSpec) -> SmallGemmConfig | None:
    """One configuration for each class of rows, like the measured table."""
    rows = 1 << (num_rows - 1).bit_length()
    if rows <= 4:
        return SmallGemmConfig("gemv", rows, 4, 1024, 4)
    if rows == 8:
        return SmallGemmConfig("held", rows, 16, 16, 4)
    splits = 2 if rows == 16 else 1
    return SmallGemmConfig("mma", rows, 64, 64, 4, 3, splits)


NUM_REQUESTS = 30


class PlanExecutor:
    """Runs every plan and makes up its tokens. Tracks the known and computed tokens of rows."""

    def __init__(self, runner: model_runner.ModelRunner, missing: Missing) -> None:
        self._runner = runner
        self._missing = missing
        self.steps: list[tuple[StepPlan, str, set[tuple[str, str]]]] = []
        self._known: dict[int, list[int]] = {}
        """slot -> known tokens, computed tokens, limit."""

    def submit(self, plan: StepPlan) -> SimpleNamespace:
        before = set(self._missing)
        mode = self._runner.execute(plan).result().graph_mode
        self.steps.append((plan, mode, set(self._missing) - before))
        for row in plan.added:
            known = len(row.token_ids)
            self._known[row.slot] = [known, row.num_computed_tokens, row.max_total_tokens]
        sampled = []
        for slot, count in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True):
            row = self._known[slot]
            row[1] += count
            takes = row[1] >= row[0] and row[0] < row[2]
            row[0] += takes
            sampled.append(int(takes))
        num_sampled = np.asarray(sampled, np.int32)
        tokens = np.full(int(num_sampled.sum()), 7, np.int32)
        result = StepResult(plan.step_id, num_sampled, tokens, None, 0, 0)
        return SimpleNamespace(result=lambda: result)

    waits_for_masks = False

    def post_masks(
        self,
        slots: IntArray,
        positions: IntArray,
        bits: IntArray,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._runner.state.masks.post(slots, positions, bits, forced)

    def withhold_masks(self, slots: IntArray) -> None:
        self._runner.state.masks.withhold(slots)

    def idle(self) -> bool:
        return False

    def graph_status(self) -> GraphStatus:
        return self._runner.graphs.status


def make_runner(config: EngineConfig, folder: Path) -> model_runner.ModelRunner:
    device = torch.device("cpu")
    model_config = build.load_model_config(folder)
    limits = resolve.resolve_limits(config, model_config, device)
    shapes = attention_shapes(config, model_config, limits, torch.float16, device)
    block_size = config.block_size or TritonPagedAttention.capabilities.preferred_block_size
    shapes = [replace(shape, block_size=block_size) for shape in shapes]
    groups = group_layers(
        [spec and replace(spec, window=None) for spec in model_config.layer_caches],
        block_size=block_size,
        max_model_len=limits.max_model_len,
    )
    attention = GroupedAttention.of_shapes(
        [TritonPagedAttention(shape) for shape in shapes], shapes, groups
    )
    shape = shapes[0]
    model = registry.resolve_name(registry.MODELS[model_config.architecture])(
        model_config,
        Build(torch.float16, device, SmallBatchLinears(small_gemm_choice), TritonOps()),
        attention,
        build.make_recurrent(model_config, limits, device),
    )
    for parameter in model.parameters():
        parameter.data.zero_()
    model.finalize()
    return model_runner.ModelRunner(
        model,
        model_config,
        attention,
        dtype=torch.float16,
        kv_cache_dtype=torch.float16,
        device=device,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        block_size=shape.block_size,
        num_eos_ids=8,
    )


def serve(core: EngineCore, seed: int, *, longest: int, batches: list[int]) -> None:
    """Batches of these sizes, a burst of long prompts, then requests of all kinds that arrive, are
    aborted and share text."""
    rng = np.random.default_rng(seed)
    count = 0

    def add(prompt: list[int], max_tokens: int, kind: dict[str, Any]) -> str:
        nonlocal count
        count += 1
        params = SamplingParams(max_tokens=max_tokens, seed=count, ignore_eos=True, **kind)
        core.submit(
            GenerationRequest(
                request_id=str(count),
                prompt_token_ids=tuple(prompt),
                params=params,
                grammar=AnyToken() if count % 3 == 0 else None,
            ),
            0,
        )
        return str(count)

    for batch in batches:
        for _ in range(batch):
            add([5, 6, 7], 3, KINDS[0] if batch % 3 else KINDS[2])
        while core.has_work:
            core.step()
    for _ in range(6):
        add(rng.integers(3, 500, longest).tolist(), 2, KINDS[0])
    text = rng.integers(3, 500, longest).tolist()
    for i in range(NUM_REQUESTS):
        length = int(rng.integers(1, longest + 1))
        prompt = text[:length] if i % 4 == 0 else rng.integers(3, 500, length).tolist()
        name = add(prompt, int(rng.integers(3, 30)), KINDS[i % len(KINDS)])
        for _ in range(int(rng.integers(0, 4))):
            core.step()
        if i % 9 == 0:
            core.abort(name)
    while core.has_work:
        core.step()


def make_core(runner: model_runner.ModelRunner, executor: PlanExecutor, blocks: int) -> EngineCore:
    most_rows, most_tokens = runner.state.pad_row, len(runner.buffers.input_ids)
    states = StateCache(
        block_size=runner.block_size,
        max_num_seqs=most_rows,
        first_place=most_rows + 1,
        num_places=runner.num_state_places,
    )
    kv = KVCacheManager(
        num_blocks=blocks,
        block_size=runner.block_size,
        max_num_seqs=most_rows,
        max_model_len=runner.max_model_len,
        enable_prefix_caching=True,
        states=states if runner.num_state_places else None,
    )
    limits = SchedulerConfig(
        max_num_seqs=most_rows,
        max_num_batched_tokens=most_tokens,
        max_model_len=runner.max_model_len,
    )
    return EngineCore(
        executor,  # type: ignore[arg-type]
        Scheduler(limits, kv),
        max_in_flight=1,
        max_model_len=runner.max_model_len,
        eos_token_ids=frozenset(),
        seed=0,
        on_delivery=lambda delivery: None,
    )


def choose_sizes(mode: str, most_rows: int, most_tokens: int) -> CudaGraphDispatcher:
    """`choose_graphs` with fewer whole steps, so that some steps of both kinds miss them."""
    if mode == "none":
        return CudaGraphDispatcher((), disabled_reason="--enforce-eager")
    return CudaGraphDispatcher(
        decode_sizes(most_rows, largest=16) if mode != "piecewise" else (),
        mixed=mixed_sizes(most_tokens, largest=256) if mode == "full" else (),
        piecewise=piecewise_sizes(most_rows, most_tokens) if "piecewise" in mode else (),
        max_num_seqs=most_rows,
    )


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    config = EngineConfig(model=case["folder"], device="cpu", **case["settings"])
    runner = make_runner(config, Path(case["folder"]))
    most_rows, most_tokens = runner.state.pad_row, len(runner.buffers.input_ids)
    dispatcher = choose_sizes(case["graphs"], most_rows, most_tokens)
    runner.init_kv_cache(2)
    with collect_missing() as warm:
        warm_up.run_steps(runner, warm_up.warm_up_steps(runner, dispatcher))
        dummy_run(runner, most_tokens)
    runner.init_kv_cache(case["num_blocks"])
    with collect_missing() as served:
        runner.graphs = runner.make_graphs(dispatcher)
        runner.graphs.record_all(lambda operations: operations, lambda done: None)
        recorded = set(served)
        executor = PlanExecutor(runner, served)
        core = make_core(runner, executor, case["num_blocks"])
        longest = runner.max_model_len - 40
        serve(core, case["seed"], longest=longest, batches=case["batches"])
    late = [
        {"kernel": kernel, "rows": plan.num_rows, "tokens": plan.total_tokens, "mode": mode}
        for plan, mode, new in executor.steps
        for kernel, key in new
        if (kernel, key) not in warm
    ]
    late += [{"kernel": k, "mode": "recording"} for k, key in recorded if (k, key) not in warm]
    return {
        "warm": len(warm),
        "kernels": sorted({kernel for kernel, _ in served}),
        "late": late,
        "modes": sorted({mode for _, mode, _ in executor.steps}),
        "largest_step": max(plan.total_tokens for plan, _, _ in executor.steps),
        "num_preemptions": core.scheduler.stats.num_preemptions,
        "prefix_hit_tokens": core.scheduler.stats.prefix_hit_tokens,
        "needless": sorted({kernel for kernel, key in warm if (kernel, key) not in served}),
    }


if __name__ == "__main__":
    pretend_a_gpu()
    print(json.dumps([run_case(case) for case in json.loads(sys.argv[1])]))
