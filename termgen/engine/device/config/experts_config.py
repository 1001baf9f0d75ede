"""A model's experts, read from its config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace

from termgen.engine.device.config.config_reader import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names in a checkpoint with one tensor for each expert's matrix."""

    block: str
    """The part of a layer that holds the router and the experts."""
    gate: str
    up: str
    down: str
    router: str = "gate"


QWEN_NAMES = ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")


GEMMA4_NAMES = ExpertNames(
    block="router", gate="gate_proj", up="up_proj", down="down_proj", router="proj"
)


GPT_OSS_NAMES = ExpertNames(
    block="mlp", gate="gate_proj", up="up_proj", down="down_proj", router="router"
)


MIXTRAL_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


@dataclass(frozen=True, slots=True)
class GluClamp:
    """Gate up to `limit`, and up to `limit` on both sides: (up + 1) * gate * sigmoid(alpha * gate)
    of these."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Experts: small gated MLPs, of which a router picks a few for each token."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    """Inner size of one expert."""
    norm_topk_prob: bool
    """True if the weights of a token's experts are scaled to add up to one."""
    sparse_layers: frozenset[int]
    """The layers that have experts in the place of an MLP."""
    names: ExpertNames
    has_biases: bool = False
    """True if the router and both products of an expert have biases."""
    clamp: GluClamp | None = None
    """Set if gate and up are clamped, in the place of the model's activation."""
    shared_intermediate_size: int | None = None
    """Inner size of one more expert, through which all tokens go, times a gate; None: none."""
    weighs_inputs: bool = False
    """True if weights are sigmoids of the router's logits, and multiply what goes into an expert
    and not what comes out. The expert of all tokens has no gate then."""
    is_beside_mlp: bool = False
    """True if layers with experts have an MLP, too."""
    is_transposed: bool = False
    """True if a checkpoint has the matrices of all experts in one tensor, [num_experts, in,
    out]."""

    is_shared_apart: bool = False
    """True if the expert of all tokens is not kept with the others, though of their size."""

    @property
    def has_shared_of_same_size(self) -> bool:
        """True if the expert of all tokens has the shape of the others: it is kept as the last of
        them then, and the row of its gate as the last of the router's."""
        is_alike = self.shared_intermediate_size == self.intermediate_size
        return is_alike and not self.is_shared_apart


def qwen3_moe_experts(read: ConfigReader, num_layers: int) -> MoeConfig:
    # transformers 5 writes the number under the name that Mixtral has for it.
    key = "num_experts" if read.get("num_local_experts") is None else "num_local_experts"
    num_experts, chosen = expert_numbers(read, key)
    step = read.integer("decoder_sparse_step", default=1)
    dense = _layer_list(read, "mlp_only_layers", num_layers)
    sparse = (layer for layer in range(num_layers) if (layer + 1) % step == 0)
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        intermediate_size=read.integer("moe_intermediate_size"),
        norm_topk_prob=read.flag("norm_topk_prob", default=False),
        sparse_layers=frozenset(sparse) - dense,
        names=QWEN_NAMES,
    )


def qwen3_next_experts(read: ConfigReader, num_layers: int) -> MoeConfig:
    shared = read.integer("shared_expert_intermediate_size")
    return replace(qwen3_moe_experts(read, num_layers), shared_intermediate_size=shared)


def qwen3_5_experts(read: ConfigReader, num_layers: int) -> MoeConfig:
    key = "num_experts" if read.get("num_local_experts") is None else "num_local_experts"
    num_experts, chosen = expert_numbers(read, key)
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        intermediate_size=read.integer("moe_intermediate_size"),
        norm_topk_prob=True,
        sparse_layers=frozenset(range(num_layers)),
        names=QWEN_NAMES,
        shared_intermediate_size=read.integer("shared_expert_intermediate_size"),
    )


def mixtral_experts(read: ConfigReader, num_layers: int) -> MoeConfig:
    num_experts, chosen = expert_numbers(read, "num_local_experts")
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        intermediate_size=read.integer("intermediate_size"),
        norm_topk_prob=True,
        sparse_layers=frozenset(range(num_layers)),
        names=MIXTRAL_NAMES,
    )


def gpt_oss_experts(read: ConfigReader, num_layers: int) -> MoeConfig:
    num_experts, chosen = expert_numbers(read, "num_local_experts")
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        intermediate_size=read.integer("intermediate_size"),
        norm_topk_prob=True,  # a softmax over those chosen is that over all, scaled
        sparse_layers=frozenset(range(num_layers)),
        names=GPT_OSS_NAMES,
        has_biases=True,
        clamp=GluClamp(
            read.number("swiglu_alpha", above=0.0), read.number("swiglu_limit", above=0.0)
        ),
        is_transposed=True,
    )


def expert_numbers(
    read: ConfigReader, key: str, chosen_key: str = "num_experts_per_tok"
) -> tuple[int, int]:
    """How many experts there are, and how many a token goes through."""
    num_experts = read.integer(key, most=1024)
    chosen = read.integer(chosen_key)
    if chosen > num_experts:
        read.fail(chosen_key, f"is {chosen}, but there are {num_experts} experts")
    return num_experts, chosen


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
