"""A request says the same whatever happens around it: {sync, async} x {preempted} x {chunked} x
{with drafts}, in any of the engine's exact or rounded KV caches.

Every request asks for something else: penalties, log-probabilities, seeds, stop strings, a schema,
mixes, and vectors of prompts. What the schema forces is computed together with other tokens in
every cell. What it says alone, one step at a time, is what it must say among the others in every
cell. All cells share one loaded model: each has a core of its own over the same executor.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_executor import make_core
from tiny_assistant import make_assistant
from tiny_dflash import make_dflash, target_of_few
from tiny_heads import add_mtp, quiet_target

from termgen.client import TokenDelta
from termgen.config import EngineConfig
from termgen.engine.loop.startup import EngineParts, build_engine
from termgen.engine.schedule.invariants import check_scheduler
from termgen.engine.schedule.state_cache import StateCache
from termgen.engine.text.output import OutputProcessor
from termgen.vocabulary.device.pooling import PoolingKind, PoolingParams
from termgen.vocabulary.request import FinishReason, GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import StepDelivery
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

BLOCK_SIZE = 16
CHUNK = 20
NUM_DRAFTS = 4
SCHEMA = StructuredOutputsParams(
    json=json.dumps(
        {
            "type": "object",
            "properties": {"full_name": {"enum": ["Anna", "Bert"]}, "age": {"type": "integer"}},
            "required": ["full_name", "age"],
            "additionalProperties": False,
        }
    )
)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seed": {"temperature": 0.9, "seed": 7},
    "filters": {"temperature": 1.1, "seed": 8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.8, "repetition_penalty": 1.2},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "stop": {"temperature": 0.0, "stop": ()},
    "minimum": {"temperature": 0.8, "seed": 9, "min_tokens": 9},
    "mix": {
        "temperature": 0.7,
        "seed": 10,
        "frequency_penalty": 0.6,
        "logprobs": 2,
        "top_k": 50,
        "stop": (),
    },
    "schema": {"temperature": 0.9, "seed": 11, "structured_outputs": SCHEMA},
    "schema mix": {
        "temperature": 0.7,
        "seed": 12,
        "presence_penalty": 0.6,
        "repetition_penalty": 1.1,
        "logprobs": 2,
        "min_tokens": 5,
        "structured_outputs": SCHEMA,
    },
    "vector last": {"temperature": 0.0},
    "vector mean": {"temperature": 0.0},
}
POOLINGS = {
    "vector last": PoolingParams(PoolingKind.LAST),
    "vector mean": PoolingParams(PoolingKind.MEAN),
}
PROMPTS = (
    "Once upon a time there was a fox who",
    "The capital of France is",
    "Copper is used for wires because",
    "def fibonacci(n):\n    ",
    "It rained all night, and in the morning the river had",
    "A short list of fruits: apples,",
    "My favourite season is",
    "The captain looked at the map, then at the sea, and said " * 3,
    "Who is it?",
    "A record of the oldest of them:",
    "The captain looked at the map, then at the sea, and slept. " * 3,
    "What the sea is to the captain, the map is to the sea. " * 3,
)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    ranked: list[tuple[int, ...]] = field(default_factory=list)
    """The most likely tokens of each position."""
    reason: FinishReason | None = None
    vector: np.ndarray | None = None

    def take(self, delta: TokenDelta) -> None:
        assert delta.error is None, delta.error
        self.tokens += delta.token_ids
        self.text += delta.text
        for entry in delta.logprobs or ():
            self.logprobs.append(entry.logprob)
            self.ranked.append(tuple(top[0] for top in entry.top))
        self.reason = delta.finish_reason or self.reason
        self.vector = delta.vector if delta.vector is not None else self.vector


class Bench:
    """One loaded model and the requests of the matrix."""

    def __init__(
        self,
        model: Path,
        *,
        most_tokens: int,
        method: str = "ngram",
        head: Path | None = None,
        **options: Any,
    ) -> None:
        """head: a drafter's own files."""
        self.is_cpu = options["device"] == "cpu"
        if self.is_cpu:  # where drafts are made
            drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
            if head is not None:
                drafts["model"] = str(head)
            options["speculative_config"] = json.dumps(drafts)
        config = EngineConfig(
            model=str(model),
            max_num_seqs=len(KINDS),
            max_model_len=256,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=160,
            dtype="float32",
            async_scheduling=True,
            **options,
        )
        self.parts: EngineParts = build_engine(config, on_delivery=lambda news: None)
        assert self.parts.tokenizer is not None
        self.most_tokens = most_tokens
        self.prompts = [tuple(self.parts.tokenizer.encode(text)) for text in PROMPTS]
        self.params = {
            name: SamplingParams(max_tokens=most_tokens, **kind) for name, kind in KINDS.items()
        }
        self.expected: dict[str, Answer] = {}
        for name in KINDS:
            if "stop" in KINDS[name]:
                # Something that it will say, found in the middle of what it says without.
                text = self.alone(name).text
                middle = len(text) // 2
                self.params[name] = replace(self.params[name], stop=(text[middle : middle + 2],))
            self.expected[name] = self.alone(name)

    def make_states(self) -> StateCache | None:
        """For a model with recurrent layers."""
        places, rows = self.parts.info.state_places, len(KINDS)
        if not places:
            return None
        return StateCache(
            block_size=BLOCK_SIZE, max_num_seqs=rows, first_place=rows + 1, num_places=places
        )

    def alone(self, name: str) -> Answer:
        return self.run([name], depth=1, is_forced=False)[name]

    def run(
        self,
        names: list[str],
        *,
        depth: int,
        num_blocks: int = 160,
        max_num_batched_tokens: int = 256,
        resets: tuple[int, ...] = (),
        num_drafts: int = 0,
        num_ahead: int = 0,
        is_forced: bool = True,
        arrivals: Mapping[str, int] | None = None,
        aborts: Mapping[str, int] | None = None,
    ) -> dict[str, Answer]:
        """resets: turns before which everybody is preempted. num_drafts: places for them, which the
        device fills with what it found. num_ahead: positions of further ones. is_forced: tokens
        that a grammar forces are drafts. arrivals, aborts: turns of requests that come later, or
        whose reader leaves."""
        deliveries: list[StepDelivery] = []
        self.core = core = make_core(
            self.parts.core.executor,
            deliveries,
            depth=depth,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=len(KINDS),
            max_model_len=256,
            max_num_batched_tokens=max_num_batched_tokens,
            eos=min(self.parts.info.eos_token_ids, default=1),
            run_ahead_ms=20.0,
            num_drafts=num_drafts,
            states=self.make_states(),
            num_ahead=num_ahead,
            windows=self.parts.info.windows,
            most_forced=self.parts.info.most_forced if is_forced else 0,
        )
        processor = OutputProcessor(self.parts.tokenizer, self.parts.info.eos_token_ids)
        answers = {name: Answer() for name in names}

        def submit(name: str) -> None:
            prompt = self.prompts[list(KINDS).index(name)]
            wanted, grammar = self.params[name].structured_outputs, None
            if wanted is not None:
                grammar = self.parts.input_processor._need_grammars(wanted).compile(wanted)
            request = GenerationRequest(
                request_id=name,
                prompt_token_ids=prompt,
                params=self.params[name],
                grammar=grammar,
                pooling=POOLINGS.get(name),
            )
            for completion in processor.expect(request, 0):
                core.submit(completion, 0)

        waiting = {name: (arrivals or {}).get(name, 0) for name in names}
        ring = core.bus.subscribe(10_000)
        for turn in itertools.count():
            for name in [name for name, at in waiting.items() if at <= turn]:
                del waiting[name]
                submit(name)
            for name in [name for name, at in (aborts or {}).items() if at == turn]:
                core.abort(name)
            if turn in resets:
                core.control.reset_prefix_cache(True)
            if not core.has_work and not waiting:
                break
            core.step()
            check_scheduler(core.scheduler)
            while deliveries:
                for delta in processor.process(deliveries.pop(0)):
                    answers[delta.request_id].take(delta)
            for request_id in processor.take_aborts():
                core.abort(request_id)
        self.depths = {e.queue_depth for e in ring.drain() if hasattr(e, "queue_depth")}
        assert core.scheduler.kv.pool.num_used == 0
        return answers


def guess_half(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the device guess what a request is going to say, one or two tokens rightly."""
    runner = bench.parts.core.executor._runner  # type: ignore[attr-defined]
    texts = [
        (*prompt, *bench.expected[name].tokens)
        for name, prompt in zip(KINDS, bench.prompts, strict=True)
    ]

    def guess(tokens: np.ndarray) -> tuple[np.ndarray, int]:
        seen = tuple(tokens.tolist())
        (text,) = [text for text in texts if text[: len(seen)] == seen] or [seen]
        rest = np.asarray(text[len(seen) :][:NUM_DRAFTS], np.int32)
        rest[1 + len(seen) % 2 :] += 1
        rest %= bench.parts.info.vocab_size
        return rest, 1

    def choose(
        slots: np.ndarray, num_found: np.ndarray, kinds: np.ndarray, num_rows: int
    ) -> np.ndarray:
        return num_found

    monkeypatch.setattr(runner.drafts.drafter, "guess", guess)
    monkeypatch.setattr(runner.drafts.drafter._payoff, "choose", choose)


CACHES = ("int8", "int4")
"""Types of KV cache that round what a token reads together with others."""
MODELS = [
    *("smollm2", "hybrid", *CACHES),
    *(pytest.param(f"random {kind}", marks=pytest.mark.gpu) for kind in ("auto", *CACHES)),
]


@pytest.fixture(scope="module", params=MODELS)
def bench(
    request: pytest.FixtureRequest,
    tiny_model_dir: Callable[..., Path],
) -> Iterator[Bench]:
    if request.param == "smollm2":
        made = Bench(request.getfixturevalue("smollm2_gguf"), most_tokens=12, device="cpu")
    elif request.param == "hybrid":
        made = Bench(tiny_model_dir("qwen3_5_text"), most_tokens=24, device="cpu")
    elif request.param in CACHES:
        made = Bench(
            tiny_model_dir("llama"), most_tokens=24, device="cpu", kv_cache_dtype=request.param
        )
    else:
        kind = request.param.removeprefix("random ")
        folder = tiny_model_dir("llama", head_dim=32)  # the least in int4
        made = Bench(folder, most_tokens=40, device="cuda", kv_cache_dtype=kind)
    yield made
    made.parts.core.executor.shutdown()


def check(bench: Bench, answers: dict[str, Answer]) -> None:
    for name, answer in answers.items():
        alone = bench.expected[name]
        assert (answer.tokens, answer.text, answer.reason) == (
            alone.tokens,
            alone.text,
            alone.reason,
        ), name
        if name in POOLINGS:
            assert answer.vector is not None and alone.vector is not None
            assert np.linalg.norm(answer.vector - alone.vector) < 1e-2, name
        # On a GPU the products of another batch size round otherwise, and near ties change places.
        is_cpu = bench.parts.info.device == "cpu"
        assert answer.ranked == alone.ranked or not is_cpu, name
        tolerance = 1e-3 if is_cpu else 2e-2
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=tolerance), name


def test_the_requests_are_as_different_as_they_should_be(bench: Bench) -> None:
    for name, alone in bench.expected.items():
        assert bool(alone.tokens) == (name not in POOLINGS), name
        if "stop" in KINDS[name]:
            assert alone.reason is FinishReason.STOP and alone.text, name
        assert len(alone.logprobs) == (len(alone.tokens) if "logprobs" in KINDS[name] else 0)
    assert len(bench.expected["minimum"].tokens) >= 9


# Every two of the three together, in as few runs as that takes.
@pytest.mark.parametrize(
    ("depth", "preempted", "chunked"),
    [
        pytest.param(1, False, False, id="sync-undisturbed-whole"),
        pytest.param(1, True, True, id="sync-preempted-chunked"),
        pytest.param(2, False, True, id="async-undisturbed-chunked"),
        pytest.param(2, True, False, id="async-preempted-whole"),
    ],
)
def test_every_request_says_what_it_says_alone(
    bench: Bench, depth: int, preempted: bool, chunked: bool
) -> None:
    longest = max(map(len, bench.prompts)) + bench.most_tokens
    answers = bench.run(
        list(KINDS),
        depth=depth,
        num_blocks=longest // BLOCK_SIZE + 7 if preempted else 160,
        max_num_batched_tokens=CHUNK if chunked else 256,
        resets=(5, 9) if preempted else (),
    )
    check(bench, answers)
    if bench.is_cpu:
        assert bench.core.scheduler.stats.num_forced_tokens > 0
    assert max(map(len, bench.prompts)) > CHUNK
    assert (bench.core.scheduler.stats.num_preemptions > 2) == preempted
    assert max(bench.depths) >= depth - 1 and (max(bench.depths) > 0) == (depth > 1)


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_changes_nothing(bench: Bench, seed: int) -> None:
    """Requests come and leave at any step, up to eight steps ahead, with few blocks or many."""
    print(f"seed {seed}")
    rng = np.random.default_rng([seed, 5])
    longest = max(map(len, bench.prompts)) + bench.most_tokens
    fewest = longest // BLOCK_SIZE + 7
    leaving = rng.choice(list(KINDS), 2, replace=False).tolist()
    answers = bench.run(
        list(KINDS),
        depth=int(rng.integers(1, 9)),
        num_blocks=int(rng.choice([fewest, 2 * fewest, 160])),
        max_num_batched_tokens=int(rng.choice([9, CHUNK, 256])),
        resets=tuple(rng.integers(3, 40, 2).tolist()),
        arrivals={name: int(rng.integers(0, 25)) for name in KINDS},
        aborts={name: int(rng.integers(5, 40)) for name in leaving},
    )
    for name in leaving:  # they may have ended before
        said, alone = answers.pop(name), bench.expected[name]
        assert said.tokens == alone.tokens[: len(said.tokens)], name
    check(bench, answers)


@pytest.mark.parametrize(
    ("depth", "preempted", "chunked"),
    [
        pytest.param(1, False, True, id="sync-undisturbed-chunked"),
        pytest.param(2, True, False, id="async-preempted-whole"),
    ],
)
def test_every_request_says_the_same_with_drafts(
    bench: Bench,
    depth: int,
    preempted: bool,
    chunked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not bench.is_cpu:
        pytest.skip("drafts are made on a CPU")
    guess_half(bench, monkeypatch)
    longest = max(map(len, bench.prompts)) + bench.most_tokens
    answers = bench.run(
        list(KINDS),
        depth=depth,
        num_blocks=longest // BLOCK_SIZE + 7 if preempted else 160,
        max_num_batched_tokens=2 * CHUNK if chunked else 256,
        resets=(5, 9) if preempted else (),
        num_drafts=NUM_DRAFTS,
    )
    check(bench, answers)
    stats = bench.core.scheduler.stats
    assert (stats.num_preemptions > 2) == preempted
    assert 0.2 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_accepted_tokens > 20 and stats.num_forced_tokens > 0


@pytest.fixture(scope="module", params=["mtp", "dflash", "assistant"])
def head_bench(
    request: pytest.FixtureRequest,
    tiny_model_dir: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bench]:
    """A model with a head that drafts, all of whose drafts are computed."""
    place, few = tmp_path_factory.mktemp("matrix"), (7, 300)
    if request.param == "mtp":
        kinds = ["full_attention"] * 2
        made = tiny_model_dir("qwen3_5_text", num_hidden_layers=2, layer_types=kinds)
        folder = quiet_target(made, place / "target")
        add_mtp(folder)
        bench = Bench(folder, most_tokens=24, method="mtp", device="cpu")
    elif request.param == "dflash":
        folder = target_of_few(tiny_model_dir("llama"), place / "target", few)
        head = make_dflash(folder, place / "head", layers=(0,), window=12)
        bench = Bench(folder, most_tokens=24, method="dflash", head=head, device="cpu")
    else:
        made = tiny_model_dir("gemma4_text", final_logit_softcapping=None)
        folder = target_of_few(made, place / "target", few)
        head = make_assistant(folder, place / "head", few=few)
        bench = Bench(folder, most_tokens=24, method="assistant", head=head, device="cpu")
    runner = bench.parts.core.executor._runner  # type: ignore[attr-defined]
    runner.drafts.drafter._payoff.choose = lambda slots, num_found, kinds, num_rows: num_found
    yield bench
    bench.parts.core.executor.shutdown()


@pytest.mark.parametrize(
    ("depth", "preempted", "chunked"),
    [
        pytest.param(1, False, True, id="sync-undisturbed-chunked"),
        pytest.param(2, True, False, id="async-preempted-whole"),
    ],
)
def test_every_request_says_the_same_with_a_head(
    head_bench: Bench, depth: int, preempted: bool, chunked: bool
) -> None:
    runner = head_bench.parts.core.executor._runner  # type: ignore[attr-defined]
    answers = head_bench.run(
        list(KINDS),
        depth=depth,
        max_num_batched_tokens=2 * CHUNK if chunked else 256,
        resets=(5, 9) if preempted else (),
        num_drafts=NUM_DRAFTS,
        num_ahead=runner.drafts.drafter.model.num_ahead,
    )
    check(head_bench, answers)
    stats = head_bench.core.scheduler.stats
    assert (stats.num_preemptions > 2) == preempted
    assert 10 < stats.num_accepted_tokens < stats.num_draft_tokens
