"""What the benches can be told. Flags are generated from these; names and defaults follow vLLM.

Imports nothing heavy: `termgen --help` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from termgen.config import MAX_INT, check_settings, setting
from termgen.errors import ConfigError

DATASETS = ("random", "job256")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """One batch of equal requests, again and again."""

    input_len: int = setting(32, "prompt tokens of each request", minimum=1, maximum=MAX_INT)
    output_len: int = setting(128, "tokens each request generates", minimum=1, maximum=MAX_INT)
    batch_size: int = setting(8, "requests in the batch", minimum=1, maximum=65536)
    num_iters_warmup: int = setting(10, "batches before measuring", minimum=0, maximum=MAX_INT)
    num_iters: int = setting(30, "batches measured", minimum=1, maximum=MAX_INT)
    output_json: str | None = setting(None, "also write the figures to this file", metavar="FILE")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions:
    """Many requests at once, until all are done."""

    dataset_name: str = setting(
        "random",
        "random: --num-prompts prompts of about --input-len tokens; "
        "job256: 256 prompts, input and output lengths uniform in 100..1024",
        choices=DATASETS,
    )
    num_prompts: int | None = setting(
        None, "number of requests (default: 1000)", minimum=1, maximum=MAX_INT
    )
    input_len: int | None = setting(
        None, "prompt tokens of each request (default: 512)", minimum=1, maximum=MAX_INT
    )
    output_len: int | None = setting(
        None, "tokens each request generates (default: 128)", minimum=1, maximum=MAX_INT
    )
    random_range_ratio: float | None = setting(
        None,
        "lengths are uniform in length * (1 - X) .. length * (1 + X) (default: 0)",
        minimum=0.0,
        maximum=1.0,
    )
    output_json: str | None = setting(None, "also write the figures to this file", metavar="FILE")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.dataset_name != "random":
            for name in ("num_prompts", "input_len", "output_len", "random_range_ratio"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{name} cannot be changed: dataset {self.dataset_name} fixes it",
                        param=name,
                    )
