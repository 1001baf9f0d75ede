"""FlashInfer and FlashAttention as torch code, with the packages' signatures and preconditions.

They let the whole test set of backends run where neither package can: a backend's arguments (pages,
lengths, layouts, windows) are held to the same oracle, and the packages' preconditions are
asserted. Signatures: flashinfer-python 0.6 to 0.7, flash-attn 2.8.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make `import` find the stand-in instead of the package."""
    module: Any = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    if name == "flashinfer":
        module.BatchPrefillWithPagedKVCacheWrapper = PrefillWrapper
        properties = SimpleNamespace(multi_processor_count=2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    else:
        module.flash_attn_varlen_func = flash_attn_varlen_func
        module.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, name, module)


def attend(
    q: torch.Tensor,  # [n, num_heads, head_dim]: a row's last n tokens
    keys: torch.Tensor,  # [m, num_kv_heads, head_dim]
    values: torch.Tensor,
    scale: float,
    window: tuple[int, int],  # keys seen before a query and after it; -1 for all
) -> torch.Tensor:
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), keys.float()) * scale
    position = torch.arange(q.shape[0])[:, None] + keys.shape[0] - q.shape[0]
    distance = position - torch.arange(keys.shape[0])  # [n, m]
    before, after = window
    seen = distance >= -after if after >= 0 else torch.ones_like(distance, dtype=torch.bool)
    if before >= 0:
        seen &= distance <= before
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, values.float()).to(q.dtype)


class PrefillWrapper:
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "HND"
        assert backend in ("auto", "fa2")
        self._backend = backend
        self._plan: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        host = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        assert all(x.device.type == "cpu" and x.dtype == torch.int32 for x in host)
        assert paged_kv_indices.dtype == torch.int32
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        rows = len(qo_indptr) - 1
        assert rows > 0 and len(paged_kv_indptr) == rows + 1 and len(paged_kv_last_page_len) == rows
        assert qo_indptr[0] == 0 and paged_kv_indptr[0] == 0
        assert bool((qo_indptr.diff() > 0).all()) and bool((paged_kv_indptr.diff() > 0).all())
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        assert self._backend == "auto" or bool((qo_indptr.diff() == 1).all())
        assert causal and sm_scale is not None and window_left >= -1
        assert q_data_type == kv_data_type
        self._plan = {
            "rows": (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            "heads": (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            "scale": sm_scale,
            "window": (window_left, 0),
            "dtype": q_data_type,
        }

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
    ) -> torch.Tensor:
        qo_indptr, kv_indptr, indices, last_page_len = self._plan["rows"]
        num_heads, num_kv_heads, head_dim, page_size = self._plan["heads"]
        assert isinstance(paged_kv_cache, torch.Tensor) and q.dtype == self._plan["dtype"]
        assert paged_kv_cache.shape[1:] == (2, num_kv_heads, page_size, head_dim)
        assert paged_kv_cache.is_contiguous()
        assert q.shape == (int(qo_indptr[-1]), num_heads, head_dim) and q.stride(-1) == 1
        result = torch.empty(q.shape, dtype=q.dtype) if out is None else out
        assert result.shape == q.shape and result.dtype == q.dtype
        for row in range(len(last_page_len)):
            pages = paged_kv_cache[indices[kv_indptr[row] : kv_indptr[row + 1]].long()]
            length = (len(pages) - 1) * page_size + int(last_page_len[row])
            keys, values = (pages[:, i].transpose(1, 2).flatten(0, 1)[:length] for i in (0, 1))
            part = slice(int(qo_indptr[row]), int(qo_indptr[row + 1]))
            result[part] = attend(q[part], keys, values, self._plan["scale"], self._plan["window"])
        return result


def _check_paged(k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor, rows: int) -> None:
    assert k.shape == v.shape and k.dim() == 4 and k.stride(-1) == v.stride(-1) == 1
    assert k.shape[1] % 256 == 0
    assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1
    assert block_table.shape[0] == rows


def _gather(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    used = blocks[: -(-length // cache.shape[1])].long()
    return cache[used].flatten(0, 1)[:length]


def _window(causal: bool, window_size: tuple[int, int]) -> tuple[int, int]:
    return (window_size[0], 0) if causal else window_size


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    assert block_table is not None and softmax_scale is not None
    rows = len(cu_seqlens_q) - 1
    _check_paged(k, v, block_table, rows)
    for starts in (cu_seqlens_q, cu_seqlens_k):
        assert starts.dtype == torch.int32 and starts.is_contiguous() and starts[0] == 0
        assert len(starts) == rows + 1 and bool((starts.diff() >= 0).all())
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q != 1
    assert int(cu_seqlens_k.diff().max()) <= max_seqlen_k
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    for row in range(rows):
        part = slice(int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]))
        length = int(cu_seqlens_k.diff()[row])
        if length == 0:
            out[part] = 0
        elif part.start < part.stop:
            keys, values = (_gather(x, block_table[row], length) for x in (k, v))
            window = _window(causal, window_size)
            out[part] = attend(q[part], keys, values, softmax_scale, window)
    return out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    assert block_table is not None and softmax_scale is not None
    assert isinstance(cache_seqlens, torch.Tensor) and cache_seqlens.dtype == torch.int32
    assert cache_seqlens.is_contiguous() and q.shape[0] == len(cache_seqlens)
    _check_paged(k_cache, v_cache, block_table, q.shape[0])
    out = torch.zeros_like(q)
    for row, length in enumerate(cache_seqlens.tolist()):
        if length:
            keys, values = (_gather(x, block_table[row], length) for x in (k_cache, v_cache))
            window = _window(causal, window_size)
            out[row] = attend(q[row], keys, values, softmax_scale, window)
    return out
