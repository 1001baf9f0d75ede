"""A small run of benchmarks/soak.py, which fails if anything is held at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


async def test_random_requests_and_aborts_leave_nothing_behind(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import soak

    monkeypatch.setattr(soak, "VOCAB", 512)
    seed = 17
    print(f"seed {seed}")
    config = soak.soak_config(tiny_llama_dir, load_format="auto")
    result = await soak.soak(config, requests=250, at_once=30, seed=seed, samples=2)
    assert sum(result["endings"].values()) == 250
    assert {"stop", "length", "abort", "closed", "cancelled"} <= set(result["endings"])
    assert result["preemptions"] > 0 and result["prefix_hit_tokens"] > 0
    assert not any(result["held"].values())
    assert [done for done, _ in result["rss_mib"]] == [0, 125, 250]
