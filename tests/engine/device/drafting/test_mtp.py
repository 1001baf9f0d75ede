"""MTP layers in a checkpoint: the same text in fewer steps, and the drafts of transformers' layers.

A wrong drafter costs speed alone, which nothing else here would show, so each draft that an engine
writes is compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted_runs import (
    KINDS,
    NUM_TOKENS,
    engine_of,
    note_drafts,
    prompts,
    run,
    runner_of,
)
from safetensors.torch import load_file, save_file
from tiny_heads import add_mtp, change_config, plain_mtp, quiet_target

from termgen.engine.device.drafting.on_device import DeviceDrafter
from termgen.engine.device.runner.dispatch import CudaGraphDispatcher, drafted_sizes
from termgen.engine.device.runner.draft_steps import DraftSteps
from termgen.engine.loop.engine import SyncEngine
from termgen.errors import ModelError
from termgen.vocabulary.events import DraftChoice, DraftReason
from termgen.vocabulary.step import StepPlan

FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
NUM_DRAFTS, NUM_LAYERS = 3, 2
MTP = {"speculative_config": f'{{"method": "mtp", "num_speculative_tokens": {NUM_DRAFTS}}}'}
UNASKED: dict[str, Any] = {"speculative_config": None}
OPTIONS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 24},
    "async": {"async_scheduling": True},
    "no cache": {"enable_prefix_caching": False, "debug": True},
}

Engines = Callable[..., SyncEngine]


@pytest.fixture
def engines() -> Iterator[Engines]:
    made: list[SyncEngine] = []

    def make(folder: Path, **options: Any) -> SyncEngine:
        made.append(engine_of(folder, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


@pytest.fixture(scope="module")
def target(
    tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, list[list[int]]]]:
    """A family's tiny model with an MTP layer, all of whose own layers have attention; and what it
    says without drafts."""

    @functools.cache
    def make(family: str) -> tuple[Path, list[list[int]]]:
        kinds = ["full_attention"] * NUM_LAYERS
        made = tiny_model_dir(family, num_hidden_layers=NUM_LAYERS, layer_types=kinds)
        folder = quiet_target(made, tmp_path_factory.mktemp("mtp") / family)
        add_mtp(folder)
        engine = engine_of(folder)
        found = run(engine)
        engine.shutdown()
        return folder, found

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_transformers_layers(
    target: Callable[[str], tuple[Path, list[list[int]]]], engines: Engines, family: str
) -> None:
    folder, expected = target(family)
    engine = engines(folder, **MTP)
    written = note_drafts(engine)
    assert run(engine) == expected
    draft = plain_mtp(folder)
    assert len(written) > 50
    for text, drafts in written[::2]:
        assert drafts == draft(text, NUM_DRAFTS), len(text)
    stats = engine.core.scheduler.stats
    assert 0.05 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9


@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_neither_text_nor_drafts(
    target: Callable[[str], tuple[Path, list[list[int]]]], engines: Engines, name: str
) -> None:
    folder, expected = target(FAMILIES[0])
    engine = engines(folder, **MTP, **OPTIONS[name])
    written = note_drafts(engine)
    assert run(engine) == expected
    draft = plain_mtp(folder)
    for text, drafts in written[::2]:
        assert drafts == draft(text, NUM_DRAFTS), len(text)
    assert engine.core.scheduler.stats.num_accepted_tokens > 10


def test_what_goes_on_from_a_cached_prefix_is_drafted_alike(
    target: Callable[[str], tuple[Path, list[list[int]]]], engines: Engines
) -> None:
    """The next turn of a chat: the keys and values of the layer are found with the target's."""
    folder, expected = target(FAMILIES[0])
    engine = engines(folder, **MTP)
    written = note_drafts(engine)
    assert run(engine) == expected
    longer = [[*text, *said, 7, 8, 9] for text, said in zip(prompts(), expected, strict=True)]
    del written[:]
    before = engine.core.scheduler.stats.prefix_hit_tokens
    again = run(engine, longer)
    assert engine.core.scheduler.stats.prefix_hit_tokens > before + 100
    plain = engines(folder)
    assert again == run(plain, longer)
    draft = plain_mtp(folder)
    for text, drafts in written[::2]:
        assert drafts == draft(text, NUM_DRAFTS), len(text)


def test_preempted_requests_are_drafted_alike(
    target: Callable[[str], tuple[Path, list[list[int]]]], engines: Engines
) -> None:
    folder, expected = target(FAMILIES[0])
    engine = engines(folder, **MTP, async_scheduling=True)
    written = note_drafts(engine)

    def disturb(engine: SyncEngine, turn: int) -> None:
        if turn in (4, 9):
            engine.core.control.reset_prefix_cache(True)

    assert run(engine, disturb=disturb) == expected
    assert engine.core.scheduler.stats.num_preemptions >= len(KINDS)
    draft = plain_mtp(folder)
    for text, drafts in written[::2]:
        assert drafts == draft(text, NUM_DRAFTS), len(text)


def test_a_cache_that_is_too_small_changes_no_text(
    target: Callable[[str], tuple[Path, list[list[int]]]], engines: Engines
) -> None:
    """Where no block is left, drafts are made without the keys and values of those before them."""
    folder, expected = target(FAMILIES[0])
    few = {"num_gpu_blocks_override": 13, "max_model_len": 128}
    engine = engines(folder, **MTP, **few, async_scheduling=True)
    note_drafts(engine)
    assert run(engine) == expected
    stats = engine.core.scheduler.stats
    assert stats.num_preemptions > 0 and stats.num_accepted_tokens > 10


def test_a_draft_near_the_end_of_the_context_is_left_out(
    target: Callable[[str], tuple[Path, list[list[int]]]], engines: Engines
) -> None:
    folder, _ = target(FAMILIES[0])
    size = {"max_model_len": 70 + NUM_TOKENS}
    with_drafts, without = engines(folder, **MTP, **size), engines(folder, **size)
    written = note_drafts(with_drafts)
    assert run(with_drafts) == run(without)
    longest = max(len(text) + len(drafts) for text, drafts in written)
    assert longest == 70 + NUM_TOKENS


def test_the_layers_cache_lies_behind_the_targets(
    target: Callable[[str], tuple[Path, list[list[int]]]], engines: Engines
) -> None:
    folder, _ = target(FAMILIES[0])
    with_layer, without = engines(folder, **MTP), engines(folder)
    one, two = runner_of(with_layer), runner_of(without)
    assert len(one.kv_caches) == NUM_LAYERS + 1 == len(two.kv_caches) + 1
    assert one.bytes_per_block() * NUM_LAYERS == two.bytes_per_block() * (NUM_LAYERS + 1)


def test_drafts_that_do_not_pay_are_not_made(
    target: Callable[[str], tuple[Path, list[list[int]]]], engines: Engines
) -> None:
    folder, expected = target(FAMILIES[0])
    engine = engines(folder, **MTP)
    drafter = runner_of(engine).drafts.drafter
    drafter._payoff.choose = lambda slots, num_found, kinds, num_rows: num_found * 0
    guesses: list[int] = []
    head = drafter.model.head
    guess = head.guess
    head.guess = lambda states: guesses.append(len(states)) or guess(states)
    assert run(engine) == expected
    assert engine.core.scheduler.stats.num_draft_tokens == 0
    assert len(guesses) <= NUM_DRAFTS  # of the first step, before anything was chosen


class Turns(DeviceDrafter):
    """Takes drafts in some steps, whatever pays."""

    def _choose(self, plan: StepPlan, lengths: Sequence[int]) -> DraftChoice:
        self._steps_left = 1
        count = max(lengths, default=0) if plan.step_id % 7 in (2, 3, 5) else 0
        return DraftChoice(count, self.num_tokens, DraftReason.BEST)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_steps_before_others_without_drafts_make_none(
    target: Callable[[str], tuple[Path, list[list[int]]]], engines: Engines, is_recorded: bool
) -> None:
    """The host of a GPU does not see the drafts, and neither does this one."""
    folder, expected = target(FAMILIES[0])
    engine = engines(folder, **MTP, async_scheduling=True)
    runner = runner_of(engine)
    model = runner.drafts.drafter.model
    drafter = Turns(model, NUM_DRAFTS, num_slots=8)
    runner.drafts = DraftSteps(drafter, max_num_batched_tokens=64)
    assert drafter.may_idle
    drafted = drafted_sizes((1, 2, 5, 8), drafter.lengths, 32)
    recorded = {"drafted": drafted, "has_idle": True, "max_num_seqs": 8}
    dispatcher = (
        CudaGraphDispatcher((1, 2, 5, 8), **recorded)
        if is_recorded
        else CudaGraphDispatcher((), disabled_reason="asked for")
    )
    runner.graphs = runner.make_graphs(dispatcher)
    runner.graphs.record_all(lambda operations: operations, lambda done: None)
    wanted: list[int] = []
    draft = model.draft
    model.draft = lambda *given: wanted.append(given[-1]) or draft(*given)
    written: list[tuple[list[int], list[int]]] = []
    if not is_recorded:
        written = note_drafts(engine)
    assert run(engine) == expected
    plain = plain_mtp(folder)
    for text, drafts in written:
        assert drafts == plain(text, NUM_DRAFTS), len(text)
    assert is_recorded or len(written) > 10
    assert wanted.count(0) > 10 and wanted.count(NUM_DRAFTS) > 10
    assert engine.core.scheduler.stats.num_accepted_tokens > 5


@pytest.mark.parametrize("level", [1, 2])
def test_it_drafts_alike_after_sleep(
    target: Callable[[str], tuple[Path, list[list[int]]]], engines: Engines, level: int
) -> None:
    folder, expected = target(FAMILIES[0])
    engine = engines(folder, **UNASKED)
    assert run(engine) == expected
    engine.sleep(level)
    engine.wake_up()
    written = note_drafts(engine)
    assert run(engine) == expected
    draft = plain_mtp(folder)
    for text, drafts in written[::2]:
        assert drafts == draft(text, NUM_DRAFTS)[: len(drafts)], len(text)
    assert len(written) > 20


def test_a_dummy_model_has_a_dummy_layer(
    target: Callable[[str], tuple[Path, list[list[int]]]], engines: Engines
) -> None:
    folder, _ = target(FAMILIES[0])
    engine = engines(folder, **MTP, load_format="dummy", seed=3)
    written = note_drafts(engine)
    run(engine)
    assert written


def broken(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    return to


def _drop(ending: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("mtp.") and ending in name]:
            del tensors[name]

    return change


def _narrow(tensors: dict[str, torch.Tensor]) -> None:
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, 1:].contiguous()


CHANGES = {
    _drop(""): [],
    _drop("fc.weight"): ["lacks tensor mtp.fc.weight"],
    _narrow: ["mtp.fc.weight has shape [64, 127]"],
}
"""What is wrong with a layer, and what a model that runs without it warns of."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_drop(""), "has no MTP layer: there is no tensor mtp.*"),
        (_drop("fc.weight"), "the checkpoint lacks tensor mtp.fc.weight"),
        (_drop("pre_fc"), "lacks tensor mtp.pre_fc_norm_embedding.weight and 1 more"),
        (_narrow, r"tensor mtp.fc.weight has shape [64, 127], but config.json asks for [64, 128]"),
    ],
)
def test_a_layer_that_is_not_whole_is_named(
    target: Callable[[str], tuple[Path, list[list[int]]]],
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
    words: str,
) -> None:
    folder = broken(target(FAMILIES[0])[0], tmp_path / "broken", change)
    with pytest.raises(ModelError) as refused:
        engine_of(folder, **MTP)
    text = str(refused.value)
    assert words in text and text.startswith("speculative_config: method mtp: ")
    assert "\n" not in text


def test_without_being_asked_a_models_own_layer_drafts(
    target: Callable[[str], tuple[Path, list[list[int]]]], engines: Engines
) -> None:
    folder, expected = target(FAMILIES[0])
    engine = engines(folder, **UNASKED)
    drafts = note_drafts(engine)
    assert run(engine) == expected
    assert len(drafts) > 20
    for options in ({"load_format": "dummy"}, {"speculative_config": "none"}):
        assert runner_of(engines(folder, **UNASKED | options)).drafts.drafter.model is None


@pytest.mark.parametrize("change", [*CHANGES])
def test_a_layer_that_was_not_asked_for_and_cannot_be_loaded_is_left_out(
    target: Callable[[str], tuple[Path, list[list[int]]]],
    engines: Engines,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[dict[str, torch.Tensor]], None],
) -> None:
    whole, expected = target(FAMILIES[0])
    engine = engines(broken(whole, tmp_path / "broken", change), **UNASKED)
    assert runner_of(engine).drafts.drafter.model is None
    assert run(engine) == expected
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == len(CHANGES[change])
    assert all(words in line for words, line in zip(CHANGES[change], warned, strict=True))


def test_a_model_of_a_family_without_such_layers_is_refused(tiny_llama_dir: Path) -> None:
    with pytest.raises(ModelError, match="this LlamaForCausalLM has no MTP layer"):
        engine_of(tiny_llama_dir, **MTP)


def test_several_layers_are_refused(
    target: Callable[[str], tuple[Path, list[list[int]]]], tmp_path: Path
) -> None:
    folder = broken(target(FAMILIES[0])[0], tmp_path / "two", lambda tensors: None)
    change_config(folder, mtp_num_hidden_layers=2)
    with pytest.raises(ModelError, match="mtp_num_hidden_layers 2 is not supported, only 1"):
        engine_of(folder, **MTP)


def test_recurrent_layers_take_up_what_was_kept(
    tiny_model_dir: Callable[..., Path], tmp_path: Path, engines: Engines
) -> None:
    folder = quiet_target(tiny_model_dir("qwen3_5_text"), tmp_path / "hybrid")
    add_mtp(folder)
    engine = engines(folder, **MTP)
    written = note_drafts(engine)
    assert run(engine) == run(engines(folder))
    draft = plain_mtp(folder)
    for text, drafts in written[::4]:
        assert drafts == draft(text, NUM_DRAFTS), len(text)
    assert engine.core.scheduler.stats.num_draft_tokens > 50
