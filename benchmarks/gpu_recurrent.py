"""Times of the gated delta net: bandwidth of decodes, and prompts.

    python benchmarks/gpu_recurrent.py [--part decode|prefill] [--tune]

Decodes run as a recorded chain over states that the L2 cache does not hold together; their
bandwidth is that of one read and one write of each state, as a share of what a copy reaches here.
--tune: other ways to cut the work, too. Wrong results are reported instead of times.
"""

from __future__ import annotations

import argparse
import itertools

import torch

from termgen.engine.device.kernels.gemm.timing import time_chain
from termgen.engine.device.kernels.recurrent.chunk_plan import ChunkPlan, plan_chunks
from termgen.engine.device.kernels.recurrent.delta_decode import delta_decode
from termgen.engine.device.kernels.recurrent.delta_prefill import RecurrenceConfig, delta_prefill
from termgen.engine.device.kernels.recurrent.layout import CONV_TAPS, GatedDeltaShape
from termgen.engine.device.recurrent import base
from termgen.engine.device.recurrent.torch_delta import TorchGatedDelta

HEADS = {"qwen3.5-27b": (16, 48), "qwen3.5-35b-a3b": (16, 32)}
DECODE_ROWS = (1, 8, 32, 128)
PREFILL = [(1, 512), (8, 1024), (1, 8192), (1, 32768)]
DTYPE = torch.bfloat16
CHAIN_BYTES = 400 * 2**20
LEAST_STATES = 4  # an early read of a state must not meet the write of a call shortly before
DECODE_CUTS = {"block_v": (8, 16, 32), "num_warps": (1, 2, 4)}
PREFILL_CUTS = {"block_v": (16, 32, 64), "num_stages": (1, 2, 3), "num_warps": (4, 8)}


def normal(*size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(size, device="cuda").to(dtype)


class Batch:
    """Rows of equally many tokens that go on from random states."""

    def __init__(self, num_k_heads: int, num_v_heads: int, rows: int, length: int) -> None:
        heads = {"num_k_heads": num_k_heads, "num_v_heads": num_v_heads}
        self.shape = GatedDeltaShape(**heads, k_dim=128, v_dim=128)
        tokens, channels = rows * length, self.shape.num_channels
        self.inputs = (normal(tokens, channels), *normal(2, tokens, num_v_heads))
        self.weights = base.GatedDeltaWeights(
            base.tap_major(normal(channels, CONV_TAPS)),
            torch.linspace(0.001, 0.1, num_v_heads, device="cuda").log(),
            normal(num_v_heads, dtype=torch.float32),
        )
        starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * length
        slots = torch.randperm(rows, device="cuda").to(torch.int32)
        self.metadata = base.RecurrentMetadata(
            starts, slots, torch.full_like(slots, 5), torch.ones_like(slots).bool(),
            rows, tokens, rows if length == 1 else 0, length,
        )  # fmt: skip
        self.state_bytes = rows * num_v_heads * 128 * 128 * 4
        count = max(LEAST_STATES, CHAIN_BYTES // self.state_bytes) if length == 1 else 2
        s, ring = (rows, num_v_heads, 128, 128), (rows, CONV_TAPS, channels)
        made = ((normal(*s, dtype=torch.float32), normal(*ring)) for _ in range(count))
        self.states = [base.GatedDeltaState(*pair) for pair in made]
        self.out = normal(tokens, num_v_heads, 128)
        self.plan = ChunkPlan(max_rows=rows, max_tokens=tokens, device=self.out.device)

    def run(self, state: base.GatedDeltaState, cut: dict[str, int]) -> None:
        w, m, rows = self.weights, self.metadata, self.metadata.num_rows
        given = (*self.inputs, w.conv, w.a_log, w.dt_bias, state.delta, state.conv)
        given += (starts := m.query_start_loc, m.slots, m.positions, m.has_state)
        if m.num_decodes:
            return delta_decode(*given, shape=self.shape, num_rows=rows, out=self.out, **cut)
        chunks = plan_chunks(starts, self.plan, first_row=0, num_rows=rows, num_tokens=m.num_tokens)
        kinds = {"shape": self.shape, "max_rows": rows, "num_chunks": chunks, "out": self.out}
        config = RecurrenceConfig(**cut) if cut else None
        return delta_prefill(*given, self.plan, **kinds, config=config)

    def seconds(self, cut: dict[str, int]) -> float | None:
        state = self.states[0]
        copy = base.GatedDeltaState(state.delta.clone(), state.conv.clone())
        net = TorchGatedDelta(self.shape)
        net.prepare(self.metadata)
        expected = net.gated_delta(*self.inputs, self.weights, copy, self.metadata).float()
        self.out.fill_(float("nan"))
        self.run(state, cut)
        for x, y, error in ((self.out.float(), expected, 1e-2), (state.delta, copy.delta, 1e-3)):
            if not (x - y).norm() / y.norm() < error:
                return None
        return time_chain(lambda s: self.run(s, cut), self.states, torch.cuda.Stream(), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--part", choices=("decode", "prefill"))
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    source, target = torch.empty(2, 2**30, dtype=torch.uint8, device="cuda")
    peak = 2 * 2**30 / time_chain(target.copy_, [source], torch.cuda.Stream(), 8)
    print(f"{torch.cuda.get_device_name()}: a copy moves {peak / 1e12:.2f} TB/s")
    cases = [(rows, 1) for rows in DECODE_ROWS] if args.part != "prefill" else []
    cases += PREFILL if args.part != "decode" else []
    for (model, heads), (rows, length) in itertools.product(HEADS.items(), cases):
        batch = Batch(*heads, rows, length)
        kinds = DECODE_CUTS if length == 1 else PREFILL_CUTS
        cuts = [dict(zip(kinds, cut, strict=True)) for cut in itertools.product(*kinds.values())]
        for cut in ({}, *(cuts if args.tune else ())):
            try:
                seconds = batch.seconds(cut)
                result = "WRONG" if seconds is None else f"{seconds * 1e6:10.1f} us"
            except RuntimeError as error:  # a cut that does not fit this GPU
                seconds, result = None, f"cannot run: {error}"
            if seconds and length == 1:
                result += f" {2 * batch.state_bytes / seconds / peak:6.1%}"
            print(f"{model} {rows}x{length}".ljust(24), result, cut or "", flush=True)


if __name__ == "__main__":
    main()
