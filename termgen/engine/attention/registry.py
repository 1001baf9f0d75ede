"""Attention backends by name, resolved lazily: a backend's library is imported only when chosen."""

from __future__ import annotations

from importlib import import_module

import torch

from termgen.engine.attention.base import AttentionBackend

BACKENDS = {
    "torch_reference": "termgen.engine.attention.torch_reference:TorchReferenceAttention",
}


def make_backend(device: torch.device, name: str = "torch_reference") -> AttentionBackend:
    """A fresh backend for one model runner."""
    module, _, class_name = BACKENDS[name].partition(":")
    backend: AttentionBackend = getattr(import_module(module), class_name)()
    assert device.type in backend.capabilities.device_types
    return backend
