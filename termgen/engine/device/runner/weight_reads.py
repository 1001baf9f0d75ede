"""What steps read of a model's weights, for the dashboard to compare with the memory's rate."""

from __future__ import annotations

import torch
from torch import nn

from termgen.engine.device.layers.linear import VocabEmbedding
from termgen.engine.device.models.decoder import CausalDecoder
from termgen.engine.device.models.mlp import Matrices, SparseMoe
from termgen.engine.device.runner.memory import weight_bytes
from termgen.vocabulary.memory_ledger import WeightReads


def weight_reads(model: nn.Module, device: torch.device) -> WeightReads | None:
    """None for a model of other code, whose experts are not known."""
    if not isinstance(model, CausalDecoder):
        return None
    moe, tables, routed = model.config.moe, 0, 0
    for module in model.modules():
        if isinstance(module, VocabEmbedding):
            tables += weight_bytes(module)
        elif isinstance(module, SparseMoe) and moe is not None:
            for part in (module.gate_up, module.down):
                # The last matrix may be an expert of all tokens.
                routed += _bytes_of(part) * moe.num_experts // len(part)
    return WeightReads(
        always_bytes=weight_bytes(model) - tables - routed,
        experts_bytes=routed,
        experts_share=1.0 if moe is None else moe.num_experts_per_tok / moe.num_experts,
        bytes_per_s=_memory_rate(device),
    )


def _bytes_of(matrices: Matrices) -> int:
    return matrices.nbytes if isinstance(matrices, nn.Parameter) else weight_bytes(matrices)


def _memory_rate(device: torch.device) -> float:
    """Bytes per second; 0 where the driver does not say, and on a CPU."""
    if device.type != "cuda":
        return 0.0
    facts = torch.cuda.get_device_properties(device)
    cycles = 1e3 * getattr(facts, "memory_clock_rate", 0)
    return float(2 * cycles * getattr(facts, "memory_bus_width", 0) / 8)  # two transfers a cycle
