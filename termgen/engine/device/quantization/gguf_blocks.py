"""Dequantise GGUF tensor blocks to float32.

The GGUF checkpoint calls `dequantize` once per tensor while a model is loaded. Each block type is
a function from raw blocks to values, written over whole arrays; the arithmetic is in float32 and in
the order of the reference implementation, so results are equal to the bit. It knows nothing of
files, names or shapes beyond one tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from termgen.engine.device.quantization.mxfp4 import VALUES, ZERO_POWER
from termgen.engine.gguf.gguf_file import GGMLType
from termgen.errors import UnsupportedModelError

CHUNK_ELEMENTS = 1 << 19
"""Elements dequantised at a time: what a chunk needs then stays in the processor's cache."""
ROUNDED = frozenset({"Q2_K", "Q3_K", "Q6_K"})
"""Types with a scale for every 16 numbers: matrices with one for every 32 round their values."""
K_BLOCK = 256
"""Numbers of their blocks."""
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the four bits of IQ4_NL and IQ4_XS stand for."""


def dequantize(
    raw: npt.NDArray[np.uint8], ggml_type: GGMLType, shape: tuple[int, ...], *, name: str
) -> torch.Tensor:
    """One tensor's raw bytes as float32, [*shape]. `name` is for the error message."""
    check_supported(ggml_type, name)
    expand = _EXPANDERS[ggml_type.name]
    blocks = raw.reshape(-1, ggml_type.block_bytes)
    out = torch.empty(len(blocks), ggml_type.block_size, dtype=torch.float32)
    step = max(CHUNK_ELEMENTS // ggml_type.block_size, 1)
    for start in range(0, len(blocks), step):
        # The copy reads the chunk from the file, aligned and writable as torch requires.
        chunk = torch.from_numpy(blocks[start : start + step].copy())
        expand(chunk, out[start : start + step])
    return out.view(shape)


def expanded(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """blocks uint8 [rows, blocks of a row, bytes of a block], of a kind among `ROUNDED`, on any
    device -> float32 [rows, columns]."""
    assert kind in ROUNDED, kind
    out = torch.empty(*blocks.shape[:2], K_BLOCK, device=blocks.device)
    _EXPANDERS[kind](blocks.flatten(0, 1), out.flatten(0, 1))
    return out.flatten(1)


def check_supported(ggml_type: GGMLType, name: str, *, where: str = "") -> None:
    """Raise unless `dequantize` can read the type. `where` goes in front of the error."""
    if ggml_type.name not in _EXPANDERS:
        raise UnsupportedModelError(
            f"{where}tensor {name!r} has the type {ggml_type.name}; "
            f"supported are {', '.join(_EXPANDERS)}"
        )


# Each function below: blocks uint8 [n, block_bytes] -> out float32 [n, block_size], in place.


def _float16(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The 16-bit scale at a byte offset of every block, float32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _f32(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks.view(torch.float32))


def _f16(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks.view(torch.float16))


def _bf16(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks.view(torch.bfloat16))


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # scale 2 | 32 signed bytes
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_float16(blocks, 0))


def _nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Low halves of `packed` [n, k] to the first k columns of `out`, high halves to the next k."""
    half = packed.shape[1]
    out[:, :half] = packed & 15
    out[:, half:] = packed >> 4


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # scale 2 | 16 bytes of nibbles, offset by 8
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_float16(blocks, 0))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # scale 2 | minimum 2 | 16 bytes of nibbles
    _nibbles(blocks[:, 4:], out)
    out.mul_(_float16(blocks, 0)).add_(_float16(blocks, 2))


def fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """32 bits, lowest first, each worth 16: uint8 [n, 4] -> uint8 [n, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(-1) >> shifts) & 1
    return bits.reshape(len(packed), 32) << 4


def _q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # scale 2 | fifth bits 4 | 16 bytes of nibbles; offset by 16
    _nibbles(blocks[:, 6:], out)
    out.add_(fifth_bits(blocks[:, 2:6])).sub_(16).mul_(_float16(blocks, 0))


def _q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # scale 2 | minimum 2 | fifth bits 4 | 16 bytes of nibbles
    _nibbles(blocks[:, 8:], out)
    out.add_(fifth_bits(blocks[:, 4:8])).mul_(_float16(blocks, 0)).add_(_float16(blocks, 2))


def k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes: two uint8 [n, 8].

    Bytes 0-3: scales 0-3 in the low six bits, upper bits of scales 4-7 above them.
    Bytes 4-7: the same for the minima. Bytes 8-11: lower nibbles of scales | minima 4-7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=1)
    return scales, minima


def _k_affine(blocks: torch.Tensor, quants: torch.Tensor) -> None:
    """Scale `quants` float32 [n, 8, 32] by the header both K types share: d, dmin, scales."""
    scales, minima = k_scales(blocks[:, 4:16])
    quants.mul_((_float16(blocks, 0) * scales).unsqueeze(-1))
    quants.sub_((_float16(blocks, 2) * minima).unsqueeze(-1))


def _k_nibbles(packed: torch.Tensor, quants: torch.Tensor) -> None:
    """128 bytes to `quants` [n, 8, 32]: each 32 bytes hold two sub-blocks, low nibbles first."""
    packed = packed.reshape(-1, 4, 32)
    quants[:, 0::2] = packed & 15
    quants[:, 1::2] = packed >> 4


def _two_bits(packed: torch.Tensor) -> torch.Tensor:
    """64 bytes [n, 64] to [n, 2, 4, 32]: each 32 bytes hold four runs, lowest bits first."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device).view(1, 1, 4, 1)
    return (packed.reshape(-1, 2, 1, 32) >> shifts) & 3


def _q2_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # scales 16, with minima in the upper nibbles | 64 bytes of two bits | d 2 | dmin 2
    out.view(-1, 2, 4, 32).copy_(_two_bits(blocks[:, 16:80]))
    quants = out.view(-1, 16, 16)
    scales = blocks[:, :16]
    quants.mul_((_float16(blocks, 80) * (scales & 15)).unsqueeze(-1))
    quants.sub_((_float16(blocks, 82) * (scales >> 4)).unsqueeze(-1))


def _q3_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.view(-1, 16, 16).mul_(q3_k_parts(blocks, out).unsqueeze(-1))


def q3_k_parts(blocks: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The scales of every 16, [n, 16]; the numbers, -4 to 3, go to `out`."""
    # third bits 32 | 64 bytes of two bits | scales 12 | d 2. A third bit that is not set takes 4
    # away. Scales: eight bytes with the low nibbles of two each, four with the upper bits of four.
    quants = out.view(-1, 8, 32)
    quants.copy_(_two_bits(blocks[:, 32:96]).view(-1, 8, 32))
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    quants.sub_(((~blocks[:, None, :32] >> shifts) & 1) << 2)
    packed = blocks[:, 96:108]
    low = torch.cat((packed[:, :8] & 15, packed[:, :8] >> 4), 1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(1, 4, 1)
    upper = ((packed[:, None, 8:] >> shifts) & 3).view(-1, 16)
    return _float16(blocks, 108) * ((low | (upper << 4)).float() - 32)


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # d 2 | dmin 2 | scales and minima 12 | 128 bytes of nibbles
    quants = out.view(-1, 8, 32)
    _k_nibbles(blocks[:, 16:], quants)
    _k_affine(blocks, quants)


def _q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # d 2 | dmin 2 | scales and minima 12 | fifth bits 32 | 128 bytes of nibbles
    quants = out.view(-1, 8, 32)
    _k_nibbles(blocks[:, 48:], quants)
    # Bit j of byte i belongs to element i of sub-block j.
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    quants.add_(((blocks[:, None, 16:48] >> shifts) & 1) << 4)
    _k_affine(blocks, quants)


def _q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.view(-1, 16, 16).mul_(q6_k_parts(blocks, out).unsqueeze(-1))


def q6_k_parts(blocks: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The scales of every 16, [n, 16]; the numbers, -32 to 31, go to `out`."""
    # low nibbles 128 | upper two bits 64 | 16 signed scales | d 2. Two halves of 128 elements; in
    # each, quarter j takes its upper bits from bit pair j, and 64 bytes hold low nibbles of
    # quarters 0, 1 and high nibbles of quarters 2, 3. Offset by 32.
    quants = out.view(-1, 2, 4, 32)
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    quants[:, :, :2] = low & 15
    quants[:, :, 2:] = low >> 4
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    quants.add_(((upper >> shifts) & 3) << 4).sub_(32)
    return _float16(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)


@functools.cache
def _nonlinear() -> torch.Tensor:
    return torch.tensor(NONLINEAR, dtype=torch.float32)


def _nonlinear_values(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Low halves of `packed` [n, 16] to the first columns of `out` [n, 32], high halves to the
    others, as the numbers that they stand for."""
    halves = torch.cat((packed & 15, packed >> 4), 1)
    out.copy_(_nonlinear().index_select(0, halves.flatten().int()).view(out.shape))


def _iq4_nl(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # scale 2 | 16 bytes of nibbles
    _nonlinear_values(blocks[:, 2:], out)
    out.mul_(_float16(blocks, 0))


def _iq4_xs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # d 2 | upper bits of eight scales 2 | their low nibbles 4 | 128 bytes of nibbles
    runs = out.view(-1, 32)
    _nonlinear_values(blocks[:, 8:].reshape(-1, 16), runs)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(1, 1, 4)
    upper = ((blocks[:, 2:4].unsqueeze(-1) >> shifts) & 3).view(-1, 8)
    packed = blocks[:, 4:8].unsqueeze(-1)
    low = torch.cat((packed & 15, packed >> 4), 2).view(-1, 8)
    scales = _float16(blocks, 0) * ((low | (upper << 4)).float() - 32)
    out.view(-1, 8, 32).mul_(scales.unsqueeze(-1))


@functools.cache
def _mxfp4_tables() -> tuple[torch.Tensor, torch.Tensor]:
    """The two numbers of each byte [256, 2], and the factor of each scale [256]."""
    values = [value + 0.0 for value in VALUES]  # one zero, without a sign
    pairs = [(values[byte & 15], values[byte >> 4]) for byte in range(256)]
    powers = [2.0 ** (scale - ZERO_POWER) for scale in range(256)]
    return torch.tensor(pairs, dtype=torch.float32), torch.tensor(powers, dtype=torch.float32)


def _mxfp4(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # power of two 1 | 16 bytes of nibbles: byte j has numbers j and j + 16
    pairs, powers = _mxfp4_tables()
    values = pairs.index_select(0, blocks[:, 1:].flatten().int()).view(-1, 16, 2)
    out.view(-1, 2, 16).copy_(values.transpose(1, 2))
    out.mul_(powers.index_select(0, blocks[:, 0].int()).unsqueeze(-1))


_EXPANDERS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
SUPPORTED_TYPES = tuple(_EXPANDERS)
