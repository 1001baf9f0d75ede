"""Servers that a chat asks beside its own: their setting, and who gets which key."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine
from server_harness import serving
from tui_harness import MODEL

from termgen.client import ChatPrompt
from termgen.errors import ConfigError, TermgenError
from termgen.remote.other_servers import OtherServer, OtherServers, parse_servers
from termgen.vocabulary.sampling_params import SamplingParams


def test_entries_are_read() -> None:
    entries = ("big=http://gpu:8000", "api = https://a.example/v1 some-model key=A_KEY")
    assert parse_servers(entries) == {
        "big": OtherServer("http://gpu:8000"),
        "api": OtherServer("https://a.example/v1", "some-model", "A_KEY"),
    }
    assert OtherServers(entries).names == [
        ("big", "http://gpu:8000"),
        ("api", "https://a.example/v1 some-model"),
    ]


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("http://a.example", "it must be NAME=URL"),
        ("a=", "it must be NAME=URL"),
        ("=http://a.example", "it must be NAME=URL"),
        ("a b=http://a.example", "it must be NAME=URL"),
        ("a=gpu-box:8000", "gpu-box:8000 is no URL"),
        ("a=http://a.example one two", "it must be NAME=URL"),
        ("a=http://a.example key=", "it must be NAME=URL"),
    ],
)
def test_a_wrong_entry_is_named(entry: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        parse_servers([entry])
    assert caught.value.param == "beside" and repr(entry) in str(caught.value)
    with pytest.raises(ConfigError, match="twice"):
        parse_servers(["a=http://x.example", "a=http://y.example"])


async def answer_of(client: Any) -> str:
    prompt = ChatPrompt([{"role": "user", "content": "hi"}])
    return "".join([d.text async for d in client.generate(prompt, SamplingParams(max_tokens=32))])


async def test_a_server_is_opened_by_its_name_or_its_url() -> None:
    async with serving(FakeEngine(model=MODEL), api_key=("k1",)) as server:
        others = OtherServers(
            [f"big={server.url} key=BIG_KEY", f"open={server.url}"], environ={"BIG_KEY": "k1"}
        )
        client = await others.open("big")
        assert (await answer_of(client)).startswith("Hello") and client.model.model_id
        await client.aclose()
        for without_key in ("open", server.url):
            with pytest.raises(TermgenError, match=r"401|key"):
                await others.open(without_key)
        own = OtherServers([], own_url=server.url, own_key="k1", environ={})
        client = await own.open("smollm2-135m")
        await client.aclose()
        with pytest.raises(ConfigError, match="has no 'another'"):
            await own.open("another")
        with pytest.raises(TermgenError, match=r"401|key"):
            await own.open(server.url)


async def test_what_cannot_be_opened_is_one_line() -> None:
    others = OtherServers(["big=http://127.0.0.1:9 key=BIG_KEY"], environ={})
    with pytest.raises(ConfigError, match="BIG_KEY is not set"):
        await others.open("big")
    with pytest.raises(ConfigError, match="'small': those of the setting `beside` are big"):
        await others.open("small")
    with pytest.raises(ConfigError, match="names none"):
        await OtherServers([]).open("small")
    with pytest.raises(TermgenError, match="no server at"):
        await others.open("http://127.0.0.1:9")
