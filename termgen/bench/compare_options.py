"""What `termgen bench compare` can be told. Imports nothing heavy: `termgen --help` reads it."""

from __future__ import annotations

from dataclasses import dataclass

from termgen.config import MAX_INT, check_settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Compare two result files, with intervals."""

    before: str = setting("", "result file to compare with", metavar="A")
    after: str = setting("", "result file to judge", metavar="B")
    fail_on_regression: bool = setting(False, "exit with code 1 if anything is worse")
    threshold: float = setting(
        2.0, "smallest change that counts, in percent", minimum=0.0, maximum=1000.0
    )
    confidence: float = setting(
        95.0, "percent of draws that the interval holds", above=0.0, maximum=99.99
    )
    resamples: int = setting(2000, "number of draws", minimum=100, maximum=1_000_000)
    seed: int = setting(0, "seed of the draws", minimum=0, maximum=MAX_INT)
    output_json: str | None = setting(None, "also write the figures to this file", metavar="FILE")

    def __post_init__(self) -> None:
        check_settings(self)
