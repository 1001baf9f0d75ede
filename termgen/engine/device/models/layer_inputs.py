"""What Gemma 3n and 4 have in common, over Gemma 2: plain norm weights, scores without a factor.

Heads of q, k and v are normalised, v's without a weight. The last layers may read what earlier ones
stored. A layer may have an input of its own for each token, from a second embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from termgen.engine.device.attention.base import ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.config.layer_differences import PerLayerInputs
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.linear import Build, Linear, VocabEmbedding
from termgen.engine.device.layers.norm import HeadNorm, RMSNorm
from termgen.engine.device.layers.ops import Rotation
from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.engine.device.models.gemma2 import Gemma2ForCausalLM, Gemma2Layer
from termgen.engine.device.models.mlp import GatedMLP
from termgen.engine.device.models.pieces import Carried
from termgen.engine.device.recurrent.base import GatedDeltaNet
from termgen.vocabulary.cache_groups import Window


class LayerWithInput(Gemma2Layer):
    norm_offset = 0.0
    norms_in_float32 = True
    number: int
    """The layer's number in its model."""

    def __init__(self, config: ModelConfig, build: Build, *, window: Window | None) -> None:
        super().__init__(config, build, window=window)
        self.qk_norm = HeadNorm(config, build, in_float32=True, has_values=True)
        self._activation = config.hidden_act
        if (inputs := config.per_layer_inputs) is not None:
            hidden, size = config.hidden_size, inputs.size
            self.input_gate = Linear(
                hidden, {"per_layer_input_gate": size}, bias=False, build=build
            )
            self.input_proj = Linear(
                size, {"per_layer_projection": hidden}, bias=False, build=build
            )
            self.post_input_norm = self.make_norm(config, build)

    @classmethod
    def make_projections(cls, config: ModelConfig, build: Build) -> tuple[Linear, Linear]:
        hidden = config.hidden_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"q_proj": q_size}
        if kv_size:
            qkv["k_proj"] = kv_size
            if not config.keys_are_values:
                qkv["v_proj"] = kv_size
        return (
            Linear(hidden, qkv, bias=config.qkv_bias, build=build),
            Linear(q_size, {"o_proj": hidden}, bias=config.o_bias, build=build),
        )

    @classmethod
    def make_mlp(cls, config: ModelConfig, build: Build) -> GatedMLP:
        return GatedMLP(config, build)

    def qk_norm_weight(self) -> torch.Tensor:
        return self.qk_norm.weight

    def gated_input(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] and the layer's input [T, size] -> [T, hidden], before its norm."""
        gate = self.input_gate(x)
        y: torch.Tensor = self.input_proj(
            self._ops.activated_product(gate, inputs, self._activation)
        )
        return y

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().weight_slots(prefix)
        yield from self.qk_norm.weight_slots(f"{prefix}.self_attn")
        if hasattr(self, "input_gate"):
            yield from self.input_gate.weight_slots(prefix)
            yield from self.input_proj.weight_slots(prefix)
            yield self.post_input_norm.weight_slot(f"{prefix}.post_per_layer_input_norm.weight")


class LayerInputs(nn.Module):
    """What each layer gets of a token, besides the stream: a row of a second embedding, and a
    product with the first, normalised layer by layer."""

    def __init__(self, config: ModelConfig, inputs: PerLayerInputs, build: Build) -> None:
        super().__init__()
        size = config.num_layers * inputs.size
        self._shape = (config.num_layers, inputs.size)
        self._num_rows = inputs.vocab_size
        self._has_all_rows = inputs.vocab_size >= config.vocab_size
        self.table = VocabEmbedding(
            "model.embed_tokens_per_layer", inputs.vocab_size, size, build.for_tables
        )
        self.proj = Linear(
            config.hidden_size, {"per_layer_model_projection": size}, bias=False, build=build
        )
        # The product's factor, hidden_size ** -0.5, is left out: that is as this larger epsilon.
        eps = config.rms_norm_eps * config.hidden_size
        self.norm = RMSNorm(inputs.size, eps=eps, build=build, in_float32=True)
        self._factor = torch.tensor(math.sqrt(inputs.size), dtype=build.dtype).item()

    def forward(self, ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """ids [T], their embedding [T, hidden] -> [T, num_layers, size]"""
        projected: torch.Tensor = self.norm(self.proj(embedded).view(-1, self._shape[1]))
        if not self._has_all_rows:
            ids = ids * (ids < self._num_rows)
        rows = self.table(ids).reshape(projected.shape)
        return projected.add_(rows, alpha=self._factor).mul_(0.5**0.5).view(-1, *self._shape)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.table.weight_slots("")
        yield from self.proj.weight_slots("model")
        yield self.norm.weight_slot("model.per_layer_projection_norm.weight")


def _are_last_tokens(ctx: ForwardContext) -> bool:
    """True if the tokens asked for are those at the end of each row, and not all there are. Only a
    CPU can be asked; on a GPU a second plan within a pass would have to wait for the first one's
    readers."""
    metadata, wanted = ctx.metadata[0], ctx.wanted
    if wanted is None or wanted.device.type != "cpu":
        return False
    if len(wanted) != metadata.num_rows or len(wanted) == metadata.num_tokens:
        return False
    return bool((metadata.query_start_loc[1 : len(wanted) + 1] == wanted + 1).all())


class ModelWithInputs(Gemma2ForCausalLM):
    """Layers are of a class with `LayerWithInput` as a base."""

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        attention: GroupedAttention,
        recurrent: GatedDeltaNet | None = None,
    ) -> None:
        super().__init__(config, build, attention, recurrent)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, LayerWithInput)
            layer.number = number
        inputs = config.per_layer_inputs
        self.inputs = None if inputs is None else LayerInputs(config, inputs, build)
        sources = [config.kv_source(layer) for layer in range(config.num_layers)]
        self._num_storing = 1 + max(sources)
        """Layers up to the last one whose keys and values anything reads."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        carried = self.begin(input_ids, positions)
        normed = self.first_input(carried)
        for layer in self.layers:
            assert isinstance(layer, LayerWithInput)
            if layer.number == self._num_storing and _are_last_tokens(ctx):
                normed, ctx = self._last_tokens_alone(normed, carried, ctx)
            normed = layer(normed, carried, ctx)
        return normed

    def _last_tokens_alone(
        self, normed: torch.Tensor, carried: Carried, ctx: ForwardContext
    ) -> tuple[torch.Tensor, ForwardContext]:
        """The rest of a pass that goes on with each row's last token: no later token looks at what
        the others become in layers that store nothing."""
        wanted = ctx.wanted
        assert wanted is not None
        carried.residual = carried.residual[wanted]
        carried.rotations = tuple(
            Rotation(rotation.cos[wanted], rotation.sin[wanted]) for rotation in carried.rotations
        )
        if carried.per_layer is not None:
            carried.per_layer = carried.per_layer[wanted]
        if carried.streams is not None:
            carried.streams = carried.streams[wanted]
        num_rows = len(wanted)
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=wanted.device)
        of_groups = {  # where groups have the same, they still do
            id(of_group): replace(
                of_group,
                query_start_loc=starts,
                slot_mapping=of_group.slot_mapping[wanted],
                num_tokens=num_rows,
                num_decodes=num_rows,
                max_query_len=1,
            )
            for of_group in ctx.metadata
        }
        metadata = tuple(of_groups[id(of_group)] for of_group in ctx.metadata)
        self.attention.prepare(metadata)
        return normed[wanted], ForwardContext(metadata, ctx.kv_caches)

    def begin(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Carried:
        carried = super().begin(input_ids, positions)
        if self.inputs is not None:
            carried.per_layer = self.inputs(input_ids, carried.residual)
        return carried

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from super().weight_slots()
        if self.inputs is not None:
            yield from self.inputs.weight_slots()

    def ignored_weights(self) -> tuple[str, ...]:
        sharing = (
            layer
            for layer in range(self.config.num_layers)
            if self.config.kv_source(layer) != layer
        )
        unused = (
            f"model.layers.{layer}.self_attn.{name}.weight"
            for layer in sharing
            for name in ("k_proj", "v_proj", "k_norm", "v_norm")
        )
        return (*super().ignored_weights(), *unused)
