"""/v1/embeddings: a body to one `Job` per input, their vectors to one answer."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from termgen.api.completions import parse_prompts
from termgen.api.fields import (
    ANSWER,
    ENGINE,
    PROMPT,
    Endpoint,
    Instead,
    Served,
    is_empty,
    is_true,
    never,
    one_of,
    read,
    wanted,
)
from termgen.api.job import Job, ResponseOptions, Tally
from termgen.api.rows import GeneratingRow
from termgen.api.sampling import TokenLimit
from termgen.client import TokenDelta
from termgen.errors import RequestError
from termgen.vocabulary.device.pooling import FloatVector, PoolingInfo
from termgen.vocabulary.request import MAX_PRIORITY
from termgen.vocabulary.sampling.row import MAX_INT
from termgen.vocabulary.sampling_params import SamplingParams

MAX_INPUTS = 2048
"""OpenAI's limit."""
TYPES = "a string, a list of strings, token ids, or a list of lists of token ids"
Encoding = Literal["float", "base64"]
Dimensions = Annotated[int, Meta(ge=1, le=MAX_INT)]


class EmbeddingFields(Struct, frozen=True, kw_only=True):
    """The body of /v1/embeddings."""

    model: Annotated[
        str | None, PROMPT("the model's name, as in `/v1/models`", "a string", "the first one")
    ] = None
    input: Annotated[
        str | list[Any],
        wanted(TYPES),
        PROMPT(
            f"up to {MAX_INPUTS} inputs, each of which gets a vector",
            "a string, a list of strings, token ids, or a list of those",
        ),
    ]
    prompt_name: Annotated[
        str | None,
        PROMPT(
            "the text from the model's files to put in front of each input: `query` and `document` "
            "of Qwen3-Embedding, for instance. Inputs of token ids have none",
            "a name in `config_sentence_transformers.json`",
            "the default of those files, or none",
            origin="termgen",
        ),
    ] = None
    truncate_prompt_tokens: Annotated[
        TokenLimit | None,
        PROMPT(
            "keep only so many tokens of a longer input, the first ones, and those that the "
            "tokenizer puts behind every text; -1: as many as the model takes",
            "1 to the model's longest input, or -1",
            "all, and an error where they do not fit",
            origin="vLLM",
        ),
    ] = None
    dimensions: Annotated[
        Dimensions | None,
        ANSWER(
            "cut each vector after so many numbers, and give it length 1 again; for models that "
            "were trained for it (Matryoshka)",
            "1 to the model's own number",
        ),
    ] = None
    encoding_format: Annotated[
        Encoding,
        wanted('"float" or "base64"'),
        ANSWER(
            "numbers, or the bytes of little-endian float32 in base64, which are read faster",
            "`float`, `base64`",
        ),
    ] = "float"
    priority: Annotated[
        int,
        Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY),
        ENGINE("as in other requests", "an integer of 32 bits", origin="vLLM"),
    ] = 0
    cache_salt: Annotated[
        str | None,
        ENGINE(
            "cached prefixes are shared only with requests of the same salt",
            "1 to 128 characters of `A-Z a-z 0-9 _ -`",
            origin="vLLM",
        ),
    ] = None


EMBEDDINGS = Endpoint(
    (EmbeddingFields,),
    harmless=frozenset({"user", "metadata"}),
    refused={
        "add_special_tokens": is_true,
        "embed_dtype": one_of("float32"),
        "embedding_type": Instead("encoding_format"),
        "embedding_types": Instead("encoding_format"),
        "input_type": Instead("prompt_name"),
        "instruction": Instead("input, whose texts may begin with it"),
        "late_chunking": is_empty,
        "messages": never,
        "normalize": never,
        "pooling": never,
        "stream": is_empty,
        "task": Instead("prompt_name"),
        "truncate": Instead("truncate_prompt_tokens"),
    },
)


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    jobs: tuple[Job, ...]
    options: ResponseOptions
    as_base64: bool
    ignored: tuple[str, ...]
    not_used: tuple[str, ...] = ()


def parse_embeddings(data: Mapping[str, Any], *, model: str, info: PoolingInfo) -> EmbeddingRequest:
    """Check a body. `model` is the resolved served name, `info` how its vectors are made."""
    body = read(EmbeddingFields, data)
    inputs = parse_prompts(body.input, param="input", most=MAX_INPUTS)
    pooling = info.params(body.dimensions)
    front = info.text(body.prompt_name)
    if body.prompt_name and not all(isinstance(one, str) for one in inputs):
        raise RequestError(
            "prompt_name is for inputs of text: put its tokens in front of token ids yourself",
            param="prompt_name",
        )
    params = SamplingParams(truncate_prompt_tokens=body.truncate_prompt_tokens)
    answer_id = f"embd-{uuid.uuid4().hex}"
    jobs = tuple(
        Job(
            prompt=front + prompt if isinstance(prompt, str) else prompt,
            params=params,
            request_id=answer_id if len(inputs) == 1 else f"{answer_id}-{i}",
            priority=body.priority,
            cache_salt=body.cache_salt,
            pooling=pooling,
        )
        for i, prompt in enumerate(inputs)
    )
    options = ResponseOptions(
        id=answer_id,
        model=model,
        created=int(time.time()),
        stream=False,
        include_usage=False,
        continuous_usage=False,
        include_timings=False,
        return_token_ids=False,
        tokens_as_ids=False,
    )
    return EmbeddingRequest(
        jobs, options, body.encoding_format == "base64", EMBEDDINGS.unknown(data)
    )


def embeddings_response(asked: EmbeddingRequest, answers: Sequence[TokenDelta]) -> bytes:
    """The answer as JSON, by an encoder that is quick with numbers."""
    tally = Tally(1)
    for index, delta in enumerate(answers):
        tally.add(index, delta)
    usage = tally.usage()
    return msgspec.json.encode(
        {
            **asked.options.head("list"),
            "data": [
                {"object": "embedding", "index": i, "embedding": _written(delta, asked.as_base64)}
                for i, delta in enumerate(answers)
            ],
            "usage": {
                "prompt_tokens": usage["prompt_tokens"],
                "total_tokens": usage["prompt_tokens"],
                "prompt_tokens_details": usage["prompt_tokens_details"],
            },
        }
    )


def _written(delta: TokenDelta, as_base64: bool) -> str | list[float]:
    vector: FloatVector | None = delta.vector
    assert vector is not None, "a request without one has ended with an error"
    if as_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def _parse(served: Served, data: Mapping[str, Any]) -> EmbeddingRequest:
    return parse_embeddings(data, model=served.model, info=served.pooling)


ROW = GeneratingRow(
    path="/v1/embeddings",
    summary="embeddings",
    body=EMBEDDINGS,
    parse=_parse,
    whole=embeddings_response,
    names={"prompt": "input"},
    operation="embeddings",
)
