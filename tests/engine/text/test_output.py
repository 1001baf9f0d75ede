"""OutputProcessor: deliveries in, text out, through preemption, stops and errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from output_harness import EOS, delivery, feed, finish, request, start, text_of

from termgen.client import merge_deltas
from termgen.engine.text.output import OutputProcessor
from termgen.engine.text.tokenizer import Tokenizer
from termgen.errors import RequestError, StepError
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.step import StepLogprobs


class TestText:
    def test_deltas_add_up_to_the_answer(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        ids = smollm2.encode("Grüße! 👋🏽 ok")
        processor.add(request(), arrival_ns=100)
        deltas = feed(processor, ids, end=finish())
        assert text_of(deltas) == "Grüße! 👋🏽 ok"
        assert [t for d in deltas for t in d.token_ids] == ids
        assert [d.num_output_tokens for d in deltas] == list(range(1, len(ids) + 1))
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(ids) - 1)
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert deltas[-1].stop_reason is None
        assert len(processor) == 0

    def test_a_stop_string_waits_for_min_tokens(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        ids = smollm2.encode(" a b a b a b")
        assert len(ids) == 6
        processor.add(request(stop=("b",), min_tokens=3), 0)
        deltas = feed(processor, ids[:4], end=None)
        assert [d.finish_reason for d in deltas[:3]] == [None] * 3
        assert deltas[3].finish_reason is FinishReason.STOP and deltas[3].stop_reason == "b"
        assert text_of(deltas) == " a b a "

    def test_half_a_character_at_the_end_is_flushed(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        ids = smollm2.encode("a👋")[:-1]
        processor.add(request(), 0)
        assert text_of(feed(processor, ids, end=finish())) == smollm2.decode(ids) == "a\ufffd"

    def test_end_of_sequence_is_reported_but_not_shown(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        ids = [*smollm2.encode("bye"), EOS]
        processor.add(request(skip_special_tokens=False), 0)
        end = finish(reason=FinishReason.STOP, by_token=True)
        deltas = feed(processor, ids, end=end)
        assert text_of(deltas) == "bye"
        assert deltas[-1].token_ids == (EOS,)
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, None)

    def test_end_of_sequence_that_does_not_end_is_text(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        ids = [EOS, *smollm2.encode("on"), EOS]
        processor.add(request(skip_special_tokens=False, ignore_eos=True), 0)
        assert text_of(feed(processor, ids, end=finish())) == "<|im_end|>on<|im_end|>"

    def test_early_stop_token_the_engine_passes_over_is_text(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        # the engine handles min_tokens: only its decision counts here
        ids = [EOS, *smollm2.encode("on")]
        processor.add(request(skip_special_tokens=False, min_tokens=2), 0)
        deltas = feed(processor, ids, end=finish())
        assert text_of(deltas) == "<|im_end|>on"

    def test_a_stop_string_in_a_token_the_engine_passes_over_ends_the_text(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        first, second = smollm2.encode("stop on")
        processor.add(request(stop=("stop",), stop_token_ids=(first,)), 0)
        processor.process(delivery(started=[start()]))
        deltas = [d for i in (first, second) for d in processor.process(delivery([(0, 0, [i])]))]
        assert [(d.text, d.finish_reason) for d in deltas] == [("", None), ("", FinishReason.STOP)]
        assert deltas[-1].stop_reason == "stop" and deltas[-1].token_ids == ()

    def test_finish_in_a_later_delivery_still_hides_the_stop_token(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        processor.add(request(skip_special_tokens=False), 0)
        deltas = feed(processor, [*smollm2.encode("hey"), EOS], end=None)
        deltas += processor.process(
            delivery(finished=[finish(reason=FinishReason.STOP, by_token=True)])
        )
        assert text_of(deltas) == "hey"
        assert deltas[-1].token_ids == () and deltas[-1].finish_reason is FinishReason.STOP

    @pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hi there")])
    def test_own_stop_token_is_shown_only_on_request(
        self, processor: OutputProcessor, smollm2: Tokenizer, include: bool, text: str
    ) -> None:
        ids = smollm2.encode("hi there")
        assert len(ids) == 2
        processor.add(
            request(stop_token_ids=(ids[1],), include_stop_str_in_output=include), arrival_ns=0
        )
        end = finish(reason=FinishReason.STOP, token=ids[1], by_token=True)
        deltas = feed(processor, ids, end=end)
        assert text_of(deltas) == text
        assert deltas[-1].stop_reason == ids[1]

    def test_without_a_tokenizer_there_is_no_text(self) -> None:
        processor = OutputProcessor(None, (EOS,))
        processor.add(request(), 0)
        deltas = feed(processor, [5, 6, EOS], end=finish(reason=FinishReason.STOP, by_token=True))
        assert text_of(deltas) == ""
        assert [t for d in deltas for t in d.token_ids] == [5, 6, EOS]


class TestStopStrings:
    def test_stop_across_tokens_ends_the_request_and_asks_for_an_abort(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        ids = smollm2.encode("one two\nUser: three")
        processor.add(request(stop=("\nUser:",)), 0)
        deltas = feed(processor, ids, end=finish())
        assert text_of(deltas) == "one two"
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "\nUser:")
        assert deltas[-1].timings is not None
        assert smollm2.decode([t for d in deltas for t in d.token_ids]) == "one two\nUser:"
        assert processor.take_aborts() == ["r"]
        assert processor.take_aborts() == []
        late = delivery([(0, 0, [5])], finished=[finish(reason=FinishReason.ABORT)])
        assert processor.process(late) == []

    def test_no_abort_when_the_engine_ended_it_in_the_same_step(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        processor.add(request(stop=("b",)), 0)
        deltas = feed(processor, smollm2.encode("ab"), end=finish())
        assert text_of(deltas) == "a"
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert processor.take_aborts() == []

    def test_tokens_after_the_stop_are_dropped(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        ids = smollm2.encode("one two three four")
        processor.add(request(stop=(" two",)), 0)
        processor.process(delivery(started=[start()]))
        [delta] = processor.process(delivery([(0, 0, ids)]))
        assert delta.text == "one"
        assert list(delta.token_ids) == ids[:2]
        assert delta.num_output_tokens == 2

    def test_held_back_text_is_flushed_by_length_and_by_eos(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        for end, tail in (
            (finish(), []),
            (finish(reason=FinishReason.STOP, by_token=True), [EOS]),
            (finish(reason=FinishReason.ABORT), []),
        ):
            processor.add(request(stop=("over and out",)), 0)
            ids = [*smollm2.encode("all over and"), *tail]
            deltas = feed(processor, ids, end=end)
            assert text_of(deltas) == "all over and"
            assert text_of(deltas[:-1]).startswith("all") and deltas[-1].text

    def test_stop_string_is_kept_on_request(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        processor.add(request(stop=("!",), include_stop_str_in_output=True), 0)
        assert text_of(feed(processor, smollm2.encode("hey! you"), end=finish())) == "hey!"


class TestRows:
    def test_only_the_current_epoch_of_a_slot_counts(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        a, b, c = smollm2.encode("a b c")
        processor.add(request(), 0)
        assert processor.process(delivery([(0, 0, [a])])) == []  # no request has that slot
        first = processor.process(
            delivery([(3, 5, [a])], started=[start(slot=3, epoch=5, cached=16)])
        )
        # preempted, and resumed in another slot; the old row still sends a token
        resumed = start(slot=1, epoch=6, cached=99)
        second = processor.process(delivery([(3, 5, [c]), (1, 6, [b])], started=[resumed]))
        assert text_of(first + second) == "a b"
        assert {d.num_cached_tokens for d in first + second} == {16}

    def test_many_requests_in_one_step(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        words = ["zero", "one", "two", "three"]
        for i, _ in enumerate(words):
            processor.add(request(f"r{i}"), 0)
        started = [start(f"r{i}", slot=i, epoch=i + 10) for i in range(4)]
        rows = [(i, i + 10, smollm2.encode(w)) for i, w in enumerate(words)]
        deltas = processor.process(delivery(rows, started=started, finished=[finish("r2")]))
        assert [(d.request_id, d.text) for d in deltas] == [
            (f"r{i}", w) for i, w in enumerate(words)
        ]
        assert [d.finish_reason for d in deltas] == [None, None, FinishReason.LENGTH, None]
        assert len(processor) == 3

    def test_finished_before_any_token(self, processor: OutputProcessor) -> None:
        processor.add(request(), 42)
        [delta] = processor.process(
            delivery(finished=[finish(reason=FinishReason.ABORT)], time_ns=90)
        )
        assert (delta.text, delta.token_ids, delta.num_output_tokens) == ("", (), 0)
        assert delta.finish_reason is FinishReason.ABORT
        assert delta.prompt_token_ids == (7, 8, 9)
        assert delta.timings is not None
        assert (delta.timings.arrival_ns, delta.timings.finished_ns) == (42, 90)
        assert delta.timings.first_token_ns == 0

    def test_error_carries_its_cause_and_what_was_held(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        error = StepError("the device said no", step_id=4, request_ids=("r",))
        processor.add(request(stop=("nope",)), 0)
        deltas = feed(processor, smollm2.encode("no"), end=None)
        deltas += processor.process(
            delivery(finished=[finish(reason=FinishReason.ERROR, error=error)])
        )
        assert deltas[-1].error is error
        assert deltas[-1].finish_reason is FinishReason.ERROR
        assert text_of(deltas) == "no"

    def test_timings(self, processor: OutputProcessor, smollm2: Tokenizer) -> None:
        a, b = smollm2.encode("a b")
        processor.add(request(), arrival_ns=100)
        processor.process(delivery([(0, 0, [a])], started=[start()], time_ns=700))
        [delta] = processor.process(delivery([(0, 0, [b])], finished=[finish()], time_ns=900))
        timings = delta.timings
        assert timings is not None
        assert (
            timings.arrival_ns,
            timings.first_scheduled_ns,
            timings.first_token_ns,
            timings.finished_ns,
        ) == (100, 500, 700, 900)

    def test_prompt_ids_come_once(self, processor: OutputProcessor, smollm2: Tokenizer) -> None:
        processor.add(request(), 0)
        deltas = feed(processor, smollm2.encode("a b c"), end=finish())
        assert [d.prompt_token_ids for d in deltas] == [(7, 8, 9), None, None]
        assert {d.num_prompt_tokens for d in deltas} == {3}

    def test_same_id_twice_is_refused_until_the_first_has_ended(
        self, processor: OutputProcessor
    ) -> None:
        processor.add(request(), 0)
        with pytest.raises(RequestError, match="already in use"):
            processor.add(request(), 0)
        processor.process(delivery(finished=[finish()]))
        processor.add(request(), 0)


class TestLogprobs:
    def step_logprobs(self, rows: Sequence[Sequence[int]]) -> StepLogprobs:
        ids = np.array(rows, dtype=np.int32)
        values = np.tile(-0.5 * np.arange(1, ids.shape[1] + 1, dtype=np.float32), (len(ids), 1))
        return StepLogprobs(ids, values, np.arange(1, len(ids) + 1, dtype=np.int32))

    def test_rows_are_cut_to_what_each_request_asked(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        a, b, c = smollm2.encode("a b c")
        for name, count in (("none", None), ("chosen", 0), ("two", 2)):
            processor.add(request(name, logprobs=count), 0)
        logprobs = self.step_logprobs([[a, a, b, c], [b, a, b, c], [c, a, b, c]])
        deltas = processor.process(
            delivery(
                [(0, 0, [a]), (1, 0, [b]), (2, 0, [c])],
                started=[start("none", 0), start("chosen", 1), start("two", 2)],
                logprobs=logprobs,
            )
        )
        assert deltas[0].logprobs is None
        assert deltas[1].logprobs is not None and deltas[2].logprobs is not None
        [chosen] = deltas[1].logprobs
        assert (chosen.token_id, chosen.token, chosen.logprob, chosen.rank) == (b, " b", -0.5, 2)
        assert chosen.top == ()
        [two] = deltas[2].logprobs
        assert [t[:2] for t in two.top] == [(a, "a"), (b, " b")]
        assert [t[3] for t in two.top] == [-1.0, -1.5]
        assert two.top[0][2] == b"a"

    def test_likeliest_tokens_are_named_when_they_are_read(
        self, processor: OutputProcessor, smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a, b, c = smollm2.encode("a b c")
        named: list[int] = []
        token_text = smollm2.token_text
        monkeypatch.setattr(smollm2, "token_text", lambda i: named.append(i) or token_text(i))
        processor.add(request(logprobs=2), 0)
        logprobs = self.step_logprobs([[a, b, c]])
        [delta] = processor.process(
            delivery([(0, 0, [a])], started=[start()], logprobs=logprobs),
        )
        assert delta.logprobs is not None and named == [a]
        top = delta.logprobs[0].top
        assert len(top) == 2 and named == [a]
        second = (c, " c", b" c", -1.5)
        assert top[1] == second and named == [a, c]
        assert top[1:] == (second,) and top == ((b, " b", b" b", -1.0), second) != top[1:]
        assert hash(top) == hash(tuple(top)) and repr(top) == repr(tuple(top))

    def test_logprobs_travel_with_their_tokens_while_text_is_held(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        ids = smollm2.encode("all over")
        processor.add(request(stop=("all over now",), logprobs=0), 0)
        processor.process(delivery(started=[start()]))
        for token_id in ids:
            [delta] = processor.process(
                delivery([(0, 0, [token_id])], logprobs=self.step_logprobs([[token_id]]))
            )
            assert delta.text == ""
            assert delta.logprobs is not None
            assert [e.token_id for e in delta.logprobs] == list(delta.token_ids) == [token_id]

    def test_part_of_a_character_keeps_its_bytes(
        self, processor: OutputProcessor, smollm2: Tokenizer
    ) -> None:
        ids = smollm2.encode("👋")
        assert len(ids) > 1
        processor.add(request(logprobs=0), 0)
        processor.process(delivery(started=[start()]))
        entries = []
        for token_id in ids:
            [delta] = processor.process(
                delivery([(0, 0, [token_id])], logprobs=self.step_logprobs([[token_id]]))
            )
            entries += delta.logprobs or ()
        assert b"".join(e.token_bytes for e in entries) == "👋".encode()
        assert "\ufffd" in entries[0].token

    def test_without_a_tokenizer(self) -> None:
        processor = OutputProcessor(None, (EOS,))
        processor.add(request(logprobs=1), 0)
        [delta] = processor.process(
            delivery([(0, 0, [5])], started=[start()], logprobs=self.step_logprobs([[5, 6]]))
        )
        assert delta.logprobs is not None
        assert delta.logprobs[0].token_id == 5 and delta.logprobs[0].token == ""


def test_drafts_of_a_completion_are_counted_up_to_its_stop_string(smollm2: Tokenizer) -> None:
    processor = OutputProcessor(smollm2, (EOS,))
    processor.add(request(stop=("b",)), 0)
    processor.process(delivery(started=[start()]))
    a, b = (smollm2.encode(text)[0] for text in "ab")
    (first,) = processor.process(delivery([(0, 0, [a])]))
    assert (first.num_draft_tokens, first.num_accepted_tokens) == (0, 0)
    (more,) = processor.process(delivery([(0, 0, [a, a])], drafted=[4]))
    assert (more.num_draft_tokens, more.num_accepted_tokens) == (4, 1)
    (last,) = processor.process(delivery([(0, 0, [a, b, a, a])], drafted=[3]))
    assert last.text == "a" and last.num_output_tokens == 5
    assert (last.num_draft_tokens, last.num_accepted_tokens) == (7, 2)


def test_the_text_of_guessed_tokens_is_marked(smollm2: Tokenizer) -> None:
    processor = OutputProcessor(smollm2, (EOS,))
    processor.add(request(), 0)
    processor.process(delivery(started=[start()]))
    ids = smollm2.encode("one two three four")
    assert len(ids) == 4
    (plain,) = processor.process(delivery([(0, 0, ids[:1])]))
    assert plain.drafted == ()
    (more,) = processor.process(delivery([(0, 0, ids[1:])], drafted=[5]))
    assert more.text == " two three four" and more.drafted == ((0, len(" two three")),)
    (none,) = processor.process(delivery([(0, 0, ids[:1])], drafted=[5]))
    assert none.drafted == (), "the one token of the step is the model's own"
    both = merge_deltas([plain, more, none, more])
    parts = [both.text[first:end] for first, end in both.drafted]
    assert parts == [" two three"] * 2


def test_guessed_text_ends_where_a_stop_string_begins(smollm2: Tokenizer) -> None:
    processor = OutputProcessor(smollm2, (EOS,))
    processor.add(request(stop=("b",)), 0)
    processor.process(delivery(started=[start()]))
    a, b = (smollm2.encode(text)[0] for text in "ab")
    (last,) = processor.process(delivery([(0, 0, [a, b, a, a])], drafted=[3]))
    assert (last.text, last.drafted) == ("a", ((0, 1),))


def test_half_a_character_counts_for_its_last_token(smollm2: Tokenizer) -> None:
    processor = OutputProcessor(smollm2, (EOS,))
    processor.add(request(), 0)
    processor.process(delivery(started=[start()]))
    ids = smollm2.encode("a👋b")
    assert len(ids) > 4
    (begun,) = processor.process(delivery([(0, 0, ids[:-2])], drafted=[5]))
    assert (begun.text, begun.drafted) == ("a", ((0, 1),))
    (rest,) = processor.process(delivery([(0, 0, ids[-2:])], drafted=[5]))
    assert (rest.text, rest.drafted) == ("👋b", ((0, 1),))
