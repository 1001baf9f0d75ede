"""The order in which `pytest -n 3 --dist loadfile` assigns files; only xdist's controller uses it.

Files that use the real model go to one worker, as if they were one file, so that it is loaded and
its reference computed once. They come first, then the other slow ones: a long file assigned last
keeps one worker busy after the others have ended.
"""

from __future__ import annotations

from pathlib import PurePosixPath

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
    "test_real_clients",
    "test_structured_clients",
    "test_bench_command",
    "test_endpoint_docs",
)
SLOW_FILES = (
    "test_launch",
    "test_server_openapi",
    "test_server_engine",
    "test_warm_up",
    "test_imports",
    "test_sleep",
    "test_tui_branches",
    "test_tui_chat",
    "test_paged_prefill",
    "test_paged_decode",
    "test_hopper_kernels",
    "test_token_lens",
    "test_tui_snapshots",
    "test_tui_dashboard",
    "test_tui_chat_tools",
    "test_tui_mouse",
    "test_families_triton",
    "test_structured_server",
    "test_hostile_files",
    "test_tui_sessions",
    "test_gpu_async",
    "test_local_shelf",
    "test_server_run",
    "test_fetch",
)
"""Files of about 15 seconds or more. The others follow, ordered by their number of tests."""


class SharedStarts(LoadFileScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return REAL_MODEL if PurePosixPath(file).stem in REAL_MODEL_FILES else file

    def _assign_work_unit(self, node: object) -> None:
        """Assign the next file to `node`: a slow one while any is left."""
        waiting = {PurePosixPath(scope).stem: scope for scope in self.workqueue}
        slow = next((waiting[n] for n in (REAL_MODEL, *SLOW_FILES) if n in waiting), None)
        if slow is not None:
            self.workqueue.move_to_end(slow, last=False)
        super()._assign_work_unit(node)
