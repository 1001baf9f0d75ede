"""Combined statistics of alternating cells with and without a screen. Used by `screen_cost.py`."""

from __future__ import annotations

import statistics
from typing import Any

from frame_cost import HEAD, line

HEAD_OF_PARTS = (
    f"{'part':>13}{'kept':>9}{'mean off':>9}{'on':>8}{'p99 off':>9}{'on':>8}{'max off':>9}"
    f"{'on':>8}{'idle off':>9}{'on':>8}{'frames/s':>9}"
)


def median(cells: list[dict[str, Any]], name: str, *, on: bool) -> float:
    return statistics.median(cell[name] for cell in cells if cell["on"] is on)


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    step_figures = {
        f"{name}_{'on' if on else 'off'}": median(cells, name, on=on)
        for name in ("steps_per_s", "mean_ms", "p99_ms", "max_ms", "idle_share", "loop_share")
        for on in (False, True)
    }
    pairs = zip(cells[::2], cells[1::2], strict=True)
    kept = statistics.median(on["steps_per_s"] / off["steps_per_s"] for off, on in pairs)
    frames = median(cells, "frames_per_s", on=True)
    told = [cell["frames"] for cell in cells if cell["frames"]]
    a_frame = {name: statistics.median(f[name] for f in told) for name in (told[0] if told else ())}
    return {"kept": kept, **step_figures, "frames_per_s": frames, "frame": a_frame}


def print_part(name: str, s: dict[str, Any]) -> None:
    print(
        f"{name:>13}{100 * s['kept']:8.2f}%"
        f"{s['mean_ms_off']:9.2f}{s['mean_ms_on']:8.2f}"
        f"{s['p99_ms_off']:9.2f}{s['p99_ms_on']:8.2f}"
        f"{s['max_ms_off']:9.1f}{s['max_ms_on']:8.1f}"
        f"{100 * s['idle_share_off']:9.2f}{100 * s['idle_share_on']:8.2f}"
        f"{s['frames_per_s']:9.1f}",
        flush=True,
    )
    if s["frame"]:
        print(HEAD, line(name, s["frame"]), sep="\n", flush=True)
