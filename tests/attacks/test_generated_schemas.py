"""Whatever a model says under a schema is valid: random schemas, a random model, temperature 1.5.

More of them, or a real model:
TERMGEN_SCHEMAS=300 TERMGEN_SCHEMA_MODEL=smollm2-135m pytest tests/attacks/test_generated_schemas.py
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import jsonschema
from generated_schemas import generate

from termgen import LLM, SamplingParams
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

NUM_SCHEMAS = int(os.environ.get("TERMGEN_SCHEMAS", "40"))
MODEL = os.environ.get("TERMGEN_SCHEMA_MODEL")


def test_answers_under_generated_schemas_are_valid(tiny_llama_dir: Path) -> None:
    schemas = [generate(seed) for seed in range(NUM_SCHEMAS)]
    with LLM(
        MODEL or tiny_llama_dir,
        device="cpu",
        max_model_len=1024 if MODEL else 512,
        max_num_seqs=16,
        num_gpu_blocks_override=1100,
        async_scheduling=True,
    ) as llm:
        longest = llm.model.max_model_len - 32
        params = [
            SamplingParams(
                temperature=1.5,
                seed=seed,
                max_tokens=longest,
                structured_outputs=StructuredOutputsParams(json=schema),
            )
            for seed, schema in enumerate(schemas)
        ]
        outputs = llm.generate(["Some JSON: "] * NUM_SCHEMAS, params)
    texts: Counter[str] = Counter()
    for seed, (schema, output) in enumerate(zip(schemas, outputs, strict=True)):
        answer = output.outputs[0]
        where = (seed, schema, answer.text)
        assert answer.finish_reason == "stop", where
        value = json.loads(answer.text)
        jsonschema.Draft202012Validator.check_schema(schema)
        errors = list(jsonschema.Draft202012Validator(schema).iter_errors(value))
        assert not errors, (where, errors)
        texts[answer.text] += 1
    assert len(texts) > NUM_SCHEMAS * 0.6, "the answers should differ"
