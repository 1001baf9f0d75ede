"""Comparisons: regressions found, their confidence, and files refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_runs import make_run

from termgen.bench.compare import compare
from termgen.bench.options import CompareOptions, ServeOptions
from termgen.bench.serve import document
from termgen.commands.cli import main
from termgen.errors import ConfigError


def write(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def serve_file(path: Path, mean_s: float, *, seed: int, count: int = 150, **flags: Any) -> str:
    times = np.random.default_rng(seed).gamma(4.0, mean_s / 4, size=count)
    run = make_run(ServeOptions(**flags), first_s=times.tolist())
    return write(path, document(run, None))


def compared(before: str, after: str, **options: Any) -> Any:
    return compare(CompareOptions(before=before, after=after, **options))


def test_a_clear_change_is_found_and_noise_is_not(tmp_path: Path) -> None:
    base = serve_file(tmp_path / "a.json", 0.10, seed=1)
    noise = serve_file(tmp_path / "n.json", 0.10, seed=2)
    slow = serve_file(tmp_path / "s.json", 0.15, seed=3)
    alike = compared(base, noise)
    assert alike.regressions == [] and {c.verdict for c in alike.changes} == {"same"}
    worse = compared(base, slow)
    by_name = {c.name: c for c in worse.changes}
    assert {"mean ttft", "p50 ttft", "mean e2el", "p99 ttft"} <= by_name.keys()
    assert {"mean ttft", "p50 ttft", "mean e2el"} <= set(worse.regressions)
    low, high = by_name["mean ttft"].interval
    assert 0.2 < low < 0.5 < high < 1.0, "the true change is within"
    assert by_name["mean tpot"].verdict == "same"
    better = {c.name: c.verdict for c in compared(slow, base).changes}
    assert better["mean ttft"] == "better" and "worse" not in better.values()
    assert worse.differences == ()


def test_intervals_hold_the_true_change_about_as_often_as_they_say(tmp_path: Path) -> None:
    """There is no true change, so about 1 of 20 intervals may miss zero."""
    missed = 0
    for seed in range(60):
        files = [
            serve_file(tmp_path / f"{i}.json", 0.1, seed=seed * 2 + i, count=40) for i in (0, 1)
        ]
        changes = compared(*files, resamples=100).changes
        low, high = next(c.interval for c in changes if c.name == "mean ttft")
        missed += not low <= 0 <= high
    assert 0 < missed <= 9, missed


def test_throughput_is_better_when_it_is_more(tmp_path: Path) -> None:
    def file(name: str, rate: float) -> str:
        noise = np.random.default_rng(len(name)).normal(rate, 3, size=30)
        return write(tmp_path / name, {"output_tokens_by_second": [*noise.tolist(), 1.0]})

    changes = compared(file("a", 100), file("bb", 90)).changes
    assert [(c.name, c.verdict) for c in changes] == [("mean output throughput", "worse")]
    assert changes[0].change == pytest.approx(-0.1, abs=0.03), "the last second is left out"
    assert compared(file("a", 100), file("bb", 90), threshold=50.0).regressions == []


def test_files_of_bench_latency_and_of_vllm(tmp_path: Path) -> None:
    fast = write(tmp_path / "f", {"latencies": [1.0, 1.1] * 10})
    slow = write(tmp_path / "s", {"latencies": [2.0, 2.1] * 10})
    assert compared(fast, slow).regressions == ["mean batch latency", "p50 batch latency"]
    theirs = {"ttfts": [0.1] * 9, "itls": [[0.1, 0.3]] * 9, "output_lens": [3] * 9}
    same = compared(*[write(tmp_path / "v", theirs)] * 2)
    values = {c.name: c.before for c in same.changes}
    assert values["mean e2el"] == pytest.approx(500) and values["mean tpot"] == pytest.approx(200)


def test_a_server_that_fails_requests_is_worse_however_fast_the_rest_is(tmp_path: Path) -> None:
    slow, fast = [0.1] * 200, [0.02] * 200
    base = write(tmp_path / "a", document(make_run(ServeOptions(), first_s=slow), None))
    for failures, verdict in ((180, "worse"), (8, "worse"), (1, "same")):
        run = make_run(ServeOptions(), first_s=fast, num_failed=failures)
        found = compared(base, write(tmp_path / "b", document(run, None)))
        first = found.changes[0]
        assert (first.name, first.verdict) == ("failed requests", verdict), failures
        assert first.change == pytest.approx(failures / 200)
        assert ("failed requests" in found.regressions) == (verdict == "worse")
        assert f"+{failures / 2:.1f} pt" in found.lines()[1]
        back = compared(str(tmp_path / "b"), base).changes[0]
        assert back.verdict == ("better" if verdict == "worse" else "same")


def test_vllms_rows_of_failed_requests_are_no_times(tmp_path: Path) -> None:
    def theirs(num_failed: int, *, tells_why: bool = True) -> dict[str, Any]:
        num_good = 200 - num_failed
        return {
            "num_prompts": 200,
            "completed": num_good,
            "ttfts": [0.1] * num_good + [0.0] * num_failed,
            "itls": [[0.1, 0.3]] * num_good + [[]] * num_failed,
            "output_lens": [3] * num_good + [0] * num_failed,
            "errors": [""] * num_good + ["broke" if tells_why else ""] * num_failed,
        }

    base = write(tmp_path / "a", theirs(0))
    for tells_why in (True, False):
        found = compared(base, write(tmp_path / "b", theirs(100, tells_why=tells_why)))
        values = {c.name: c.after for c in found.changes}
        assert values["mean ttft"] == pytest.approx(100)
        assert values["mean e2el"] == pytest.approx(500)
        assert values["mean tpot"] == pytest.approx(200)
        assert found.regressions == ["failed requests"]
    none_left = compared(base, write(tmp_path / "c", theirs(200)))
    assert [c.name for c in none_left.changes] == none_left.regressions == ["failed requests"]


def test_what_is_not_alike_is_named(tmp_path: Path) -> None:
    a = serve_file(tmp_path / "a", 0.1, seed=1, random_input_len=5, label="x")
    b = serve_file(tmp_path / "b", 0.1, seed=1, random_input_len=6, request_rate=2.0)
    assert set(compared(a, b).differences) == {
        "request_rate: inf in A, 2.0 in B",
        "random_input_len: 5 in A, 6 in B",
    }


def test_files_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    good = serve_file(tmp_path / "a", 0.1, seed=1)
    broken = tmp_path / "broken"
    broken.write_text("{")
    for path, words in (
        (str(tmp_path / "none"), "none cannot be read: No such file"),
        (str(broken), "broken is not JSON"),
        (write(tmp_path / "list", [1]), "must be a JSON object"),
        (write(tmp_path / "text", {"ttfts": "abc"}), "is not a result of a bench"),
        (write(tmp_path / "other", {"tokens_per_second": 3}), "no figure in common"),
        (write(tmp_path / "few", {"ttfts": [1.0] * 3}), "at least 8 samples"),
        (
            write(tmp_path / "count", {"completed": "many", "failed": 0}),
            "is not a result of a bench",
        ),
        (write(tmp_path / "less", {"completed": 9, "num_prompts": 3}), "is not a result of a"),
    ):
        with pytest.raises(ConfigError, match=words):
            compared(good, path)


def test_settings_of_another_form_are_not_compared(tmp_path: Path) -> None:
    content = {"latencies": [1.0] * 9, "options": [1], "machine": ["x"]}
    odd = write(tmp_path / "odd", content)
    usual = write(tmp_path / "usual", content | {"options": {"x": 1}, "machine": {"cpu": "y"}})
    assert compared(odd, odd).differences == ()
    assert compared(odd, usual).differences == ("cpu: None in A, y in B",)


def test_the_command_fails_on_a_regression(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base = serve_file(tmp_path / "a.json", 0.10, seed=1)
    slow = serve_file(tmp_path / "s.json", 0.15, seed=3)
    out = tmp_path / "out.json"
    assert main(["bench", "compare", base, slow, "--output-json", str(out)]) == 0
    assert "mean ttft" in json.loads(out.read_text())["regressions"]
    assert main(["bench", "compare", base, slow, "--fail-on-regression"]) == 1
    assert "worse" in capsys.readouterr().out
    assert main(["bench", "compare", slow, base, "--fail-on-regression"]) == 0
    assert main(["bench", "compare", base, str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_each_time_has_its_unit(tmp_path: Path) -> None:
    fast = serve_file(tmp_path / "a.json", 0.5, seed=1)
    slow = serve_file(tmp_path / "b.json", 4.0, seed=2)
    lines = compared(fast, slow).lines()
    (row,) = [line for line in lines if line.startswith("mean ttft ")]
    assert re.search(r" \d{3} ms +\d\.\d\d s +\+", row), row
    (row,) = [line for line in lines if line.startswith("mean output throughput, tokens/s")]
    assert re.search(r" \d+\.\d\d +\d+\.\d\d ", row), row
