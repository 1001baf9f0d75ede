"""Which steps to record as CUDA graphs, from the settings and what can be recorded here."""

from __future__ import annotations

from termgen.config import EngineConfig
from termgen.engine.device.attention.base import AttentionBackend
from termgen.engine.device.models.decoder import CausalDecoder
from termgen.engine.device.models.pieces import PiecewiseModel
from termgen.engine.device.runner.dispatch import (
    CudaGraphDispatcher,
    decode_sizes,
    mixed_sizes,
    piecewise_sizes,
)
from termgen.engine.device.runner.resolve import Limits


def choose_graphs(
    config: EngineConfig,
    limits: Limits,
    *,
    device_type: str,
    attention: AttentionBackend,
    model: object,
) -> CudaGraphDispatcher:
    """The sizes of each kind of recording, or why there are none.

    Attention that cannot be part of a recording can still run between two: where all steps were to
    be recorded, they are recorded in pieces then.
    """
    mode = config.cudagraph_mode
    graph_modes = attention.capabilities.graph_modes
    has_pieces = "PIECEWISE" in graph_modes and isinstance(model, PiecewiseModel)
    seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens

    def none(reason: str) -> CudaGraphDispatcher:
        return CudaGraphDispatcher((), disabled_reason=reason)

    def pieces(why_not_full: str = "") -> CudaGraphDispatcher:
        sizes = piecewise_sizes(seqs, tokens)
        return CudaGraphDispatcher(
            (), piecewise=sizes, max_num_seqs=seqs, why_not_full=why_not_full
        )

    if config.enforce_eager:
        return none("--enforce-eager")
    if mode == "none":
        return none("--cudagraph-mode none")
    if device_type != "cuda":
        return none("no CUDA device")
    if isinstance(model, CausalDecoder) and not model.can_be_recorded:
        return none("experts without Triton kernels cannot be recorded")
    if mode == "piecewise":
        return pieces() if has_pieces else none("the model cannot be cut at attention")
    if "FULL" not in graph_modes:
        why = f"{attention.name} attention cannot be recorded"
        return none(why) if mode == "full_decode_only" or not has_pieces else pieces(why)
    is_both = mode == "full_and_piecewise" and has_pieces
    return CudaGraphDispatcher(
        decode_sizes(seqs),
        mixed=mixed_sizes(tokens) if mode == "full" else (),
        piecewise=piecewise_sizes(seqs, tokens) if is_both else (),
        max_num_seqs=seqs,
    )
