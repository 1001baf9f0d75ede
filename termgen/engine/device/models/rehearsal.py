"""A decoder with one layer of each kind, to compile and rehearse its kernels. Skip it on a first
reading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from torch import nn

from termgen.engine.device.layers.matrix_list import ExpertList
from termgen.engine.device.models.decoder import CausalDecoder, DecoderLayer


def weights_of(module: nn.Module) -> object:
    """What kernels know of a module's weights: equal for modules that run the same ones."""
    tensors = (
        (name, t.shape, t.dtype, t.data_ptr() % 16 == 0)
        for name, t in (*module.named_parameters(), *module.named_buffers())
    )
    forms = (part.form for part in module.modules() if isinstance(part, ExpertList))
    return (*tensors, *forms)


@contextmanager
def one_layer_of_each_kind(model: object) -> Iterator[None]:
    """Skip the other layers of a `CausalDecoder`: layers of one kind run the same kernels on the
    same shapes, so a step through one rehearses all in a fraction of the time. The last layer
    stays, as it computes only the tokens whose hidden states are wanted."""
    if not isinstance(model, CausalDecoder):
        yield  # other models keep all their layers
        return
    layers = model.layers
    kinds: dict[object, DecoderLayer] = {}
    for layer in layers:
        kind = (type(layer), type(layer.mlp), layer.window, layer.place.rope, weights_of(layer))
        kinds.setdefault(kind, layer)
    others = [layer for layer in kinds.values() if layer is not layers[-1]]
    model.layers = cast(list[DecoderLayer], nn.ModuleList([*others, layers[-1]]))
    try:
        yield
    finally:
        model.layers = layers
