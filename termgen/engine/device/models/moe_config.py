"""The experts of a config.json: which layers have them, how many there are, and their sizes.

Read by `models.config` for the families that have one. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from termgen.engine.device.models.config_reader import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What a checkpoint with one tensor for each expert's matrix calls them."""

    block: str
    """The part of a layer that holds the router and the experts."""
    gate: str
    up: str
    down: str


QWEN_NAMES = ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")
MIXTRAL_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Experts: small gated MLPs, of which a router picks a few for each token."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    """Of one expert."""
    norm_topk_prob: bool
    """Whether the weights of a token's experts are scaled to add up to one."""
    sparse_layers: frozenset[int]
    """The layers that have experts in the place of an MLP."""
    names: ExpertNames


def read_qwen3_moe(read: ConfigReader, num_layers: int) -> MoeConfig:
    # transformers 5 writes the number under the name that Mixtral has for it.
    key = "num_experts" if read.get("num_local_experts") is None else "num_local_experts"
    step = read.integer("decoder_sparse_step", default=1)
    dense = _layer_list(read, "mlp_only_layers", num_layers)
    sparse = (layer for layer in range(num_layers) if (layer + 1) % step == 0)
    return MoeConfig(
        **_sizes(read, key),
        intermediate_size=read.integer("moe_intermediate_size"),
        norm_topk_prob=read.flag("norm_topk_prob", default=False),
        sparse_layers=frozenset(sparse) - dense,
        names=QWEN_NAMES,
    )


def read_mixtral(read: ConfigReader, num_layers: int) -> MoeConfig:
    return MoeConfig(
        **_sizes(read, "num_local_experts"),
        intermediate_size=read.integer("intermediate_size"),
        norm_topk_prob=True,
        sparse_layers=frozenset(range(num_layers)),
        names=MIXTRAL_NAMES,
    )


def _sizes(read: ConfigReader, key: str) -> dict[str, int]:
    num_experts = read.integer(key, most=1024)
    chosen = read.integer("num_experts_per_tok")
    if chosen > num_experts:
        read.fail("num_experts_per_tok", f"is {chosen}, but there are {num_experts} experts")
    return {"num_experts": num_experts, "num_experts_per_tok": chosen}


def _layer_list(read: ConfigReader, key: str, num_layers: int) -> frozenset[int]:
    layers = read.get(key)
    if layers is None:
        return frozenset()
    if not isinstance(layers, list | tuple):
        read.fail(key, "must be a list of layers")
    for layer in layers:
        if type(layer) is not int or not 0 <= layer < num_layers:
            read.fail(key, f"must hold layers from 0 to {num_layers - 1}, not {layer!r}")
    return frozenset(layers)
