"""Gemma 3n: several residual streams, of which a layer works on one (AltUp).

A layer predicts its streams from those of the layer before, each token with factors of its own;
attention and MLP work on the active one, and what they change there corrects the others. Beside
attention goes a product of low rank (LAuReL). The first layers close most gates of their MLP: those
below a threshold of mean and deviation. Each layer's own input reaches the streams behind the
first alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import nn

from termgen.engine.device.attention.base import ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.config.layer_differences import ResidualStreams
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.linear import Build, Linear
from termgen.engine.device.layers.norm import RMSNorm
from termgen.engine.device.layers.weight_slot import WeightSlot, empty_parameter, parameter_slot
from termgen.engine.device.models.decoder import DecoderLayer
from termgen.engine.device.models.layer_inputs import LayerWithInput, ModelWithInputs
from termgen.engine.device.models.mlp import GatedMLP
from termgen.engine.device.models.pieces import Carried
from termgen.engine.device.recurrent.base import GatedDeltaNet
from termgen.vocabulary.cache_groups import Window

_LEAST_SQUARE = 1e-5
"""A stream whose mean square is less counts as having this much, when it is scaled."""


class Gemma3nLayer(LayerWithInput):
    following: Callable[[Carried], torch.Tensor]
    """Makes the input of the next layer, or what follows the last one. Set by the model."""

    def __init__(self, config: ModelConfig, build: Build, *, window: Window | None) -> None:
        super().__init__(config, build, window=window)
        assert config.streams is not None
        hidden, rank = config.hidden_size, config.streams.laurel_rank
        self.altup = AltUp(config, config.streams, build)
        self.laurel_left = Linear(hidden, {"linear_left": rank}, bias=False, build=build)
        self.laurel_right = Linear(rank, {"linear_right": hidden}, bias=False, build=build)
        self.laurel_norm = self.make_norm(config, build)

    @classmethod
    def make_mlp(cls, config: ModelConfig, build: Build) -> GatedMLP:
        return SparseGateMLP(config, build) if config.gate_sparsity else GatedMLP(config, build)

    def predict(self, carried: Carried) -> torch.Tensor:
        """[T, hidden]: the input of this layer, normalised."""
        assert carried.streams is not None
        carried.streams = self.altup.predict(carried.streams)
        # A copy: one token's stream would be a view that the layer adds to.
        active = carried.streams[:, self.altup.active]
        carried.residual = active.clone(memory_format=torch.contiguous_format)
        normed: torch.Tensor = self.input_norm(carried.residual)
        return normed

    def before_attention(
        self,
        normed: torch.Tensor,
        carried: Carried,
        ctx: ForwardContext,
        q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        beside = self.laurel_norm(self.laurel_right(self.laurel_left(normed)))
        carried.residual.add_(normed).add_(beside)
        return super().before_attention(normed, carried, ctx, q)

    def finish(
        self, attended: torch.Tensor, carried: Carried, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        residual, streams = carried.residual, carried.streams
        assert streams is not None and carried.per_layer is not None
        inputs = carried.per_layer[:, self.number]
        if wanted is not None and self.place.is_last:
            attended, residual = attended[wanted], residual[wanted]
            inputs, streams = inputs[wanted], streams[wanted]
        output = self.o_proj(attended.flatten(1))
        norm = self.post_attention_norm
        normed = norm.norm_add(output, residual, self.pre_mlp_norm, 0.5**0.5)
        residual.add_(self.post_mlp_norm(self.mlp(normed)))
        streams = self.altup.correct(streams, residual)
        own = self.gated_input(self.altup.output(streams), inputs)
        streams[:, 1:].add_(self.post_input_norm(own).unsqueeze(1))
        carried.streams = streams
        return self.following(carried)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().weight_slots(prefix)
        yield from self.altup.weight_slots(f"{prefix}.altup")
        yield from self.laurel_left.weight_slots(f"{prefix}.laurel")
        yield from self.laurel_right.weight_slots(f"{prefix}.laurel")
        yield self.laurel_norm.weight_slot(f"{prefix}.laurel.post_laurel_norm.weight")


class AltUp(nn.Module):
    """How the streams before, in and after a layer follow from each other. All depends on a few
    numbers of a token, which the active stream gives."""

    def __init__(self, config: ModelConfig, streams: ResidualStreams, build: Build) -> None:
        super().__init__()
        hidden, num = config.hidden_size, streams.num
        self.active = streams.active
        self._num = num
        self._has_output_scale = streams.has_output_scale
        self._ops = build.ops
        self._eps = config.rms_norm_eps
        # Kept with the factor of the router's input, 1 / hidden_size.
        self.router_norm = empty_parameter(hidden, dtype=torch.float32, device=build.device)
        self.router = build.parameter(num, hidden)
        self.prediction = build.parameter(num * num, num)
        self.correction = build.parameter(num, num)
        self.output_scale = build.parameter(hidden)

    def _route(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, num]"""
        routed = F.linear(self._ops.rms_norm(x, self.router_norm, self._eps), self.router)
        return routed.float().tanh().to(x.dtype)

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, num, hidden] from the same."""
        factors = F.linear(self._route(streams[:, self.active]), self.prediction)
        return torch.baddbmm(streams, factors.view(-1, self._num, self._num), streams)

    def correct(self, streams: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Predicted streams [T, num, hidden], corrected in place by what the active one has become,
        x [T, hidden]."""
        factors = F.linear(self._route(x), self.correction).add_(1.0)
        change = x - streams[:, self.active]
        return streams.addcmul_(change.unsqueeze(1), factors.unsqueeze(2))

    def output(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, hidden]: what a layer's own input is gated by."""
        x = streams[:, self.active]
        return x * self.output_scale if self._has_output_scale else x.contiguous()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        def load_norm(tensor: torch.Tensor) -> None:
            self.router_norm.copy_(tensor).div_(len(self.router_norm))

        shape = tuple(self.router_norm.shape)
        yield WeightSlot(f"{prefix}.router_norm.weight", shape, "norm", load_norm)
        yield parameter_slot(f"{prefix}.modality_router.weight", self.router, "matrix")
        yield parameter_slot(f"{prefix}.prediction_coefs.weight", self.prediction, "matrix")
        yield parameter_slot(f"{prefix}.correction_coefs.weight", self.correction, "matrix")
        yield parameter_slot(f"{prefix}.correct_output_scale", self.output_scale, "norm")


class SparseGateMLP(GatedMLP):
    """Only gates above a threshold are open: the mean of a token's, and some deviations."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        # The model was trained with the number rounded to its type.
        deviations = NormalDist().inv_cdf(config.gate_sparsity)
        self._deviations = torch.tensor(deviations, dtype=build.dtype).item()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        deviation, mean = torch.std_mean(gate, -1, correction=0, keepdim=True)
        gate = (gate - mean.add_(deviation, alpha=self._deviations)).relu_()
        y: torch.Tensor = self.down_proj(self._ops.activated_product(gate, up, self._activation))
        return y


class StreamEnds(nn.Module):
    """Streams from an embedding, and one hidden state from streams. All have the magnitude of the
    first of them."""

    def __init__(self, config: ModelConfig, streams: ResidualStreams, build: Build) -> None:
        super().__init__()
        hidden, others = config.hidden_size, range(streams.num - 1)
        self._num_others = len(others)
        names = {f"altup_projections.{i}": hidden for i in others}
        self.apart = Linear(hidden, names, bias=False, build=build)
        self.back = nn.ModuleList(
            Linear(hidden, {f"altup_unembed_projections.{i}": hidden}, bias=False, build=build)
            for i in others
        )

    def begin(self, embedded: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, num, hidden]"""
        first = embedded.unsqueeze(1)
        others = self.apart(embedded).view(len(embedded), self._num_others, -1)
        return torch.cat((first, _scaled(others, _magnitude(first)).to(embedded.dtype)), 1)

    def end(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, num, hidden] -> their mean [T, hidden]"""
        first = streams[:, 0]
        magnitude = _magnitude(first)
        total = first.float()
        for number, back in enumerate(self.back, 1):
            total = total + _scaled(back(streams[:, number].contiguous()), magnitude)
        return (total / (self._num_others + 1)).to(streams.dtype)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.apart.weight_slots("model")
        for back in self.back:
            assert isinstance(back, Linear)
            yield from back.weight_slots("model")


def _magnitude(x: torch.Tensor, least_square: float = 0.0) -> torch.Tensor:
    """The root mean square of rows [..., hidden], [..., 1] float32."""
    return x.float().square().mean(-1, keepdim=True).clamp_min_(least_square).sqrt_()


def _scaled(x: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """x [..., hidden] with this magnitude, float32."""
    return x * (magnitude / _magnitude(x, _LEAST_SQUARE))


class Gemma3nForCausalLM(ModelWithInputs):
    layer_class: type[DecoderLayer] = Gemma3nLayer

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        attention: GroupedAttention,
        recurrent: GatedDeltaNet | None = None,
    ) -> None:
        super().__init__(config, build, attention, recurrent)
        assert config.streams is not None
        self.ends = StreamEnds(config, config.streams, build)
        layers = [layer for layer in self.layers if isinstance(layer, Gemma3nLayer)]
        self._predict_first = layers[0].predict
        following = [*(layer.predict for layer in layers[1:]), _ending(self.ends, self.norm)]
        for layer, makes_next in zip(layers, following, strict=True):
            layer.following = makes_next

    def begin(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Carried:
        carried = super().begin(input_ids, positions)
        carried.streams = self.ends.begin(carried.residual)
        return carried

    def first_input(self, carried: Carried) -> torch.Tensor:
        return self._predict_first(carried)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from super().weight_slots()
        yield from self.ends.weight_slots()


def _ending(ends: StreamEnds, norm: RMSNorm) -> Callable[[Carried], torch.Tensor]:
    # Holds the two parts alone: a method would keep the model alive as long as its last layer.
    def end(carried: Carried) -> torch.Tensor:
        assert carried.streams is not None
        normed: torch.Tensor = norm(ends.end(carried.streams))
        return normed

    return end
