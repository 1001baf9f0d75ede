"""The last layer computes only the tokens whose hidden states are wanted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged_model import PagedModel, Row, load

DELTA_NET_LAST = {"layer_types": ["full_attention", "linear_attention"] * 2}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("gemma3_text", {}),
        ("gemma3n_text", {}),
        ("gemma4_text", {}),
        ("gemma4_moe", {}),
        ("qwen3_moe", {}),
        ("llama4_text", {}),
        ("qwen3_5_text", {}),
        ("qwen3_5_text", DELTA_NET_LAST),
    ],
)
def test_wanted_tokens_alone_pass_the_last_layer(
    family: str, overrides: dict[str, list[str]], tiny_model_dir: Callable[..., Path]
) -> None:
    model = load(tiny_model_dir(family, **overrides))
    rows = [Row(0, 0, [5]), Row(1, 0, list(range(3, 20))), Row(2, 0, [9, 8, 7])]
    every = [logits[-1] for logits in PagedModel(model).step(rows)]
    sizes: dict[int, list[int]] = {}
    for index, layer in enumerate(model.layers):
        layer.mlp.register_forward_hook(
            lambda module, args, result, at=index: sizes.setdefault(at, []).append(len(args[0]))
        )
    last = PagedModel(model).last_logits(rows)
    torch.testing.assert_close(last, torch.stack(every), atol=1e-5, rtol=1e-5)
    *before, final = (sizes[index] for index in sorted(sizes))
    # On a CPU, layers that store nothing have no work with the others.
    storing = [model.config.kv_source(index) == index for index in range(len(before))]
    assert before and before == [[21] if stores else [3] for stores in storing]
    assert all(storing) == (family not in ("gemma3n_text", "gemma4_text"))
    assert final == [3]
