"""The last layer computes only the tokens whose hidden states are wanted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged_model import PagedModel, Row, load


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "qwen3_moe"])
def test_wanted_tokens_alone_pass_the_last_layer(
    family: str, tiny_model_dir: Callable[..., Path]
) -> None:
    model = load(tiny_model_dir(family))
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
    assert before and all(size == [21] for size in before)
    assert final == [3]
