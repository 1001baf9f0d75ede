"""Decides whether a mixture's experts lie in main memory, and how many of them on the GPU, too."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from termgen.config import EngineConfig, parse_cpu_experts
from termgen.engine.device import native
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.kernels import why_unusable
from termgen.engine.device.models.decoder import CausalDecoder
from termgen.engine.device.models.mlp import SparseMoe
from termgen.engine.device.runner import resolve
from termgen.engine.device.runner.memory import MemoryAccount
from termgen.errors import ConfigError
from termgen.vocabulary.memory_ledger import GIB, size

if TYPE_CHECKING:
    from termgen.engine.device.host_experts.host_list import HostExperts
    from termgen.engine.device.host_experts.placement import Placement

logger = logging.getLogger(__name__)

FIELD = "cpu_experts"
_COMPUTED = ("int8", "q4")
"""The quantizations whose experts the CPU computes."""
_BITS = {"int8": 9.0, "q4": 5.5, "fp8": 8.5}
"""Bits of a weight, or a little more."""
_OF_FILE = 1.2
"""Bytes in memory to bytes of a file whose weights stay what they are, at most."""
_NO_FLOAT8 = "the CPU computes no 8-bit floats; add quantization int8 or q4, which round them"
_FULL = 0.85
"""Share of the free memory that weights may take and leave enough for the rest."""
_KV_SHARE = 0.2
"""Share of what the other weights leave that the KV cache is to have."""
_REST_BYTES, _REST_SHARE = GIB // 2, 0.06
"""What steps, graphs and buffers take, and the share of the memory that they take more."""


@dataclass(slots=True)
class CpuExperts:
    """A model's experts are to lie in main memory."""

    num_wanted: int | None
    """Experts of each layer that the GPU shall not have; None: those that do not fit."""
    num_bits: int
    threads: int
    """Three quarters of the CPU's. The engine and the driver wait for the GPU on others, and a
    product is as slow as the slowest of its threads."""
    top_k: int
    max_tokens: int
    kv_cache_gib: float | None
    placement: Placement | None = None
    """Set once the model is loaded."""

    def make(self, shape: tuple[int, int, int], build: object) -> HostExperts:
        from termgen.engine.device.host_experts.host_list import (
            HostExperts,  # triton may be missing
        )

        return HostExperts(shape, build, self.num_bits)  # type: ignore[arg-type]

    def place(self, model: CausalDecoder, memory: MemoryAccount | None) -> None:
        """Put experts of a loaded model where they are to be. memory: unless `num_wanted` says how
        many."""
        from termgen.engine.device.host_experts.host_list import HostExperts
        from termgen.engine.device.host_experts.placement import ExpertPlaces, HostCompute
        from termgen.engine.device.host_experts.placement import Placement as Made
        from termgen.engine.device.native.expert_kernels import Activation

        layers = [
            module
            for module in model.modules()
            if isinstance(module, SparseMoe) and isinstance(module.gate_up, HostExperts)
        ]
        moe = model.config.moe
        assert layers and moe is not None
        compute = HostCompute(
            model.config.hidden_size,
            self.top_k,
            self.max_tokens,
            device=model.device,
            threads=self.threads,
        )
        here = self._num_on_card(layers, moe.num_experts, memory)
        clamp = moe.clamp
        limits = (0.0, 0.0) if clamp is None else (clamp.limit, clamp.alpha)
        places = []
        for number, layer in enumerate(layers):
            host = layer.gate_up, layer.down
            assert isinstance(host[0], HostExperts) and isinstance(host[1], HostExperts)
            made = ExpertPlaces(
                number,
                (host[0], host[1]),
                compute,
                num_experts=moe.num_experts,
                num_on_card=here,
                activation=Activation(layer.activation, *limits),
                biases=(layer.gate_up_bias, layer.down_bias),
                weighs_inputs=moe.weighs_inputs,
            )
            host[0].places = host[1].places = made
            places.append(made)
        self.placement = Made(places)

    def _num_on_card(
        self, layers: list[SparseMoe], num_experts: int, memory: MemoryAccount | None
    ) -> int:
        """Experts of each layer."""
        if self.num_wanted is not None:
            return max(0, num_experts - self.num_wanted)
        assert memory is not None
        from termgen.engine.device.host_experts.host_list import HostExperts

        of_all = 0
        for layer in layers:
            assert isinstance(layer.gate_up, HostExperts) and isinstance(layer.down, HostExperts)
            of_all += layer.gate_up.card_bytes + layer.down.card_bytes
        room = memory.room_for_kv(memory.limit)
        room -= _REST_BYTES + int(_REST_SHARE * memory.limit)
        kv = self.kv_cache_gib
        room -= int(_KV_SHARE * max(0, room)) if kv is None else int(kv * GIB)
        num_matrices = layers[0].gate_up.shape[0]
        each = of_all / num_matrices
        beside = num_matrices - num_experts  # an expert of all tokens
        return max(0, min(num_experts, int(room / each) - beside))


def choose_cpu_experts(
    config: EngineConfig,
    model: ModelConfig,
    limits: resolve.Limits,
    device: torch.device,
    path: Path,
    quantization: str | None,
    memory: MemoryAccount,
) -> CpuExperts | None:
    """None if all experts lie on the GPU, or there are none. Raises ConfigError where it was asked
    for what cannot be done."""
    wanted = parse_cpu_experts(config.cpu_experts)
    if wanted == 0:
        return None
    why_not = _why_not(model, device, quantization)
    if wanted is None and why_not == _NO_FLOAT8:
        if not _fits(model, path, quantization, memory):
            logger.warning("experts stay on the GPU: %s", why_not)
        return None
    if wanted is None and (why_not or _fits(model, path, quantization, memory)):
        return None
    if why_not:
        raise ConfigError(f"{FIELD} {wanted}: {why_not}", param=FIELD)
    moe = model.moe
    assert moe is not None
    if wanted is not None and wanted > moe.num_experts:
        raise ConfigError(
            f"{FIELD} is {wanted}, but a layer has {moe.num_experts} experts", param=FIELD
        )
    return CpuExperts(
        wanted,
        4 if quantization == "q4" else 8,
        resolve.resolve_threads(config.threads) * 3 // 4 or 1,
        moe.num_experts_per_tok + moe.has_shared_of_same_size,
        limits.max_num_batched_tokens,
        config.kv_cache_gib,
    )


def _why_not(model: ModelConfig, device: torch.device, quantization: str | None) -> str:
    """Why experts cannot lie in main memory; empty if they can."""
    moe = model.moe
    if moe is None or model.transformers is not None:
        return "the model has no experts that termgen's own code runs"
    if device.type != "cuda" or why_unusable(device):
        return "it is for an NVIDIA GPU, beside which the CPU computes"
    if problem := native.why_unusable():
        return problem
    if quantization == "fp8":
        return _NO_FLOAT8
    if quantization not in _COMPUTED:
        return "experts are computed by the CPU in 8 or 4 bits; add quantization int8 or q4"
    from termgen.engine.device.native.expert_kernels import ACTIVATIONS
    from termgen.engine.device.native.int8_blocks import BLOCK

    if moe.clamp is None and model.hidden_act not in ACTIVATIONS:
        return f"the CPU's kernels do not have the activation {model.hidden_act}"
    if model.hidden_size % BLOCK or moe.intermediate_size % BLOCK:
        return f"the sizes of its experts are no multiples of {BLOCK}"
    return ""


def _file_bytes(path: Path) -> int:
    """Bytes of a model's files; 0: there are none."""
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(f.stat().st_size for f in files if f.suffix != ".json" and f.is_file())


def _fits(model: ModelConfig, path: Path, quantization: str | None, memory: MemoryAccount) -> bool:
    """True if all weights fit the GPU, to judge by the file."""
    needed = model.num_parameters * _BITS.get(quantization or "", 16.0) / 8
    if of_files := _file_bytes(path):
        needed = min(needed, _OF_FILE * of_files)
    room = memory.room_for_kv(memory.limit)
    if needed <= _FULL * room:
        return True
    logger.info("weights of about %s do not fit %s", size(int(needed)), size(room))
    return False
