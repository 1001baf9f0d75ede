"""Makes the drafter that `speculative_config` asks for.

Its settings and files are read before the target is built, as the layers of its model have places
in the target's KV cache.
"""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from termgen.config import EngineConfig
from termgen.engine.device.attention.base import AttentionShape
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.config.assistant_config import assistant_head
from termgen.engine.device.config.dflash_config import dflash_head
from termgen.engine.device.config.drafter_kind import method_of
from termgen.engine.device.config.head_config import HeadConfig, draft_model, eagle3_head, mtp_head
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.drafting.assistant_drafts import AssistantDrafts
from termgen.engine.device.drafting.base import Drafter, DraftModel
from termgen.engine.device.drafting.block_drafts import BlockDrafts
from termgen.engine.device.drafting.forced import NoGuesses
from termgen.engine.device.drafting.head_drafts import HeadDrafts
from termgen.engine.device.drafting.ngram import NgramDrafter
from termgen.engine.device.drafting.on_device import DeviceDrafter
from termgen.engine.device.drafting.paying import ModelDrafter
from termgen.engine.device.drafting.prompt_lookup import PromptLookup
from termgen.engine.device.drafting.small_model import SmallModelDrafts
from termgen.engine.device.kernels import why_unusable
from termgen.engine.device.layers.linear import Build
from termgen.engine.device.loader import open_checkpoint
from termgen.engine.device.loader.checkpoint import load_model_config, parsed, read_config
from termgen.engine.device.loader.head_weights import (
    load_assistant,
    load_dflash,
    load_eagle3,
    load_mtp,
)
from termgen.engine.device.loader.weights import load_dummy
from termgen.engine.device.models.decoder import CausalDecoder
from termgen.engine.device.models.heads.assistant import AssistantHead
from termgen.engine.device.models.heads.dflash import DFlashHead
from termgen.engine.device.models.heads.eagle3 import Eagle3Head
from termgen.engine.device.models.heads.mtp import MtpHead
from termgen.engine.device.runner import resolve
from termgen.engine.device.runner.dispatch import MOST_DRAFTED_TOKENS
from termgen.engine.device.runner.make_attention import reading_attention
from termgen.errors import ConfigError, ModelError
from termgen.library.catalog import resolve_model
from termgen.vocabulary.device.speculation import (
    FIELD,
    SpeculativeConfig,
    parse_speculative_config,
)

logger = logging.getLogger(__name__)

LoadedHead = MtpHead | Eagle3Head | DFlashHead | AssistantHead
_READERS = {"eagle3": eagle3_head, "dflash": dflash_head, "assistant": assistant_head}


@dataclass(frozen=True, slots=True)
class WantedDrafts:
    """What was asked for, and can be made."""

    settings: SpeculativeConfig
    head: HeadConfig | None
    """For a method whose drafts come from a model."""
    is_default: bool = False
    """True if none were asked for, and the model's files have what drafts."""


class DefaultDraftsError(ModelError):
    """A drafter that was not asked for cannot be loaded."""


def read_drafts(
    config: EngineConfig, path: Path, model: ModelConfig, device: torch.device, *, is_shared: bool
) -> WantedDrafts | None:
    """None without drafts. is_shared: the CPU has a part of the model. Raises ConfigError or
    ModelError where those asked for cannot be made."""
    if config.speculative_config is None:
        return None if is_shared else _default_drafts(config, path, model, device)
    settings = parse_speculative_config(config.speculative_config)
    if settings.method is None:
        settings = replace(settings, method=_method_of_files(settings))
    if not settings.num_drafts:
        return None
    why_not = ""
    if device.type != "cpu" and why_unusable(device):
        why_not = f"drafts need Triton kernels: {why_unusable(device)}"
    elif settings.method != "ngram" and model.transformers is not None:
        why_not = f"{settings.method} is for models that termgen's own code runs"
    if why_not:
        raise ConfigError(f"{FIELD}: {why_not}; leave it out", param=FIELD)
    try:
        head = _read_head(settings, model)
    except ModelError as error:
        raise type(error)(f"{FIELD}: method {settings.method}: {error}") from error
    if head is not None and head.block_size > 1:
        settings = _within_block(settings, head.block_size)
    return WantedDrafts(settings, head)


def _default_drafts(
    config: EngineConfig, path: Path, model: ModelConfig, device: torch.device
) -> WantedDrafts | None:
    """Those of an MTP layer in the model's files, where whole steps are recorded or none are."""
    if model.num_mtp_layers != 1 or model.transformers is not None or config.load_format == "dummy":
        return None
    if device.type != "cpu" and (
        why_unusable(device)
        or config.enforce_eager
        or config.cudagraph_mode in ("none", "piecewise")
    ):
        return None
    try:
        with closing(open_checkpoint(path, mtp=True)) as files:
            if not files.names():
                return None
    except ModelError as error:
        logger.warning("%s: method mtp: %s; no tokens are guessed", FIELD, error)
        return None
    logger.info("tokens are guessed by the model's own MTP layer (none: --speculative-config none)")
    return WantedDrafts(SpeculativeConfig(method="mtp"), mtp_head(model), is_default=True)


def _method_of_files(settings: SpeculativeConfig) -> str:
    assert settings.model is not None
    place = resolve_model(settings.model).path
    if place.is_file():
        return "draft_model"
    try:
        source = place / "config.json"
        return parsed(source, lambda: method_of(read_config(source)))
    except ModelError as error:
        raise type(error)(f"{FIELD}: {error}") from error


def _within_block(settings: SpeculativeConfig, block_size: int) -> SpeculativeConfig:
    """With no more drafts than a block of the head has. Raises ConfigError."""
    most = block_size - 1
    if (settings.num_speculative_tokens or 0) > most:
        raise ConfigError(
            f"{FIELD}: num_speculative_tokens is {settings.num_speculative_tokens}, but a block of"
            f" this head has {most} besides its first token (block_size {block_size} in its"
            " config.json)",
            param=FIELD,
        )
    return replace(settings, num_speculative_tokens=min(settings.num_drafts, most))


def _read_head(settings: SpeculativeConfig, model: ModelConfig) -> HeadConfig | None:
    if settings.method == "mtp":
        return mtp_head(model)
    if settings.model is None:
        return None
    place = resolve_model(settings.model).path
    if settings.method == "draft_model":
        return draft_model(load_model_config(place), model, place)
    source = place / "config.json"
    assert settings.method is not None
    read_head = _READERS[settings.method]
    return parsed(source, lambda: read_head(read_config(source), model, place))


def load_head(
    config: EngineConfig,
    path: Path,
    drafts: WantedDrafts,
    target: CausalDecoder,
    build: Build,
    attention: GroupedAttention,
    shape: AttentionShape,
) -> LoadedHead:
    """The head of a loaded target. attention: of the layers of both. shape: as `make_attention`
    gives it. Raises ModelError, one of `DefaultDraftsError` where it was not asked for."""
    head = drafts.head
    assert head is not None
    own = attention.behind(target.config.num_layers)
    made: LoadedHead
    try:
        if head.method == "eagle3":

            def make(has_embedding: bool, has_head: bool) -> Eagle3Head:
                has = {"has_embedding": has_embedding, "has_head": has_head}
                return Eagle3Head(head, target, build, own, **has)

            made = load_eagle3(head, make)
        elif head.method == "dflash":
            made = DFlashHead(head, target, build, own)
            load_dflash(made)
        elif head.method == "assistant":
            made = AssistantHead(
                *(head, target, build), reading_attention(attention, shape, head.layers)
            )
            load_assistant(made)
        else:
            made = MtpHead(head, target, build, own)
            if config.load_format == "dummy":
                load_dummy(made, config.seed)
            else:
                load_mtp(path, made)
    except ModelError as error:
        kind = DefaultDraftsError if drafts.is_default else type(error)
        raise kind(f"{FIELD}: method {head.method}: {error}") from error
    made.finalize()
    return made


def make_drafter(
    wanted: WantedDrafts | None,
    head: LoadedHead | CausalDecoder | None,
    attention: GroupedAttention,
    limits: resolve.Limits,
    *,
    block_size: int,
    device: torch.device,
    is_recurrent: bool = False,
) -> Drafter | None:
    """head: loaded, for a method that has one. Without any, tokens that a grammar forces are drafts
    still where a step may have any number of a row's tokens, and no state keeps what it has taken
    up."""
    if wanted is None:
        return NoGuesses() if device.type == "cpu" and not is_recurrent else None
    settings, num_slots = wanted.settings, limits.max_num_seqs
    ends = {"shortest": settings.prompt_lookup_min, "longest": settings.prompt_lookup_max}
    model: DraftModel
    if head is None and device.type == "cpu":
        return NgramDrafter(settings.num_drafts, num_slots=num_slots, **ends)
    if head is None:
        max_model_len = limits.max_model_len
        model = PromptLookup(
            **ends,
            max_rows=max(num_slots, MOST_DRAFTED_TOKENS),
            max_model_len=max_model_len,
            device=device,
            by_kernels=True,
        )
        return DeviceDrafter(model, settings.num_drafts, num_slots=num_slots)
    sizes = {
        "max_rows": num_slots,
        "max_tokens": limits.max_num_batched_tokens,
        "block_size": block_size,
    }
    if isinstance(head, DFlashHead):
        model = BlockDrafts(
            head,
            num_noised=head.config.block_size,
            mask_token_id=head.config.mask_token_id,
            most_drafted=MOST_DRAFTED_TOKENS,
            **sizes,
            device=device,
        )
    elif isinstance(head, AssistantHead):
        most = MOST_DRAFTED_TOKENS
        model = AssistantDrafts(head, most_drafted=most, **sizes, device=device)
    elif isinstance(head, CausalDecoder):
        number = settings.num_drafts
        model = SmallModelDrafts(head, attention, num_drafts=number, **sizes, device=device)
    else:
        number = settings.num_drafts
        model = HeadDrafts(head, attention, num_drafts=number, **sizes, device=device)
    if device.type == "cpu":
        return ModelDrafter(model, settings.num_drafts, num_slots=num_slots)
    return DeviceDrafter(model, settings.num_drafts, num_slots=num_slots)
