"""A program of its own: tries to compile a grammar, within limits of time and memory.

    python -P grammar_trial.py < JSON of [source, limits of llguidance, seconds, bytes]

Some grammars, mostly those that ask for several patterns at once, take llguidance for ever, and a
thread cannot be stopped; a process can. `grammar_source.py` runs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys

from llguidance import LLMatcher, LLParserLimits

NICENESS = 5
"""The engine goes first."""


def main() -> None:
    with contextlib.suppress(OSError):  # not every sandbox lets it
        os.nice(NICENESS)
    source, limits, seconds, num_bytes = json.load(sys.stdin)
    # By a signal of its own, before it is killed: that anybody could have done.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # not every system can limit this
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    LLMatcher.validate_grammar(source, None, limits=LLParserLimits(**limits))


if __name__ == "__main__":
    main()
