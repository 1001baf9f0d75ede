"""top-n-sigma against llama.cpp's arithmetic; the kernel and the CPU form against the reference."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from sampling_columns import make_cuts
from sampling_rows import NEEDS, batch_of, make_state, plan_of, random_row
from triton_device import DEVICES, DEVICES_AND_DTYPES, normal, require_triton

require_triton()

from termgen.engine.device.kernels.sampling.fused import FusedSampler  # noqa: E402
from termgen.engine.device.kernels.sampling.top_k_top_p import (  # noqa: E402
    CutWorkspace,
    cut_threshold,
    cut_threshold_of_slots,
)
from termgen.engine.device.sampling.sampler import Sampler  # noqa: E402
from termgen.engine.device.sampling.top_k_top_p import (  # noqa: E402
    cut_threshold_cpu,
    cut_threshold_reference,
)
from termgen.errors import RequestError  # noqa: E402
from termgen.vocabulary.sampling_params import SamplingParams  # noqa: E402

devices = pytest.mark.parametrize("device", DEVICES)
devices_and_dtypes = pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
forms = pytest.mark.parametrize("form", [cut_threshold_cpu, cut_threshold_reference])
INF, NAN = float("inf"), float("nan")
UNUSED = 2**31 - 1
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from termgen.engine.device.kernels.sampling.top_k_top_p import _cut_kernel as kernel

types = {name: "*fp32" for name in kernel.arg_names} | {
    "logits_ptr": "*bf16", "slots_ptr": "*i64", "top_k_ptr": "*i32", "edit_kinds_ptr": "*i64",
    "total_len_ptr": "*i64", "min_total_ptr": "*i64", "pieces_ptr": "*i32",
    "collected_ptr": "*i32", "logits_stride": "i32",
}
for has_edited in (False, True):
    constants = {
        "VOCAB_SIZE": 128256, "TILE": 4096, "PIECE": 64, "BLOCK_PIECES": 2048, "CAPACITY": 4096,
        "SAMPLES": 1, "HAS_EDITED": has_edited,
    }
    signature = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
    assert ".f64" in made.asm["ptx"]
"""


def kept_by_llama_cpp(logits: np.ndarray, n: float) -> np.ndarray:
    """What `llama_sampler_top_n_sigma_apply` leaves of one row, before any temperature."""
    finite = logits[logits != -INF]
    limit = finite.max() - n * np.sqrt(((finite - finite.mean()) ** 2).mean())
    return np.asarray(logits >= limit)


def thresholds(
    logits: torch.Tensor, *, temperature: Any = 1.0, capacity: int = 4096, **cuts: Any
) -> tuple[torch.Tensor, torch.Tensor, CutWorkspace]:
    """Those of the kernel and of the reference, and what the kernel left in its buffers."""
    device, num_rows = logits.device, len(logits)
    columns = make_cuts(num_rows, device=device, **cuts)
    heat = torch.as_tensor(temperature, dtype=torch.float32, device=device).expand(num_rows)
    slots = torch.arange(num_rows, device=device)
    workspace = CutWorkspace(
        max_rows=num_rows, vocab_size=logits.shape[1], device=device, tile=1024, capacity=capacity
    )
    workspace.pieces.fill_(UNUSED)
    workspace.collected.fill_(UNUSED)
    ours = cut_threshold(logits, slots, workspace, columns, temperature=heat.clone())
    return ours, cut_threshold_of_slots(logits, slots, columns, temperature=heat), workspace


@forms
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.9])
def test_tokens_kept_are_those_of_llama_cpp(form, temperature: float) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    logits = normal(6, 2000, dtype=torch.float32, device="cpu", seed=seed, scale=3.0)
    logits[2, ::3] = -INF  # masked tokens do not count
    logits[3] += 500.0
    n = [0.5, 1.0, 1.5, 2.0, 3.5, 100.0]
    threshold = form(logits / temperature, make_cuts(6, top_n_sigma=n))
    kept = (logits / temperature >= threshold).numpy()
    for row, values in enumerate(logits.double().numpy()):
        expected = kept_by_llama_cpp(values, n[row])
        finite = values[values != -INF]
        for index in (kept[row] != expected).nonzero()[0]:  # at the limit, up to rounding
            distance = (finite.max() - values[index]) / finite.std()
            assert distance == pytest.approx(n[row], rel=1e-5), (row, index)
        assert 0 < kept[row].sum() <= len(finite)
    assert kept[5].all() and kept[0].sum() < kept[4].sum() < 2000


@devices
def test_the_deviation_is_that_of_the_whole_population(device: str) -> None:
    logits = torch.full((2, 70), -INF, device=device)
    logits[:, 3:7] = torch.tensor([4.0, 0.0, 0.0, 0.0], device=device)  # sqrt(3); of a sample: 2
    ours, theirs, _ = thresholds(logits, temperature=[1.0, 0.5], top_n_sigma=2.2)
    cpu = cut_threshold_cpu(logits.cpu(), make_cuts(2, top_n_sigma=2.2))[0].item()
    for limit in (float(ours[0]), float(theirs[0]), float(ours[1]) / 2, float(theirs[1]) / 2, cpu):
        assert limit == pytest.approx(4 - 2.2 * 3**0.5, rel=1e-5)


@devices_and_dtypes
@pytest.mark.parametrize("vocab_size", [1, 7, 1500])
def test_the_kernel_has_the_threshold_of_the_reference(
    device: str, dtype: torch.dtype, vocab_size: int
) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    logits = normal(5, vocab_size, dtype=dtype, device=device, seed=seed, scale=4.0)
    logits[1, : vocab_size // 2] = -INF
    n = [0.1, 1.0, 2.5, 0.0, 100.0]
    heat = [0.7, 1.0, 1.3, 1.0, 2.0]
    ours, theirs, _ = thresholds(logits, temperature=heat, top_n_sigma=n)
    scaled = logits.float() / torch.tensor(heat, device=device)[:, None]
    smallest = scaled.amin(dim=1)  # below which the reference does not go
    assert torch.equal(torch.maximum(ours, smallest), theirs)
    assert ours[3] == -INF


@devices
@pytest.mark.parametrize("capacity", [32, 4096])
def test_it_comes_before_top_k_and_beside_min_p(device: str, capacity: int) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    logits = normal(5, 1300, dtype=torch.float32, device=device, seed=seed, scale=1.5)
    cuts = {
        "top_n_sigma": [1.0, 1.0, 3.0, 0.2, 2.0],
        "top_k": [0, 5, 5, 900, 40],
        "min_p": [0.0, 0.0, 0.0, 0.9, 0.001],
    }
    ours, theirs, _ = thresholds(logits, capacity=capacity, **cuts)
    kept, expected = logits >= ours[:, None], logits >= theirs[:, None]
    relative = (logits - logits.amax(dim=1, keepdim=True)).double().exp()
    for row, index in (kept != expected).nonzero().tolist():  # min-p up to rounding
        assert float(relative[row, index]) == pytest.approx(cuts["min_p"][row], rel=1e-5)
    alone = logits >= thresholds(logits, top_n_sigma=cuts["top_n_sigma"])[0][:, None]
    assert not (kept & ~alone).any()
    # top-p counts the mass of what is left: all of it is needed for nearly all of it
    top_p, _, _ = thresholds(logits, capacity=capacity, top_n_sigma=1.0, top_p=0.999999)
    widest, _, _ = thresholds(logits, capacity=capacity, top_n_sigma=1.0)
    assert torch.equal(logits >= top_p[:, None], logits >= widest[:, None])


def test_the_cpu_form_equals_the_reference() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    logits = normal(60, 3001, dtype=torch.float32, device="cpu", seed=seed, scale=2.0)
    logits = logits.bfloat16().float()
    logits[:, 11] = -INF
    cuts = make_cuts(
        60,
        top_n_sigma=[rng.choice([0.0, 0.5, 1.5, 4.0]) for _ in range(60)],
        top_k=[rng.choice([0, 1, 30, 2500]) for _ in range(60)],
        min_p=[rng.choice([0.0, 0.01]) for _ in range(60)],
    )
    assert torch.equal(cut_threshold_cpu(logits, cuts), cut_threshold_reference(logits, cuts))


@devices
def test_rows_that_do_not_ask_cost_nothing_and_lost_rows_are_not_cut(device: str) -> None:
    logits = normal(6, 1100, dtype=torch.float32, device=device, seed=2)
    logits[2] = -INF
    logits[3, 5], logits[4, 5] = NAN, INF
    logits[5] = 2.0  # no deviation: the equals of the largest stay
    ours, _, left = thresholds(
        logits, temperature=[1.0, 0.0, 1.0, 1.0, 1.0, 1.0], top_n_sigma=[0.0, 1.0, 1, 1, 1, 1]
    )
    assert (ours[:5] == -INF).all() and ours[5] == 2.0
    assert (left.pieces[:2] == UNUSED).all(), "a row without a cut, or greedy, is not read"
    assert (left.collected == UNUSED).all(), "nothing is searched"


@devices_and_dtypes
def test_draws_are_those_of_the_sampler(device: str, dtype: torch.dtype) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng, vocab = random.Random(seed), 900
    kinds: list[dict[str, Any]] = [
        {"top_n_sigma": 1.0},
        {"top_n_sigma": 0.3, "temperature": 1.9},
        {"top_n_sigma": 2.0, "top_k": 3},
        {"top_n_sigma": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
        {"top_n_sigma": 1.0, "allowed_token_ids": range(20, 90)},
        {"top_n_sigma": 0.001},
        {"temperature": 0.9},
    ]
    state = make_state(len(kinds) + 2, vocab, device)
    state.update(plan_of([random_row(rng, i, vocab, **kind) for i, kind in enumerate(kinds)]))
    kernels = FusedSampler(max_rows=len(kinds) + 1, vocab_size=vocab, device=torch.device(device))
    slots, counts = batch_of(rng, state, len(kinds), 1)
    logits = normal(len(kinds) + 1, vocab, dtype=dtype, device=device, seed=seed, scale=3.0)
    expected = Sampler()(logits.float(), state.sampling_metadata(slots, counts, NEEDS)).token_ids
    drawn, _ = kernels(logits, slots, counts, state, NEEDS)
    assert torch.equal(drawn, expected)
    likeliest = (slots == 5).nonzero().item()
    assert drawn[likeliest] == logits[likeliest].float().argmax()


def test_off_is_0_or_llama_cpps_minus_1() -> None:
    assert SamplingParams(top_n_sigma=-1).top_n_sigma == 0.0
    assert not SamplingParams(top_n_sigma=-1.0).has_cuts
    assert SamplingParams(top_n_sigma=0.7).has_cuts
    with pytest.raises(RequestError, match=r"^top_n_sigma must be 0 or in \[0.001, 100\]"):
        SamplingParams(top_n_sigma=5e-324)  # 0 in the device's float32, which would be all tokens


def test_the_kernel_compiles_for_a_gpu() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True, timeout=300)
