"""Tiny Gemma 4 assistants made on the spot, and the drafts of transformers' class for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from reference_model import load_reference
from safetensors.torch import load_file, save_file
from tiny_dflash import speak_of_few
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig
from transformers.cache_utils import DynamicCache

WEIGHTS = "model.safetensors"
KINDS = ("sliding_attention", "full_attention", "sliding_attention", "full_attention")

ALL_SHARED = patch.object(
    Gemma4TextConfig,
    "kv_sharing_modes",
    property(lambda config: ["reuse"] * config.num_hidden_layers),
)
"""Some releases of transformers refuse a model of which every layer reads what others store."""

Drafts = Callable[[Sequence[int], int], list[int]]
"""(a text, how many) -> the tokens that are guessed to follow it."""


def make_assistant(
    target: Path,
    folder: Path,
    *,
    few: Sequence[int] | None = None,
    num_centroids: int = 0,
    num_heads: int | None = None,
) -> Path:
    """A folder with a random assistant of four layers. few: two tokens that it says most of the
    time. num_centroids: of its clusters of tokens, of which it looks into three; 0: it has none."""
    of_target = json.loads((target / "config.json").read_text())
    same = ("vocab_size", "num_key_value_heads", "head_dim", "global_head_dim", "sliding_window")
    same += ("num_global_key_value_heads", "attention_k_eq_v", "bos_token_id", "eos_token_id")
    text = {key: of_target[key] for key in same if of_target.get(key) is not None}
    by_layer = of_target.get("per_layer_config")
    if by_layer:  # of the target's layers; its last one sees everything
        text["per_layer_config"] = {
            f"{layer}": by_layer[max(by_layer)]
            for layer, kind in enumerate(KINDS)
            if kind == "full_attention"
        }
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(
            **text,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=len(KINDS),
            layer_types=list(KINDS),
            num_attention_heads=num_heads or of_target["num_attention_heads"],
            num_kv_shared_layers=len(KINDS),
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=0,
        ),
        backbone_hidden_size=of_target["hidden_size"],
        use_ordered_embeddings=num_centroids > 0,
        num_centroids=num_centroids or 2048,
        centroid_intermediate_top_k=3,
    )
    with torch.random.fork_rng(), ALL_SHARED:
        torch.manual_seed(11)
        model: Any = Gemma4AssistantForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.6, 1.4)
                    if ".q_norm" in name:  # scores have no other factor
                        parameter.mul_(0.3)
                else:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
            for name, buffer in model.named_buffers():
                if name.endswith("layer_scalar"):
                    buffer.uniform_(0.5, 1.2)
                if name.endswith("token_ordering"):
                    buffer.copy_(torch.randperm(len(buffer)))
            if few is not None:
                speak_of_few(model.lm_head.weight, few)
    model.save_pretrained(folder)
    return folder


def change_text(folder: Path, **changes: object) -> None:
    """Set keys of text_config in a config.json; None removes one."""
    source = folder / "config.json"
    config = json.loads(source.read_text())
    text = {**config["text_config"], **changes}
    config["text_config"] = {key: value for key, value in text.items() if value is not None}
    source.write_text(json.dumps(config))


def change_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Set tensors of a folder; None removes one."""
    tensors = {**load_file(folder / WEIGHTS), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / WEIGHTS)


def plain_assistant(target_folder: Path, folder: Path) -> Drafts:
    """Every pass sees what a token in the place of the newest one would see before itself."""
    target = load_reference(target_folder)
    config = target.config.get_text_config()
    with ALL_SHARED:
        made = Gemma4AssistantForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assistant: Any = made.eval()
    storing = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
    sources = {kind: layer for layer, kind in enumerate(storing)}
    embed = target.get_input_embeddings()

    @torch.inference_mode()
    def draft(text: Sequence[int], count: int) -> list[int]:
        ids, cache = torch.tensor([list(text[:-1])]), DynamicCache(config=config)
        output = target.get_decoder()(ids, past_key_values=cache, output_hidden_states=True)
        shared = {}
        for kind, layer in sources.items():
            last = 1 - config.sliding_window if kind == "sliding_attention" else 0
            stored = cache.layers[layer]
            shared[kind] = stored.keys[:, :, last:], stored.values[:, :, last:]
        state, drafts = output.hidden_states[-1][:, -1:], list[int]()
        for _ in range(count):
            newest = torch.tensor([[*text[-1:], *drafts][-1:]])
            made = assistant(
                inputs_embeds=torch.cat((embed(newest), state), dim=-1),
                position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=shared,
            )
            drafts.append(int(made.logits.argmax()))
            state = made.last_hidden_state
        return drafts

    return draft
