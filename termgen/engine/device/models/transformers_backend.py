"""A model whose arithmetic is transformers' own code, over termgen's paged cache.

What `CausalDecoder` is to the runner, for every architecture without a family file here. The base
model runs a step's tokens as one row, each with its position; its attention calls come back to
`PagedLayers`. Built by `loader.transformers_weights`; refused with a reason where
`transformers_config` finds that the architecture cannot run so. The caller holds
`torch.inference_mode`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from termgen.engine.device.attention.base import ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.ops import LayerOps
from termgen.engine.device.layers.weight_slot import WeightSlot, parameter_slot
from termgen.engine.device.models.transformers_attention import (
    IMPLEMENTATION,
    OwnTokens,
    PagedLayers,
    PlainLayers,
    install,
)
from termgen.engine.device.models.transformers_config import (
    refusals_of,
    split,
)
from termgen.errors import UnsupportedModelError
from termgen.vocabulary.device.kv_cache_types import LayerScales

_TEXT_TOKENS = 24
_MOST_DIFFERENCE = {torch.float32: 1e-3}
_MOST_DIFFERENCE_HALF = 0.1
"""Limit of the relative difference between a token's hidden states with different neighbours.
Rounding may depend on the place in a batch; a neighbour's influence is far larger."""


class TransformersDecoder(nn.Module):
    """A decoder-only language model over a paged KV cache."""

    def __init__(
        self,
        hf_model: Any,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: GroupedAttention,
        ops: LayerOps,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.device = device
        self.attention = attention
        self._parameters_by_name = dict(hf_model.named_parameters())
        self._ops = ops
        self._paged: PagedLayers | None = None
        self.base, self.head = split(hf_model)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """input_ids [T], positions [T] -> normed hidden states [N, hidden] of `ctx.wanted`.

        The attention backend must have prepared `ctx.metadata`.
        """
        assert self._paged is not None, "finalize() comes first"
        self._paged.context = ctx
        try:
            hidden = self._hidden(input_ids, positions)
            return hidden if ctx.wanted is None else hidden[ctx.wanted]
        finally:
            self._paged.context = None

    def _hidden(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # A row that has ended may continue past the last position of a table.
        positions = positions.clamp(max=self.config.max_position_embeddings - 1)
        output = self.base(
            input_ids=input_ids.long()[None], position_ids=positions[None], use_cache=False
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden] -> [N, vocab_size], in the model's type."""
        logits: torch.Tensor = self.head(hidden[None])[0]
        return logits.to(self.dtype)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every parameter, for random weights; real ones are loaded by transformers."""
        for name, parameter in self._parameters_by_name.items():
            if name.endswith("bias"):
                yield parameter_slot(name, parameter, "bias")
            else:
                yield parameter_slot(name, parameter, "norm" if parameter.dim() == 1 else "matrix")

    @torch.inference_mode()
    def finalize(self) -> None:
        """Number the layers, check that the code keeps tokens apart, and take up the paged cache.

        Called once, with the weights in place, before the first step. Raises UnsupportedModelError.
        """
        stage = OwnTokens()
        with refusals_of(self.config.architecture):
            install(self.base, stage)
            self._check_tokens_stay_apart()
            assert len(stage.layers) == self.config.num_layers, stage.layers
            install(self.base, PlainLayers())
            self._check_one_text()
        self._paged = PagedLayers(stage.layers, self.attention, self._ops)
        install(self.base, self._paged)

    def layer_names(self) -> dict[str, int]:
        """The modules that attend, and their layers; once they are numbered."""
        assert self._paged is not None, "finalize() comes first"
        layers = self._paged.layers
        modules = self.base.named_modules()
        return {name: layers[id(module)] for name, module in modules if id(module) in layers}

    def use_cache_scales(self, scales: Mapping[int, LayerScales]) -> None:
        """scales: by layer, for an fp8 cache."""
        assert self._paged is not None, "finalize() comes first"
        self._paged.cache_scales = scales

    def _check_tokens_stay_apart(self) -> None:
        """Check that a token's states depend on its id and position alone, not on its place in the
        row or its neighbours, when attention is limited to the token itself."""
        last = self.config.max_position_embeddings - 1
        ids = torch.tensor([1, 2, 3], device=self.device) % self.config.vocab_size
        positions = torch.tensor([0, 7, 2], device=self.device).clamp(max=last)
        one = self._hidden(ids, positions)
        other = self._hidden(
            torch.stack((ids[1], ids[1], ids[0])),
            torch.stack((positions[1], positions[2], positions[0])),
        )
        for expected, found in ((one[1], other[0]), (one[0], other[2])):
            difference = (found - expected).float().norm() / expected.float().norm()
            if difference > _MOST_DIFFERENCE.get(self.dtype, _MOST_DIFFERENCE_HALF):
                raise UnsupportedModelError(
                    "its code mixes tokens outside attention, or does not go by their positions"
                )

    def _check_one_text(self) -> None:
        """Check that a short text has the states that transformers computes with its own positions,
        masks and attention.

        In half precision a token's experts may change with rounding, so there the median token
        counts; wrong positions or masks change almost all of them.
        """
        length = min(_TEXT_TOKENS, self.config.max_position_embeddings)
        settings: Any = self.base.config
        reserved = {
            getattr(settings, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos", "sep")
        }
        usable = [i for i in range(min(self.config.vocab_size, 1000)) if i not in reserved]
        ids = torch.tensor(usable or [0], device=self.device)
        ids = ids[torch.arange(length, device=self.device) * 7 % len(ids)]
        found = self._hidden(ids, torch.arange(length, device=self.device)).float()
        settings._attn_implementation = "eager"
        try:
            expected = self.base(input_ids=ids[None], use_cache=False).last_hidden_state[0].float()
        finally:
            settings._attn_implementation = IMPLEMENTATION
        if not bool(expected.isfinite().all()):
            raise UnsupportedModelError("its weights make NaN or infinite values of a short text")
        differences = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-9)
        is_exact = self.dtype == torch.float32
        difference = float(differences.max() if is_exact else differences.median())
        if not difference <= _MOST_DIFFERENCE.get(self.dtype, _MOST_DIFFERENCE_HALF):
            raise UnsupportedModelError(
                "a short text has other states than in transformers itself, because its positions"
                " do not begin at 0 or its attention does more than a causal mask and a window"
            )
