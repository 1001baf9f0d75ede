"""Which attention backend runs where.

Called by the runner's builder, once per engine. A literal dictionary, resolved lazily, so that a
backend's kernels are imported only where they can run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from termgen.engine.attention.base import AttentionBackend

BACKENDS = {
    "torch_reference": "termgen.engine.attention.torch_reference:TorchReferenceAttention",
}
DEFAULT_BACKEND = {"cpu": "torch_reference", "cuda": "torch_reference"}


def make_backend(device: torch.device) -> AttentionBackend:
    """A backend for one engine; it keeps the plan of that engine's current step."""
    module, _, name = BACKENDS[DEFAULT_BACKEND[device.type]].partition(":")
    backend: AttentionBackend = getattr(import_module(module), name)()
    return backend
