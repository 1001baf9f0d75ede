"""Tiny DFlash heads made on the spot, and the drafts that transformers' class for them gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from reference_model import load_reference
from safetensors.torch import load_file, save_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from termgen.config import EngineConfig

WEIGHTS = "model.safetensors"
QUIET, LOUD = 0.02, 20.0
"""Factors of the rows of a target's head that are seldom the largest, and of the others."""
_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "layer_types"),
)
_OUTER = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}

Drafts = Callable[[Sequence[int], int, int], list[int]]
"""(a text, how many, where KV blocks end) -> the tokens that are guessed to follow it."""


def target_of_few(made: Path, folder: Path, few: Sequence[int]) -> Path:
    """A copy of a tiny model that says a few tokens most of the time, and so do its drafts."""
    folder.mkdir()
    for file in made.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / WEIGHTS)
    name = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
    speak_of_few(tensors[name], few, LOUD)
    save_file(tensors, folder / WEIGHTS)
    return folder


def speak_of_few(head: torch.Tensor, few: Sequence[int], factor: float = 1.0) -> None:
    """Have one of two tokens be the likeliest behind any state. factor: of their rows."""
    one, other = few
    factors = torch.full((len(head), 1), QUIET)
    factors[list(few)] = factor
    head *= factors
    head[other] = -head[one]


def make_dflash(
    target: Path,
    folder: Path,
    *,
    layers: Sequence[int],
    num_noised: int = 6,
    window: int | None = None,
    of_muse: bool = False,
    **changes: object,
) -> Path:
    """A folder with a random head of three layers. layers: of the target, whose outputs it reads;
    window: of all its layers but the second. changes: to its config."""
    folder.mkdir()
    raw = json.loads((target / "config.json").read_text())
    of_target = raw.get("text_config", raw)
    hidden = of_target["hidden_size"]
    kinds = ["full_attention"] * 3
    if window is not None:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    own = {"target_layer_ids": list(layers), "mask_token_id": 7}
    config: dict[str, Any] = {
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "num_attention_heads": of_target["num_attention_heads"],
        "num_hidden_layers": 3,
        "num_key_value_heads": of_target["num_key_value_heads"],
        "head_dim": of_target.get("head_dim") or hidden // of_target["num_attention_heads"],
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        "block_size": num_noised,
        "layer_types": kinds,
        "sliding_window": window,
    }
    if of_muse:
        config |= {"architectures": ["MuseGlimmerAssistantModel"], **own}
        config |= {"model_type": "muse_glimmer_assistant"}
    else:
        config |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}
        config |= {"dflash_config": own, "vocab_size": of_target["vocab_size"]}
        config |= {"num_target_layers": of_target["num_hidden_layers"]}
    config |= changes
    (folder / "config.json").write_text(json.dumps(config))
    tensors = _tensors(config, len(layers))
    if of_muse:
        for name in list(tensors):
            for ours, theirs in _OUTER.items():
                if name.startswith(ours):
                    tensors[theirs + name.removeprefix(ours)] = tensors.pop(name)
    save_file(tensors, folder / WEIGHTS)
    return folder


def _tensors(config: dict[str, Any], num_read: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = (config[f"num_{k}_heads"] * dim for k in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {"fc.weight": drawn(hidden, num_read * hidden)}
    tensors |= {f"{name}.weight": 1.0 + drawn(hidden) for name in ("hidden_norm", "norm")}
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}"
        # Attention must have a say: tiny embeddings are small beside what it adds.
        tensors |= {f"{at}.{name}.weight": 2.0 * drawn(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = 1.0 + drawn(hidden)
        for name in ("q_norm", "k_norm"):
            tensors[f"{at}.self_attn.{name}.weight"] = 1.5 + drawn(dim)
    return tensors


def plain_dflash(target_folder: Path, folder: Path) -> Drafts:
    """The drafts of a head, by the class that transformers has for Muse Glimmer's assistant."""
    target = load_reference(target_folder)
    config = json.loads((folder / "config.json").read_text())
    own = config.get("dflash_config", config)
    window = config["sliding_window"]
    known = MuseGlimmerAssistantConfig(
        **{key: config[key] for key in _KEYS},
        target_layer_ids=own["target_layer_ids"],
    )
    known._attn_implementation = "eager"
    head: Any = MuseGlimmerAssistantModel(known).eval()
    tensors = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        outer = next((o for o in _OUTER if name.startswith(o)), None)
        tensors[name if outer is None else _OUTER[outer] + name.removeprefix(outer)] = tensor
    head.load_state_dict(tensors)
    table, num_noised = target.get_input_embeddings().weight, config["block_size"]

    @torch.inference_mode()
    def draft(text: Sequence[int], count: int, end: int) -> list[int]:
        length = len(text) - 1
        ids = torch.tensor([list(text[:-1])])
        states = target.get_decoder()(ids, output_hidden_states=True).hidden_states
        context = torch.cat([states[layer + 1] for layer in own["target_layer_ids"]], dim=2)
        size = min(num_noised, end - length)
        noise = [text[-1]] + [own["mask_token_id"]] * (size - 1)
        keys = torch.arange(length + size)
        unseen = torch.full((length + size,), float("-inf"))
        sees_all = torch.zeros(1, 1, size, length + size)
        # Counted from the end of a whole block.
        first = length - (window or length) - (num_noised - size)
        cut = sees_all + torch.where(keys < first, unseen, 0.0)
        made = head(
            noise_embeds=table[torch.tensor([noise])],
            context_hidden_states=context,
            position_ids=keys[None],
            attention_mask={"full_attention": sees_all, "sliding_attention": cut},
        ).last_hidden_state
        guessed: list[int] = target.lm_head(made[0, 1:]).argmax(dim=-1).tolist()
        return guessed[:count]

    return draft


def settings(head: Path, number: int | None) -> dict[str, Any]:
    chosen = {"method": "dflash", "model": str(head)}
    more = {} if number is None else {"num_speculative_tokens": number}
    fields: dict[str, Any] = {"speculative_config": json.dumps({**chosen, **more})}
    EngineConfig(**fields)
    return fields
