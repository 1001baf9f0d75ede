"""Any value in any field is accepted, or an error names the field. Nothing else happens, and
fast."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import scaled

from termgen.api.chat import parse_chat
from termgen.api.completions import parse_completion
from termgen.api.document import ENDPOINTS
from termgen.api.errors import reply_for
from termgen.engine.text.input_processor import InputProcessor
from termgen.errors import RequestError
from termgen.vocabulary.sampling_params import SamplingParams

VOCAB = 50
NAMES = {
    name: sorted({*body.fields, *body.refused, *body.harmless} - {"model"})
    for name, body in ENDPOINTS.items()
}
OTHERS: dict[str, tuple[str, ...]] = {
    "min_tokens": ("max_tokens",),
    "stream": ("stream_options", "prompt_logprobs", "sse_ping_interval"),
    "add_generation_prompt": ("continue_final_message",),
    "n": ("best_of",),
    "echo": ("suffix",),
}
"""Fields that an error about another field may name, because the two are incompatible."""

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 140)
    | st.integers(-(2**70), 2**70)
    | st.floats(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9)
    | st.sampled_from(["x" * 300, "\x00", "�", "1", "none", "auto"])
)
keys = st.text(max_size=6) | st.integers(-2, 60).map(str)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=8,
)
quick = settings(max_examples=scaled(120), deadline=None, print_blob=True)


def process(endpoint: str, body: dict[str, Any]) -> None:
    """Process a body as the server does, up to the engine. The prompt is ids, so no tokenizer is
    needed."""
    parse: Any = parse_chat if endpoint == "chat" else parse_completion
    request = parse(body, model="m", defaults={})
    jobs = [request.job] if endpoint == "chat" else request.jobs
    processor = InputProcessor(None, 64, VOCAB, has_priorities=True)
    for job in jobs:
        given = processor.process(
            [1, 2, 3],
            job.params,
            request_id=job.request_id,
            priority=job.priority,
            cache_salt=job.cache_salt,
        )
        assert given.params.max_tokens is not None and given.params.max_tokens <= 61
        for token_id, bias in given.params.bias_pairs:
            assert 0 <= token_id < VOCAB and -100 <= bias <= 100
        for ids in (given.params.allowed_token_ids or (), given.params.stop_token_ids):
            assert all(0 <= token_id < VOCAB for token_id in ids)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@given(data=st.data())
@quick
def test_one_odd_field_is_taken_or_named(endpoint: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES[endpoint]))
    value = data.draw(values)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    body = json.loads(json.dumps({**body, "max_tokens": 9, name: value}))
    try:
        process(endpoint, body)
    except RequestError as error:
        reply = reply_for(error)
        assert reply.status == 400
        named = (error.param or "").split(".")[0].split("[")[0]
        # the error about too long an answer names the prompt, as clients expect
        allowed = {name, *OTHERS.get(name, ())}
        if error.code == "context_length_exceeded":
            allowed = {"messages", "prompt"}
        assert named in allowed, (error, error.param)
        message = reply.body["error"]["message"]
        assert message and "\n" not in message and len(message) < 500


ODD = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)


@given(
    fields=st.dictionaries(
        st.sampled_from(sorted(SamplingParams.__dataclass_fields__)),
        ODD | st.lists(ODD, max_size=4) | st.dictionaries(ODD, ODD, max_size=3),
        max_size=3,
    )
)
@quick
def test_sampling_params_take_a_value_or_name_it(fields: dict[str, Any]) -> None:
    """Python callers can pass anything, NaN included."""
    try:
        params = SamplingParams(**fields)
        params.validate_for(vocab_size=VOCAB)
    except RequestError as error:
        assert error.param in fields
    else:
        hash(params)
        assert SamplingParams(**{name: getattr(params, name) for name in fields}) == params
