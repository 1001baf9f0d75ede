"""When each request of a bench is due. The same seed gives the same times."""

from __future__ import annotations

import math

import numpy as np


def due_times(count: int, rate: float, *, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start, [count], rising; all 0 for an infinite rate.

    Times between requests are of a gamma distribution with mean 1 / rate. As in vLLM they are then
    scaled so that the last request is due after exactly count / rate seconds: runs of one rate
    stay comparable however few their requests are.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = np.random.default_rng([seed, 1])
    gaps = rng.gamma(burstiness, 1.0 / (rate * burstiness), size=count)  # [count]
    times = np.cumsum(gaps)
    total = float(times[-1])
    if total > 0:
        times *= count / rate / total
    return [float(t) for t in times]
