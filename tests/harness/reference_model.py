"""transformers' own model of a folder, the reference of ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def load_reference(folder: Path) -> Any:
    """The model in float32 on the CPU."""
    from transformers import AutoConfig

    kind = model_class(AutoConfig.from_pretrained(folder))
    # Other implementations of attention leave out soft caps, in some releases.
    eager = {"attn_implementation": "eager"}
    model = kind.from_pretrained(folder, dtype=torch.float32, **eager).eval()
    for name, module in model.named_modules():
        if name.endswith("embed_tokens_per_layer"):
            module.register_forward_pre_hook(_first_row_for_others)
    return model


def _first_row_for_others(table: Any, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """What transformers does for tokens beyond the table, but not in its first releases here."""
    (ids,) = arguments
    return (torch.where(ids < table.num_embeddings, ids, 0),)


def model_class(config: Any) -> Any:
    """The class that writes text, which AutoModelForCausalLM lacks of some that see images."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_text = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


class GreedyReference:
    """A model's greedy answers to some prompts: every token has the highest logit after the prompt
    and the tokens before it. So one pass over the first answer that is checked decides whether all
    of it is right."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self._model = model
        self._prompts = prompts
        self._best: dict[int, list[int]] = {}

    def check(self, answers: Sequence[list[int]], num_tokens: int) -> None:
        """Raises AssertionError for an answer of another length or with another token."""
        assert [len(answer) for answer in answers] == [num_tokens] * len(self._prompts)
        for i, answer in enumerate(answers):
            if i not in self._best:
                self._best[i] = self._best_tokens(self._prompts[i], answer)
            assert answer == self._best[i], f"prompt {i}"

    def _best_tokens(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """Right up to the answer's first wrong token, and there."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *answer]])).logits[0]
        best: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        return best
