"""The order in which `pytest -n 3 --dist loadfile` assigns files; only xdist's controller uses it.

Files that use the real model go to one worker, as if they were one file, so that it is loaded and
its reference computed once. What takes longest by `tests/slow.txt` comes first: a long file that is
assigned last keeps one worker busy after the others have ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from lanes import slow_functions
from xdist.scheduler import LoadFileScheduling

REAL_MODEL = "the real model"
REAL_MODEL_FILES = (
    "test_parity",
    "test_lm_eval",
    "test_families",
    "test_int8",
    "test_parity_matrix",
    "test_fp8_kv_cache",
    "test_gguf_checkpoint",
    "test_gguf_tokenizer",
    "test_ollama_clients",
    "test_real_clients",
    "test_structured_clients",
    "test_bench_command",
    "test_endpoint_docs",
)


def scope_of(file: str) -> str:
    """What goes to one worker with this file: tests/a/test_b.py."""
    return REAL_MODEL if PurePosixPath(file).stem in REAL_MODEL_FILES else file


def seconds_by_scope() -> dict[str, float]:
    """Time of the slow tests of each scope."""
    found: dict[str, float] = defaultdict(float)
    for name, seconds in slow_functions().items():
        found[scope_of(f"tests/{name.split('::')[0]}")] += seconds
    return found


def longest(waiting: Iterable[str], seconds: Mapping[str, float]) -> str:
    """The scope that takes longest; the first of those without a slow test."""
    return max(waiting, key=lambda scope: seconds.get(scope, 0.0))


class SharedStarts(LoadFileScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return scope_of(super()._split_scope(nodeid))

    def _assign_work_unit(self, node: object) -> None:
        """Assign the next file to `node`."""
        self.workqueue.move_to_end(longest(self.workqueue, seconds_by_scope()), last=False)
        super()._assign_work_unit(node)
