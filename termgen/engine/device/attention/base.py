"""The interface of attention: a step's metadata, and the backends' methods.

The runner fills an `AttentionMetadata` for each step, calls the backend's `prepare`, and passes it
to the model in a `ForwardContext`, which layers pass on. Nothing is global: two models can run in
one process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from termgen.engine.device.kernels.kv_cache import head_items, stored_width
from termgen.engine.device.recurrent.base import RecurrentStep
from termgen.vocabulary.cache_groups import Window
from termgen.vocabulary.device.kv_cache_types import LayerScales

SOFTCAP = "soft caps of scores"
SINKS = "attention sinks"
CHUNKS = "windows that are chunks"
UNEQUAL_LAYERS = "layers of unequal sizes"


@dataclass(slots=True, eq=False)
class AttentionMetadata:
    """The positions of one step's tokens in the KV cache, and the keys they attend to.

    Rows are in batch order, tokens row by row. Rows [0, num_decodes) have exactly one token;
    later rows have one or more. A padded row has seq_len 0: it sees nothing, and its tokens'
    slots are in the null block. In a recorded step padded rows may have no token, and tokens past
    the last row's are padding too: their results are not used.
    """

    query_start_loc: torch.Tensor
    """[B+1] int32: row b's tokens are [query_start_loc[b], query_start_loc[b+1])."""
    seq_lens: torch.Tensor
    """[B] int32: computed tokens plus this step's."""
    block_table: torch.Tensor
    """[B, max_blocks] int32: block ids of each row. What lies beyond its length, or before what its
    tokens see in a group with a window, is never read."""
    slot_mapping: torch.Tensor
    """[T] int64: block * block_size + offset, where each token's key and value are written."""
    num_rows: int
    num_tokens: int
    num_decodes: int | None
    """None in a recorded step of prompts and decodes: rows of one token come first, but only the
    device knows how many there are."""
    max_query_len: int
    """Upper bound over all rows, as the next one: known to the host without asking the device."""
    max_seq_len: int
    block_size: int
    positions: torch.Tensor | None = None
    """[T] int64, in a step whose rows have `max_query_len` tokens each: a row uses as many of them
    as bring it to its length, and the others repeat its first one. Only for backends that take as
    many queries."""


@dataclass(slots=True, eq=False)
class ForwardContext:
    """The inputs of one forward pass besides its tokens."""

    metadata: tuple[AttentionMetadata, ...]
    """One for each group of layers; they differ in block tables and slots alone."""
    kv_caches: list[torch.Tensor]
    """One tensor per layer with a cache of its own, as `kv_cache_view` makes them; layers of
    different groups share their memory."""
    wanted: torch.Tensor | None = None
    """[N] int64: the tokens whose hidden states are asked for; None for all."""
    recurrent: RecurrentStep | None = None
    """For models with recurrent layers."""
    kept_layers: tuple[int, ...] = ()
    """Layers whose inputs are asked for, in rising order."""
    kept: list[torch.Tensor] = field(default_factory=list)
    """The residual stream ahead of each of them [T, hidden], filled by the pass."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionForm:
    """The arithmetic of one layer's attention. Layers of equal form may share it or not."""

    scale: float
    """Factor of the scores."""
    window: Window | None = None
    """The part of a context that a token sees; None: all."""
    softcap: float | None = None
    """A scaled score s becomes softcap * tanh(s / softcap), before anything is masked."""
    sinks: torch.Tensor | None = None  # [num_heads] float32
    """One more score for each head's softmax, neither scaled nor capped, whose weight goes to no
    value."""
    cache_scales: LayerScales | None = None
    """What keys and values are multiplied by: they were divided by it when they were stored."""

    score_scale: float = field(init=False)
    """Factor of the products of queries with what the cache has for keys."""
    value_scale: float | None = field(init=False)

    def __post_init__(self) -> None:
        scales = self.cache_scales
        of_scores = self.scale if scales is None else self.scale * scales.key
        object.__setattr__(self, "score_scale", of_scores)
        object.__setattr__(self, "value_scale", None if scales is None else scales.value)


@dataclass(frozen=True, slots=True)
class AttentionCapabilities:
    """The shapes and types a backend can run; None means any."""

    device_types: frozenset[str]
    dtypes: frozenset[torch.dtype]
    graph_modes: frozenset[str]
    """The kinds of recording that its steps allow, of NONE, PIECEWISE and FULL."""
    head_dims: frozenset[int] | None = None
    block_sizes: frozenset[int] | None = None
    preferred_block_size: int = 16
    min_compute_capability: tuple[int, int] | None = None
    kv_cache_dtypes: frozenset[torch.dtype] = frozenset()
    """Types of keys and values that it reads besides the one it computes in."""
    int4_head_dims: frozenset[int] | None = None
    """Those with a cache of int4; None: any even one."""
    shares_plans: bool = False
    """True if `prepare` looks at no block table, so that once is enough for all groups."""
    features: frozenset[str] = frozenset()
    """What it has of `SOFTCAP`, `SINKS`, `CHUNKS` and `UNEQUAL_LAYERS`: of the last, that it reads
    a cache whose blocks do not lie one behind the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The sizes and types of one engine's attention; a backend is made for them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[Window | None, ...]
    """Every window among the layers, None for full attention."""
    block_size: int | None
    """None: the size that the backend prefers."""
    max_num_seqs: int
    """Rows of the largest step: where a drafter passes over blocks, each of its tokens may be
    one."""
    max_num_tokens: int
    dtype: torch.dtype
    """Type of queries and results."""
    kv_cache_dtype: torch.dtype
    device: torch.device
    max_queries: int = 1
    """Tokens of each row in the largest step with drafts; 1: there is none."""
    needs: frozenset[str] = frozenset()
    """What the layers need of a backend's features."""

    @property
    def kv_heads(self) -> tuple[int, int]:
        return self.num_kv_heads, self.head_dim


class AttentionBackend(Protocol):
    """Paged attention over one layer's cache."""

    def __init__(self, shape: AttentionShape) -> None: ...

    name: str
    capabilities: AttentionCapabilities
    max_queries: int
    """Most tokens of each row in steps with `AttentionMetadata.positions`; 1: it takes none."""
    kv_cache_order: tuple[int, ...]
    """Memory order of the cache's dimensions, slowest first, blocks ahead of all. See
    `kv_cache_view`."""

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Compute what all layers share; once per step, before the model's forward."""

    def forward(
        self,
        q: torch.Tensor,  # [T, num_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, block_size, 2, num_kv_heads, head_dim]
        metadata: AttentionMetadata,
        form: AttentionForm,
        *,
        out: torch.Tensor | None = None,  # [T, num_heads, head_dim], contiguous
    ) -> torch.Tensor:  # [T, num_heads, head_dim]
        """The step's keys and values are in the cache already: rows of one step may share blocks,
        so every write comes before any read, and q is as `queries_for` makes it. The result is in
        `out`, if that is given."""


def kv_cache_view(
    backend: AttentionBackend,
    pages: torch.Tensor,
    *,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    part: int = 0,
) -> torch.Tensor:
    """One layer's cache [num_blocks, block_size, 2 (k, v), num_kv_heads, head_dim], in the memory
    order that its backend reads best: the part of that number in each page. Block 0 is the null
    block, a target for padding. pages: [num_blocks, numbers of a page]. The scales that some types
    have lie behind the numbers of each part (`scales_of`)."""
    width = stored_width(head_dim, pages.dtype)
    shape = (len(pages), block_size, 2, num_kv_heads, width)
    order = backend.kv_cache_order
    assert order[0] == 0, order
    heads = 2 * block_size * num_kv_heads
    first = part * heads * head_items(head_dim, pages.dtype)
    own = pages[:, first : first + heads * width]
    memory = own.view([shape[dim] for dim in order])
    return memory.permute([order.index(dim) for dim in range(len(order))])
