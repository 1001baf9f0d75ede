"""Ollama's chats and completions, over the same engine as OpenAI's."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, GenerateCall, Script, make_model_info
from server_harness import ANSWER, MESSAGES, app_client, socket_client

from termgen.client import ChatPrompt, FillPrompt
from termgen.config import ServerConfig
from termgen.serving.app import build_app
from termgen.serving.request_metrics import RequestReport
from termgen.serving.state import ServerState
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.tool_format import ToolFormat

MODEL = "fake/model-1"
CHAT, GENERATE = "/api/chat", "/api/generate"
METRICS = {
    *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"),
    *("eval_count", "eval_duration"),
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
PIXEL = base64.b64encode(b"\x89PNG" + b"\0" * 9000).decode()


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, **fields}


def generate(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", **fields}


def lines_of(reply: httpx.Response) -> list[Any]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.text.endswith("\n")
    return [json.loads(line) for line in reply.text[:-1].split("\n")]


def text_of(lines: list[Any]) -> str:
    return "".join(line["message"]["content"] for line in lines)


async def error_of(client: httpx.AsyncClient, path: str, body: Any) -> tuple[int, str]:
    reply = await client.post(path, json=body)
    assert reply.json().keys() == {"error"} and reply.headers["x-request-id"]
    return reply.status_code, reply.json()["error"]


async def params_of(body: dict[str, Any], path: str = CHAT, **model: Any) -> Any:
    """The sampling of the one request that the engine gets."""
    engine = FakeEngine(model=make_model_info(**model))
    async with app_client(engine) as client:
        reply = await client.post(path, json={**body, "stream": False})
    assert reply.status_code == 200, reply.text
    return engine.calls[0].params, reply


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_an_answer_streams_by_default(path: str) -> None:
    async with app_client(FakeEngine()) as client:
        body = chat() if path == CHAT else generate()
        *pieces, last = lines_of(await client.post(path, json=body))
        whole = (await client.post(path, json={**body, "stream": False})).json()
    for line in pieces:
        assert (line["model"], line["done"]) == (MODEL, False)
        assert line["created_at"].endswith("Z") and "total_duration" not in line
    if path == CHAT:
        assert text_of(pieces) == ANSWER == whole["message"]["content"]
        assert last["message"] == {"role": "assistant", "content": ""}
        assert all(line["message"]["role"] == "assistant" for line in pieces)
    else:
        assert "".join(line["response"] for line in pieces) == ANSWER == whole["response"]
        assert last["response"] == "" and "context" not in last
    for end in (last, whole):
        assert end["done"] is True and end["done_reason"] == "stop" and METRICS <= end.keys()
        assert end["eval_count"] == 11 and end["prompt_eval_count"] > 2
        parts = end["prompt_eval_duration"] + end["eval_duration"]
        assert 0 < end["eval_duration"] and parts <= end["total_duration"]
        assert end["load_duration"] == 0


async def test_all_that_a_chat_may_have_reaches_the_engine() -> None:
    options = {
        **{"temperature": 0.5, "top_k": 7.0, "top_p": 0.8, "min_p": 0.1, "seed": 3},
        **{"num_predict": 9, "stop": ["never"], "repeat_penalty": 1.2, "num_ctx": 4096},
        **{"presence_penalty": 0.3, "frequency_penalty": 0.4, "top_n_sigma": 2},
        **{"typical_p": 1.0, "mirostat": 0, "tfs_z": 1, "repeat_last_n": -1, "num_keep": 4},
        **{"num_gpu": 99, "num_thread": 8, "use_mmap": True, "penalize_newline": True},
    }
    params, reply = await params_of(chat(options=options, keep_alive="5m"))
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.8, 0.1)
    assert (params.seed, params.max_tokens, params.stop) == (3, 9, ("never",))
    assert (params.repetition_penalty, params.presence_penalty) == (1.2, 0.3)
    assert (params.frequency_penalty, params.top_n_sigma) == (0.4, 2)
    unused = {"num_keep", "num_gpu", "num_thread", "use_mmap"}
    named = {f"options.{name}" for name in unused} | {"keep_alive"}
    assert set(reply.headers["x-termgen-not-used"].split(", ")) == named
    assert "x-termgen-ignored" not in reply.headers


async def test_options_that_mean_none() -> None:
    own = {"repetition_penalty": 1.3, "temperature": 0.2}
    given = {"num_predict": -2, "seed": -1, "repeat_last_n": 0, "top_k": -1, "stop": None}
    params, _ = await params_of(chat(options=given), default_params=own)
    assert (params.max_tokens, params.seed, params.repetition_penalty) == (None, None, 1.0)
    assert (params.temperature, params.top_k) == (0.2, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 9}, "options.temperature must be in [0, 2]"),
        ({"temperature": "hot"}, "options.temperature must be a finite number"),
        ({"top_k": 1.5}, "options.top_k must be"),
        ({"top_p": -1}, "options.top_p must be"),
        ({"repeat_penalty": 0}, "options.repeat_penalty must be"),
        ({"num_predict": 0}, "options.num_predict must be"),
        ({"num_predict": "x"}, "options.num_predict must be"),
        ({"num_ctx": 8192}, "options.num_ctx is 8192, and this server's context has 4096"),
        ({"stop": [""]}, "options.stop"),
        ({"mirostat": 2}, "options.mirostat is not supported here"),
        ({"typical_p": 0.5}, "options.typical_p is not supported here"),
        ({"grammar": "root ::= x"}, "options.grammar is not supported here"),
        ({"dry_multiplier": 0.8}, "options.dry_multiplier is not supported"),
        ({"vocab_only": True}, "options.vocab_only is not supported"),
        ({"penalize_newline": False}, "options.penalize_newline is not supported"),
        ({"max_tokens": 5}, "its name here is options.num_predict"),
        ({"repetition_penalty": 2}, "its name here is options.repeat_penalty"),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "options.repeat_last_n must be -1, or 0"),
        (5, "options must be an object"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_an_option_is_honoured_or_named(options: Any, words: str, path: str) -> None:
    body = chat(options=options) if path == CHAT else generate(options=options)
    async with app_client(FakeEngine()) as client:
        status, message = await error_of(client, path, body)
    assert status == 400 and words in message


async def test_a_penalty_of_the_model_counts_for_its_reach() -> None:
    """The option alone changes what the penalty does that the model's files ask for."""
    body = chat(options={"repeat_last_n": 64})
    params, _ = await params_of(body)
    assert not params.has_penalties
    info = make_model_info(default_params={"repetition_penalty": 1.1})
    async with app_client(FakeEngine(model=info)) as client:
        status, message = await error_of(client, CHAT, body)
    assert status == 400 and "repeat_penalty looks at all tokens" in message


async def test_unknown_names_are_reported() -> None:
    _, reply = await params_of(chat(options={"new_thing": 1}, other=2, user="u"))
    assert set(reply.headers["x-termgen-ignored"].split(", ")) == {"options.new_thing", "other"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 0}, "use options.temperature"),
        ({"max_tokens": 5}, "use options.num_predict"),
        ({"repeat_penalty": 2}, "use options.repeat_penalty"),
        ({"response_format": {"type": "json_object"}}, "use format"),
        ({"grammar": "root ::= x"}, "grammar is not a field"),
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"truncate": True}, "truncate is not supported"),
        ({"shift": True}, "shift is not supported"),
        ({"cache_salt": "a"}, "cache_salt is not supported"),
        ({"tool_choice": "required"}, "tool_choice is not supported"),
        ({"format": "xml"}, "format must be `json` or a JSON schema"),
        ({"format": [5]}, "format must be `json` or a JSON schema"),
        ({"think": "hard"}, "think must be true, false, low"),
        ({"keep_alive": "soon"}, "keep_alive must be a number of seconds"),
        ({"keep_alive": [5]}, "keep_alive must be a number of seconds"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be between 0 and 20"),
        ({"stream": "yes"}, "stream must be true or false"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_fields_of_other_apis_are_named(fields: Any, words: str, path: str) -> None:
    body = chat(**fields) if path == CHAT else generate(**fields)
    async with app_client(FakeEngine()) as client:
        status, message = await error_of(client, path, body)
    assert status == 400 and words in message


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (GENERATE, {"context": [1, 2]}, "use /api/chat"),
        (GENERATE, {"messages": MESSAGES}, "use /api/chat"),
        (CHAT, {"prompt": "hi"}, "use /api/generate"),
        (CHAT, {"images": [PIXEL]}, "use images of a message"),
        (GENERATE, {"raw": True, "system": "s"}, "system has no place in this prompt"),
        (GENERATE, {"suffix": "x", "images": [PIXEL]}, "images has no place"),
        (GENERATE, {"images": ["?"]}, "images[0] must be base64"),
        (CHAT, {"messages": [{"role": "judge"}]}, "messages[0].role must be system, user"),
        (CHAT, {"messages": [5]}, "messages[0] must be an object"),
        (CHAT, {"messages": [{"role": "user", "content": [1]}]}, "messages[0].content must be"),
        (CHAT, {"messages": [{"role": "user", "images": [5]}]}, "messages[0].images[0]"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (CHAT, {"tools": [{"function": {"name": "?"}}]}, "tools[0].function.name must have"),
    ],
)
async def test_other_faults_name_their_place(path: str, fields: Any, words: str) -> None:
    body = chat(**fields) if path == CHAT else generate(**fields)
    async with app_client(FakeEngine()) as client:
        status, message = await error_of(client, path, body)
    assert status == 400 and words in message


async def test_errors_before_a_field_is_read() -> None:
    async with app_client(FakeEngine(), api_key=("k",)) as client:
        assert await error_of(client, CHAT, chat()) == (401, (await _denied(client)))
        headers = {"authorization": "Bearer k"}
        broken = await client.post(
            CHAT, content=b"{", headers={**headers, "content-type": "application/json"}
        )
        assert broken.status_code == 400 and "not valid JSON" in broken.json()["error"]
        missing = await client.get("/api/nothing", headers=headers)
        assert missing.status_code == 404 and isinstance(missing.json()["error"], str)
        wrong = await client.get(CHAT, headers=headers)
        assert wrong.status_code == 405 and isinstance(wrong.json()["error"], str)


async def _denied(client: httpx.AsyncClient) -> str:
    return str((await client.get("/v1/models")).json()["error"]["message"])


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_names_of_models(path: str) -> None:
    body = chat() if path == CHAT else generate()
    async with app_client(FakeEngine(), served_model_name=("small", "org/x:q4")) as client:
        for name in ("small", "small:latest", "org/x:q4"):
            reply = await client.post(path, json={**body, "model": name, "stream": False})
            assert reply.json()["model"] == name
        for name in ("other", "small:q4", "org/x", "org/x:latest"):
            status, message = await error_of(client, path, {**body, "model": name})
            assert (status, message) == (404, f"model '{name}' not found")
        for none in ({"model": ""}, {"model": None}):
            assert await error_of(client, path, {**body, **none}) == (400, "model is required")
        assert (await error_of(client, path, {**body, "model": 5}))[0] == 400


async def test_a_request_without_a_question_loads_the_model() -> None:
    engine = FakeEngine()
    async with app_client(engine) as client:
        loaded = await client.post(CHAT, json={"model": MODEL})
        assert loaded.json()["message"] == {"role": "assistant", "content": ""}
        other = await client.post(GENERATE, json={"model": MODEL, "keep_alive": -1})
        assert other.json()["response"] == "" and "x-termgen-not-used" not in other.headers
        for reply in (loaded, other):
            assert reply.json()["done"] is True and reply.json()["done_reason"] == "load"
        unload = {"model": MODEL, "keep_alive": 0}
        for path in (CHAT, GENERATE):
            status, message = await error_of(client, path, unload)
            assert status == 400 and "keeps its model loaded" in message
            assert (await error_of(client, path, {**unload, "keep_alive": "0m"}))[0] == 400
        engine.sleep_level = 1
        assert (await error_of(client, CHAT, {"model": MODEL}))[0] == 503
    assert not engine.calls


async def test_what_becomes_the_prompt() -> None:
    engine = FakeEngine(model=make_model_info(tool_format=ToolFormat(knows_tools=True)))
    messages = [
        {"role": "System", "content": "Be short."},
        {"role": "user", "content": "Weather?", "images": [PIXEL]},
        {
            "role": "assistant",
            "thinking": "hm",
            "tool_calls": [
                {"function": {"name": "a", "arguments": {"x": 1}}},
                {"id": "mine", "function": {"name": "b", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "B", "tool_name": "b"},
        {"role": "tool", "content": "A"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "It is"},
    ]
    async with app_client(engine) as client:
        reply = await client.post(CHAT, json=chat(messages=messages, stream=False))
        assert reply.headers["x-termgen-not-used"] == "messages.image"
        await client.post(GENERATE, json=generate(system="s", stream=False))
        await client.post(GENERATE, json=generate(raw=True, stream=False))
        await client.post(GENERATE, json=generate(suffix="after", stream=False))
    answered, asked, raw, fill = [call.prompt for call in engine.calls]
    assert isinstance(answered, ChatPrompt) and answered.continue_final_message
    system, user, calls, first, second, _, begun = answered.messages
    assert (system["role"], system["content"]) == ("system", "Be short.")
    assert user["content"] == "[image, 9 KB, not read by this model]\nWeather?"
    assert calls["reasoning_content"] == "hm"
    assert [call["id"] for call in calls["tool_calls"]] == ["call_0", "mine"]
    assert (first["tool_call_id"], first["name"]) == ("mine", "b")
    assert (second["tool_call_id"], second["name"]) == ("call_0", "a")
    assert begun["content"] == "It is"
    assert isinstance(asked, ChatPrompt)
    assert [m["content"] for m in asked.messages] == ["s", "hi"]
    assert raw == "hi" and fill == FillPrompt("hi", "after")


async def test_a_model_without_a_template_goes_on_with_the_text() -> None:
    engine = FakeEngine(model=make_model_info(has_chat_template=False))
    async with app_client(engine) as client:
        lines = lines_of(await client.post(GENERATE, json=generate()))
        assert "".join(line["response"] for line in lines) == ANSWER
        status, message = await error_of(client, GENERATE, generate(system="s"))
    assert engine.calls[0].prompt == "hi"
    assert status == 400 and "no chat template" in message


async def test_images_can_be_refused() -> None:
    messages = [{"role": "user", "content": "What?", "images": [PIXEL]}]
    async with app_client(FakeEngine(), images="refuse") as client:
        answered = await error_of(client, CHAT, chat(messages=messages))
        assert answered == (400, "messages[0].images: this model reads no images")
        answered = await error_of(client, GENERATE, generate(images=[PIXEL]))
        assert answered == (400, "images: this model reads no images")


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_log_probabilities(path: str) -> None:
    body = chat(logprobs=True) if path == CHAT else generate(logprobs=True, raw=True)
    async with app_client(FakeEngine()) as client:
        lines = lines_of(await client.post(path, json=body))
        whole = (await client.post(path, json={**body, "stream": False})).json()
        top = (await client.post(path, json={**body, "stream": False, "top_logprobs": 2})).json()
    streamed = [entry for line in lines for entry in line.get("logprobs", ())]
    assert streamed == whole["logprobs"] and "".join(e["token"] for e in streamed) == ANSWER
    assert streamed[0].keys() == {"token", "logprob", "bytes"}
    assert len(top["logprobs"][0]["top_logprobs"]) == 2


async def test_an_answer_that_is_cut_says_so() -> None:
    async with app_client(FakeEngine()) as client:
        lines = lines_of(await client.post(CHAT, json=chat(options={"num_predict": 2})))
        stopped = lines_of(await client.post(CHAT, json=chat(options={"stop": [" wor"]})))
    assert (text_of(lines), lines[-1]["done_reason"]) == ("Hello,", "length")
    assert lines[-1]["eval_count"] == 2
    assert (text_of(stopped), stopped[-1]["done_reason"]) == ("Hello,", "stop")


@pytest.mark.parametrize("fault", [{"raise_after": 2}, {"fail_after": 2}])
async def test_a_stream_that_fails_ends_with_an_error(fault: dict[str, int]) -> None:
    async with app_client(FakeEngine(script=Script(**fault))) as client:
        lines = lines_of(await client.post(CHAT, json=chat()))
        whole = await client.post(CHAT, json=chat(stream=False))
    assert text_of(lines[:-1]) == "Hello,"
    assert lines[-1].keys() == {"error"} and "the step failed" in lines[-1]["error"]
    assert whole.status_code == 500 and whole.json().keys() == {"error"}


async def test_a_silent_stream_is_kept_open_with_what_clients_can_read() -> None:
    engine = FakeEngine(script=Script(hold_after=3))
    async with socket_client(engine, sse_ping_interval=0.05) as client:
        async with client.stream("POST", CHAT, json=chat()) as reply:
            raw = b""
            async for data in reply.aiter_bytes():
                raw += data
                if raw.endswith(b"  "):
                    engine.release.set()
    lines = raw.decode().split("\n")
    assert lines.pop() == "" and all(lines) and any(line.startswith("  {") for line in lines)
    assert text_of([json.loads(line) for line in lines]) == ANSWER


async def test_prompts_that_do_not_fit_are_named_as_the_client_knows_them() -> None:
    async with app_client(FakeEngine(model=make_model_info(max_model_len=20))) as client:
        for path, body in ((CHAT, chat()), (GENERATE, generate(prompt="x" * 40, raw=True))):
            body = {**body, "messages": [{"role": "user", "content": "x" * 40}]}
            if path == GENERATE:
                del body["messages"]
            status, message = await error_of(client, path, body)
            assert status == 400 and "maximum context length is 20" in message


# -- thoughts and calls --------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def in_pieces(text: str) -> Script:
    return Script(pieces=[text[i : i + 3] for i in range(0, len(text), 3)])


async def test_calls_come_whole_with_arguments_as_objects() -> None:
    script = in_pieces(f"Let me see. {CALL}\n{CALL.replace('Paris', 'Rome')}")
    async with app_client(FakeEngine(script=script)) as client:
        lines = lines_of(await client.post(CHAT, json=chat(tools=[TOOL])))
        whole = (await client.post(CHAT, json=chat(tools=[TOOL], stream=False))).json()
    assert text_of(lines).strip() == "Let me see." == whole["message"]["content"].strip()
    streamed = [c for line in lines for c in line["message"].get("tool_calls", ())]
    assert lines[-1]["done_reason"] == whole["done_reason"] == "stop"
    for calls in (streamed, whole["message"]["tool_calls"]):
        functions = [call["function"] for call in calls]
        assert functions == [
            {"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}},
            {"index": 1, "name": "get_weather", "arguments": {"city": "Rome"}},
        ]
        assert len({call["id"] for call in calls}) == 2


async def test_a_call_that_was_cut_off_is_no_call() -> None:
    script = Script(pieces=[CALL[:-25]], finish_reason=FinishReason.LENGTH)
    async with app_client(FakeEngine(script=script)) as client:
        lines = lines_of(await client.post(CHAT, json=chat(tools=[TOOL])))
        whole = (await client.post(CHAT, json=chat(tools=[TOOL], stream=False))).json()
    assert not any("tool_calls" in line["message"] for line in lines)
    assert '"name": "get_weather"' in text_of(lines) and lines[-1]["done_reason"] == "length"
    assert whole["message"] == {"role": "assistant", "content": text_of(lines)}


class Thinker:
    """A parser as transformers has them: what comes before a line is thought."""

    def __init__(self, prompt_ids: Any, tools: Any = ()) -> None:
        self._thinks = True

    def feed(self, text: str) -> list[dict[str, Any]]:
        events = []
        for char in text:
            if char == "|":
                self._thinks = False
                continue
            field = "thinking" if self._thinks else "content"
            events.append({"type": "region_chunk", "field": field, "text": char})
        return events

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        return {}, []


def thinking_model(*variables: str, **fields: Any) -> FakeEngine:
    tool_format = ToolFormat(knows_tools=True, template_variables=variables, **fields)
    return FakeEngine(
        script=in_pieces("a thought|an answer"), model=make_model_info(tool_format=tool_format)
    )


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_thoughts_have_a_field_of_their_own(path: str) -> None:
    body = chat() if path == CHAT else generate()
    engine = thinking_model("enable_thinking", new_parser=Thinker)
    async with app_client(engine) as client:
        for think in (None, True, False, "high"):
            asked = {**body, "think": think}
            lines = lines_of(await client.post(path, json=asked))
            whole = (await client.post(path, json={**asked, "stream": False})).json()
            parts = [line["message"] if path == CHAT else line for line in (*lines, whole)]
            thoughts = [part.get("thinking", "") for part in parts]
            texts = [part["content" if path == CHAT else "response"] for part in parts]
            shown = "" if think is False else "a thought"
            assert "".join(thoughts[:-1]) == thoughts[-1] == shown
            assert "".join(texts[:-1]) == texts[-1] == "an answer"
    wishes = [_kwargs(call) for call in engine.calls[::2]]
    assert wishes == [{}, {"enable_thinking": True}, {"enable_thinking": False}] + [
        {"enable_thinking": True}
    ]


def _kwargs(call: GenerateCall) -> Any:
    assert isinstance(call.prompt, ChatPrompt)
    return call.prompt.template_kwargs


async def test_levels_of_thinking() -> None:
    engine = thinking_model("reasoning_effort", new_parser=Thinker)
    async with app_client(engine) as client:
        for think in (True, "low", False):
            await client.post(CHAT, json=chat(think=think))
    assert [_kwargs(call) for call in engine.calls] == [
        {"reasoning_effort": "medium"},
        {"reasoning_effort": "low"},
        {},
    ]


async def test_a_model_that_cannot_think_says_so() -> None:
    async with app_client(thinking_model()) as client:
        answered = await error_of(client, CHAT, chat(think=True))
        assert answered == (400, f'"{MODEL}" does not support thinking')
        reply = await client.post(CHAT, json=chat(think=False, stream=False))
    assert reply.status_code == 200 and "x-termgen-not-used" not in reply.headers


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_a_format_is_a_grammar(path: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = chat() if path == CHAT else generate()
    for given, kind in (("json", "json_object"), (schema, "json"), ("", None)):
        params, _ = await params_of({**body, "format": given}, path)
        wanted = params.structured_outputs
        assert (None if wanted is None else wanted.kind) == kind
        if kind == "json":
            assert json.loads(wanted.json) == schema


async def test_a_client_that_leaves_ends_its_answer() -> None:
    engine = FakeEngine(script=Script(hold_after=2))
    async with socket_client(engine) as client:
        async with client.stream("POST", CHAT, json=chat()) as reply:
            assert json.loads(await anext(reply.aiter_lines()))["message"]["content"]
        async with asyncio.timeout(10):
            while engine.live:
                await asyncio.sleep(0.01)
    assert len(engine.aborted) == 1


async def test_large_bodies_are_parsed_elsewhere() -> None:
    engine = FakeEngine(model=make_model_info(max_model_len=100_000))
    long = "word " * 10_000
    async with socket_client(engine) as client:
        for path, body in (
            (CHAT, chat(messages=[{"role": "user", "content": long}], tools=[TOOL])),
            (GENERATE, generate(prompt=long, images=[PIXEL, f"{PIXEL[:76]}\n{PIXEL[76:]}"])),
        ):
            reply = await client.post(path, json={**body, "stream": False})
            assert reply.status_code == 200 and reply.json()["eval_count"] == 11, reply.text
            answered = await error_of(client, path, {**body, "options": {"top_k": "x"}})
            assert answered == (400, "options.top_k must be an integer, not 'x'")
            answered = await error_of(client, path, {**body, "model": "y"})
            assert answered == (404, "model 'y' not found")


class Sink:
    def __init__(self) -> None:
        self.reports: list[RequestReport] = []

    def add(self, report: RequestReport) -> None:
        self.reports.append(report)

    def close(self) -> None:
        pass


async def test_reports_and_metrics_count_them() -> None:
    state, sink = ServerState(ServerConfig()), Sink()
    state._sinks.append(sink)
    state.attach(FakeEngine())
    transport = httpx.ASGITransport(app=build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        await client.post(CHAT, json=chat())
        await client.post(GENERATE, json=generate(stream=False))
        await client.post(CHAT, json={"model": MODEL})
        metrics = (await client.get("/metrics")).text
        described = (await client.get("/openapi.json")).json()["paths"]
    answered = [(r.path, r.operation, r.outcome, r.num_output_tokens) for r in sink.reports]
    assert answered == [(CHAT, "chat", "ok", 11), (GENERATE, "text_completion", "ok", 11)]
    assert all(report.answer_id.startswith("ollama-") for report in sink.reports)
    assert 'termgen_generation_tokens_total{model="fake/model-1"} 22.0' in metrics
    for path in (CHAT, GENERATE, "/api/show", "/api/pull"):
        content = described[path]["post"]["requestBody"]["content"]
        assert "model" in content["application/json"]["schema"]["properties"]
    error = described[CHAT]["post"]["responses"]["4XX"]["content"]["application/json"]["schema"]
    assert error == {"$ref": "#/components/schemas/OllamaError"}
    assert {"/api/tags", "/api/ps", "/api/version"} <= described.keys()
