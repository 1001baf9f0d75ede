"""Numbers that no float can hold are refused like any other that is out of range."""

from __future__ import annotations

from typing import Any

import pytest

from termgen.errors import RequestError
from termgen.vocabulary.sampling_params import SamplingParams


@pytest.mark.parametrize("number", [10**400, -(10**400), 10**5000], ids=["large", "low", "long"])
@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "seed", "n"]
    + ["top_k", "max_tokens", "logprobs", "logit_bias", "stop_token_ids", "allowed_token_ids"],
)
def test_a_huge_integer_is_refused_naming_its_field(name: str, number: int) -> None:
    given: Any = number
    if name == "logit_bias":
        given = {5: number}
    elif name.endswith("token_ids"):
        given = (number,)
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{name: given})
    assert refusal.value.param == name and len(str(refusal.value)) < 200
