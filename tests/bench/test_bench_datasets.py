"""Datasets and times of the load test: seeded, of the lengths asked for, and readable errors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from termgen.bench.datasets import check_fits, make_prompts, warmup_prompts
from termgen.bench.options import ServeOptions
from termgen.bench.prompts import Prompt, RequestMaker, Turn
from termgen.bench.serve import due_times
from termgen.errors import ConfigError


def prompts(**options: object) -> list[Prompt]:
    return make_prompts(ServeOptions(**options), seed=3)  # type: ignore[arg-type]


def words(prompt: Prompt) -> tuple[int, ...]:
    return tuple(w for turn in prompt.turns for w in turn.words)


def test_random_prompts_are_seeded_and_as_long_as_asked() -> None:
    made = prompts(num_prompts=50, random_input_len=20, random_output_len=7)
    assert made == prompts(num_prompts=50, random_input_len=20, random_output_len=7)
    assert {(p.num_words, p.output_len) for p in made} == {(20, 7)}
    assert len({words(p)[:4] for p in made}) == 50, "no two begin alike"
    other = make_prompts(ServeOptions(num_prompts=50, random_input_len=20), seed=4)
    assert words(other[0]) != words(made[0])
    warm = warmup_prompts(made, 3, seed=3)
    assert {p.num_words for p in warm} == {20} and len(warm) == 3
    assert not {words(p)[:4] for p in warm} & {words(p)[:4] for p in made}


def test_the_range_ratio_spreads_lengths_both_ways() -> None:
    made = prompts(
        num_prompts=400,
        random_input_len=100,
        random_output_len=10,
        random_range_ratio=0.5,
        random_prefix_len=6,
    )
    sizes = [p.num_words - 6 for p in made]
    assert min(sizes) >= 50 and max(sizes) <= 150 and min(sizes) < 60 and max(sizes) > 140
    assert {p.output_len for p in made} == set(range(5, 16))
    assert len({words(p)[:6] for p in made}) == 1


def test_prefixes_are_repeated_and_endings_are_not() -> None:
    made = prompts(
        dataset_name="prefix_repetition",
        num_prompts=30,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_prefix_len=8,
        prefix_repetition_suffix_len=5,
        prefix_repetition_output_len=2,
    )
    beginnings = [words(p)[:8] for p in made]
    assert len(set(beginnings)) == 3
    assert all(beginnings.count(b) == 10 for b in set(beginnings))
    assert beginnings != beginnings[:3] * 10, "in no order"
    assert len({words(p)[8:] for p in made}) == 30
    assert {(p.num_words, p.output_len) for p in made} == {(13, 2)}


def test_conversations_grow() -> None:
    made = prompts(dataset_name="synthetic-chat", num_prompts=300)
    by_first: dict[tuple[int, ...], list[Prompt]] = {}
    for prompt in made:
        assert [t.role for t in prompt.turns[:2]] in (["user"], ["user", "assistant"])
        assert prompt.turns[-1].role == "user"
        by_first.setdefault(prompt.turns[0].words, []).append(prompt)
    longest = max(by_first.values(), key=len)
    assert len(longest) > 3
    for earlier, later in zip(longest, longest[1:], strict=False):
        assert later.turns[: len(earlier.turns)] == earlier.turns
        assert len(later.turns[len(earlier.turns)].words) == earlier.output_len
    medians = (
        np.median([len(p.turns[-1].words) for p in made]),
        np.median([p.output_len for p in made]),
    )
    assert 45 < medians[0] < 80 and 160 < medians[1] < 250


def write(path: Path, *rows: object) -> str:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_trace_has_its_times_and_shares_its_hashes(tmp_path: Path) -> None:
    def row(at: float, size: int, *hashes: int) -> dict[str, object]:
        return {"timestamp": at, "input_length": size, "output_length": 4, "hash_ids": hashes}

    path = write(tmp_path / "t.jsonl", row(500, 700, 1, 2), "", row(750, 600, 1, 9), row(1500, 10))
    made = prompts(dataset_name="trace", dataset_path=path)
    assert [p.at_s for p in made] == [0.0, 0.25, 1.0]
    assert [p.num_words for p in made] == [700, 600, 10]
    assert words(made[0])[:512] == words(made[1])[:512]
    assert words(made[0])[512:600] != words(made[1])[512:]
    assert len(prompts(dataset_name="trace", dataset_path=path, num_prompts=2)) == 2


def test_custom_prompts_are_sent_as_they_are(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write(tmp_path / "c.jsonl", {"prompt": "Once", "output_tokens": 9}, {"messages": chat})
    made = prompts(dataset_name="custom", dataset_path=path, custom_output_len=5)
    assert [p.output_len for p in made] == [9, 5]
    text = RequestMaker("m", is_chat=False, token_pool=[1, 2])
    assert text.body(made[0])["prompt"] == "Once"
    assert text.body(made[1])["prompt"] == "System: Be brief.\nUser: Hi\nAssistant:"
    chats = RequestMaker("m", is_chat=True, fields={"temperature": 0.5})
    body = chats.body(made[1])
    assert body["messages"] == chat and body["max_completion_tokens"] == 5
    assert body["stream"] is True and body["temperature"] == 0.5 and body["model"] == "m"
    assert body["stream_options"] == {"include_usage": True}


def test_prompts_become_tokens_where_the_server_can_tokenise() -> None:
    prompt = Prompt((Turn("user", (0, 1, 2, 3)),), 4)
    assert RequestMaker("m", False, token_pool=[7, 8, 9]).body(prompt)["prompt"] == [7, 8, 9, 7]
    assert len(RequestMaker("m", False).body(prompt)["prompt"].split()) == 4


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("custom", ['{"prompt": "a"}', '{"prompt": '], "line 2: is not JSON"),
        ("custom", ["[1]"], "line 1: must be a JSON object"),
        ("custom", ['{"text": "a"}'], "line 1: needs either prompt or messages"),
        ("custom", ['{"prompt": ""}'], "line 1: prompts and contents must be text"),
        ("custom", ['{"prompt": "a", "output_tokens": 0}'], "output_tokens must be an integer"),
        ("custom", ['{"messages": [{"role": "boss"}]}'], "line 1: each message needs a role"),
        ("custom", [""], "has no prompts"),
        ("trace", ['{"timestamp": 0, "input_length": 3}'], "output_length must be an integer"),
        (
            "trace",
            [
                '{"timestamp": 5, "input_length": 3, "output_length": 1}',
                '{"timestamp": 4, "input_length": 3, "output_length": 1}',
            ],
            "line 2: timestamp is earlier",
        ),
        (
            "trace",
            ['{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": ["x"]}'],
            "hash_ids must be a list of integers",
        ),
    ],
)
def test_a_broken_file_is_named_with_its_line(
    tmp_path: Path, name: str, rows: list[str], words: str
) -> None:
    path = write(tmp_path / "x.jsonl", *rows)
    with pytest.raises(ConfigError, match=words) as caught:
        prompts(dataset_name=name, dataset_path=path)
    assert path in str(caught.value) and caught.value.param == "dataset_path"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.jsonl cannot be read: No such file"):
        prompts(dataset_name="custom", dataset_path=str(tmp_path / "none.jsonl"))
    (tmp_path / "raw").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        prompts(dataset_name="custom", dataset_path=str(tmp_path / "raw"))


def test_what_the_context_cannot_hold_is_refused() -> None:
    made = prompts(num_prompts=2, random_input_len=60, random_output_len=41)
    with pytest.raises(ConfigError, match="up to 101 tokens, but the server's context holds 100"):
        check_fits(made, 100)
    check_fits(made, 101)
    check_fits(made, None)


def test_times_are_those_of_the_rate() -> None:
    times = due_times(2000, 50.0, burstiness=1.0, seed=1)
    assert times == due_times(2000, 50.0, burstiness=1.0, seed=1)
    assert times == sorted(times) and times[-1] == pytest.approx(40.0)
    gaps = np.diff([0.0, *times])
    assert 0.9 < np.std(gaps) / np.mean(gaps) < 1.1, "Poisson: as spread as long"
    even = np.diff([0.0, *due_times(2000, 50.0, burstiness=100.0, seed=1)])
    assert np.std(even) / np.mean(even) < 0.2
    bursts = np.diff([0.0, *due_times(2000, 50.0, burstiness=0.1, seed=1)])
    assert np.std(bursts) / np.mean(bursts) > 2
    assert due_times(3, math.inf, burstiness=1.0, seed=1) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"base_url": "127.0.0.1:8000"}, "base_url must be like http"),
        ({"base_url": "http://h:99999"}, "base_url must be like http"),
        ({"base_url": "ftp://h"}, "base_url must be like http"),
        ({"host": "a"}, "host needs --port"),
        ({"port": 80}, "port needs --host"),
        ({"host": "a", "port": 1, "base_url": "http://x"}, "exclude each other"),
        ({"dataset_name": "trace"}, "trace needs --dataset-path"),
        ({"dataset_path": "x"}, "random reads no file"),
        ({"goodput": ("itl:5",)}, "goodput takes ttft, tpot, e2el"),
        ({"goodput": ("ttft",)}, "not 'ttft'"),
        ({"percentile_metrics": "ttft,x"}, "not 'x'"),
        ({"metric_percentiles": "101"}, "numbers from 0 to 100"),
        ({"extra_body": "{"}, "extra_body is not JSON"),
        ({"extra_body": "[]"}, "must be a JSON object"),
        ({"request_rate": 0.0}, "request_rate must be greater than 0"),
        ({"request_rate": float("nan")}, "request_rate must be a number"),
        ({"burstiness": float("inf")}, "burstiness must be a number"),
        ({"burstiness": 0.5}, "burstiness is of arrivals at a rate: give --request-rate"),
        ({"burstiness": 0.5, "request_rate": float("inf")}, "burstiness is of arrivals"),
        (
            {"burstiness": 0.5, "dataset_name": "trace", "dataset_path": "x"},
            "burstiness is of arrivals",
        ),
        (
            {"dataset_name": "synthetic-chat", "random_output_len": 5},
            "random_output_len is for dataset random, not synthetic-chat",
        ),
        ({"prefix_repetition_num_prefixes": 3}, "is for dataset prefix-repetition, not random"),
        ({"custom_output_len": 3}, "custom_output_len is for dataset custom"),
        ({"result_dir": "x"}, "result_dir needs --save-result"),
    ],
)
def test_wrong_options_are_named(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServeOptions(**values)  # type: ignore[arg-type]


def test_urls_are_cut_to_their_root() -> None:
    assert ServeOptions(base_url="http://h:1/v1/").url == "http://h:1"
    assert ServeOptions(host="h", port=2).url == "http://h:2"
    assert ServeOptions().url is None
    assert ServeOptions().ready_timeout_s == 600
    assert ServeOptions(host="h", port=2).ready_timeout_s == 10
    assert ServeOptions(request_rate=float("inf")).request_rate == math.inf
