"""The gated activation of a decoder's MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
}


class GatedActivation:
    """act(gate) * up, from the two side by side: [T, 2 * intermediate] -> [T, intermediate]."""

    def __init__(self, name: str) -> None:
        self._activation = _ACTIVATIONS[name]

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self._activation(gate).mul_(up)
