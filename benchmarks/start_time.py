"""One start of the engine, from its process's birth to its first token; run by `gpu_decode.py`.

    python benchmarks/start_time.py FOLDER BORN [FIELD=VALUE ...]

BORN is what `time.time` said when the process was started. Prints JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    folder, born, *items = sys.argv[1:]
    from gpu_decode import engine_options  # imports the engine: part of what is measured

    from termgen.config import EngineConfig
    from termgen.engine.loop.engine import SyncEngine
    from termgen.vocabulary.request import GenerationRequest
    from termgen.vocabulary.sampling_params import SamplingParams

    options: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": "cuda",
        "max_model_len": 4096,
        **engine_options(items),
    }
    imported = time.time()
    engine = SyncEngine(EngineConfig(model=folder, **options))
    ready = time.time()
    engine.add(
        GenerationRequest(
            request_id="first",
            prompt_token_ids=tuple(range(10, 110)),
            params=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
        )
    )
    while not any(delta.token_ids for delta in engine.step()):
        pass
    first_token = time.time()
    snapshot = engine.snapshot()
    result = {
        "imports_s": imported - float(born),
        "ready_s": ready - float(born),
        "first_token_s": first_token - float(born),
        "phases": [list(phase) for phase in engine.model.startup],
        "graphs": [snapshot.num_graphs_recorded, snapshot.num_graphs],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
