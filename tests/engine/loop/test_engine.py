"""Both front ends of the engine, on a tiny random model."""

from __future__ import annotations

import asyncio
import shutil
import time
import traceback
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from termgen.client import ChatPrompt, TokenDelta
from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine, SyncEngine
from termgen.engine.loop.executor import LocalExecutor
from termgen.errors import ConfigError, CorruptFileError, EngineDeadError, RequestError, StepError
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.request import FinishReason, GenerationRequest, IntArray, hash_blocks
from termgen.vocabulary.sampling_params import SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def config(folder: Path, **options: object) -> EngineConfig:
    options = {"device": "cpu", "kv_cache_gib": 0.01, "threads": 1, **options}
    return EngineConfig(model=str(folder), **options)  # type: ignore[arg-type]


@pytest.fixture
async def engine(tiny_llama_dir: Path) -> AsyncIterator[AsyncEngine]:
    started = await AsyncEngine.start(config(tiny_llama_dir))
    yield started
    await started.shutdown()


async def collect(engine: AsyncEngine, prompt: object, params: SamplingParams) -> list[TokenDelta]:
    return [delta async for delta in engine.generate(prompt, params)]  # type: ignore[arg-type]


async def settle(engine: AsyncEngine) -> int:
    """Used blocks once no request runs any more."""
    for _ in range(200):
        snapshot = await engine.snapshot()
        if not snapshot.num_running and not snapshot.num_waiting:
            return snapshot.num_used_blocks
        await asyncio.sleep(0.01)
    raise AssertionError("requests never ended")


async def test_a_stream_ends_once_with_usage_and_timings(engine: AsyncEngine) -> None:
    deltas = await collect(engine, "Hello, how are you?", SHORT)
    last = deltas[-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert sum(len(d.token_ids) for d in deltas) == 12 == last.num_output_tokens
    assert deltas[0].prompt_token_ids is not None
    assert last.num_prompt_tokens == len(deltas[0].prompt_token_ids)
    timings = last.timings
    assert timings is not None
    assert 0 < timings.arrival_ns <= timings.first_scheduled_ns <= timings.first_token_ns
    assert timings.first_token_ns <= timings.finished_ns


async def test_requests_together_give_what_each_gives_alone(engine: AsyncEngine) -> None:
    prompts = [f"Prompt number {i}, with words " + "and more " * i for i in range(9)]
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True)

    async def tokens(prompt: str) -> list[int]:
        return [t for d in await collect(engine, prompt, params) for t in d.token_ids]

    alone = [await tokens(prompt) for prompt in prompts]
    together = await asyncio.gather(*(tokens(prompt) for prompt in prompts))
    assert together == alone


async def test_completions_of_one_request_differ_and_repeat_with_the_seed(
    engine: AsyncEngine,
) -> None:
    params = SamplingParams(n=3, temperature=1.5, seed=11, max_tokens=10, ignore_eos=True)

    async def texts() -> dict[int, list[int]]:
        found: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for delta in await collect(engine, "Once upon a time", params):
            found[delta.index] += delta.token_ids
        return found

    first = await texts()
    assert len({tuple(ids) for ids in first.values()}) == 3
    assert await texts() == first


async def test_closing_the_stream_aborts_and_frees_everything(engine: AsyncEngine) -> None:
    stream = engine.generate("Tell me a long story", LONG)
    await anext(stream)
    assert (await engine.snapshot()).num_running == 1
    await stream.aclose()
    assert await settle(engine) == 0


async def test_cancelling_the_reader_aborts(engine: AsyncEngine) -> None:
    task = asyncio.create_task(collect(engine, "Tell me a long story", LONG))
    while not (await engine.snapshot()).num_running:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await settle(engine) == 0


async def test_abort_by_id_ends_the_stream_with_its_reason(engine: AsyncEngine) -> None:
    stream = engine.generate("Tell me a long story", LONG, request_id="story")
    deltas = [await anext(stream)]
    assert await engine.abort("story")
    deltas += [delta async for delta in stream]
    assert deltas[-1].finish_reason is FinishReason.ABORT
    assert not await engine.abort("story"), "it is gone"


async def test_a_bad_request_fails_before_anything_is_queued(engine: AsyncEngine) -> None:
    ring = engine.events()
    with pytest.raises(RequestError) as error:
        await collect(engine, [10**6], SHORT)
    assert error.value.param == "prompt"
    too_long = [5] * engine.model.max_model_len
    with pytest.raises(RequestError) as error:
        await collect(engine, too_long, SHORT)
    assert error.value.code == "context_length_exceeded"
    assert ring.drain() == []


async def test_two_requests_may_not_share_an_id(engine: AsyncEngine) -> None:
    stream = engine.generate("Tell me a long story", LONG, request_id="same")
    await anext(stream)
    with pytest.raises(RequestError):
        await anext(engine.generate("Another", SHORT, request_id="same"))
    assert (await anext(stream)).finish_reason is None, "the first one goes on"
    await stream.aclose()


async def test_a_stop_string_ends_the_request_in_the_engine_too(engine: AsyncEngine) -> None:
    text = "".join(d.text for d in await collect(engine, "Hello there", LONG))
    stop = text[20:23]
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, stop=stop)
    deltas = await collect(engine, "Hello there", params)
    assert "".join(d.text for d in deltas) == text[: text.index(stop)]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, stop)
    assert await settle(engine) == 0


async def test_a_slow_reader_loses_nothing(engine: AsyncEngine) -> None:
    expected = [t for d in await collect(engine, "Hello there", LONG) for t in d.token_ids]
    stream = engine.generate("Hello there", LONG)
    got = list((await anext(stream)).token_ids)
    while (await engine.snapshot()).num_running:  # it finishes without being read
        await asyncio.sleep(0.01)
    rest = [delta async for delta in stream]
    assert len(rest) <= 2, "what waited was merged"
    assert got + [t for d in rest for t in d.token_ids] == expected


async def test_a_failing_step_fails_its_requests_and_the_engine_goes_on(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine.parts.core.executor._runner  # type: ignore[attr-defined]
    real, calls = runner._run_model, []

    def fail_once(plan: object, dispatch: object) -> object:
        calls.append(plan)
        if len(calls) == 3:
            raise RuntimeError("a cosmic ray")
        return real(plan, dispatch)

    monkeypatch.setattr(runner, "_run_model", fail_once)
    deltas = await collect(engine, "Hello there", SHORT)
    assert deltas[-1].finish_reason is FinishReason.ERROR
    assert isinstance(deltas[-1].error, StepError) and "cosmic ray" in str(deltas[-1].error)
    again = await collect(engine, "Hello there", SHORT)
    assert again[-1].finish_reason is FinishReason.LENGTH
    assert engine.is_healthy


async def test_a_dead_engine_tells_every_stream_and_turns_unhealthy(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = engine.generate("Tell me a long story", LONG)
    await anext(stream)

    def broken(now_ns: int = 0) -> None:
        raise AssertionError("scheduler bug")

    monkeypatch.setattr(engine.parts.core.scheduler, "schedule", broken)
    with pytest.raises(EngineDeadError, match="scheduler bug"):
        async for _ in stream:
            pass
    assert not engine.is_healthy
    told = []
    for _ in range(3):
        with pytest.raises(EngineDeadError, match="scheduler bug") as caught:
            await collect(engine, "Hello", SHORT)
        told.append(caught.value)
    assert len({len(traceback.extract_tb(error.__traceback__)) for error in told}) == 1
    assert all(isinstance(error.__cause__, AssertionError) for error in told)


async def test_events_and_snapshot_while_running(engine: AsyncEngine) -> None:
    ring = engine.events()
    stream = engine.generate("Tell me a long story", LONG)
    while (await anext(stream)).num_output_tokens < 3:
        continue
    snapshot = await engine.snapshot()
    assert [r.status for r in snapshot.requests] == ["decode"]
    assert snapshot.num_used_blocks == snapshot.requests[0].num_blocks > 0
    await stream.aclose()
    steps = [e for e in ring.drain() if isinstance(e, StepRecord)]
    assert steps[0].num_prefill_tokens > 0 and steps[-1].num_decode_rows == 1
    engine.close_events(ring)


async def test_reset_prefix_cache(engine: AsyncEngine) -> None:
    await collect(engine, "word " * 60, SHORT)
    hit = (await collect(engine, "word " * 60, SHORT))[-1].num_cached_tokens
    assert hit > 0
    assert await engine.reset_prefix_cache()
    assert (await collect(engine, "word " * 60, SHORT))[-1].num_cached_tokens == 0


async def test_salts_keep_caches_apart(engine: AsyncEngine) -> None:
    async def cached(salt: str | None) -> int:
        stream = engine.generate("word " * 60, SHORT, cache_salt=salt)
        return [d async for d in stream][-1].num_cached_tokens

    assert await cached("alice") == 0
    assert await cached("bob") == 0
    assert await cached("alice") > 0


async def test_the_engines_thread_hashes_no_prompt(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps wait for that thread: hashing 128k tokens takes milliseconds."""
    made: list[int] = []

    def counted(token_ids: IntArray, size: int, chain: list[bytes], salt: str | None) -> None:
        before = len(chain)
        hash_blocks(token_ids, size, chain, salt)
        made.append(len(chain) - before)

    monkeypatch.setattr("termgen.engine.schedule.kv_cache.hash_blocks", counted)
    for salt in (None, "alice"):
        news = [d async for d in engine.generate("word " * 60, SHORT, cache_salt=salt)]
        assert news[-1].num_cached_tokens == 0
        assert made and sum(made) <= 1, "at most the block that the answer fills"
        made.clear()


async def test_an_idle_engine_uses_no_cpu(engine: AsyncEngine) -> None:
    await collect(engine, "Hello", SHORT)
    before = time.process_time()
    await asyncio.sleep(1.0)
    assert time.process_time() - before < 0.1


async def test_chat_prompts_go_through_the_template(engine: AsyncEngine) -> None:
    prompt = ChatPrompt([{"role": "user", "content": "Hi"}])
    ids = await engine.tokenize(prompt)
    text = await engine.detokenize(ids)
    assert text == "<s>user\nHi</s>\n<s>assistant\n"


async def test_a_missing_model_is_reported_by_start(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="nothing-here"):
        await AsyncEngine.start(EngineConfig(model=str(tmp_path / "nothing-here")))


async def test_prompts_are_cut_by_time_where_requests_come_while_others_generate(
    engine: AsyncEngine, tiny_llama_dir: Path
) -> None:
    assert engine.parts.core.scheduler.config.adaptive_prefill
    for setting, expected in ((None, False), (False, False), (True, True)):
        offline = SyncEngine(config(tiny_llama_dir, adaptive_prefill=setting))
        assert offline.core.scheduler.config.adaptive_prefill == expected
        offline.shutdown()


async def test_an_answer_that_does_not_fit_is_cut_where_requests_come_while_others_generate(
    engine: AsyncEngine, tiny_llama_dir: Path
) -> None:
    room = 3
    prompt = [5] * (engine.model.max_model_len - room)
    wanted = SamplingParams(max_tokens=room + 1, ignore_eos=True)
    assert (await collect(engine, prompt, wanted))[-1].num_output_tokens == room
    for setting, refuses in ((None, True), (False, True), (True, False)):
        offline = SyncEngine(config(tiny_llama_dir, clamp_max_tokens=setting))
        prompt = [5] * (offline.model.max_model_len - room)
        if refuses:
            with pytest.raises(RequestError, match="context_length_exceeded"):
                offline.input_processor.process(prompt, wanted)
        else:
            offline.input_processor.process(prompt, wanted)
        offline.shutdown()


def test_settings_that_cannot_be_met_name_themselves(tiny_llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        SyncEngine(config(tiny_llama_dir, max_model_len=10**6))
    with pytest.raises(ConfigError, match="max_model_len 256 does not fit"):
        SyncEngine(
            config(tiny_llama_dir, kv_cache_gib=None, num_gpu_blocks_override=4, max_model_len=256)
        )
    with pytest.raises(ConfigError, match="kv_cache_gib"):
        SyncEngine(config(tiny_llama_dir, kv_cache_gib=10.0**6))


def test_dummy_weights_and_no_tokenizer_need_a_config_only(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((tiny_llama_dir / "config.json").read_bytes())
    engine = SyncEngine(config(tmp_path, load_format="dummy", skip_tokenizer_init=True))
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    engine.add(GenerationRequest(request_id="a", prompt_token_ids=(5, 6, 7), params=params))
    deltas = []
    while engine.has_unfinished:
        deltas += engine.step()
    assert sum(len(d.token_ids) for d in deltas) == 5
    assert all(d.text == "" for d in deltas)
    engine.shutdown()


def test_a_start_that_fails_late_lets_go_of_the_device(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_llama_dir, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": "warm"}')
    ended: list[LocalExecutor] = []
    monkeypatch.setattr(LocalExecutor, "shutdown", lambda self: ended.append(self))
    with pytest.raises(CorruptFileError, match="temperature"):
        SyncEngine(config(tmp_path / "model"))
    assert len(ended) == 1
