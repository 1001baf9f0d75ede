"""Builds an engine from model file, tokenizer, executor, scheduler, loop and text processors.

The composition root of the engine, for `AsyncEngine` and `SyncEngine`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from termgen.client import ModelInfo
from termgen.config import EngineConfig
from termgen.engine.grammar.grammar import GrammarCompiler
from termgen.engine.loop.core import EngineCore
from termgen.engine.loop.executor import LocalExecutor
from termgen.engine.schedule.kv_cache import KVCacheManager
from termgen.engine.schedule.scheduler import Scheduler, SchedulerConfig
from termgen.engine.schedule.state_cache import StateCache
from termgen.engine.text.input_processor import InputProcessor
from termgen.engine.text.output import OutputProcessor
from termgen.engine.text.text_process import TextProcess
from termgen.engine.text.tokenizer import Tokenizer, load_tokenizer
from termgen.engine.text.tool_detection import tool_format
from termgen.errors import ConfigError, CorruptFileError, RequestError
from termgen.library.catalog import CATALOG, LocalModel, resolve_model
from termgen.library.pooling_files import read_pooling
from termgen.vocabulary.cache_groups import CacheGroup
from termgen.vocabulary.grammar_times import GrammarTimes
from termgen.vocabulary.model_info import DeviceInfo
from termgen.vocabulary.sampling_params import MAX_EOS_IDS, RECOMMENDED, SamplingParams
from termgen.vocabulary.startup_phases import (
    LOADING_TOKENIZER,
    READING_VOCABULARY,
    PhaseClock,
    StartupPhase,
    describe_startup,
)
from termgen.vocabulary.step import StepDelivery
from termgen.vocabulary.tool_format import ToolFormat

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A started engine, ready to step."""

    core: EngineCore
    info: DeviceInfo
    model: ModelInfo
    tokenizer: Tokenizer | None
    input_processor: InputProcessor
    output_processor: OutputProcessor
    grammar_times: GrammarTimes = field(default_factory=GrammarTimes)


def build_engine(
    config: EngineConfig,
    *,
    on_delivery: Callable[[StepDelivery], None],
    on_progress: Progress | None = None,
    prewarm: bool = False,
    is_live: bool = False,
) -> EngineParts:
    """Start everything in the calling thread, in this order. Raises ConfigError or ModelError.

    prewarm: build lazily created tables now, so that no first request pays for them. The model must
    be on disk: `termgen pull` fetches models. is_live: requests arrive while others generate.
    """
    progress = PhaseClock(on_progress or (lambda phase, fraction: None))
    local = source = resolve_model(config.model)
    tokenizer = None
    if not config.skip_tokenizer_init:
        progress(LOADING_TOKENIZER, 0.0)
        source = resolve_model(config.tokenizer) if config.tokenizer else local
        tokenizer = load_tokenizer(source.path)
    executor = LocalExecutor(config, local.path)
    info = executor.start(progress)  # the device half: see `build_runner`
    try:
        if tokenizer is not None:
            _check_vocabulary(tokenizer, info)
        recommended = executor.generation_config()
        defaults = sampling_defaults(local, recommended)
        eos = _eos_token_ids(info, tokenizer, recommended)
        scheduler = _make_scheduler(config, info, is_live)
        core = EngineCore(
            executor,
            scheduler,
            max_in_flight=info.max_in_flight,
            run_ahead_ms=config.run_ahead_ms,
            max_model_len=info.max_model_len,
            eos_token_ids=eos,
            seed=config.seed,
            on_delivery=on_delivery,
        )
        grammars = None
        if tokenizer is not None:
            grammars = GrammarCompiler(
                tokenizer, vocab_size=info.vocab_size, eos_token_ids=tuple(eos)
            )
        input_processor = InputProcessor(
            tokenizer,
            info.max_model_len,
            info.vocab_size,
            eos_token_ids=eos,
            has_priorities=config.scheduling_policy == "priority",
            clamps_max_tokens=_for_live(config.clamp_max_tokens, is_live),
            grammars=grammars,
            hash_block_size=scheduler.kv.hash_block_size,
            marks_turns=scheduler.kv.states is not None,
            # Drafters look at the place of the token behind a prompt.
            max_pooled_len=info.max_model_len - (info.num_drafts > 0),
        )
        output_processor = OutputProcessor(tokenizer, tuple(eos))
        if prewarm:
            progress(READING_VOCABULARY, 0.0)
            texts = TextProcess(source.path, info.max_model_len, info.vocab_size)
            input_processor.prewarm(texts)
    except BaseException:
        executor.shutdown()
        raise
    startup = progress.stop()
    model = _describe(config, local, info, tokenizer, defaults, startup)
    ahead = f"; runs up to {model.run_ahead_ms:g} ms ahead" if model.run_ahead_ms else ""
    logger.info("%s%s", describe_startup(startup), ahead)
    times = GrammarTimes() if grammars is None else grammars.times
    return EngineParts(core, info, model, tokenizer, input_processor, output_processor, times)


def _check_vocabulary(tokenizer: Tokenizer, info: DeviceInfo) -> None:
    """Raises ConfigError for another model's tokenizer.

    A text model may share the tokenizer of a vision model, and lack rows for its image tokens. The
    input processor refuses prompts with these.
    """
    beyond = range(info.vocab_size, tokenizer.vocab_size)
    special = tokenizer.special_token_ids
    if len(beyond) > len(special) or not special.issuperset(beyond):
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {info.vocab_size}",
            param="tokenizer",
        )


def _for_live(setting: bool | None, is_live: bool) -> bool:
    """The value of a setting that is on by default where requests arrive while others generate."""
    return is_live if setting is None else setting


def _make_scheduler(config: EngineConfig, info: DeviceInfo, is_live: bool) -> Scheduler:
    states = None
    if info.state_places:
        states = StateCache(
            block_size=info.block_size,
            max_num_seqs=info.max_num_seqs,
            first_place=info.max_num_seqs + 1,  # the rows come first, the padded one among them
            num_places=info.state_places,
        )
    kv = KVCacheManager(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_seqs=info.max_num_seqs,
        max_model_len=info.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        windows=info.windows,
        debug=config.debug,
        states=states,
    )
    limits = SchedulerConfig(
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        adaptive_prefill=_for_live(config.adaptive_prefill, is_live),
        policy=config.scheduling_policy,
        num_speculative_tokens=info.num_drafts,
        most_forced=info.most_forced,
        num_ahead=info.num_drafts_ahead,
    )
    return Scheduler(limits, kv)


def _eos_token_ids(
    info: DeviceInfo, tokenizer: Tokenizer | None, generation_config: dict[str, Any]
) -> frozenset[int]:
    """All end-of-sequence ids: of the generation config, the model and the tokenizer."""
    listed = generation_config.get("eos_token_id")
    ids = {listed} if isinstance(listed, int) else set(listed or ())
    ids |= set(info.eos_token_ids)
    if tokenizer is not None:
        ids |= set(tokenizer.eos_token_ids)
    usable = frozenset(i for i in ids if 0 <= i < info.vocab_size)
    if beyond := sorted(ids - usable):
        logger.warning(
            "end tokens %s are ignored: the model has %d tokens",
            ", ".join(map(str, beyond[:4])) + (", ..." if len(beyond) > 4 else ""),
            info.vocab_size,
        )
    if len(usable) > MAX_EOS_IDS:
        raise ConfigError(
            f"the model's files name {len(usable)} end tokens (eos_token_id in"
            f" generation_config.json and config.json); at most {MAX_EOS_IDS} are supported"
        )
    return usable


def _describe(
    config: EngineConfig,
    local: LocalModel,
    info: DeviceInfo,
    tokenizer: Tokenizer | None,
    default_params: dict[str, Any],
    startup: tuple[StartupPhase, ...],
) -> ModelInfo:
    return ModelInfo(
        model_id=local.name,
        root=local.root,
        architecture=info.architecture,
        dtype=info.dtype,
        quantization=info.quantization,
        device=info.device,
        device_name=info.device_name,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
        created=int(time.time()),
        default_params=default_params,
        implementation=info.implementation,
        tool_format=ToolFormat() if tokenizer is None else tool_format(tokenizer),
        memory=info.memory,
        max_num_seqs=info.max_num_seqs,
        run_ahead_ms=config.run_ahead_ms if info.max_in_flight > 1 else 0.0,
        num_threads=info.num_threads,
        num_cores=info.num_cores,
        cache_groups=tuple(map(CacheGroup.of, info.windows, info.layers)),
        num_drafts=info.num_drafts,
        pooling=read_pooling(local.path, info.hidden_size),
        startup=startup,
    )


def sampling_defaults(local: LocalModel, generation_config: dict[str, Any]) -> dict[str, Any]:
    """Sampling defaults from the model's generation_config.json, else from the catalog.

    Raises CorruptFileError for a value that is invalid as a sampling parameter.
    """
    own = {
        key: generation_config[key] for key in RECOMMENDED if generation_config.get(key) is not None
    }
    try:
        SamplingParams(**own)
    except RequestError as error:
        path = local.path
        source = path / "generation_config.json" if path.is_dir() else path
        raise CorruptFileError(f"{source}: the recommended {error}") from None
    known = CATALOG.get(local.name)
    return own or (dict(known.default_params) if known is not None else {})
