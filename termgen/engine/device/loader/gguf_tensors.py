"""What each tensor of a GGUF file is in a Hugging Face checkpoint, by architecture.

Conversion to GGUF renames tensors, stacks or parts them, and changes values; a `Recipe` undoes that
for one tensor of the checkpoint. It works on dequantised values, so putting columns back in order
is exact whatever the blocks were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from termgen.engine.device.config.linear_config import LinearAttention
from termgen.engine.device.config.model_config import ModelConfig

Change = Callable[..., torch.Tensor]


_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_INPUTS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
"""Tensors outside layers of architectures whose layers have inputs of their own."""
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_OF_STREAMS = {
    "altup_proj.weight": "altup_projections",
    "altup_unembd_proj.weight": "altup_unembed_projections",
}
"""Tensors of the file that are several in a checkpoint, one for each stream behind the first."""
_GEMMA = {
    **_ATTENTION,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WITH_INPUTS = {
    **_GEMMA,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA3N = {
    **_WITH_INPUTS,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_GEMMA4 = {
    **_WITH_INPUTS,
    "ffn_gate_inp": "router.proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_MUSE = {
    **{part: name for part, name in _GEMMA.items() if part not in ("attn_q_norm", "attn_k_norm")},
    "attn_gate": "self_attn.gate_proj",
}
_QWEN3_MOE = {
    **_ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
_DELTA_NETS = {
    **_ATTENTION,
    "post_attention_norm": "post_attention_layernorm",
    "ssm_norm": "linear_attn.norm",
}
_SHARED_EXPERT = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_BY_K_HEAD = {
    "ssm_in": "linear_attn.in_proj_qkvz",  # of older files
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_out": "linear_attn.out_proj",
}
_GPT_OSS = {
    **_ATTENTION,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
_LLAMA4 = {
    **_ATTENTION,
    **{part: name.replace("mlp.", "feed_forward.") for part, name in _MLP.items()},
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
    "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
    "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
}
_PLAIN = {
    "llama": _LLAMA,
    "llama4": _LLAMA4,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma3n": _GEMMA3N,
    "gemma4": _GEMMA4,
    "muse-glimmer": _MUSE,
    "qwen3moe": _QWEN3_MOE,
    "qwen35": {**_DELTA_NETS, **_MLP},
    "qwen35moe": {**_DELTA_NETS, **_SHARED_EXPERT},
    "qwen3next": {**_DELTA_NETS, **_SHARED_EXPERT, **_BY_K_HEAD},
    "gpt-oss": _GPT_OSS,
}
"""architecture -> part of a block's name -> name in a layer, of tensors that are taken as they are,
but for the order of rows and what was added to norms."""

_PLUS_ONE = frozenset({"gemma2", "gemma3", "muse-glimmer", "qwen35", "qwen35moe", "qwen3next"})
"""Architectures whose norms are distances from one in a checkpoint, and not in a file."""
_PLAIN_NORMS = {"muse-glimmer": ("output_norm.weight",)}
"""Those among their norms that are the same in both; `ssm_norm` always is."""
_MTP = {
    "nextn.eh_proj.weight": "fc.weight",
    "nextn.enorm.weight": "pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "norm.weight",
}
"""Parts of the block behind a model's own that are not its layer's, and names under `mtp.`."""
_NEIGHBOURS = frozenset({"llama", "muse-glimmer"})
"""Architectures in whose files the two values of a rotary pair are neighbours in q and k."""
_MADE_UP = {"muse-glimmer": frozenset({"attn_q_norm.weight", "attn_k_norm.weight"})}
"""Parts that conversion makes up. What they say is in the configuration, too."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One tensor of a Hugging Face checkpoint, from one or more of the file."""

    name: str
    """Its name in its layer, or in the model."""
    stored: tuple[str, ...]
    """Names in the file, in the layer's block: the order in which `change` takes their values."""
    change: Change | None = None
    """Makes the values from those stored; None: they are the same."""
    by_rows: bool = True
    """True if `change` may be given some rows at a time, those of the first axis."""
    of_blocks: Change | None = None
    """Makes whole rows from those stored, all as bytes, where `change` moves no more than rows; a
    checkpoint that has [in, out] has the rows of [out, in] here."""
    must_be: str = ""
    """The range of the stored values, where `change` makes others infinite or no numbers."""


def top_recipes(architecture: str, config: ModelConfig) -> dict[str, tuple[Recipe, ...]]:
    """Name in the file -> what it is part of, of tensors outside layers."""
    more = _LAYER_INPUTS if architecture in ("gemma3n", "gemma4") else {}
    recipes = _with_norms(architecture, _as_they_are(_TOP_LEVEL | more))
    parted: dict[str, tuple[Recipe, ...]] = {part: (made,) for part, made in recipes.items()}
    if (streams := config.streams) is not None:
        count = streams.num - 1
        for part, name in _OF_STREAMS.items():
            parted[part] = tuple(
                Recipe(
                    f"model.{name}.{index}.weight",
                    (part,),
                    partial(_one_of, index=index, count=count),
                    by_rows=False,
                )
                for index in range(count)
            )
    return parted


def layer_recipes(architecture: str, config: ModelConfig) -> dict[str, Recipe]:
    """The same of the tensors of a layer, whose names are those in its block."""
    recipes = _with_norms(architecture, _as_they_are(_PLAIN[architecture]))
    more: list[Recipe] = []
    if architecture in _NEIGHBOURS:
        for part, heads in (("attn_q", config.num_heads), ("attn_k", config.num_kv_heads)):
            for suffix in ("weight", "bias"):
                recipe = recipes[f"{part}.{suffix}"]
                change = partial(_halves, heads=heads, head_dim=config.head_dim)
                more.append(_moved(recipe.name, recipe.stored, change))
    if architecture == "gpt-oss":
        more += _gpt_oss()
    elif architecture == "gemma3n":
        more.append(Recipe("altup.correct_output_scale", ("altup_correct_scale.weight",)))
    elif architecture == "gemma4":
        more += _gemma4()
    elif architecture == "llama4":
        more += _stacked_experts("feed_forward.experts", suffix=".weight")
    elif config.moe is not None:
        more += _stacked_experts("mlp.experts")
        if config.moe.shared_intermediate_size is not None:
            gate = ("ffn_gate_inp_shexp.weight",)
            more.append(Recipe("mlp.shared_expert_gate.weight", gate, _one_row, by_rows=False))
    if config.linear is not None:
        by_k_head = config.linear.is_by_k_head
        more += (_by_k_head_delta_net if by_k_head else _tiled_delta_net)(config.linear)
    return recipes | {part: recipe for recipe in more for part in recipe.stored}


def mtp_recipes(architecture: str, config: ModelConfig) -> dict[str, Recipe]:
    """The same of the MTP layer, whose block lies behind the model's own, with names in the whole
    checkpoint."""
    recipes: dict[str, Recipe] = {}
    for recipe in layer_recipes(architecture, config).values():  # the same one for all its parts
        named = replace(recipe, name=f"mtp.layers.0.{recipe.name}")
        recipes |= dict.fromkeys(recipe.stored, named)
    around = {part: Recipe(f"mtp.{name}", (part,)) for part, name in _MTP.items()}
    return recipes | _with_norms(architecture, around)


def made_up_parts(architecture: str) -> frozenset[str]:
    return _MADE_UP.get(architecture, frozenset())


def _as_they_are(names: Mapping[str, str]) -> dict[str, Recipe]:
    return {
        f"{part}.{suffix}": Recipe(f"{name}.{suffix}", (f"{part}.{suffix}",))
        for part, name in names.items()
        for suffix in ("weight", "bias")
    }


def _with_norms(architecture: str, recipes: dict[str, Recipe]) -> dict[str, Recipe]:
    if architecture not in _PLUS_ONE:
        return recipes
    plain = ("ssm_norm.weight", *_PLAIN_NORMS.get(architecture, ()))
    for part, recipe in recipes.items():
        if part.endswith("norm.weight") and part not in plain:
            recipes[part] = Recipe(recipe.name, recipe.stored, _minus_one)
    return recipes


def _moved(name: str, stored: tuple[str, ...], change: Change) -> Recipe:
    """A tensor whose rows are in another order in the file."""
    return Recipe(name, stored, change, by_rows=False, of_blocks=change)


def _stacked_experts(path: str, suffix: str = "") -> list[Recipe]:
    gate_up = f"{path}.gate_up_proj{suffix}"
    parts = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
    return [
        Recipe(gate_up, parts, _one_after_the_other, of_blocks=_one_after_the_other),
        Recipe(gate_up, ("ffn_gate_up_exps.weight",)),
        Recipe(f"{path}.down_proj{suffix}", ("ffn_down_exps.weight",)),
    ]


def _gemma4() -> list[Recipe]:
    return [
        *_stacked_experts("experts"),
        Recipe("layer_scalar", ("layer_output_scale.weight",)),
        Recipe("router.scale", ("ffn_gate_inp.scale",)),
        Recipe("router.per_expert_scale", ("ffn_down_exps.scale",)),
    ]


def _gpt_oss() -> list[Recipe]:
    gate_up = "mlp.experts.gate_up_proj"
    weights = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
    biases = ("ffn_gate_exps.bias", "ffn_up_exps.bias")
    return [
        Recipe("self_attn.sinks", ("attn_sinks.weight",)),
        Recipe(gate_up, weights, _taking_turns_transposed, of_blocks=_taking_turns),
        Recipe(f"{gate_up}_bias", biases, _taking_turns),
        Recipe(
            *(gate_up, ("ffn_gate_up_exps.weight",), _halves_taking_turns_transposed),
            of_blocks=_halves_taking_turns,
        ),
        Recipe(f"{gate_up}_bias", ("ffn_gate_up_exps.bias",), _halves_taking_turns),
        Recipe(
            *("mlp.experts.down_proj", ("ffn_down_exps.weight",), _transposed),
            of_blocks=_as_stored,
        ),
        Recipe("mlp.experts.down_proj_bias", ("ffn_down_exps.bias",)),
    ]


def _tiled_delta_net(linear: LinearAttention) -> list[Recipe]:
    """A file orders value heads so that one of each key head comes after another; a checkpoint has
    those of a key head side by side."""
    of_heads = partial(_grouped_rows, linear=linear, dim=linear.v_dim)
    of_scalars = partial(_grouped_rows, linear=linear, dim=1)
    first = 2 * linear.num_k_heads * linear.k_dim  # q and k
    behind = partial(_grouped_rows, linear=linear, dim=linear.v_dim, first=first)

    def conv(values: torch.Tensor) -> torch.Tensor:
        return _of_one_input(behind(values))

    def a_log(values: torch.Tensor) -> torch.Tensor:
        return _log_of_negative(of_scalars(values))

    path = "linear_attn"
    columns = partial(_grouped_columns, linear=linear)
    return [
        _moved(f"{path}.in_proj_qkv.weight", ("attn_qkv.weight",), behind),
        _moved(f"{path}.in_proj_z.weight", ("attn_gate.weight",), of_heads),
        _moved(f"{path}.in_proj_a.weight", ("ssm_alpha.weight",), of_scalars),
        _moved(f"{path}.in_proj_b.weight", ("ssm_beta.weight",), of_scalars),
        Recipe(f"{path}.conv1d.weight", ("ssm_conv1d.weight",), conv, by_rows=False),
        Recipe(f"{path}.dt_bias", ("ssm_dt.bias",), of_scalars, by_rows=False),
        Recipe(f"{path}.A_log", ("ssm_a",), a_log, by_rows=False, must_be="below 0"),
        Recipe(f"{path}.out_proj.weight", ("ssm_out.weight",), columns),
    ]


def _by_k_head_delta_net(linear: LinearAttention) -> list[Recipe]:
    """Value heads are in the order of the checkpoint, which has the projections into a delta net
    key head by key head."""
    path = "linear_attn"
    parts, change = ("attn_qkv.weight", "attn_gate.weight"), partial(_by_k_head, linear=linear)
    return [
        _moved(f"{path}.in_proj_qkvz.weight", parts, change),
        Recipe(f"{path}.conv1d.weight", ("ssm_conv1d.weight",), _of_one_input),
        Recipe(f"{path}.dt_bias", ("ssm_dt.bias",)),
        Recipe(f"{path}.A_log", ("ssm_a",), _log_of_negative, must_be="below 0"),
    ]


# Each function below is a `Change`. It may work in place: dequantised values have no other user.


def _minus_one(values: torch.Tensor) -> torch.Tensor:
    return values.sub_(1.0)


def _one_of(values: torch.Tensor, *, index: int, count: int) -> torch.Tensor:
    if len(values) != count:
        raise IndexError(f"{len(values)} in the place of {count}")
    return values[index]


def _one_row(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(1, -1)


def _of_one_input(taps: torch.Tensor) -> torch.Tensor:
    """[channels, taps] -> the weights of a convolution of each channel alone"""
    return taps.unsqueeze(1)


def _log_of_negative(values: torch.Tensor) -> torch.Tensor:
    return values.neg().log()


def _as_stored(values: torch.Tensor) -> torch.Tensor:
    return values


def _transposed(values: torch.Tensor) -> torch.Tensor:
    return values.transpose(1, 2)


def _one_after_the_other(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.cat((gate, up), 1)


def _taking_turns(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[n, inner, ...] twice -> [n, 2 * inner, ...]"""
    return torch.stack((gate, up), 2).flatten(1, 2)


def _taking_turns_transposed(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return _taking_turns(gate, up).transpose(1, 2)


def _halves_taking_turns(values: torch.Tensor) -> torch.Tensor:
    return _taking_turns(*values.chunk(2, 1))


def _halves_taking_turns_transposed(values: torch.Tensor) -> torch.Tensor:
    return _taking_turns_transposed(*values.chunk(2, 1))


def _halves(rows: torch.Tensor, *, heads: int, head_dim: int) -> torch.Tensor:
    """[heads * head_dim, ...]: pairs (0, 1), (2, 3), ... of a head become (i, i + half)."""
    paired = rows.view(heads, head_dim // 2, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)


def _grouped_rows(
    rows: torch.Tensor, *, linear: LinearAttention, dim: int, first: int = 0
) -> torch.Tensor:
    """[first + v_heads * dim, ...]: the heads behind `first` go to their key heads."""
    per_k_head = linear.num_v_heads // linear.num_k_heads
    others, tiled = rows[:first], rows[first:]
    tiled = tiled.view(per_k_head, linear.num_k_heads, dim, *rows.shape[1:])
    return torch.cat((others, tiled.transpose(0, 1).flatten(0, 2)))


def _grouped_columns(rows: torch.Tensor, *, linear: LinearAttention) -> torch.Tensor:
    """[n, v_heads * v_dim]: the same of columns."""
    per_k_head = linear.num_v_heads // linear.num_k_heads
    tiled = rows.view(len(rows), per_k_head, linear.num_k_heads, linear.v_dim)
    return tiled.transpose(1, 2).flatten(1)


def _by_k_head(qkv: torch.Tensor, z: torch.Tensor, *, linear: LinearAttention) -> torch.Tensor:
    """qkv [channels, ...] and z [v_heads * v_dim, ...] -> their rows, key head by key head."""
    heads, k_dim = linear.num_k_heads, linear.k_dim
    v_dim = linear.num_v_heads // heads * linear.v_dim
    q, k, v = qkv.tensor_split((heads * k_dim, 2 * heads * k_dim))
    parts = ((q, k_dim), (k, k_dim), (v, v_dim), (z, v_dim))
    of_heads = [rows.reshape(heads, dim, *rows.shape[1:]) for rows, dim in parts]
    return torch.cat(of_heads, 1).flatten(0, 1)
