"""Releases a device's memory while its engine sleeps, and restores it.

A recorded step has the addresses of the KV cache and of the weights, and both change at waking up.
So recordings are dropped with them and made again, which takes as many seconds as at start. Used by
the executor, with no step in flight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from termgen.config import EngineConfig
from termgen.engine.device.runner.build import build_runner, record_steps
from termgen.engine.device.runner.cuda_graphs import CudaRecorder, FullGraphs
from termgen.engine.device.runner.dispatch import CudaGraphDispatcher
from termgen.engine.device.runner.memory import held_tensors, is_out_of_memory, make_meter
from termgen.engine.device.runner.model_runner import ModelRunner
from termgen.engine.device.runner.warm_up import run_largest_steps
from termgen.errors import EngineError, TermgenError
from termgen.vocabulary.memory_ledger import size
from termgen.vocabulary.model_info import DeviceInfo
from termgen.vocabulary.startup_phases import LOADING_WEIGHTS, RECORDING_GRAPHS, SIZING_CACHE

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]


class LightSleep:
    """Level 1: no KV cache and no recordings; a GPU's weights move to main memory.

    The runner stays, with its request rows and work buffers, except for a GPU's tables of rows
    times vocabulary. On a CPU the weights stay too, as there is no other memory for them.
    """

    def __init__(self, runner: ModelRunner, config: EngineConfig, info: DeviceInfo) -> None:
        """Fall asleep. Raises EngineError, still awake, if main memory cannot hold the weights."""
        self._runner = runner
        self._config = config
        self._num_blocks = info.num_blocks
        self._dispatcher = runner.graphs.dispatcher
        asleep = self._graphs_asleep()  # may fail, so do it before anything has changed
        self._weights = OffloadedWeights(runner.model) if runner.device.type == "cuda" else None
        self._drop_tables()
        runner.kv_caches, runner.states, runner.graphs = [], [], asleep

    def give_back(self) -> None:
        make_meter(self._runner.device).release()

    def wake_up(self, on_progress: Progress) -> ModelRunner:
        try:
            if self._weights is not None:
                self._weights.restore(lambda done: on_progress(LOADING_WEIGHTS, done))
            on_progress(SIZING_CACHE, 0.0)
            for tensor in sampling_tables(self._runner):
                tensor.untyped_storage().resize_(tensor.nbytes)
                tensor.zero_()  # a request that has run before is added anew, and counted
            self._runner.init_kv_cache(self._num_blocks)
            with self._runner.experts_at_rest():
                self._record(on_progress)
        except (RuntimeError, MemoryError) as error:
            self._drop()
            if self._weights is not None:
                self._weights.drop()
            self.give_back()
            if not is_out_of_memory(error):
                raise
            raise _no_room(self._runner.device) from error
        return self._runner

    def _drop(self) -> None:
        asleep = self._graphs_asleep()
        self._runner.kv_caches, self._runner.states, self._runner.graphs = [], [], asleep
        self._drop_tables()

    def _drop_tables(self) -> None:
        for tensor in sampling_tables(self._runner):
            tensor.untyped_storage().resize_(0)

    def _graphs_asleep(self) -> FullGraphs:
        """An empty set of recordings, without a reference to the present KV cache."""
        runner = self._runner
        caches, runner.kv_caches = runner.kv_caches, []
        try:
            return runner.make_graphs(CudaGraphDispatcher((), disabled_reason="asleep"))
        finally:
            runner.kv_caches = caches

    def _record(self, on_progress: Progress) -> None:
        runner, dispatcher = self._runner, self._dispatcher
        if dispatcher.is_empty:
            runner.graphs = runner.make_graphs(dispatcher)
            return
        runner.graphs = record_steps(
            runner,
            dispatcher,
            CudaRecorder(runner.device),
            lambda done: on_progress(RECORDING_GRAPHS, done),
            in_background=self._config.capture_in_background,
        )
        run_largest_steps(runner)  # allocate again what the first real steps need


def sampling_tables(runner: ModelRunner) -> list[torch.Tensor]:
    """A GPU's tables that have a place for every token of every row."""
    if runner.device.type != "cuda":
        return []
    sampler = runner.fused_sampler
    return [runner.state.token_counts, *([sampler.edited] if sampler is not None else [])]


class OffloadedWeights:
    """Copies of a model's weights in main memory, while the device's storages are empty.

    It works on storages, not tensors: tensors that share one, such as tied embeddings or views of
    fused weights, are released and restored together.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        found = (tensor.untyped_storage() for tensor in held_tensors(model))
        storages = {storage.data_ptr(): storage for storage in found}
        storages.pop(0, None)  # of a tensor without elements
        self._kept: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        try:
            for storage in storages.values():
                self._kept.append((storage, _bytes_of(storage).to("cpu", copy=True)))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            needed = sum(storage.nbytes() for storage in storages.values())
            raise EngineError(
                f"main memory cannot hold the {size(needed)} of weights; sleep at level 2, which "
                "reads them from disk again"
            ) from error
        self.drop()

    def drop(self) -> None:
        for storage, _ in self._kept:
            storage.resize_(0)

    def restore(self, on_progress: Callable[[float], None]) -> None:
        for i, (storage, kept) in enumerate(self._kept):
            on_progress(i / len(self._kept))
            storage.resize_(len(kept))
            _bytes_of(storage).copy_(kept)


class DeepSleep:
    """Level 2: nothing is kept. Waking up is a new start with the sizes of the first one."""

    def __init__(self, config: EngineConfig, path: Path, info: DeviceInfo) -> None:
        self._config = replace(
            config,
            num_gpu_blocks_override=info.num_blocks,
            kv_cache_gib=None,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
        )
        self._path = path
        self._info = info

    def give_back(self) -> None:
        make_meter(torch.device(self._info.device)).release()

    def wake_up(self, on_progress: Progress) -> ModelRunner:
        try:
            runner, info = build_runner(self._config, self._path, on_progress)
        except TermgenError as error:
            raise EngineError(f"the engine cannot wake up: {error}") from error
        if _sizes(info) != _sizes(self._info):
            raise EngineError(
                f"the engine cannot wake up: the model at {self._path} is not the one it was"
            )
        return runner


def _sizes(info: DeviceInfo) -> tuple[object, ...]:
    """The sizes that the host half depends on."""
    limits = (info.max_num_seqs, info.max_num_batched_tokens, info.max_model_len)
    cache = (info.num_blocks, info.block_size, info.windows)
    return (*limits, *cache, info.vocab_size, info.architecture, info.dtype)


def _no_room(device: torch.device) -> EngineError:
    free, total = make_meter(device).free_and_total()
    return EngineError(
        f"the engine cannot wake up: its memory does not fit on {device} any more, of whose "
        f"{size(total)} {size(free)} are free; free memory there, then wake it up again"
    )


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
