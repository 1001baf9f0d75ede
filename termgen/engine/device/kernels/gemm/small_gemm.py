"""x @ weight.T for a few rows of x, at the speed at which the weight can be read.

A decode step multiplies some 1 to 64 rows: its time is that of the weight's bytes and of starting
and ending a kernel. Three kernels, one contract:

    gemv    1 to 4 rows    multiplies in registers: a program takes a few rows of the weight, whole
    held    up to 32 rows  a program's part of the weight, whole rows of it, is in shared memory
                           before the kernel ahead of it has ended; then come x and the matrix units
    mma     up to 64 rows  the weight's rows are the tall operand of the matrix units and the tokens
                           the narrow one, padded to 16; tiles are copied asynchronously

Where an mma grid would leave multiprocessors idle, K is cut between `splits` programs; the
last to arrive adds the parts up in a fixed order. A row's result depends on its own values and the
configuration, never on the rows beside it or on timing. The weight is read once, so it is marked to
leave the L2 cache first; what a program reads first is fetched before the kernel ahead of this one
has ended. `small_gemm_config` says which configuration, if any, beats cuBLAS.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.gemm.small_gemm_config import SmallGemmConfig
from termgen.engine.device.kernels.launch import ask_l2, dot_precision, pdl_options

_PREFETCH_ALIGNMENT = 16
VECTOR: tl.constexpr = tl.constexpr(4)
"""Words whose products are added up within a thread before anything crosses threads."""


class SmallGemmWorkspace:
    """Partial sums of products whose K is cut; one launch at a time may use it."""

    def __init__(self, device: torch.device, *, num_values: int, num_tiles: int) -> None:
        self.partial = torch.empty(max(1, num_values), dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(max(1, num_tiles), dtype=torch.int32, device=device)


@triton.jit
def prefetch_weight(
    w_ptr, first_row, first_column, n, k, row_bytes, ROWS: tl.constexpr, THREADS: tl.constexpr
):
    """Asks the L2 cache for `row_bytes` of each of ROWS rows, spread over the warps."""
    ITEM_BYTES: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    SHARE: tl.constexpr = THREADS // ROWS
    thread = tl.arange(0, THREADS)
    row = tl.minimum(first_row + thread // SHARE, n - 1).to(tl.int64)
    # What is asked for never leaves its row, wherever the run of the last program starts.
    first_byte = tl.minimum(first_column * ITEM_BYTES, k * ITEM_BYTES - row_bytes)
    address = w_ptr.to(tl.int64) + row * (k * ITEM_BYTES) + first_byte
    ask_l2(address, tl.where(thread % SHARE == 0, row_bytes, 0))


@triton.jit
def weight_tile(at, columns, k, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=(columns < k)[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def halves(words, DTYPE: tl.constexpr):
    """The two values of a half type in each 32-bit word, as float32."""
    if DTYPE == tl.bfloat16:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def add_products(
    sums,
    w,
    x_ptr,
    start,
    num_rows,
    k,
    x_stride,
    BLOCK_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """sums, of each token [N, K / VECTOR]: + its x times w [N, K], added up within threads only.

    Nothing crosses threads where all warps lie along K: 128 words of 32 bits a warp.
    """
    BLOCK_N: tl.constexpr = w.shape[0]
    BLOCK_K: tl.constexpr = w.shape[1]
    columns = start + tl.arange(0, BLOCK_K)
    new_sums = ()
    for token in tl.static_range(BLOCK_M):
        # A token past the last repeats it; its sums go nowhere.
        x_at = x_ptr + tl.minimum(token, num_rows - 1) * x_stride + columns[None, :]
        if EVEN_K:
            x = tl.load(x_at)
        else:
            x = tl.load(x_at, mask=(columns < k)[None, :], other=0)
        if w.dtype == tl.int32:
            w_low, w_high = halves(w, DTYPE)
            x_low, x_high = halves(x, DTYPE)
            products = w_low * x_low + w_high * x_high
        else:
            products = w.to(tl.float32) * x.to(tl.float32)
        products = tl.reshape(products, [BLOCK_N, BLOCK_K // VECTOR, VECTOR])
        new_sums += (sums[token] + tl.sum(products, axis=2),)  # type: ignore[assignment]
    return new_sums


@triton.jit(do_not_specialize=["num_rows", "row_bytes"])
def gemv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    n,
    k,
    x_stride,
    row_bytes,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PREFETCH_THREADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    first_row = tl.program_id(0) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    w_at = w_ptr + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * k + columns[None, :]
    HOLDS_FIRST: tl.constexpr = NUM_STAGES == 1
    if USE_PDL:
        if PREFETCH_THREADS > 0:
            head = BLOCK_K if HOLDS_FIRST else 0
            prefetch_weight(w_ptr, first_row, head, n, k, row_bytes, BLOCK_N, PREFETCH_THREADS)
    if HOLDS_FIRST:
        w = weight_tile(w_at, columns, k, EVEN_K)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    sums = ()
    for _ in tl.static_range(BLOCK_M):
        sums += (tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32),)  # type: ignore[assignment]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if HOLDS_FIRST:
        last = (tl.cdiv(k, BLOCK_K) - 1) * BLOCK_K
        for start in range(0, last, BLOCK_K):
            columns += BLOCK_K
            next_w = weight_tile(w_at + (start + BLOCK_K), columns, k, EVEN_K)
            sums = add_products(sums, w, x_ptr, start, num_rows, k, x_stride, BLOCK_M, True, dtype)
            w = next_w
        sums = add_products(sums, w, x_ptr, last, num_rows, k, x_stride, BLOCK_M, EVEN_K, dtype)
    else:
        for start in tl.range(0, k, BLOCK_K, num_stages=NUM_STAGES):
            w = weight_tile(w_at + start, columns + start, k, EVEN_K)
            sums = add_products(
                sums, w, x_ptr, start, num_rows, k, x_stride, BLOCK_M, EVEN_K, dtype
            )
    for token in tl.static_range(BLOCK_M):
        y = tl.sum(sums[token], axis=1)
        if HAS_BIAS:
            y += bias
        mask = (rows < n) & (token < num_rows)
        tl.store(out_ptr + token * n + rows, y.to(out_ptr.dtype.element_ty), mask=mask)


# In a chain of short kernels the memory idles while one ends and the next begins. Here K is spread
# over the warps, and they read their part of the weight while the kernel ahead still runs; after
# the wait they read x, multiply, and add up the warps' sums in a fixed order.
@triton.jit(do_not_specialize=["num_rows"])
def held_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    n,
    k,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    # A batch of products is spread over the warps: one warp, one run of K.
    columns = tl.arange(0, WARPS)[:, None] * (STEPS * BLOCK_K) + tl.arange(0, BLOCK_K)[None, :]
    w_at = w_ptr + tl.minimum(rows, n - 1).to(tl.int64)[None, :, None] * k + columns[:, None, :]
    held = ()
    for step in tl.static_range(STEPS):
        start = step * BLOCK_K
        if EVEN_K:
            tile = tl.load(w_at + start, eviction_policy="evict_first")
        else:
            inside = (columns + start < k)[:, None, :]
            tile = tl.load(w_at + start, mask=inside, other=0, eviction_policy="evict_first")
        held += (tile,)  # type: ignore[assignment]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    x_at = x_ptr + tokens[None, None, :] * x_stride + columns[:, :, None]
    xs = ()
    for step in tl.static_range(STEPS):
        start = step * BLOCK_K
        inside = (tokens < num_rows)[None, None, :]
        if not EVEN_K:
            inside = inside & (columns + start < k)[:, :, None]
        xs += (tl.load(x_at + start, mask=inside, other=0),)  # type: ignore[assignment]
    acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.static_range(STEPS):
        acc = tl.dot(held[step], xs[step], acc, input_precision=PRECISION)
    y = tl.sum(acc, axis=0)
    if HAS_BIAS:
        y += bias[:, None]
    out_at = out_ptr + tokens[None, :] * n + rows[:, None]
    mask = (tokens < num_rows)[None, :] & (rows < n)[:, None]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "row_bytes"])
def _mma_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrivals_ptr,
    num_rows,
    n,
    k,
    x_stride,
    row_bytes,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    PREFETCH_THREADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    steps = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS)
    first_column = split * steps * BLOCK_K
    end_column = tl.minimum(first_column + steps * BLOCK_K, k)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    is_token = tokens < num_rows
    w_at = w_ptr + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * k
    x_at = x_ptr + tokens[:, None] * x_stride
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
    if USE_PDL:
        if PREFETCH_THREADS > 0:
            prefetch_weight(
                w_ptr, tile * BLOCK_N, first_column, n, k, row_bytes, BLOCK_N, PREFETCH_THREADS
            )
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(first_column, end_column, BLOCK_K, num_stages=NUM_STAGES):
        columns = start + tl.arange(0, BLOCK_K)
        w = weight_tile(w_at + columns[None, :], columns, k, EVEN_K)
        x_mask = is_token[:, None]
        if not EVEN_K:
            x_mask = x_mask & (columns < k)[None, :]
        x = tl.load(x_at + columns[None, :], mask=x_mask, other=0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)

    is_last = True
    if SPLITS > 1:
        # Parts lie tile by tile, split by split, each [BLOCK_N, BLOCK_M].
        PART: tl.constexpr = BLOCK_N * BLOCK_M
        within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tokens[None, :]
        parts_at = partial_ptr + tile * (SPLITS * PART) + within
        tl.store(parts_at + split * PART, acc)
        tl.debug_barrier()  # every thread's stores come before the one thread's arrival
        arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel")
        is_last = arrived == SPLITS - 1
        if is_last:
            tl.store(arrivals_ptr + tile, 0)  # ready for the next launch
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for part in tl.static_range(SPLITS):
                # L1 may hold what an earlier launch left in the workspace: read past it.
                acc += tl.load(parts_at + part * PART, cache_modifier=".cg")
    if is_last:
        if HAS_BIAS:
            acc += bias[:, None]
        out_at = out_ptr + tokens[None, :] * n + rows[:, None]
        mask = is_token[None, :] & (rows < n)[:, None]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)


def small_gemm(
    x: torch.Tensor,  # [M, K], its rows dense
    weight: torch.Tensor,  # [N, K], contiguous
    bias: torch.Tensor | None = None,  # [N]
    *,
    config: SmallGemmConfig,
    workspace: SmallGemmWorkspace | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = True,
) -> torch.Tensor:  # [M, N]
    """x @ weight.T + bias in x's type. `workspace` is needed where `config` cuts K."""
    num_rows, k = x.shape
    n = weight.shape[0]
    assert weight.shape == (n, k) and weight.is_contiguous(), (weight.shape, weight.stride())
    assert x.stride(1) == 1 and x.dtype == weight.dtype, (x.stride(), x.dtype, weight.dtype)
    assert num_rows <= config.block_m, (num_rows, config)
    if out is None:
        out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    assert out.shape == (num_rows, n) and out.is_contiguous(), (out.shape, out.stride())
    if not num_rows:
        return out
    if config.kind == "held":
        _launch_held(x, weight, bias, out, config, pdl)
    elif config.kind == "gemv":
        _launch_gemv(x, weight, bias, out, config, pdl)
    else:
        _launch_mma(x, weight, bias, out, config, workspace, pdl)
    return out


def _launch_held(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: SmallGemmConfig,
    pdl: bool,
) -> None:
    n, k = weight.shape
    held_kernel[(config.tiles(n),)](
        x,
        weight,
        bias,
        out,
        *_sizes(x, weight),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        WARPS=config.num_warps,
        STEPS=config.held_steps(k),
        EVEN_K=k % (config.num_warps * config.block_k) == 0,
        HAS_BIAS=bias is not None,
        PRECISION=dot_precision(x.dtype),
        num_warps=config.num_warps,
        **pdl_options(x.device, enabled=pdl),
    )


def _launch_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: SmallGemmConfig,
    pdl: bool,
) -> None:
    block_k, common = config.block_k, _common(x, weight, bias, config, pdl)
    if are_words(x, weight):
        # Held as pairs, a tile takes half the registers.
        x, weight = x.view(torch.int32), weight.view(torch.int32)
        block_k //= 2
    gemv_kernel[(config.tiles(weight.shape[0]),)](
        x, weight, bias, out, *_sizes(x, weight), BLOCK_K=block_k, **common
    )


def _launch_mma(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: SmallGemmConfig,
    workspace: SmallGemmWorkspace | None,
    pdl: bool,
) -> None:
    n = weight.shape[0]
    tiles = config.tiles(n)
    partial, arrivals = split_buffers(config, n, workspace)
    _mma_kernel[(tiles, config.splits)](
        x,
        weight,
        bias,
        out,
        partial,
        arrivals,
        *_sizes(x, weight),
        BLOCK_K=config.block_k,
        SPLITS=config.splits,
        PRECISION=dot_precision(x.dtype),
        **_common(x, weight, bias, config, pdl),
    )


def _sizes(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int, int, int]:
    """num_rows, n, k and the stride of x, whose lone row's stride must not choose a variant."""
    num_rows, k = x.shape
    return num_rows, weight.shape[0], k, x.stride(0) if num_rows > 1 else k


def _common(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: SmallGemmConfig,
    pdl: bool,
) -> dict[str, Any]:
    k = weight.shape[1]
    row_bytes, threads = prefetch_plan(config, k, weight)
    return {
        "row_bytes": row_bytes,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "NUM_STAGES": config.num_stages,
        "EVEN_K": k % config.block_k == 0,
        "HAS_BIAS": bias is not None,
        "PREFETCH_THREADS": threads,
        "num_warps": config.num_warps,
        **pdl_options(x.device, enabled=pdl),
    }


def are_words(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True if the values are halves of 32-bit words, all rows starting at the first of a word."""
    if x.element_size() != 2 or x.shape[1] % 2 or (x.shape[0] > 1 and x.stride(0) % 2):
        return False
    return x.storage_offset() % 2 == 0 and weight.storage_offset() % 2 == 0


def split_buffers(
    config: SmallGemmConfig, n: int, workspace: SmallGemmWorkspace | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The parts' sums and their arrivals, if programs share the K of a tile."""
    if config.splits == 1:
        return None, None
    assert workspace is not None, "K is cut, so there must be a workspace"
    partial, arrivals = workspace.partial, workspace.arrivals
    assert partial.numel() >= config.partial_values(n) and arrivals.numel() >= config.tiles(n)
    return partial, arrivals


def prefetch_plan(
    config: SmallGemmConfig, k: int, weight: torch.Tensor, unit: int = 1
) -> tuple[int, int]:
    """(bytes of each row of a tile to prefetch, threads that do so); (0, 0) for none. unit: items
    of the weight that `block_k` counts."""
    item, block_k = weight.element_size(), config.block_k * unit
    if k * item % _PREFETCH_ALIGNMENT or weight.data_ptr() % _PREFETCH_ALIGNMENT:
        return 0, 0
    if config.kind == "gemv":
        # A first tile that is held is loaded, not prefetched.
        run = k - block_k if config.num_stages == 1 else k
    else:
        run = min(k, -(-k // (block_k * config.splits)) * block_k)
    row_bytes = min(run * item, config.prefetch_bytes // config.block_n)
    row_bytes -= row_bytes % _PREFETCH_ALIGNMENT
    if row_bytes <= 0:
        return 0, 0
    return row_bytes, max(config.block_n, 32 * config.num_warps)


def small_gemm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return F.linear(x, weight, bias)
