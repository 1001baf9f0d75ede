"""The programs of examples/ and of the README, run on a tiny model, with their output checked."""

from __future__ import annotations

import asyncio
import io
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from real_server import serving_tiny

from termgen import LLM, SamplingParams

FOLDER = Path(__file__).resolve().parents[1] / "examples"
README = FOLDER.parent / "README.md"
QUESTIONS = ("Hello, how are you today?", "What is the capital of France?")


class Examples:
    """Runs a program with arguments, in this process, and returns what it printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def run(self, name: str, *arguments: str, typed: str = "") -> str:
        path = str(FOLDER / name)
        self._monkeypatch.setattr(sys, "argv", [path, *arguments])
        self._monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        self._capsys.readouterr()
        runpy.run_path(path, run_name="__main__")
        return self._capsys.readouterr().out


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Examples:
    return Examples(monkeypatch, capsys)


def test_every_example_is_tested_short_and_in_the_list() -> None:
    names = {path.name for path in FOLDER.glob("*.py")}
    assert names == set(re.findall(r'examples\.run,? ?\(?\s*"(\w+\.py)"', own_source()))
    assert names == set(re.findall(r"\]\((\w+\.py)\)", (FOLDER / "README.md").read_text()))
    for name in names:
        assert len((FOLDER / name).read_text().splitlines()) <= 60, name


def own_source() -> str:
    return Path(__file__).read_text().replace("to_thread(examples.run, ", "examples.run(")


def test_chat(examples: Examples, tiny_llama_dir: Path) -> None:
    arguments = ("--model", str(tiny_llama_dir), "--max-tokens", "16")
    shown = examples.run("chat.py", *arguments, typed="\n".join((*QUESTIONS, "")))

    params = SamplingParams(temperature=0.2, top_p=0.9, seed=0, max_tokens=16)
    expected, messages = "", []
    with LLM(str(tiny_llama_dir)) as llm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            output = llm.chat(messages, params)[0]
            answer, num_tokens = output.outputs[0].text, len(output.prompt_token_ids)
            messages.append({"role": "assistant", "content": answer})
            expected += f"> {answer}\n[{output.num_cached_tokens} of {num_tokens} tokens cached]\n"
    assert shown == expected + "> "
    assert output.num_cached_tokens > 0, "the second question found nothing of the first"


def test_batch(examples: Examples, tiny_llama_dir: Path) -> None:
    arguments = ("--model", str(tiny_llama_dir), "--max-tokens", "8")
    *lines, last = examples.run("batch.py", *arguments, *QUESTIONS).splitlines()

    with LLM(str(tiny_llama_dir)) as llm:
        outputs = llm.generate(list(QUESTIONS), SamplingParams(temperature=0.0, max_tokens=8))
    texts = [output.outputs[0].text for output in outputs]
    assert lines == [f"{q!r} -> {text!r}" for q, text in zip(QUESTIONS, texts, strict=True)]
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert re.fullmatch(rf"{num_tokens} tokens in \d+\.\d s, [\d.]+ tokens/s", last)


def test_the_readme_runs(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert code.count('"smollm2-135m"') == 1
    exec(compile(code.replace('"smollm2-135m"', repr(str(tiny_llama_dir))), README, "exec"), {})
    shown = capsys.readouterr().out
    assert shown.startswith("The capital of France is ->") and "\nWater boils at ->" in shown


def test_structured_output(examples: Examples, tiny_llama_dir: Path) -> None:
    schema = runpy.run_path(str(FOLDER / "structured_output.py"))["SCHEMA"]
    shown = examples.run("structured_output.py", "--model", str(tiny_llama_dir), "--seed", "7")
    cat, end = json.JSONDecoder().raw_decode(shown)
    jsonschema.validate(cat, schema)
    sentence = f"{cat['name']} is {cat['colour']} and {cat['age']} years old."
    assert shown[end:] == f"\n{sentence}\n"


async def test_openai_client(examples: Examples, tiny_llama_dir: Path) -> None:
    question = QUESTIONS[0]
    async with serving_tiny(tiny_llama_dir) as (client, _):
        arguments = ("--url", str(client.base_url) + "/v1", "--max-tokens", "12", question)
        shown = await asyncio.to_thread(examples.run, "openai_client.py", *arguments)
        messages = [{"role": "user", "content": question}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 12}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    usage = answer["usage"]
    assert shown == (
        f"{answer['choices'][0]['message']['content']}\n"
        f"[{usage['prompt_tokens']} + {usage['completion_tokens']} tokens]\n"
    )


@pytest.mark.parametrize("options", [(), ("--again",)])
async def test_tool_loop(
    options: tuple[str, ...],
    examples: Examples,
    tiny_model_dir: Callable[..., Path],
    tmp_path: Path,
) -> None:
    sizes = {"a.txt": 12, "b.txt": 345}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    # Its tokenizer knows few words, so tools take many tokens.
    folder = tiny_model_dir("llama", max_position_embeddings=1536)
    async with serving_tiny(folder, max_model_len=1536) as (client, _):
        arguments = ("--url", str(client.base_url) + "/v1", "--folder", str(tmp_path), *options)
        shown = await asyncio.to_thread(examples.run, "tool_loop.py", *arguments)
    call, _, answer = shown.partition("\n")
    assert call in [f"size_of({name!r}) = {size}" for name, size in sizes.items()]
    assert answer.strip(), "no answer came after the call"
