"""Runs step plans on one device: rows in, model forward, sample, rows updated, tokens out.

Owns the model, the KV cache and the request rows. Knows plans and results, not requests or text;
called by the executor from one thread. The same code runs on CPU and CUDA.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from termgen.engine.device.attention.base import ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.drafting.acceptance import Samples, keep_drawn
from termgen.engine.device.drafting.base import Drafter, TargetStates
from termgen.engine.device.kernels import why_unusable
from termgen.engine.device.kernels.kv_cache import fill_with_nan
from termgen.engine.device.models.decoder import CausalDecoder
from termgen.engine.device.models.rehearsal import one_layer_of_each_kind
from termgen.engine.device.models.transformers_backend import TransformersDecoder
from termgen.engine.device.quantization.block_experts import BlockExperts
from termgen.engine.device.recurrent.base import GatedDeltaState, RecurrentStep, empty_state
from termgen.engine.device.runner.async_output import (
    AsyncOutput,
    DeviceClock,
    HostRows,
    Launch,
    RecordedOutput,
    StepTensors,
    cuda_event,
    make_copy_stream,
)
from termgen.engine.device.runner.cuda_graphs import (
    RING_SIZE,
    AddressCheck,
    FullGraphs,
    NamedTensor,
    tensors_of,
)
from termgen.engine.device.runner.dispatch import (
    NEEDS,
    BatchDescriptor,
    CudaGraphDispatcher,
    Dispatch,
)
from termgen.engine.device.runner.draft_steps import (
    DraftSteps,
    even_descriptor,
    even_samples,
    prepare_even,
    sample_even,
)
from termgen.engine.device.runner.input_batch import InputBatch, InputBuffers, RowHeader
from termgen.engine.device.runner.piecewise_graphs import PiecewiseGraphs
from termgen.engine.device.runner.pooling import Pooler
from termgen.engine.device.runner.prompt_logprobs import prompt_logprobs
from termgen.engine.device.runner.request_state import RequestState
from termgen.engine.device.sampling.logprobs import gather_logprobs
from termgen.engine.device.sampling.sampler import Sampler
from termgen.engine.device.sampling.token_ring import TokenRing
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.sampling_params import MAX_LOGPROBS
from termgen.vocabulary.step import SamplingNeeds, StepPlan

if TYPE_CHECKING:
    from termgen.engine.device.host_experts.placement import Placement
    from termgen.engine.device.kernels.compilation import CompileCounter
    from termgen.engine.device.kernels.sampling.fused import FusedSampler


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The model's part of a step of B rows."""

    slots: torch.Tensor  # [B] int64
    num_tokens: torch.Tensor  # [B] int64
    hidden: torch.Tensor  # [S, hidden], normed, of the tokens behind which one is drawn
    prompt_logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    pooled: torch.Tensor | None = None
    """See `StepTensors`, both."""
    samples: Samples | None = None
    """See `InputBatch`."""
    drafted: tuple[InputBatch, TargetStates] | None = None
    """What a drafter that is a model reads."""
    span_ns: tuple[int, int] = (0, 0)
    """On a CPU, perf_counter_ns when the model began and when it had ended. A GPU runs the model
    later than the host calls it."""


class ModelRunner:
    """One model on one device."""

    def __init__(
        self,
        model: CausalDecoder | TransformersDecoder,
        model_config: ModelConfig,
        attention: GroupedAttention,
        *,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
        device: torch.device,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        num_eos_ids: int,
        spins: bool = False,
        debug: bool = False,
        caches_states: bool = True,
        drafter: Drafter | None = None,
    ) -> None:
        """spins: never sleep while a recorded step runs. debug: check addresses at every replay.
        caches_states: have room for as many copies of recurrent states as there are rows."""
        self.model = model
        self.config = model_config
        self.attention = attention
        self.dtype = dtype
        self.kv_cache_dtype = kv_cache_dtype
        self.device = device
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.debug = debug
        self.recurrent = model.recurrent if isinstance(model, CausalDecoder) else None
        self.drafts = None
        if drafter is not None:
            is_recurrent = self.recurrent is not None
            self.drafts = DraftSteps(drafter, max_num_batched_tokens, is_recurrent=is_recurrent)
        self.pooler = Pooler(max_num_seqs, device)
        self.sampler = Sampler()
        self.fused_sampler: FusedSampler | None = None
        self._gather = gather_logprobs
        if not why_unusable(device):
            most_even = 0 if self.drafts is None else self.drafts.most_even_tokens
            self.use_fused_sampler(max(max_num_seqs, most_even))
        self.kv_caches: list[torch.Tensor] = []
        self.placement: Placement | None = None
        """Where a mixture's experts are, if the CPU computes some of them."""
        self._expert_counts: list[torch.Tensor] = []
        """A tensor for each layer that counts the tokens of its experts on a CPU."""
        self.states: list[GatedDeltaState] = []
        """One for each recurrent layer: the states of all request rows, and copies behind them."""
        is_cached = self.recurrent is not None and caches_states
        self.num_state_places = max_num_seqs if is_cached else 0
        num_slots = max_num_seqs + 1 + self.num_state_places
        self.state = RequestState(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_blocks=-(-max_model_len // block_size),
            num_groups=len(attention.groups),
            is_recurrent=self.recurrent is not None,
            looks_ahead=drafter is not None and drafter.model is not None,
            num_replayed=num_slots if self.recurrent is not None and drafter is not None else 0,
            vocab_size=model_config.vocab_size,
            num_eos_ids=num_eos_ids,
            device=device,
        )
        self.buffers = InputBuffers(
            max_num_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            device=device,
            num_groups=len(attention.groups),
            is_recurrent=self.recurrent is not None,
        )
        self._copy_stream = make_copy_stream(device)
        self._clock = None
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            self._clock = DeviceClock(partial(cuda_event, spins=spins), stream=stream)
        self._late_compiles: CompileCounter | None = None
        self.graphs = self.make_graphs(
            CudaGraphDispatcher((), disabled_reason="no graphs recorded")
        )

    def use_fused_sampler(self, max_rows: int) -> None:
        """Sample with kernels."""
        from termgen.engine.device.kernels.sampling.fused import FusedSampler

        self.fused_sampler = FusedSampler(
            max_rows=max_rows, vocab_size=self.config.vocab_size, device=self.device
        )
        self._gather = self.fused_sampler.gather_logprobs

    @property
    def uses_kernels(self) -> bool:
        """True if steps run kernels that must be compiled."""
        return self.fused_sampler is not None

    def experts_at_rest(self) -> AbstractContextManager[object]:
        """Context for rehearsing and recording steps: see `Placement.at_rest`."""
        return nullcontext() if self.placement is None else self.placement.at_rest()

    def expert_counts(self) -> npt.NDArray[np.int64] | None:
        """[layers, experts]: how many tokens went to each expert; None where that is not counted.
        A copy, which steps that run meanwhile may have changed in part."""
        if self.placement is not None:
            return self.placement.counts
        counts = self._expert_counts
        if not counts or self.config.moe is None:
            return None
        return np.stack([one.numpy() for one in counts])[:, : self.config.moe.num_experts]

    def be_ready(self) -> None:
        """Count compilations from now on, as no step should need any, and tokens of experts."""
        parts = ((n, m) for n, m in self.model.named_modules() if n.endswith(".gate_up"))
        self._expert_counts = [m.counts for _, m in parts if isinstance(m, BlockExperts)]
        for counts in self._expert_counts:
            counts.zero_()
        if self.uses_kernels:
            from termgen.engine.device.kernels.compilation import CompileCounter

            self._late_compiles = CompileCounter()

    @property
    def num_late_compiles(self) -> int:
        """Kernels compiled since `be_ready`."""
        return self._late_compiles.count if self._late_compiles is not None else 0

    def watch_compiles(self) -> AbstractContextManager[object]:
        """Context that counts compilations, for everything that runs once the engine is ready."""
        return self._late_compiles if self._late_compiles is not None else nullcontext()

    def bytes_per_block(self) -> int:
        """KV bytes of one block over all layers of a group."""
        return self.attention.bytes_per_block(self.block_size, self.kv_cache_dtype)

    def init_kv_cache(self, num_blocks: int) -> None:
        """Allocate the paged KV cache, block 0 being the null block, and the states of recurrent
        layers, where there are none yet. Zeroed: no NaN to read."""
        self.kv_caches = []  # drop the old one first
        self.kv_caches = self.attention.empty_caches(
            self._zeros,
            num_blocks=num_blocks,
            block_size=self.block_size,
            dtype=self.kv_cache_dtype,
        )
        if self.recurrent is not None and not self.states:
            assert self.config.linear is not None
            shape, num_slots = self.recurrent.shape, self.state.pad_row + 1 + self.num_state_places
            drafts = 0 if self.drafts is None else self.drafts.drafter.num_tokens
            self.states = [
                empty_state(
                    *(self._empty, shape), num_slots=num_slots, dtype=self.dtype, num_drafts=drafts
                )
                for _ in self.config.linear.layers
            ]

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.kv_cache_dtype, device=self.device)
        # The system allocates numpy's zeros on first access: a large cache costs neither start-up
        # time nor memory until it is used.
        dtype = self.kv_cache_dtype
        size = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def make_graphs(self, dispatcher: CudaGraphDispatcher) -> FullGraphs:
        """An empty set of recordings of this runner's steps.

        They reference the runner weakly, as it owns them: its memory must be freed with it.
        """
        runner = weakref.proxy(self)
        pad_row = self.state.pad_row
        size = max(1, dispatcher.max_rows, pad_row)
        header = RowHeader(size, pad_row=pad_row, device=self.device)
        pieces = PiecewiseGraphs(
            self.model,
            self.attention,
            self.kv_caches,
            config=self.config,
            buffers=self.buffers,
            state=self.state,
            header=header,
            sizes=dispatcher.piecewise,
            max_num_seqs=dispatcher.max_num_seqs,
            dtype=self.dtype,
        )
        # Only termgen's kernels can write to host memory.
        is_mapped = self.state.fused and self.device.type == "cuda"
        num_samples = size if self.drafts is None else self.drafts.most_samples(size)
        ring = TokenRing(
            RING_SIZE,
            num_samples,
            self.device,
            num_logprobs=min(MAX_LOGPROBS, self.state.vocab_size),
            is_mapped=is_mapped,
        )
        check = None
        if self.debug:
            tensors = partial(ModelRunner._recorded_tensors, runner, header, pieces)
            check = AddressCheck(tensors)
        return FullGraphs(
            partial(ModelRunner.step_on_device, runner),
            dispatcher,
            header,
            pieces,
            ring=ring,
            address_check=check,
            rehearsing=partial(one_layer_of_each_kind, self.model),
        )

    def _recorded_tensors(
        self, header: RowHeader, pieces: PiecewiseGraphs
    ) -> Iterator[NamedTensor]:
        """Tensors that recordings read or write and that steps must not reallocate."""
        yield from self.model.named_parameters("model")
        yield from self.model.named_buffers("model")
        for layer, cache in enumerate(self.kv_caches):
            yield f"kv_caches[{layer}]", cache
        for layer, of_layer in enumerate(self.states):
            yield from tensors_of(f"states[{layer}]", of_layer)
        yield from tensors_of("state", self.state)
        yield from tensors_of("state.edits", self.state.edits)
        yield from tensors_of("state.masks", self.state.masks)
        if self.fused_sampler is not None:
            yield from tensors_of("fused_sampler", self.fused_sampler)
        yield from tensors_of("buffers", self.buffers)
        yield from tensors_of("header", header)
        yield from tensors_of("pieces", pieces)

    def record_next(self) -> bool:
        """Record one graph that was left for idle moments; False when none is left."""
        with self.watch_compiles():
            made_one = self.graphs.record_next()
        if made_one and self.device.type == "cuda" and not self.graphs.num_waiting:
            # The allocator keeps the memory of the attempts for the recorder's stream, which no
            # step uses.
            torch.cuda.empty_cache()
        return made_one

    def execute(self, plan: StepPlan) -> RecordedOutput:
        """Launch one step. On CUDA it returns before the device is done.

        This is all host work between two steps of the same rows, so it makes few torch calls.
        """
        if self.placement is not None:
            with torch.inference_mode():
                self.placement.before_step()
        launch = self._begin(plan)
        recording = launch.dispatch.descriptor
        if recording is None:
            is_even = self._guesses is not None and self._guesses.is_even(launch.plan)
            return self._launch_even(launch) if is_even else self._launch(launch)
        # Fast path, skip on a first reading: one recording holds model and sampling. It compiles
        # nothing, so nothing is counted.
        return self._land(launch, self.graphs.replay(recording, launch.plan))

    def _begin(self, plan: StepPlan) -> Launch:
        """Update the rows to the plan and choose the recording. On an idle device the step's time
        begins after the update."""
        started_ns = time.perf_counter_ns()
        clock = self._clock
        start = None
        if plan.changes_rows:
            start = clock.start() if clock is not None and clock.is_busy else None
            with torch.inference_mode(), self.watch_compiles():
                self.state.update(plan)
        num_drafted = on_landing = choice = None
        if self.drafts is not None:
            self.drafts.is_idle = False
            if plan.num_drafts:
                has_guesses = plan.most_guesses > 0
                plan = self.drafts.cut(plan, self.state, self.graphs)
                num_drafted = plan.num_draft_tokens
                choice = self.drafts.drafter.choice if has_guesses else None
        if self._guesses is not None:
            on_landing = partial(self._guesses.drafter.landed, plan)
        if self.states:
            self._copy_states(plan)
        if plan.given_up is not None:
            self._spoil(plan.given_up)
        is_idle = self.drafts is not None and self.drafts.is_idle
        dispatch = self.graphs.dispatch(plan, is_idle=is_idle)
        if plan.constrained is not None and not self.state.masks.is_awaited:
            with torch.inference_mode():
                self.state.masks.upload(plan.slots[plan.constrained])
        if clock is not None and start is None:
            start = clock.start()
        return Launch(
            plan,
            dispatch,
            started_ns,
            start,
            num_drafted=num_drafted,
            draft_choice=choice,
            on_landing=on_landing,
        )

    @torch.inference_mode()
    def _copy_states(self, plan: StepPlan) -> None:
        """Copy the states of rows, then take those of new rows from copies made before."""
        if plan.copied_slots is not None:
            assert plan.copy_places is not None
            self._move_states(plan.copied_slots, plan.copy_places)
        found = [(row.state_place, row.slot) for row in plan.added if row.state_place >= 0]
        if found:
            self._move_states(*np.asarray(found, np.int32).T)

    def _move_states(self, sources: IntArray, targets: IntArray) -> None:
        both = self.state.upload(np.concatenate((sources, targets)).astype(np.int64))
        source, target = both[: len(sources)], both[len(sources) :]
        tensors = [tensor for state in self.states for tensor in state.tensors()]
        if len(self.state.num_taken_up):
            tensors.append(self.state.num_taken_up)
        for tensor in tensors:
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    @torch.inference_mode()
    def _spoil(self, blocks: IntArray) -> None:
        """Fill blocks with NaN: what reads them has an error to show."""
        where = self.state.upload(blocks.astype(np.int64))
        for cache in {id(cache): cache for cache in self.kv_caches}.values():
            fill_with_nan(cache, where)

    def _run_model(self, plan: StepPlan, dispatch: Dispatch) -> ModelOutput:
        """Launch the model on a step that no recording samples."""
        if dispatch.padded_tokens is None:
            return self._run_operations(plan)
        # Fast path, skip on a first reading: the model as several pieces.
        batch, hidden = self.graphs.replay_pieces(dispatch.padded_tokens, plan)
        drafted = None if self._guesses is None else (batch, TargetStates(hidden))
        return ModelOutput(batch.slots, batch.num_tokens, hidden, drafted=drafted)

    def _run_operations(self, plan: StepPlan) -> ModelOutput:
        """Launch the model's operations one by one."""
        batch = self.buffers.prepare(plan, self.state)
        is_timed = self.device.type == "cpu"
        began_ns = time.perf_counter_ns() if is_timed else 0
        reads_all = plan.prompt_spans or self._needs_all
        if reads_all or (plan.pooled and Pooler.needs_all(plan)):
            wanted = None
        else:
            wanted = batch.logits_indices
        hidden, kept = self._pass(batch, wanted)
        drafted = None if self._guesses is None else (batch, self._guesses.states(hidden, kept))
        span_ns = (began_ns, time.perf_counter_ns()) if is_timed else (0, 0)
        of_prompts = None
        if plan.prompt_spans:
            of_prompts = prompt_logprobs(
                plan, hidden, self.state, self.model.compute_logits, self._gather
            )
        pooled = self.pooler(plan, hidden, has_all=wanted is None) if plan.pooled else None
        if wanted is None:
            hidden = batch.sampled(hidden)
        return ModelOutput(
            *(batch.slots, batch.num_tokens, hidden, of_prompts, pooled),
            *(batch.samples, drafted, span_ns),
        )

    def _launch(self, launch: Launch) -> RecordedOutput:
        """Launch a step that no recording holds whole."""
        plan = launch.plan
        with torch.inference_mode(), self.watch_compiles():
            output = self._run_model(plan, launch.dispatch)
            launch.model_span_ns = output.span_ns
            of_prompts = output.prompt_logprobs
            needs_copy = of_prompts is not None or output.pooled is not None
            ring = None if needs_copy else self.graphs.ring
            slots, num_tokens, samples = output.slots, output.num_tokens, output.samples
            if plan.num_pooled_rows == plan.num_rows:  # nothing is drawn, so nothing is appended
                nothing = torch.zeros_like(slots)
                tokens = self.state.append_sampled(slots, num_tokens, nothing, ring)
                sampled = StepTensors(tokens)
            else:
                logits = self.model.compute_logits(output.hidden)
                sampled = self._sample(slots, num_tokens, logits, plan.sampling, ring, samples)
            if self._guesses is not None:
                if output.drafted is not None:
                    is_idle = self._guesses.is_idle
                    self._guesses.draft(
                        *output.drafted, self.kv_caches, self.state, is_idle=is_idle
                    )
                took_ns = time.perf_counter_ns() - launch.started_ns
                self._guesses.drafter.step_ended(plan, took_ns, self.state)
        if ring is not None:
            return self._land(launch, self.graphs.pushed(plan))
        sampled = replace(sampled, prompt_logprobs=of_prompts, pooled=output.pooled)
        return self._land(launch, sampled)

    def _launch_even(self, launch: Launch) -> RecordedOutput:
        """Launch a step with drafts, laid out as its recording would be."""
        plan, descriptor = launch.plan, even_descriptor(launch.plan)
        self.graphs.header.upload(plan, plan.num_rows)
        with torch.inference_mode(), self.watch_compiles():
            self.graphs.run_padding(descriptor)
        return self._land(launch, self.graphs.pushed(plan, descriptor.num_drafts))

    def _land(self, launch: Launch, results: StepTensors | HostRows) -> RecordedOutput:
        """The output of a completely launched step. results: tensors to copy, or what the device
        writes to host memory."""
        launch.num_late_compiles = self.num_late_compiles
        if not isinstance(results, StepTensors):
            return RecordedOutput(launch, results)
        with torch.inference_mode():
            return AsyncOutput(launch, results, self._copy_stream)

    def step_on_device(
        self,
        slots: torch.Tensor,
        num_tokens: torch.Tensor,
        descriptor: BatchDescriptor,
        ring: TokenRing,
    ) -> None:
        """A step from device memory alone: what a full graph records.

        slots, num_tokens: [B] int64, num_tokens 0 for a padded row. Pushes tokens [B] int32 to the
        ring, of a step with drafts [B * (1 + num_drafts)].
        """
        if descriptor.num_drafts:
            batch = prepare_even(
                self.buffers,
                slots,
                num_tokens,
                self.state,
                num_queries=1 + descriptor.num_drafts,
                max_seq_len=self.max_model_len,
                by_kernels=self.attention.max_queries > descriptor.num_drafts,
            )
        elif descriptor.is_decode:
            batch = self.buffers.prepare_decode(
                slots, num_tokens, self.state, max_seq_len=self.max_model_len
            )
        else:
            batch = self.buffers.prepare_ragged(
                slots,
                num_tokens,
                self.state,
                total=descriptor.num_tokens,
                num_decodes=None,
                max_query_len=descriptor.num_tokens,
                max_seq_len=self.max_model_len,
            )
        needs, needs_all = NEEDS[descriptor.sampling], self._needs_all
        hidden, kept = self._pass(batch, None if needs_all else batch.logits_indices)
        logits = self.model.compute_logits(batch.sampled(hidden) if needs_all else hidden)
        counts, drafts = batch.num_tokens, descriptor.num_drafts
        if drafts and self.fused_sampler is not None:
            sample_even(self.fused_sampler, batch, logits, self.state, needs, ring, drafts)
        else:
            samples = None
            if drafts:
                counts, samples = even_samples(batch, self.state, drafts)
            self._sample(batch.slots, counts, logits, needs, ring, samples)
        if self.drafts is not None:
            states = self.drafts.states(hidden, kept)
            self.drafts.draft(batch, states, self.kv_caches, self.state, is_idle=descriptor.is_idle)

    def _sample(
        self,
        slots: torch.Tensor,  # [B] int64
        num_tokens: torch.Tensor,  # [B] int64
        logits: torch.Tensor,  # [S, V]
        needs: SamplingNeeds,
        ring: TokenRing | None,
        samples: Samples | None = None,
    ) -> StepTensors:
        """Sampling and state update. Kernels with a ring leave log-probabilities there alone."""
        state = self.state
        if needs.grammar:
            num_tokens = state.await_masks(slots, num_tokens)
        if samples is not None:
            num_tokens = num_tokens - samples.drafts
            at = slots[samples.rows], num_tokens[samples.rows] + samples.places
            output = self.sampler(logits.float(), state.sampling_metadata(*at, needs, samples))
            tokens = keep_drawn(
                state, slots, num_tokens, output.token_ids, samples, ring, output.logprobs
            )
            return StepTensors(tokens, output.logprobs)
        if self.fused_sampler is None:
            meta = state.sampling_metadata(slots, num_tokens, needs)
            output = self.sampler(logits.float(), meta)
            ids, logprobs = output.token_ids, output.logprobs
        else:  # fast path, skip on a first reading: the same draws in a few kernels
            ids, logprobs = self.fused_sampler(logits, slots, num_tokens, state, needs, ring)
        counts = ring is None or not needs.is_plain  # which compiles fewer kernels than all cases
        tokens = state.append_sampled(
            slots, num_tokens, ids, ring, logprobs=logprobs, has_penalties=counts
        )
        return StepTensors(tokens, logprobs)

    @property
    def _needs_all(self) -> bool:
        """True if every step needs the hidden states of all its tokens."""
        return self._guesses is not None and self._guesses.reads_states

    @property
    def _guesses(self) -> DraftSteps | None:
        """`drafts`, unless grammars alone make them: then nothing runs behind a step."""
        return self.drafts if self.drafts is not None and self.drafts.drafter.num_tokens else None

    def forward(self, batch: InputBatch) -> torch.Tensor:
        """[B, V] logits of each row's last token, in the model's type."""
        return self.model.compute_logits(self._hidden(batch, batch.logits_indices))

    def _hidden(self, batch: InputBatch, wanted: torch.Tensor | None) -> torch.Tensor:
        """[N, H] normed hidden states of the wanted tokens; None for all."""
        return self._pass(batch, wanted)[0]

    def _pass(
        self, batch: InputBatch, wanted: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The same, and the inputs of layers that the drafter's model reads."""
        self.attention.prepare(batch.metadata)
        context = ForwardContext(batch.metadata, self.kv_caches, wanted)
        if self._guesses is not None:
            context.kept_layers = self._guesses.kept_layers
        if self.recurrent is not None:
            assert batch.recurrent is not None
            self.recurrent.prepare(batch.recurrent)
            context.recurrent = RecurrentStep(batch.recurrent, self.states)
        hidden: torch.Tensor = self.model(batch.input_ids, batch.positions, context)
        return hidden, context.kept
