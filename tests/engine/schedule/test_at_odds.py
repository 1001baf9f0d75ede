"""Requests whose parameters leave their grammar no token: the error names the parameters."""

from __future__ import annotations

import numpy as np
from constrained_harness import ConstrainedDriver, FakeGrammar
from scheduler_harness import make_request
from scripted_device import VOCAB

from termgen.engine.schedule.constraints import fault_of
from termgen.errors import RequestError
from termgen.vocabulary.request import FinishReason


def test_parameters_that_leave_the_grammar_nothing_are_the_requests_fault() -> None:
    """The device here samples what the grammar allows, whatever else the request asks for.

    Each has a third token of its answer that its own parameters forbid.
    """
    driver = ConstrainedDriver(depth=2)
    prompt, grammar = [3, 4], FakeGrammar(9)
    answer = driver.reference(driver.constrain("plain", prompt, grammar, max_tokens=9))
    assert answer[2] not in answer[:2], "the third is to be the first that is forbidden"
    others = tuple(token for token in range(VOCAB) if token != answer[2])
    words = {"bad_words": ["as ids"]}
    cases = {
        "allowed": driver.constrain("a", prompt, grammar, allowed_token_ids=others),
        "bad": driver.constrain("b", prompt, grammar, bad=((answer[2],),), **words),
        "bad pair": driver.constrain("c", prompt, grammar, bad=(tuple(answer[1:3]),), **words),
    }
    kept = driver.constrain(
        "kept",
        prompt,
        grammar,
        bad=((answer[0], answer[2]),),
        allowed_token_ids=range(VOCAB),
        min_tokens=9,
        **words,
    )
    driver.run()
    for name, bearer in cases.items():
        assert bearer.reason is FinishReason.ERROR and bearer.tokens == answer[:3], name
        assert bearer.ending is not None and isinstance(bearer.ending.error, RequestError)
        param = "allowed_token_ids" if name == "allowed" else "bad_words"
        assert bearer.ending.error.param == param and param in str(bearer.ending.error)
    assert kept.reason is FinishReason.STOP and kept.tokens == answer
    assert driver.scheduler.kv.pool.num_used == 0


def test_a_least_length_that_the_grammar_ends_before_is_the_requests_fault() -> None:
    """The mask only has the end token, which min_tokens forbids: the device sampled another one."""
    request = make_request("r", [1, 2], min_tokens=3, max_tokens=9)
    fault = fault_of(request, np.asarray([6, 6, 7], np.int32), is_allowed=False)
    assert fault is not None and fault.param == "min_tokens" and "token 3" in str(fault)
    assert fault_of(request, np.asarray([6, 6, 6, 7], np.int32), is_allowed=False) is None
    assert fault_of(request, np.asarray([6, 6, 5], np.int32), is_allowed=True) is None
