"""What `termgen bench sweep` can be told. Imports nothing heavy: `termgen --help` reads it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from termgen.bench.serve_options import ServeOptions
from termgen.config import MAX_INT, setting
from termgen.errors import ConfigError

OVER = ("concurrency", "rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(ServeOptions):
    """Raise the load on a server step by step until it can take no more."""

    num_prompts: int = setting(
        32,
        "fewest requests of a step; it has at least 4 for each client, or for 10 seconds",
        minimum=1,
        maximum=MAX_INT,
    )
    sweep_over: str = setting(
        "concurrency",
        "concurrency: clients that wait for their answers; rate: requests per second, which needs "
        "--goodput",
        choices=OVER,
    )
    sweep_from: float = setting(1.0, "load of the first step, doubled from step to step", above=0.0)
    sweep_to: float = setting(1024.0, "most load of a step", above=0.0)
    sweep_attainment: float = setting(
        90.0,
        "with --goodput: percent of requests that must keep it",
        above=0.0,
        maximum=100.0,
    )
    sweep_gain: float = setting(
        5.0,
        "without --goodput: percent of throughput that a doubled load must add",
        minimum=0.0,
        maximum=100.0,
    )
    sweep_refine: int = setting(
        2, "with --goodput: steps between the last that kept it and the next", minimum=0, maximum=20
    )

    def __post_init__(self) -> None:
        ServeOptions.__post_init__(self)
        if self.request_rate is not None:
            raise ConfigError(
                "request_rate is what a sweep changes; use --sweep-over rate", param="request_rate"
            )
        if self.sweep_over == "concurrency":
            if self.max_concurrency is not None:
                raise ConfigError(
                    "max_concurrency is what this sweep changes; use --sweep-to",
                    param="max_concurrency",
                )
            if self.sweep_from < 1:
                raise ConfigError("sweep_from must be at least 1 client", param="sweep_from")
        elif not self.goodput:
            raise ConfigError("sweep_over rate needs --goodput", param="sweep_over")
        self._check_limits()
        if self.sweep_to < self.sweep_from:
            raise ConfigError("sweep_to is less than sweep_from", param="sweep_to")
        if self.save_detailed:
            raise ConfigError(
                "save_detailed is for `bench serve`: a sweep keeps figures of its steps only",
                param="save_detailed",
            )

    @property
    def has_rate(self) -> bool:
        return self.sweep_over == "rate"

    def _check_limits(self) -> None:
        """What decides over a step is a limit on latencies or a gain of throughput."""
        needs, of = (
            ("goes without", ("sweep_gain",))
            if self.goodput
            else ("needs", ("sweep_attainment", "sweep_refine"))
        )
        for f in fields(self):
            if f.name in of and getattr(self, f.name) != f.default:
                raise ConfigError(f"{f.name} {needs} --goodput", param=f.name)
