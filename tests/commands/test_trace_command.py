"""`termgen trace`: recordings of a server, with all that may happen to them and to the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_engine import make_model_info, make_step_record
from trace_reader import Trace

from termgen.commands.cli import main
from termgen.vocabulary.telemetry import Opening, encode, encode_events

MS = 1_000_000
TOPICS = frozenset({"step"})


def stream(name: str, *, clock_ms: int, unix_ms: int, first: int = 0, device: str = "cpu") -> bytes:
    """A snapshot, and three steps of a millisecond each ten milliseconds after it."""
    opening = Opening(
        stream=name,
        resumed=first > 0,
        clock_ns=clock_ms * MS,
        unix_ns=unix_ms * MS,
        dropped=0,
        status="ok",
        model=make_model_info(device=device),
        snapshot=None,
    )
    steps = [
        make_step_record(
            step_id=first + i,
            planned_ns=at,
            submitted_ns=at,
            started_ns=at,
            ended_ns=at + MS,
            landed_ns=at + MS,
            applied_ns=at + MS,
        )
        for i in range(3)
        for at in [(clock_ms + 10 * (i + 1)) * MS]
    ]
    frames = encode_events(steps, stream=name, first=first, dropped=0, topics=TOPICS)
    return bytes(encode(opening, f"{name}-0")) + b"".join(map(bytes, frames))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["trace", *words])
    return code, *capsys.readouterr()


def test_a_recording_becomes_a_trace_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = tmp_path / "run.events"
    recording.write_bytes(stream("a", clock_ms=100, unix_ms=5000) + b"event: step\nid: cut o")
    code, out, err = run(capsys, str(recording))
    made = tmp_path / "run.trace.json.gz"
    assert (code, err) == (0, "")
    assert out == f"{made}: 3 steps in 0.0 s; open it at https://ui.perfetto.dev\n"
    trace = Trace(made)
    assert trace.durations_ns["steps", "decode"] == 3 * MS
    assert trace.about.keys() == {"termgen"}


def test_a_server_that_was_started_again_is_another_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording, made = tmp_path / "run.events", tmp_path / "out"
    parts = [
        stream("a", clock_ms=100, unix_ms=5000),
        stream("a", clock_ms=200, unix_ms=5100, first=3),  # the connection was lost for a moment
        stream("b", clock_ms=7, unix_ms=6000, device="cuda:0"),
    ]
    recording.write_bytes(b"".join(parts))
    code, _, _ = run(capsys, str(recording), "--output", str(made))
    assert code == 0
    trace = Trace(made)
    assert len(trace.processes) == 2
    begins = {pid: [] for pid in trace.processes}  # type: dict[int, list[int]]
    for (pid, _), slices in trace.slices.items():
        begins[pid] += [begin for begin, _, e in slices if e["name"] == "decode"]
    assert sorted(begins[1]) == [at * MS for at in (0, 10, 20, 100, 110, 120)]
    assert sorted(begins[2]) == [at * MS for at in (1000, 1010, 1020)]


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "No such file"), (b"", "no frame of an event stream"), (b"x\n\n", "no frame")],
)
def test_what_is_no_recording_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, why: str
) -> None:
    recording = tmp_path / "run.events"
    if content is not None:
        recording.write_bytes(content)
    code, out, err = run(capsys, str(recording))
    assert code == 2 and out == "" and why in err and err.count("\n") == 1
    assert "--replay" not in err
    assert not (tmp_path / "run.trace.json.gz").exists()


def test_no_file_is_overwritten_and_none_is_left_unfinished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, made = tmp_path / "run.events", tmp_path / "run.trace.json.gz"
    recording.write_bytes(stream("a", clock_ms=100, unix_ms=5000))
    made.write_text("mine")
    code, _, err = run(capsys, str(recording))
    assert code == 2 and "exists already" in err and made.read_text() == "mine"
    made.unlink()

    def fail(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("termgen.commands.trace_command.write_trace", fail)
    code, _, err = run(capsys, str(recording))
    assert code == 2 and "No space left on device" in err and not made.exists()
