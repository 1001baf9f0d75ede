"""The linear method of CUDA: the configuration for a row count, or torch's own product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from triton_device import DEVICES, assert_near, normal, require_triton

require_triton()

from termgen.engine.device.kernels.gemm.small_gemm_config import SmallGemmConfig  # noqa: E402
from termgen.engine.device.layers.linear import LinearSpec  # noqa: E402
from termgen.engine.device.layers.triton_ops import SmallBatchLinears, measured_choice  # noqa: E402

GEMV = SmallGemmConfig("gemv", 2, 4, 64, 1)
SPLIT = SmallGemmConfig("mma", 16, 32, 32, 4, 3, 2)


def choice(num_rows: int, spec: LinearSpec) -> SmallGemmConfig | None:
    if num_rows <= 2:
        return GEMV
    return SPLIT if num_rows <= 16 and spec.in_features >= 128 else None


@pytest.mark.parametrize("device", DEVICES)
def test_every_row_count_and_bias(device: str) -> None:
    factory = SmallBatchLinears(choice)
    layers = []
    for out_features, in_features in ((48, 64), (80, 128)):
        spec = LinearSpec(in_features, out_features, torch.float32, torch.device(device), False)
        layer = factory(spec)
        weight = normal(out_features, in_features, dtype=spec.dtype, device=device, seed=1)
        layer.load_rows(weight, 0)
        layer.finalize()
        layers.append((layer, weight))
    bias = normal(80, dtype=torch.float32, device=device, seed=2)
    for num_rows in (0, 1, 2, 3, 16, 17):
        for layer, weight in layers:
            x = normal(num_rows, weight.shape[1], dtype=torch.float32, device=device, seed=3)
            own = bias[: weight.shape[0]]
            scale = weight.shape[1] ** 0.5
            for b in (None, own):
                y = layer.multiply(x, b)
                assert_near(y / scale, F.linear(x, weight, b) / scale, torch.float32)


def test_nothing_but_a_hopper_gpu_has_a_measured_choice() -> None:
    spec = LinearSpec(1024, 4096, torch.bfloat16, torch.device("cpu"), False)
    assert measured_choice(1, spec) is None


@pytest.mark.gpu
def test_padding_never_changes_the_configuration() -> None:
    """A row's result must be the same, bit for bit, however far its batch is padded."""
    from termgen.engine.device.runner.dispatch import (
        CudaGraphDispatcher,
        SamplingVariant,
        decode_sizes,
    )

    dispatcher = CudaGraphDispatcher(decode_sizes(256), max_num_seqs=256)
    for n, k in ((4096, 1024), (1024, 3072), (16384, 2048), (128256, 4096)):
        spec = LinearSpec(k, n, torch.bfloat16, torch.device("cuda"), False)
        for rows in range(1, 65):
            found = dispatcher.dispatch(
                num_rows=rows, num_tokens=rows, sampling=SamplingVariant.PLAIN
            )
            assert found.descriptor is not None
            assert measured_choice(rows, spec) == measured_choice(found.descriptor.num_rows, spec)
