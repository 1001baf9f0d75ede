"""OutputProcessor: names, completions of one request, endings, and whole answers."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from output_harness import EOS, delivery, finish, request, start

from termgen.engine.text.output import OutputProcessor, RequestOutputBuilder, fan_out
from termgen.engine.text.tokenizer import Tokenizer
from termgen.errors import RequestError
from termgen.vocabulary.request import FinishReason, GenerationRequest
from termgen.vocabulary.step import StepLogprobs


class TestFanOut:
    def test_children_draw_with_their_own_seed(self) -> None:
        parent = request("p", n=3, seed=10)
        children = fan_out(parent)
        assert [c.request_id for c in children] == ["p-0", "p-1", "p-2"]
        assert [c.params.seed for c in children] == [10, 11, 12]
        assert {c.params.n for c in children} == {1}
        assert [c.params.seed for c in fan_out(request("p", n=2))] == [None, None]
        assert [c.params.seed for c in fan_out(request("p", n=2, seed=2**63 - 1))] == [
            2**63 - 1,
            -(2**63),
        ]
        single = request("s", seed=1)
        assert fan_out(single) == [single]

    def test_greedy_completions_are_copies_of_one(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        parent = request("p", n=3, temperature=0.0)
        (only,) = processor.expect(parent, 0)
        assert (only.request_id, only.params.n) == ("p", 1)
        rows = [(0, 0, smollm2.encode("left"))]
        deltas = processor.process(delivery(rows, started=[start("p", 0)]))
        deltas += processor.process(delivery(finished=[finish("p")]))
        assert [(d.request_id, d.index, d.text) for d in deltas] == [
            *(("p", i, "left") for i in range(3)),
            *(("p", i, "") for i in range(3)),
        ]
        assert [d.prompt_token_ids is not None for d in deltas] == [True, *[False] * 5]
        assert [d.finish_reason for d in deltas[3:]] == [FinishReason.LENGTH] * 3
        assert "p" not in processor and len(processor) == 0

    def test_deltas_carry_the_parent_and_the_index(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        parent = request("p", n=2)
        for index, child in enumerate(fan_out(parent)):
            processor.add(child, 0, index=index, parent_id="p")
        assert "p" in processor
        rows = [(0, 0, smollm2.encode("left")), (1, 0, smollm2.encode("right"))]
        started = [start("p-0", 0), start("p-1", 1)]
        deltas = processor.process(delivery(rows, started=started, finished=[finish("p-0")]))
        assert [(d.request_id, d.index, d.text) for d in deltas] == [
            ("p", 0, "left"),
            ("p", 1, "right"),
        ]
        assert [d.prompt_token_ids for d in deltas] == [(7, 8, 9), None]
        assert processor.engine_ids("p") == ["p-1"]
        assert processor.cancel("p") == ["p-1"]
        assert "p" not in processor and len(processor) == 0

    def test_stop_string_of_one_child_leaves_the_others(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        for index, child in enumerate(fan_out(request("p", n=2, stop=("left",)))):
            processor.add(child, 0, index=index, parent_id="p")
        rows = [(0, 0, smollm2.encode("left")), (1, 0, smollm2.encode("right"))]
        processor.process(delivery(rows, started=[start("p-0", 0), start("p-1", 1)]))
        assert processor.take_aborts() == ["p-0"]
        assert processor.engine_ids("p") == ["p-1"]


class TestNames:
    """A name may be used again at once; the engine may still run its earlier request."""

    def names(self, requests: Sequence[GenerationRequest]) -> list[str]:
        return [r.request_id for r in requests]

    def test_a_name_in_use_is_refused_whole(self, processor: OutputProcessor) -> None:
        assert self.names(processor.expect(request("a"), 0)) == ["a"]
        for n in (1, 3):
            with pytest.raises(RequestError, match="already in use"):
                processor.expect(request("a", n=n), 0)
        assert len(processor) == 1

    def test_a_child_whose_name_is_taken_gets_another(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        processor.expect(request("p-1"), 0)
        children = processor.expect(request("p", n=2), 0)
        assert self.names(children) == ["p-0", "p-1~2"]
        rows = [(0, 0, smollm2.encode("left")), (1, 0, smollm2.encode("right"))]
        deltas = processor.process(delivery(rows, started=[start("p-1~2", 0), start("p-1", 1)]))
        assert [(d.request_id, d.index) for d in deltas] == [("p", 1), ("p-1", 0)]
        assert processor.engine_ids("p") == ["p-0", "p-1~2"]

    @pytest.mark.parametrize("end", ["cancel", "stop string"])
    def test_late_news_of_an_earlier_bearer_does_not_reach_a_new_one(
        self, processor: OutputProcessor, smollm2: Tokenizer, end: str
    ) -> None:
        processor.expect(request("a", stop=("left",)), 0)
        if end == "cancel":
            processor.cancel("a")
        else:
            processor.process(delivery([(0, 0, smollm2.encode("left"))], started=[start("a")]))
            assert processor.take_aborts() == ["a"]
        assert self.names(processor.expect(request("a"), 0)) == ["a~2"]
        late = delivery([(1, 0, [5])], started=[start("a", 1)], finished=[finish("a")])
        assert processor.process(late) == []
        fresh = delivery([(2, 0, smollm2.encode("new"))], started=[start("a~2", 2)])
        assert [(d.request_id, d.text) for d in processor.process(fresh)] == [("a", "new")]
        assert processor.cancel("a") == ["a~2"]
        # the engine has finished the first request, and its name is free again
        assert self.names(processor.expect(request("a"), 0)) == ["a"]

    def test_nothing_is_remembered_once_the_engine_has_told_the_end(
        self, processor: OutputProcessor
    ) -> None:
        processor.expect(request("a"), 0)
        processor.process(delivery(finished=[finish("a")]))
        assert self.names(processor.expect(request("a"), 0)) == ["a"]


class TestEndings:
    def test_cancelled_requests_are_forgotten(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        processor.add(request(), 0)
        processor.process(delivery(started=[start()]))
        assert processor.cancel("r") == ["r"]
        assert processor.cancel("r") == []
        assert processor.cancel("never") == []
        assert processor.process(delivery([(0, 0, smollm2.encode("x"))])) == []
        assert processor.process(delivery(finished=[finish()])) == []


class TestRequestOutputBuilder:
    def test_builds_what_the_deltas_say(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        builder = RequestOutputBuilder("p", prompt="Say", n=2)
        for index, child in enumerate(fan_out(request("p", n=2))):
            processor.add(child, 0, index=index, parent_id="p")
        left, right = smollm2.encode("left one"), smollm2.encode("right")
        started = [start("p-0", 0, cached=16), start("p-1", 1)]
        for delta in processor.process(
            delivery([(0, 0, left[:1]), (1, 0, right)], started=started, finished=[finish("p-1")])
        ):
            builder.add(delta)
        assert not builder.finished
        assert builder.build().outputs[0].finish_reason is None
        for delta in processor.process(
            delivery([(0, 0, left[1:])], finished=[finish("p-0")], time_ns=2000)
        ):
            builder.add(delta)
        output = builder.build()
        assert output.finished and builder.finished
        assert (output.request_id, output.prompt) == ("p", "Say")
        assert output.prompt_token_ids == [7, 8, 9]
        assert output.num_cached_tokens == 16
        assert [o.text for o in output.outputs] == ["left one", "right"]
        assert output.outputs[0].token_ids == left
        assert output.outputs[0].cumulative_logprob is None
        assert [o.finish_reason for o in output.outputs] == [FinishReason.LENGTH] * 2
        assert output.timings is not None and output.timings.finished_ns == 2000

    def test_sums_logprobs(self, processor: OutputProcessor, smollm2: Tokenizer) -> None:
        ids = smollm2.encode("a b")
        processor.add(request(logprobs=0), 0)
        builder = RequestOutputBuilder("r")
        logprobs = StepLogprobs(
            np.array([[i] for i in ids], dtype=np.int32),
            np.array([[-0.25], [-0.5]], dtype=np.float32),
            np.array([1, 3], dtype=np.int32),
        )
        for delta in processor.process(
            delivery([(0, 0, ids)], started=[start()], finished=[finish()], logprobs=logprobs)
        ):
            builder.add(delta)
        [output] = builder.build().outputs
        assert output.cumulative_logprob == -0.75
        assert output.logprobs is not None
        [first, second] = output.logprobs
        assert (list(first), list(second)) == ([ids[0]], [ids[1]])
        assert (first[ids[0]].rank, second[ids[1]].rank) == (1, 3)
        assert second[ids[1]].decoded_token == smollm2.token_text(ids[1])


def test_calls_per_step_are_linear_in_rows_and_flat_in_length(smollm2: Tokenizer) -> None:
    [word] = smollm2.encode(" word")

    def calls(num_rows: int, num_steps: int) -> int:
        processor = OutputProcessor(smollm2, (EOS,))
        started = [start(f"r{i}", slot=i) for i in range(num_rows)]
        for i in range(num_rows):
            processor.add(request(f"r{i}"), 0)
        rows = [(i, 0, [word]) for i in range(num_rows)]
        processor.process(delivery(started=started))
        for _ in range(num_steps):
            processor.process(delivery(rows))
        step, count = delivery(rows), 0

        def profile(frame: object, event: str, arg: object) -> None:
            nonlocal count
            count += event == "call"

        gc.collect()
        gc.disable()  # what it would call is counted, too
        sys.setprofile(profile)
        try:
            processor.process(step)
        finally:
            sys.setprofile(None)
            gc.enable()
        return count

    assert calls(64, 200) == calls(64, 2)
    assert calls(256, 2) <= 4 * calls(64, 2)
    assert calls(256, 2) <= 256 * 10


def test_delta_of_another_request_is_our_bug(processor: OutputProcessor) -> None:
    processor.add(request(), 0)
    [delta] = processor.process(delivery(finished=[finish()]))
    with pytest.raises(AssertionError):
        RequestOutputBuilder("other").add(replace(delta))
