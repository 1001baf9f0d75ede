"""Quantised weights written in the formats of other packages, and what they stand for.

compressed-tensors packs and unpacks its own formats. GPTQ's and AWQ's packages need a GPU: their
layouts are written here number by number, as slowly and plainly as they are described.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.naive_quantized import NaiveQuantizationCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

Written = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors of a matrix by what follows the module's name, and its values as float32."""
Write = Callable[[torch.Tensor], Written]
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantize_folder(
    source: Path,
    target: Path,
    config: Mapping[str, Any],
    write: Write,
    modules: Collection[str] = MODULES,
    floats: str = "",
) -> tuple[Path, Path]:
    """Copies of a model whose linear layers are quantised, and whose layers have the values that
    the quantised ones stand for. modules: ends of their names. floats: the start of the names of
    those that stay floats."""
    twin = target.with_name(target.name + "-twin")
    for folder in (target, twin):
        shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    quantized, plain = dict(weights), dict(weights)
    for name, weight in weights.items():
        stem, _, end = name.rpartition(".")
        is_kept = bool(floats) and name.startswith(floats)
        if end == "weight" and stem.rpartition(".")[2] in modules and not is_kept:
            tensors, values = write(weight.float())
            del quantized[name]
            quantized |= {f"{stem}.{role}": t.contiguous() for role, t in tensors.items()}
            plain[name] = values
    save_file(quantized, target / "model.safetensors")
    save_file(plain, twin / "model.safetensors")
    edit_config(target, quantization_config=dict(config))
    return target, twin


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# -- formats of compressed-tensors ---------------------------------------------------------


def packed(
    bits: int, *, group: int | None = None, symmetric: bool = True, in_order: bool = True
) -> Write:
    """pack-quantized. group: None gives a row one scale; in_order: the groups are runs."""

    def write(weight: torch.Tensor) -> Written:
        args = QuantizationArgs(
            num_bits=bits,
            type="int",
            symmetric=symmetric,
            strategy="channel" if group is None else "group",
            group_size=group,
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        num_columns = weight.shape[1]
        order = torch.arange(num_columns)
        if not in_order:
            order = torch.randperm(num_columns, generator=torch.Generator().manual_seed(3))
        size = group or num_columns
        parts = weight[:, order].view(len(weight), -1, size)
        least, most = parts.amin(2), parts.amax(2)
        half = 2 ** (bits - 1)
        if symmetric:
            scale, zero = torch.maximum(-least, most) / (half - 0.5), torch.zeros_like(least)
        else:
            scale = (most - least).clamp(min=1e-5) / (2**bits - 1)
            zero = (-half - least / scale).round().clamp(-half, half - 1)
        state = {
            "weight": weight[:, order],
            "weight_scale": scale,
            "weight_zero_point": zero.to(torch.int8),
        }
        made = PackedQuantizationCompressor.compress(dict(state), scheme)
        values = PackedQuantizationCompressor.decompress(dict(made), scheme)["weight"].float()
        if not in_order:  # the columns are where they were, each with its group
            back = order.argsort()
            values = values[:, back]
            numbers = unpacked(made["weight_packed"], bits, num_columns)[:, back]
            made["weight_packed"] = repacked(numbers, bits)
            made["weight_g_idx"] = (back // size).int()
        return made, values

    return write


def unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    from compressed_tensors.compressors.pack_quantized import unpack_from_int32

    return unpack_from_int32(words, bits, torch.Size((len(words), count)))


def repacked(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    from compressed_tensors.compressors.pack_quantized import pack_to_int32

    return pack_to_int32(numbers.contiguous(), bits)


def scaled(kind: str, *, strategy: str, symmetric: bool = True) -> Write:
    """float-quantized or int-quantized. strategy: tensor or channel."""

    def write(weight: torch.Tensor) -> Written:
        args = QuantizationArgs(num_bits=8, type=kind, strategy=strategy, symmetric=symmetric)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        parts = weight if strategy == "channel" else weight.view(1, -1)
        least, most = parts.amin(1, keepdim=True), parts.amax(1, keepdim=True)
        largest = 448.0 if kind == "float" else 127.0
        state = {"weight": weight, "weight_scale": torch.maximum(-least, most) / largest}
        if not symmetric:
            state["weight_scale"] = (most - least) / 255
            zero = (-128 - least / state["weight_scale"]).round()
            state["weight_zero_point"] = zero.to(torch.int8)
        if strategy == "tensor":
            state["weight_scale"] = state["weight_scale"].reshape(1)
        made = NaiveQuantizationCompressor.compress(dict(state), scheme)
        values = NaiveQuantizationCompressor.decompress(dict(made), scheme)["weight"].float()
        return {**made, "input_scale": torch.tensor(1.5)}, values

    return write


def nvfp4(weight: torch.Tensor) -> Written:
    args = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", symmetric=True, group_size=16
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    whole = (448.0 * 6.0 / weight.abs().max()).reshape(1)
    largest = weight.view(len(weight), -1, 16).abs().amax(2)
    scale = (whole * largest / 6.0).to(torch.float8_e4m3fn).float()
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
    made = NVFP4PackedCompressor.compress(dict(state), scheme)
    # Its own decompression rounds to 16 bits.
    numbers = unpack_fp4_from_uint8(made["weight_packed"], *weight.shape, dtype=torch.float32)
    values = numbers.view(len(weight), -1, 16) * (made["weight_scale"].float() / whole)[..., None]
    return made, values.flatten(1)


# -- formats written plainly ---------------------------------------------------------------


def modelopt_nvfp4(weight: torch.Tensor) -> Written:
    """The same numbers: the whole scale is multiplied, and the numbers are `weight`."""
    made, values = nvfp4(weight)
    return {
        "weight": made["weight_packed"],
        "weight_scale": made["weight_scale"],
        "weight_scale_2": made["weight_global_scale"].reciprocal().reshape(()),
        "input_scale": torch.tensor(0.5),
    }, values


def mxfp4(weight: torch.Tensor) -> Written:
    """Powers of two for every 32, as they are in the OCP's description of MX formats."""
    magnitudes = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    blocks = weight.view(len(weight), -1, 32)
    power = torch.floor(torch.log2(blocks.abs().amax(2))) - 2
    relative = blocks / 2.0 ** power[..., None]
    codes = (relative.abs()[..., None] - magnitudes).abs().argmin(-1)
    values = magnitudes[codes] * relative.sign() * 2.0 ** power[..., None]
    codes = (codes + 8 * (relative < 0)).flatten(1).to(torch.uint8)
    packed = codes[:, ::2] | (codes[:, 1::2] << 4)
    return {
        "weight_packed": packed,
        "weight_scale": (power + 127).to(torch.uint8),
    }, values.flatten(1)


def fp8_blocks(rows: int, columns: int, scale_name: str = "weight_scale_inv") -> Write:
    def write(weight: torch.Tensor) -> Written:
        grid = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        scale, values = torch.empty(grid), torch.empty_like(weight)
        numbers = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        for i in range(grid[0]):
            for j in range(grid[1]):
                part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scale[i, j] = weight[part].abs().max() / 448.0
                numbers[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
                values[part] = numbers[part].float() * scale[i, j]
        return {"weight": numbers, scale_name: scale}, values

    return write


def fp8_whole(weight: torch.Tensor) -> Written:
    scale = weight.abs().max() / 448.0
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(2.0)}
    return tensors, numbers.float() * scale


def gptq(bits: int, group: int, *, in_order: bool = True, first_format: bool = True) -> Write:
    def write(weight: torch.Tensor) -> Written:
        num_outputs, num_inputs = weight.shape
        generator = torch.Generator().manual_seed(7)
        groups = torch.arange(num_inputs) // group
        if not in_order:
            groups = groups[torch.randperm(num_inputs, generator=generator)]
        num_groups, levels, per_word = num_inputs // group, 2**bits, 32 // bits
        scales = torch.empty(num_groups, num_outputs)
        zeros = torch.empty(num_groups, num_outputs, dtype=torch.int64)
        for g in range(num_groups):
            part = weight[:, groups == g]
            least, most = part.amin(1), part.amax(1)
            scales[g] = ((most - least) / (levels - 1)).half().float()
            zeros[g] = (-least / scales[g]).round().clamp(1, levels - 1).long()
        numbers = (weight.T / scales[groups] + zeros[groups]).round().clamp(0, levels - 1).long()
        values = ((numbers - zeros[groups]).float() * scales[groups]).T
        words = torch.zeros(num_inputs // per_word, num_outputs, dtype=torch.int64)
        for i in range(num_inputs):
            words[i // per_word] |= numbers[i] << (bits * (i % per_word))
        zero_words = torch.zeros(num_groups, num_outputs // per_word, dtype=torch.int64)
        for o in range(num_outputs):
            stored = zeros[:, o] - (1 if first_format else 0)
            zero_words[:, o // per_word] |= stored << (bits * (o % per_word))
        return {
            "qweight": signed(words),
            "qzeros": signed(zero_words),
            "scales": scales.half(),
            "g_idx": groups.int(),
        }, values.contiguous()

    return write


def awq(group: int) -> Write:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def write(weight: torch.Tensor) -> Written:
        num_outputs, num_inputs = weight.shape
        parts = weight.T.reshape(-1, group, num_outputs)
        least, most = parts.amin(1), parts.amax(1)
        scales = ((most - least) / 15).half().float()
        zeros = (-least / scales).round().clamp(0, 15).long()
        groups = torch.arange(num_inputs) // group
        numbers = (weight.T / scales[groups] + zeros[groups]).round().clamp(0, 15).long()
        values = ((numbers - zeros[groups]).float() * scales[groups]).T

        def words(table: torch.Tensor) -> torch.Tensor:
            made = torch.zeros(len(table), num_outputs // 8, dtype=torch.int64)
            for word in range(num_outputs // 8):
                for place, output in enumerate(order):
                    made[:, word] |= table[:, 8 * word + output] << (4 * place)
            return signed(made)

        tensors = {"qweight": words(numbers), "qzeros": words(zeros), "scales": scales.half()}
        return tensors, values.contiguous()

    return write


def signed(words: torch.Tensor) -> torch.Tensor:
    """Words of 32 bits as int32."""
    return torch.where(words >= 2**31, words - 2**32, words).int()
