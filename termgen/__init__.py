"""termgen: chat with, serve and watch a local language model.

`LLM`, its parameters (`SamplingParams`, `StructuredOutputsParams`, `PoolingParams` with
`PoolingKind`) are the public Python surface; everything else may change. Names are looked up on
first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from termgen.llm import LLM
    from termgen.vocabulary.device.pooling import PoolingKind, PoolingParams
    from termgen.vocabulary.sampling_params import SamplingParams
    from termgen.vocabulary.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "PoolingKind",
    "PoolingParams",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

__version__ = "0.1.0"

_HOMES = {
    "LLM": "termgen.llm",
    "PoolingKind": "termgen.vocabulary.device.pooling",
    "PoolingParams": "termgen.vocabulary.device.pooling",
    "SamplingParams": "termgen.vocabulary.sampling_params",
    "StructuredOutputsParams": "termgen.vocabulary.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
