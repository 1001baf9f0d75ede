"""Admission to the queue: counted before tokenising, refused with the time to retry."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, GenerateCall, Script, make_model_info, make_step_record
from server_harness import app_client, chat_body, eventually, read_events, socket_client

from termgen.api.job import Job
from termgen.client import ChatPrompt, Prompt
from termgen.config import ServerConfig
from termgen.errors import OverloadedError
from termgen.serving.admission import AdmissionControl, Ticket
from termgen.vocabulary.events import EngineEvent, RequestEvent, RequestEventKind
from termgen.vocabulary.sampling_params import SamplingParams

QUEUED = Script(waits_in_queue=True)


def job(
    name: str, *, n: int = 1, prompt: Prompt = "x", params: SamplingParams | None = None
) -> Job:
    params = params or SamplingParams(n=n)
    return Job(prompt=prompt, params=params, request_id=name, priority=0, cache_salt=None)


class Desk:
    """An `AdmissionControl` and the events its engine has published."""

    def __init__(self, **config: Any) -> None:
        self.events: list[EngineEvent] = []
        self.refused: list[str] = []
        self.control = AdmissionControl(
            ServerConfig(**config), drain_events=self._drain, on_refused=self.refused.append
        )

    def _drain(self) -> None:
        events, self.events = self.events, []
        self.control.on_events(events)

    def scheduled(self, engine_id: str) -> None:
        self.events.append(RequestEvent(0, engine_id, RequestEventKind.SCHEDULED, 1, 0, 0))

    def queued(self, engine_id: str, num_tokens: int) -> None:
        self.events.append(RequestEvent(0, engine_id, RequestEventKind.QUEUED, num_tokens, 0, 0))

    def is_admitted(self, *jobs: Job) -> bool:
        try:
            self.control.admit(jobs)
        except OverloadedError:
            return False
        return True


def test_what_waits_is_limited_not_what_runs() -> None:
    desk = Desk(max_queue=2)
    assert desk.is_admitted(job("a")) and desk.is_admitted(job("b"))
    assert not desk.is_admitted(job("c"))
    desk.scheduled("a")
    assert desk.is_admitted(job("c")), "one has begun"
    assert not desk.is_admitted(job("d"))
    assert desk.refused == ["queue_full"] * 2


def test_free_seats_are_no_queue() -> None:
    desk = Desk(max_queue=1)
    desk.control.num_seats = 3
    assert [desk.is_admitted(job(str(i))) for i in range(6)] == [True] * 4 + [False] * 2
    desk.events.append(make_step_record(num_waiting=1, num_running=1))
    for i in range(3):
        desk.scheduled(str(i))
    assert not desk.is_admitted(job("x")), "seats are free, but the engine lets requests wait"


def test_every_completion_counts() -> None:
    desk = Desk(max_queue=4)
    assert desk.is_admitted(job("a"))
    assert not desk.is_admitted(job("b", n=4))
    assert desk.is_admitted(job("b", n=2))
    assert not desk.is_admitted(job("c"), job("d"))
    assert desk.is_admitted(job("c"))
    for engine_id in ("b-0", "b-1", "b-1", "b-7", "b-x", "zzz", "b"):
        desk.scheduled(engine_id)
    assert desk.is_admitted(job("d", n=2)), "twice told is told once"
    assert not desk.is_admitted(job("e"))


def test_an_echo_takes_one_place() -> None:
    """The number of copies does not matter: the prompt is tokenised, or computed, once."""
    desk = Desk(max_queue=2)
    assert desk.is_admitted(job("a"))
    for params in (SamplingParams(n=3), SamplingParams(n=3, prompt_logprobs=0)):
        ticket = desk.control.admit([replace(job("b", params=params), generates=False)])
        assert ticket.num_waiting == 1
        assert not desk.is_admitted(job("c"))
        for index in range(3):
            ticket.begin("b", index)
            ticket.end("b", index)
            assert (ticket.num_waiting, ticket.num_seated) == (0, 0), "not more seats than it had"
        assert desk.is_admitted(job(f"d{params}")), "what has ended waits no more"
        desk.scheduled(f"d{params}")
        ticket.close()


def test_work_on_tokens_takes_a_place() -> None:
    desk = Desk(max_queue=2, max_queue_tokens=100)
    with desk.control.place(60), desk.control.place(40):
        assert desk.control.is_full and not desk.is_admitted(job("a"))
        with pytest.raises(OverloadedError, match="completions wait") as caught:
            desk.control.place(1).__enter__()
        assert caught.value.code == "queue_full"
    with desk.control.place(60):
        with pytest.raises(OverloadedError) as caught, desk.control.place(41):
            pass
        assert caught.value.code == "queue_tokens_full"
        assert not desk.is_admitted(job("a", prompt=(1,) * 41))
    with desk.control.place(1000):
        pass  # a server with an empty queue accepts any request
    assert desk.control._num_waiting == desk.control._tokens_waiting == 0
    assert desk.refused == ["queue_full", "queue_full", "queue_tokens_full", "queue_tokens_full"]


def test_a_server_where_nobody_waits_takes_anything() -> None:
    desk = Desk(max_queue=4, max_queue_tokens=10)
    ticket = desk.control.admit([job("a", n=100, prompt="x" * 1000)])
    assert not desk.is_admitted(job("b"))
    ticket.close()
    ticket.close()
    assert desk.is_admitted(job("b", n=50))


def test_prompt_tokens_are_limited() -> None:
    desk = Desk(max_queue=0, max_queue_tokens=100)
    assert desk.is_admitted(job("a", prompt=(1,) * 60))
    assert not desk.is_admitted(job("b", prompt=(1,) * 41))
    assert desk.is_admitted(job("b", prompt=(1,) * 40))
    assert desk.refused == ["queue_tokens_full"]
    desk.scheduled("a")
    assert desk.is_admitted(job("c", prompt=(1,) * 60))


def test_all_that_a_template_shows_is_counted() -> None:
    """Tools, the arguments of calls and reasoning count as prompt text."""
    desk = Desk(max_queue=0, max_queue_tokens=1000)
    long, user = "y" * 10_000, {"role": "user", "content": "x"}
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": [{"b": long}]}}}
    tool = {"type": "function", "function": {"name": "f", "description": long}}
    for prompt in (
        ChatPrompt(messages=({**user, "content": long},)),
        ChatPrompt(messages=({**user, "content": [{"type": "text", "text": long}]},)),
        ChatPrompt(messages=(user, {"role": "assistant", "content": None, "tool_calls": [call]})),
        ChatPrompt(messages=(user, {**user, "role": "assistant", "reasoning_content": long})),
        ChatPrompt(messages=({**user, "name": long},)),
        ChatPrompt(messages=(user,), template_kwargs={"tools": [tool]}),
        ChatPrompt(messages=(user,), template_kwargs={"tools": [{"name": {long: 1}}]}),
    ):
        assert 2500 <= desk.control.estimate(prompt) <= 2550
        waiting = desk.control.admit([job("a", prompt=(1,))])
        assert not desk.is_admitted(job("b", prompt=prompt))
        waiting.close()
    assert desk.control.estimate(ChatPrompt(messages=(user,))) == 1


def test_an_estimate_gives_way_to_what_was_tokenised() -> None:
    desk = Desk(max_queue=0, max_queue_tokens=100)
    ticket = desk.control.admit([job("a", n=2, prompt="x" * 80), job("b", prompt=(1,) * 10)])
    assert ticket.num_tokens == 31
    for engine_id in ("a-0", "a-1~2", "a-1", "zzz", "a-x"):
        desk.queued(engine_id, 80)
    desk.control.look()
    assert ticket.num_tokens == desk.control._tokens_waiting == 90
    assert not desk.is_admitted(job("c", prompt=(1,) * 11))
    desk.queued("a-0", 20)
    assert desk.is_admitted(job("c", prompt=(1,) * 11)), "it is looked at before anyone is refused"
    for engine_id in ("a-0", "a-1", "b"):
        desk.scheduled(engine_id)
    desk.queued("b", 999)
    desk.control.look()
    assert desk.control._tokens_waiting == 11, "what has begun waits no more"


def test_the_size_of_text_is_learnt() -> None:
    desk = Desk()
    message = {"role": "user", "content": "y" * 300}
    prompt = ChatPrompt(messages=(message, {"role": "assistant", "content": None}))
    before = desk.control.estimate(prompt)
    assert 50 <= before <= 100
    for _ in range(200):
        desk.control.on_prompt(prompt, 300)
    assert 295 <= desk.control.estimate(prompt) <= 305


def test_counts_hold_over_random_lives() -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    desk = Desk(max_queue=8, max_queue_tokens=200)
    tickets: dict[str, tuple[Ticket, int]] = {}
    for i in range(3000):
        name = f"cmpl-{i}"
        if rng.random() < 0.6:
            n = rng.choice((1, 1, 2, 5))
            try:
                tickets[name] = (desk.control.admit([job(name, n=n, prompt="x" * 40)]), n)
            except OverloadedError:
                pass
        if tickets and rng.random() < 0.7:
            known = rng.choice(sorted(tickets))
            n = tickets[known][1]
            desk.scheduled(
                f"{known}-{rng.randrange(n)}" if n > 1 else known + rng.choice(["", "~2"])
            )
        if tickets and rng.random() < 0.3:
            desk.queued(rng.choice(sorted(tickets)), rng.randrange(1, 30))
        if tickets and rng.random() < 0.5:
            tickets.pop(rng.choice(sorted(tickets)))[0].close()
        if rng.random() < 0.2:
            desk.control.look()
        waiting = sum(t.num_waiting for t, _ in tickets.values())
        assert desk.control._num_waiting == waiting
        tokens = sum(t.num_tokens for t, _ in tickets.values() if t.num_waiting)
        assert desk.control._tokens_waiting == tokens
    for ticket, _ in tickets.values():
        ticket.close()
    assert desk.control._num_waiting == desk.control._tokens_waiting == 0
    assert not desk.control._open and not desk.control._by_job


def test_the_time_to_come_again_follows_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("termgen.serving.admission.time.monotonic", lambda: now)
    desk = Desk(max_queue=10)
    for i in range(21):  # two starts a second
        desk.control.admit([job(f"done{i}")]).begin(f"done{i}", 0)
        now += 0.5
    for i in range(10):
        desk.control.admit([job(str(i))])
    with pytest.raises(OverloadedError) as caught:
        desk.control.admit([job("late", n=4)])
    assert caught.value.retry_after_s == pytest.approx(2.0)
    now += 31.0
    with pytest.raises(OverloadedError) as caught:
        desk.control.admit([job("later")])
    assert caught.value.retry_after_s == 5.0, "nothing was started lately"


@pytest.mark.parametrize("stream", [False, True])
async def test_refused_before_anything_is_spent(stream: bool) -> None:
    engine = FakeEngine(script=QUEUED)
    async with app_client(engine, max_queue=2) as client:
        body = chat_body(stream=stream)
        first = [
            asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(2)
        ]
        await eventually(lambda: len(engine.live) == 2)
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "queue_full"})
        assert (await client.get("/health")).status_code == 200
        refused = await client.post("/v1/chat/completions", content=b"not even read")
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert int(refused.headers["retry-after"]) == 5
        assert int(refused.headers["retry-after-ms"]) == 5000
        assert len(engine.calls) == 2
        engine.release.set()
        assert [(await answer).status_code for answer in first] == [200, 200]
        assert (await client.get("/ready")).status_code == 200
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        text = (await client.get("/metrics")).text
    assert 'termgen_rejected_total{model="fake/model-1",reason="queue_full"} 1.0' in text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wait_that_is_too_long_ends_with_an_error(stream: bool) -> None:
    def script(call: GenerateCall) -> Script:
        return Script(waits_in_queue=call.prompt == "late", first_delay_s=0.3)

    engine = FakeEngine(script=script)
    async with app_client(engine, max_queue_time=0.1) as client:

        async def ask(prompt: str) -> httpx.Response:
            return await client.post("/v1/completions", json={"prompt": prompt, "stream": stream})

        late, computed = await asyncio.gather(ask("late"), ask("good"))
    assert computed.status_code == 200, "what is being computed is not cut off"
    assert late.status_code == 429
    assert late.json()["error"]["code"] == "queue_timeout"
    assert late.headers["retry-after"]
    assert len(engine.aborted) == len(engine.finished) == 1


async def test_a_wait_behind_pings_ends_with_an_error_frame() -> None:
    engine = FakeEngine(script=QUEUED)
    async with app_client(engine, max_queue_time=0.2, sse_ping_interval=0.05) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(stream=True))
    assert response.status_code == 200 and response.content.startswith(b": ping\n\n")
    assert read_events(response.content)[-1]["error"]["code"] == "queue_timeout"
    assert len(engine.aborted) == 1


async def test_openai_clients_come_again_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    openai = pytest.importorskip("openai")
    monkeypatch.setattr("termgen.serving.admission.UNKNOWN_RETRY_AFTER_S", 0.3)
    engine = FakeEngine(script=lambda _: Script() if engine.release.is_set() else QUEUED)
    async with socket_client(engine, max_queue=1) as http:
        client = openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="x", max_retries=2)

        async def ask() -> str:
            answer = await client.completions.create(model="fake/model-1", prompt="x")
            return str(answer.choices[0].text)

        first = asyncio.create_task(ask())
        await eventually(lambda: bool(engine.live))
        second = asyncio.create_task(ask())
        await asyncio.sleep(0.1)
        engine.release.set()
        assert await first == await second
        await client.close()
    assert len(engine.calls) == 2


async def test_prompts_of_a_batch_leave_their_seats_one_by_one() -> None:
    """Prompts without completions leave too."""
    scripts = {"slow": Script(hold_after=0), "late": QUEUED}

    def script(call: GenerateCall) -> Script:
        return scripts.get(str(call.prompt), Script())

    engine = FakeEngine(script=script, model=make_model_info(max_num_seqs=4))
    async with app_client(engine, max_queue=1) as client:
        body = {"prompt": ["a", "b", "c", "slow"], "echo": True, "logprobs": 0, "max_tokens": 0}
        asking = [asyncio.create_task(client.post("/v1/completions", json=body))]
        await eventually(lambda: len(engine.finished) == 3 and len(engine.live) == 1)
        for num_late in range(1, 5):  # three slots and one waiting request
            late = client.post("/v1/completions", json={"prompt": "late"})
            asking.append(asyncio.create_task(late))
            await eventually(lambda n=num_late: len(engine.live) == 1 + n)  # type: ignore[misc]
        assert (await client.post("/v1/completions", json={"prompt": "late"})).status_code == 429
        engine.release.set()
        assert [(await answer).status_code for answer in asking] == [200] * 5


async def test_leaving_gives_the_place_back() -> None:
    engine = FakeEngine(script=QUEUED, model=make_model_info(max_num_seqs=1))
    async with app_client(engine, max_queue=2) as client:
        asking = [
            asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
            for _ in range(3)
        ]
        await eventually(lambda: len(engine.live) == 3)
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 429
        for task in asking:
            task.cancel()
        await eventually(lambda: not engine.live)
        engine.release.set()
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
