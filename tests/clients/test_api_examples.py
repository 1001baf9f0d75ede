"""The examples of docs/api.md, run as they stand against a real server on a tiny model."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

from real_server import serving_tiny
from server_harness import read_events

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
ADDRESS = "http://127.0.0.1:8000"


def examples(language: str, address: str) -> list[str]:
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert all(ADDRESS in blocks[i] for i in range(len(blocks)) if language == "sh")
    return [block.replace(ADDRESS, address.rstrip("/")) for block in blocks]


async def output_of(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_the_examples_run(tiny_llama_dir: Path) -> None:
    async with serving_tiny(tiny_llama_dir) as (client, _):
        address = str(client.base_url)
        commands = examples("sh", address)
        programs = examples("python", address)
        assert len(commands) >= 4 and len(programs) >= 2
        program = "\n".join(programs)
        printed, *answers = await asyncio.gather(
            output_of(sys.executable, "-c", program),
            *(output_of("bash", "-c", command) for command in commands),
        )
    assert printed.endswith("temperature invalid_value\n")
    for command, answer in zip(commands, answers, strict=True):
        if '"stream": true' in command:
            *_, last = read_events(answer)
            assert last["usage"]["completion_tokens"] > 0
            continue
        body = json.loads(answer)
        assert "error" not in body, body
        sent = json.loads(re.search(r"-d '(.*)'", command, re.DOTALL)[1])  # type: ignore[index]
        assert len(body["choices"]) == sent.get("n", 1)
        if sent.get("echo"):
            assert body["choices"][0]["text"] == sent["prompt"]
            assert body["choices"][0]["logprobs"]["token_logprobs"][0] is None
        if sent.get("include_timings"):
            assert len(body["termgen"]["timings"]) == sent["n"]
