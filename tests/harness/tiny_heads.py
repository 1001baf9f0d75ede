"""Tiny targets with heads that draft for them, made on the spot, and drafts without an engine.

Layers of these targets add little to the stream, so the next token follows from the newest one; a
head that passes on its embedding is often right, and often enough wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

QUIET = 0.015
"""Factor of what a layer adds to the stream."""
LOUD = 15.0
NOISE = 0.02
WEIGHTS = "model.safetensors"

Tensors = dict[str, torch.Tensor]
Drafts = Callable[[Sequence[int], int], list[int]]
"""(a text, how many) -> the tokens that are guessed to follow it."""


def quiet_target(made: Path, folder: Path) -> Path:
    """A copy of a tiny model whose layers add little."""
    folder.mkdir()
    for file in made.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            tensor *= QUIET
    save_file(tensors, folder / WEIGHTS)
    return folder


def add_mtp(folder: Path) -> None:
    """Write a random MTP layer into a target's file, called as published ones are."""
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(folder / WEIGHTS)
    hidden = tensors["model.norm.weight"].shape[0]
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    for name, tensor in list(tensors.items()):
        if name.startswith(f"model.layers.{last}."):
            part = name.removeprefix(f"model.layers.{last}.")
            drawn = torch.randn(tensor.shape, generator=generator) * tensor.std()
            if part == "self_attn.o_proj.weight":
                drawn *= LOUD  # so that what attention sees has a say
            # The norms' weights are distances from one.
            tensors[f"mtp.layers.0.{part}"] = 0.1 * drawn.sign() if "norm" in part else drawn
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        drawn = NOISE * torch.randn(hidden, generator=generator)
        # So that what is right for the target's last norm is so for the head's.
        alike = tensors["model.norm.weight"] if name == "norm" else 0.0
        tensors[f"mtp.{name}.weight"] = alike + drawn
    both = NOISE * torch.randn(hidden, 2 * hidden, generator=generator)
    both[:, :hidden] += torch.eye(hidden)
    tensors["mtp.fc.weight"] = both
    save_file(tensors, folder / WEIGHTS)


def plain_mtp(folder: Path) -> Drafts:
    """The drafts of a target's MTP layer, by transformers' own layers, which skip it on loading."""
    target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model, config = target.model, target.config
    last = model.layers[-1]
    layer, norm = type(last)(config, config.num_hidden_layers - 1), type(model.norm)
    norms = {
        name: norm(config.hidden_size, eps=config.rms_norm_eps)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    tensors = {
        name.removeprefix("mtp."): tensor
        for name, tensor in load_file(folder / WEIGHTS).items()
        if name.startswith("mtp.")
    }
    for name, module in norms.items():
        module.load_state_dict({"weight": tensors[f"{name}.weight"]})
    of_layer = {
        name.removeprefix("layers.0."): tensor
        for name, tensor in tensors.items()
        if name.startswith("layers.0.")
    }
    layer.load_state_dict(_stacked(of_layer, set(layer.state_dict())))

    def states_of(inputs: torch.Tensor) -> torch.Tensor:
        length = inputs.shape[1]
        positions = torch.arange(length)[None]
        rotation = model.rotary_emb(inputs, positions)
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        found = layer(inputs, position_embeddings=rotation, attention_mask=mask)
        found = found[0] if isinstance(found, tuple) else found
        return norms["norm"](found)

    def inputs_of(ids: Sequence[int], states: torch.Tensor) -> torch.Tensor:
        embedded = norms["pre_fc_norm_embedding"](model.embed_tokens(torch.tensor([list(ids)])))
        both = torch.cat((embedded, norms["pre_fc_norm_hidden"](states)), dim=2)
        return both @ tensors["fc.weight"].T

    @torch.inference_mode()
    def draft(text: Sequence[int], count: int) -> list[int]:
        states = model(torch.tensor([list(text[:-1])])).last_hidden_state
        inputs = inputs_of(text[1:], states)
        drafts: list[int] = []
        for _ in range(count):
            made = states_of(inputs)[:, -1:]
            drafts.append(int(target.lm_head(made).argmax()))
            inputs = torch.cat((inputs, inputs_of(drafts[-1:], made)), dim=1)
        return drafts

    return draft


def _stacked(tensors: Tensors, wanted: set[str]) -> Tensors:
    """A layer's tensors with the matrices of its experts in one, where the module has it so."""
    if "mlp.experts.gate_up_proj" not in wanted or "mlp.experts.gate_up_proj" in tensors:
        return tensors
    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    number = sum(name.endswith("experts.up_proj.weight") or ".up_proj." in name for name in tensors)
    stacks = []
    for parts in (("gate_proj", "up_proj"), ("down_proj",)):
        experts = []
        for expert in range(number):
            names = [f"mlp.experts.{expert}.{part}.weight" for part in parts]
            if names[0] in tensors:
                experts.append(torch.cat([tensors[name] for name in names]))
        stacks.append(torch.stack(experts))
    return rest | {"mlp.experts.gate_up_proj": stacks[0], "mlp.experts.down_proj": stacks[1]}


def make_eagle3(
    target: Path,
    folder: Path,
    *,
    layers: Sequence[int],
    known: Sequence[int] | None = None,
    by_speculators: bool = False,
    has_embedding: bool = False,
    norms_residual: bool = False,
    **changes: object,
) -> Path:
    """A folder with a random EAGLE-3 head. layers: of the target, whose inputs it reads; known: the
    tokens that it can guess; None: all, by the target's head. changes: to its layer's config."""
    folder.mkdir()
    of_target = json.loads((target / "config.json").read_text())
    hidden, vocab_size = of_target["hidden_size"], of_target["vocab_size"]
    inner: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "num_attention_heads": of_target["num_attention_heads"],
        "num_hidden_layers": 1,
        "num_key_value_heads": of_target["num_key_value_heads"],
        "head_dim": of_target.get("head_dim") or hidden // of_target["num_attention_heads"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 20000.0,
        "vocab_size": vocab_size,
        **changes,
    }
    more = {"norm_before_residual": norms_residual, "draft_vocab_size": len(known or []) or None}
    if by_speculators:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
            "transformer_layer_config": {k: v for k, v in inner.items() if k != "architectures"},
            "eagle_aux_hidden_state_layer_ids": list(layers),
            **more,
        }
    else:  # these name the layers whose outputs they are
        ids = [layer - 1 for layer in layers]
        config = {**inner, **more, "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_eagle3_tensors(inner, known, has_embedding, by_speculators), folder / WEIGHTS)
    return folder


def _eagle3_tensors(
    config: dict[str, Any], known: Sequence[int] | None, has_embedding: bool, by_speculators: bool
) -> Tensors:
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = (config[f"num_{k}_heads"] * dim for k in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (q_size, 2 * hidden),
        "self_attn.k_proj": (kv_size, 2 * hidden),
        "self_attn.v_proj": (kv_size, 2 * hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layer = "layers.0" if by_speculators else "midlayer"
    tensors = {f"{layer}.{name}.weight": drawn(*shape) for name, shape in shapes.items()}
    tensors["fc.weight"] = drawn(hidden, 3 * hidden)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{layer}.{name}.weight"] = 1.0 + drawn(hidden)
    tensors["norm.weight"] = 1.0 + drawn(hidden)
    if has_embedding:
        tensors["embed_tokens.weight"] = drawn(config["vocab_size"], hidden)
    if known is not None:
        tensors["lm_head.weight"] = drawn(len(known), hidden)
        tensors["d2t"] = torch.tensor(known) - torch.arange(len(known))
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool)
        tensors["t2d"][torch.tensor(known)] = True
    return tensors


def plain_eagle3(target_folder: Path, folder: Path, *, layers: Sequence[int]) -> Drafts:
    """The drafts of a head, in plain PyTorch over whole texts."""
    target: Any = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    raw = json.loads((folder / "config.json").read_text())
    config = raw.get("transformer_layer_config", raw)
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in load_file(folder / WEIGHTS).items()
    }
    embedding = tensors.get("embed_tokens.weight", target.model.embed_tokens.weight)
    head = tensors.get("lm_head.weight", target.lm_head.weight)
    offsets = tensors.get("d2t", torch.zeros(len(head), dtype=torch.long))
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config["head_dim"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = tensors[f"{name}.weight"]
        return x * (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * weight

    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ tensors[f"layers.0.{name}.weight"].T

    def turned(x: torch.Tensor) -> torch.Tensor:
        """x [heads, T, dim], rotated by position."""
        angles = torch.arange(x.shape[1])[:, None] * config["rope_theta"] ** (
            -torch.arange(0, dim, 2) / dim
        )
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def stream_of(ids: Sequence[int], states: torch.Tensor) -> torch.Tensor:
        """[T, hidden] ahead of the last norm."""
        taken = norm(states, "layers.0.hidden_norm")
        embedded = norm(embedding[torch.tensor(list(ids))], "layers.0.input_layernorm")
        both = torch.cat((embedded, taken), dim=1)
        q, k, v = (
            product(both, f"self_attn.{name}_proj").view(len(both), number, dim).transpose(0, 1)
            for name, number in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads))
        )
        k, v = (x.repeat_interleave(num_heads // num_kv_heads, dim=0) for x in (turned(k), v))
        scores = turned(q) @ k.transpose(1, 2) * dim**-0.5
        scores += torch.full(scores.shape[1:], float("-inf")).triu(1)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        stream = (taken if raw["norm_before_residual"] else states) + product(
            mixed, "self_attn.o_proj"
        )
        normed = norm(stream, "layers.0.post_attention_layernorm")
        gate = torch.nn.functional.silu(product(normed, "mlp.gate_proj"))
        return stream + product(gate * product(normed, "mlp.up_proj"), "mlp.down_proj")

    @torch.inference_mode()
    def draft(text: Sequence[int], count: int) -> list[int]:
        output = target.model(torch.tensor([list(text[:-1])]), output_hidden_states=True)
        read = torch.cat([output.hidden_states[layer][0] for layer in layers], dim=1)
        states, ids, drafts = read @ tensors["fc.weight"].T, list(text[1:]), list[int]()
        for _ in range(count):
            stream = stream_of(ids, states)[-1:]
            guess = int((norm(stream, "norm") @ head.T).argmax())
            drafts.append(guess + int(offsets[guess]))
            ids, states = [*ids, drafts[-1]], torch.cat((states, stream))
        return drafts

    return draft


def change_config(folder: Path, **changes: object) -> None:
    """Set keys of a config.json; None removes one."""
    source = folder / "config.json"
    config = {**json.loads(source.read_text()), **changes}
    kept = {key: value for key, value in config.items() if value is not None}
    source.write_text(json.dumps(kept))
