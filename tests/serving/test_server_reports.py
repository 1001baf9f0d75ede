"""Reports of finished requests: a log line, a trace, vLLM's metrics. They never hold text."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import pytest
from fake_engine import FakeEngine, Script
from prometheus_client.parser import text_string_to_metric_families
from server_harness import app_client, chat_body, eventually, serving

from termgen.client import RequestTimings
from termgen.config import ServerConfig
from termgen.errors import ConfigError
from termgen.serving.request_metrics import RequestReport
from termgen.serving.state import ServerState
from termgen.serving.tracing import TraceExporter

SECRET = "what nobody may read"


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "termgen.server.requests"]


async def test_one_line_per_request_without_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "termgen")
    script = Script(pieces=("se", "cret"), num_cached_tokens=2)
    engine = FakeEngine(script=script, clamps_max_tokens=False)
    async with app_client(engine, log_requests=True) as client:
        body = {"messages": [{"role": "user", "content": SECRET}], "user": SECRET}
        headers = {"x-request-id": "r1"}
        await client.post("/v1/chat/completions", json={**body, "n": 2}, headers=headers)
        await client.post("/v1/completions", json={"prompt": [SECRET, "b"], "stream": True})
        await client.post("/v1/chat/completions", json={**body, "max_tokens": 10**6})
        await client.post("/v1/chat/completions", json={"messages": SECRET})
    chat, batch, refused = lines_of(caplog)
    assert chat.startswith("r1 chatcmpl-") and "/v1/chat/completions:" in chat
    assert "(2 cached), 2 choices, 4 tokens, stop;" in chat and chat.endswith(" ms; ok")
    assert "2 choices, 4 tokens, stop;" in batch
    assert "0 prompt tokens" in refused and refused.endswith("context_length_exceeded")
    assert SECRET not in caplog.text and "secret" not in "".join(lines_of(caplog))


async def test_a_line_for_prompts_without_completions(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "termgen")
    async with app_client(FakeEngine(), log_requests=True) as client:
        echo = {"prompt": ["abcd", "ef"], "echo": True, "max_tokens": 0}
        await client.post("/v1/completions", json=echo)
        await client.post("/v1/completions", json={**echo, "logprobs": 1})
    plain, computed = lines_of(caplog)
    for line in (plain, computed):
        assert ": 6 prompt tokens (0 cached), 2 choices, 0 tokens, length;" in line
        assert line.endswith("; ok")
    assert "queue -," in plain and "queue -," not in computed


async def test_no_line_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "termgen")
    async with app_client(FakeEngine()) as client:
        await client.post("/v1/chat/completions", json=chat_body())
    assert lines_of(caplog) == []


async def test_how_a_request_ended_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "termgen")
    engine = FakeEngine(script=Script(hold_after=1))
    async with serving(engine, log_requests=True) as server:
        async with app_client(engine, log_requests=True) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
            await eventually(lambda: bool(engine.live))
            await engine.abort(engine.live[0])
            await asking
        host, port = server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: 14\r\n\r\n" + b'{"prompt":"x"}'
        )
        await eventually(lambda: bool(engine.live))
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await eventually(lambda: len(lines_of(caplog)) == 2)
    assert [line.rpartition("; ")[2] for line in lines_of(caplog)] == [
        "aborted",
        "disconnected while in decode",
    ]


class Spans:
    """An exporter that keeps its spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def export(self, spans: Any) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self.spans.extend(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


def make_report(**changes: Any) -> RequestReport:
    values: dict[str, Any] = {
        "request_id": "r1",
        "answer_id": "chatcmpl-1",
        "path": "/v1/chat/completions",
        "operation": "chat",
        "model": "m",
        "traceparent": None,
        "num_choices": 1,
        "num_prompt_tokens": 10,
        "num_cached_tokens": 4,
        "num_output_tokens": 3,
        "finish_reasons": ("stop",),
        "outcome": "ok",
        "timings": (RequestTimings(1_000, 2_000, 3_000, 9_000),),
        "began_ns": 500,
        "ended_ns": 10_000,
    }
    return RequestReport(**{**values, **changes})


def test_a_trace_says_what_opentelemetry_wants_to_know() -> None:
    pytest.importorskip("opentelemetry.sdk")
    exporter = Spans()
    traces = TraceExporter("http://unused", exporter=exporter)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    traces.add(make_report(traceparent=parent))
    traces.add(make_report(operation="text_completion", outcome="queue_timeout", timings=()))
    traces.close()
    first, second = exporter.spans
    assert first.name == "chat m" and second.name == "text_completion m"
    assert f"{first.context.trace_id:032x}" == parent.split("-")[1]
    assert f"{first.parent.span_id:016x}" == parent.split("-")[2]
    assert first.attributes["gen_ai.operation.name"] == "chat"
    assert first.attributes["gen_ai.usage.input_tokens"] == 10
    assert first.attributes["gen_ai.usage.output_tokens"] == 3
    assert first.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert first.attributes["gen_ai.server.time_to_first_token"] == pytest.approx(2e-6)
    assert first.end_time - first.start_time == 9_500
    assert [event.name for event in first.events] == ["scheduled", "first_token"]
    assert first.status.is_ok or first.status.is_unset
    assert second.attributes["error.type"] == "queue_timeout"
    assert not second.status.is_ok and second.parent is None


async def test_traces_are_sent_where_they_are_wanted() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    received: list[bytes] = []

    async def collect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        received.append(head + await reader.readexactly(length))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    collector = await asyncio.start_server(collect, "127.0.0.1", 0)
    port = collector.sockets[0].getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}/v1/traces"
    async with serving(FakeEngine(), otlp_traces_endpoint=endpoint) as server:
        async with app_client(FakeEngine()) as plain:
            await plain.post("/v1/chat/completions", json=chat_body())
        import httpx

        async with httpx.AsyncClient(base_url=server.url) as client:
            body = {"messages": [{"role": "user", "content": SECRET}]}
            await client.post("/v1/chat/completions", json=body)
    collector.close()
    (sent,) = received
    assert sent.startswith(b"POST /v1/traces ")
    assert b"chat fake/model-1" in sent and b"gen_ai.usage.output_tokens" in sent
    assert SECRET.encode() not in sent


def test_without_the_extra_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"termgen\[otel\]") as caught:
        ServerState(ServerConfig(otlp_traces_endpoint="http://x/v1/traces"))
    assert caught.value.param == "otlp_traces_endpoint"
    assert not ServerState(ServerConfig()).wants_reports


async def test_vllms_names_say_the_same() -> None:
    engine = FakeEngine(script=Script(num_cached_tokens=4))
    async with app_client(engine, metrics_compat="vllm") as client:
        await client.post("/v1/chat/completions", json=chat_body(n=2, max_tokens=3))
        text = (await client.get("/metrics")).text
    families = {f.name: f for f in text_string_to_metric_families(text)}
    theirs = {name for name in families if name.startswith("vllm:")}
    assert theirs >= {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits",
        "vllm:prompt_tokens",
        "vllm:generation_tokens",
        "vllm:request_success",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:cache_config_info",
    }
    for name in theirs:
        ours = families["termgen_" + name.removeprefix("vllm:")]
        assert families[name].type == ours.type
        for found, own in zip(families[name].samples, ours.samples, strict=True):
            labels = {k: v for k, v in own.labels.items() if k != "model"}
            assert found.labels == {"model_name": "fake/model-1", "engine": "0", **labels}
            assert found.value == own.value
            assert found.name == own.name.replace("termgen_", "vllm:")
    assert "vllm:generation_tokens_total{" in text
    async with app_client(FakeEngine()) as client:
        assert "vllm:" not in (await client.get("/metrics")).text


async def test_every_name_begins_alike_and_the_heartbeat_beats() -> None:
    import time

    async with app_client(FakeEngine()) as client:
        text = (await client.get("/metrics")).text
    families = list(text_string_to_metric_families(text))
    assert len({f.name for f in families}) == len(families)
    assert all(f.name.startswith("termgen_") and f.documentation for f in families)
    (beat,) = (f for f in families if f.name == "termgen_engine_heartbeat_timestamp_seconds")
    assert abs(beat.samples[0].value - time.time()) < 60
    (info,) = (f for f in families if f.name == "termgen_cache_config_info")
    assert info.samples[0].labels["block_size"] == "16"
