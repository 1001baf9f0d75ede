"""`LLM` over a tiny random model: shapes, order, errors before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from termgen import LLM, SamplingParams, StructuredOutputsParams
from termgen.errors import ConfigError, ContextLengthError, EngineError, ModelError, RequestError

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "threads": 1,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> Iterator[LLM]:
    with LLM(tiny_llama_dir, **SETTINGS) as llm:
        yield llm


def test_one_prompt_in_every_form(llm: LLM) -> None:
    text = "Hello, how are you"
    ids = llm.get_tokenizer().encode(text)
    outputs = [
        llm.generate(form, GREEDY)
        for form in (text, [text], ids, [ids], {"prompt": text}, [{"prompt_token_ids": ids}])
    ]
    assert all(len(output) == 1 for output in outputs)
    tokens = [output[0].outputs[0].token_ids for output in outputs]
    assert len(tokens[0]) == 8 and all(found == tokens[0] for found in tokens)
    assert all(output[0].prompt_token_ids == ids for output in outputs)
    assert outputs[0][0].prompt == text and outputs[2][0].prompt is None


def test_results_keep_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt number {i} " * (1 + i % 3) for i in range(11)]
    lengths = [(i * 5) % 9 + 1 for i in range(11)]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(prompts, params)
    assert [o.prompt for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    one_by_one = [llm.generate(p, q)[0] for p, q in zip(prompts, params, strict=True)]
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in one_by_one]


def test_output_fields(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=3)
    output = llm.generate("The capital of France", params)[0].outputs[0]
    assert output.index == 0 and output.error is None and output.stop_reason is None
    assert output.logprobs is not None and len(output.logprobs) == 5
    chosen = [c[t] for t, c in zip(output.token_ids, output.logprobs, strict=True)]
    for token_id, found in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(found)) == token_id
        assert [c.rank for c in found.values()] == [1, 2, 3]
        assert sorted((c.logprob for c in found.values()), reverse=True) == [
            c.logprob for c in found.values()
        ]
    assert output.cumulative_logprob == pytest.approx(sum(c.logprob for c in chosen))
    tokenizer = llm.get_tokenizer()
    assert output.text == tokenizer.decode(output.token_ids)
    assert llm.generate("x", GREEDY)[0].outputs[0].logprobs is None


def test_several_completions(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    first, again = llm.generate("Once", params)[0], llm.generate("Once", params)[0]
    assert [o.index for o in first.outputs] == [0, 1, 2]
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in again.outputs]
    assert len({tuple(o.token_ids) for o in first.outputs}) > 1
    alone = SamplingParams(temperature=1.0, seed=6, max_tokens=6, ignore_eos=True)
    assert llm.generate("Once", alone)[0].outputs[0].token_ids == first.outputs[1].token_ids


def test_chat_is_generate_on_the_rendered_template(llm: LLM) -> None:
    one = [{"role": "user", "content": "Hello, how are you?"}]
    two = [{"role": "system", "content": "Be brief."}, *one]
    both = llm.chat([one, two], GREEDY)
    assert len(both) == 2 and len(llm.chat(one, GREEDY)) == 1
    tokenizer = llm.get_tokenizer()
    for output, messages in zip(both, (one, two), strict=True):
        ids = tokenizer.apply_chat_template(messages)
        assert output.prompt_token_ids == ids
        assert output.outputs[0].token_ids == llm.generate(ids, GREEDY)[0].outputs[0].token_ids
    bare = llm.chat(one, GREEDY, add_generation_prompt=False)[0]
    assert len(bare.prompt_token_ids) < len(both[0].prompt_token_ids)


def test_sleep(llm: LLM) -> None:
    prompt = list(range(2, 30))
    told = llm.generate([prompt], GREEDY)[0].outputs[0].token_ids
    for level in (1, 2):
        llm.sleep(level)  # type: ignore[arg-type]
        with pytest.raises(EngineError, match="wake_up"):
            llm.generate([prompt], GREEDY)
        llm.wake_up()
        assert llm.generate([prompt], GREEDY)[0].outputs[0].token_ids == told


def test_repeated_prompts_hit_the_prefix_cache(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = list(range(2, 66))
    first, second = llm.generate([prompt], GREEDY)[0], llm.generate([prompt], GREEDY)[0]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= 48
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    salted = llm.generate({"prompt_token_ids": prompt, "cache_salt": "other"}, GREEDY)[0]
    assert salted.num_cached_tokens == 0


def test_default_params_come_from_the_model(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    for name, value in llm.model.default_params.items():
        assert getattr(params, name) == value
    output = llm.generate("Hi")[0]
    assert output.finished and len(output.outputs[0].token_ids) >= 1


def test_nothing_in_nothing_out(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    assert llm.chat([], GREEDY) == []


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        ([], RequestError, "empty"),
        (list(range(2, 300)), ContextLengthError, "maximum context length is 256"),
        ([5, 9999], RequestError, "vocabulary"),
        ([5, -1], RequestError, "vocabulary|token id"),
        ({"text": "x"}, RequestError, "unknown key 'text'"),
        ({"cache_salt": "x"}, RequestError, "needs `prompt`"),
    ],
)
def test_one_bad_prompt_stops_the_call_before_it_runs(
    llm: LLM, bad: Any, error: type[Exception], words: str
) -> None:
    before = llm._engine.snapshot()
    with pytest.raises(error, match=words):
        llm.generate(["fine", bad, "fine too"], GREEDY)
    after = llm._engine.snapshot()
    assert after.generation_tokens == before.generation_tokens
    assert after.num_waiting == after.num_running == 0


def test_params_must_fit_the_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 entries for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    with pytest.raises(RequestError, match="must be SamplingParams, not dict"):
        llm.generate(["a"], [{"temperature": 0}])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="must be SamplingParams, not int"):
        llm.generate(["a"], 5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="prompts must be text, token ids or a list of them"):
        llm.generate(None)  # type: ignore[arg-type]


def test_an_interrupted_call_leaves_the_engine_clean(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate("again", GREEDY)[0].outputs[0].token_ids
    steps = 0
    step = llm._engine.step

    def interrupted() -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["one", "two"], GREEDY)
    output = llm.generate("again", GREEDY)
    assert [o.outputs[0].token_ids for o in output] == [expected]
    snapshot = llm._engine.snapshot()
    assert snapshot.num_running == snapshot.num_waiting == snapshot.num_used_blocks == 0


def test_progress_bar_on_request(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY, use_tqdm=True)
    assert "2/2" in capsys.readouterr().err


def test_prompt_logprobs_in_vllms_shape(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2, n=2)
    output = llm.generate("The capital of France", params)[0]
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    for token_id, found in zip(
        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
    ):
        assert found is not None and next(iter(found)) == token_id
        assert len(found) - (found[token_id].rank > 2) == 2
    assert llm.generate("x", GREEDY)[0].prompt_logprobs is None


def test_bad_words_bias_and_allowed_ids(llm: LLM) -> None:
    def tokens(**options: Any) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, **options)
        return llm.generate("The keys and values", params)[0].outputs[0].token_ids

    plain = tokens()
    text = llm.get_tokenizer().decode(plain[:1]).strip() or llm.get_tokenizer().decode(plain[1:2])
    assert tokens(bad_words=text) != plain
    assert tokens(bad_words=["not written by chance"]) == plain
    assert tokens(logit_bias={plain[0]: -100})[0] != plain[0]
    assert tokens(allowed_token_ids=[plain[0]]) == [plain[0]] * 8


def test_priorities_need_their_policy(llm: LLM, tiny_llama_dir: Path) -> None:
    with pytest.raises(RequestError, match="--scheduling-policy priority"):
        llm.generate(["a", "b"], GREEDY, priority=[0, 1])
    with pytest.raises(RequestError, match="1 entries for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, priority=[0])
    settings = SETTINGS | {"scheduling_policy": "priority", "max_num_seqs": 1}
    with LLM(tiny_llama_dir, **settings) as sorted_llm:
        outputs = sorted_llm.generate(["a", "b", "c"], GREEDY, priority=[5, -1, 2])
    ends = [o.timings.finished_ns for o in outputs if o.timings is not None]
    assert ends[1] < ends[2] < ends[0]


def test_a_template_variable_that_nothing_reads_is_refused(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="enable_thinking has no effect") as caught:
        llm.chat(chat, GREEDY, chat_template_kwargs={"enable_thinking": False})
    assert caught.value.param == "chat_template_kwargs"
    with pytest.raises(RequestError) as caught:
        llm.chat(chat, GREEDY, chat_template_kwargs={"reasoning_effort": "low"})
    assert caught.value.param == "reasoning_effort"


def test_unknown_and_wrong_options_name_themselves(tiny_llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="'max_num_seq'; did you mean max_num_seqs"):
        LLM(tiny_llama_dir, max_num_seq=4)
    with pytest.raises(ConfigError, match="dtype must be one of"):
        LLM(tiny_llama_dir, dtype="int4")
    with pytest.raises(ModelError, match="no such file or folder: /does/not/exist"):
        LLM("/does/not/exist")


def test_dummy_weights_need_config_json_alone(tiny_llama_dir: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_llama_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = SETTINGS | {"load_format": "dummy", "skip_tokenizer_init": True}
    with LLM(tmp_path, **settings) as llm:
        output = llm.generate([[5, 6, 7], [8, 9]], GREEDY)
        assert [len(o.outputs[0].token_ids) for o in output] == [8, 8]
        assert [o.outputs[0].text for o in output] == ["", ""]
        with pytest.raises(ConfigError, match="skip_tokenizer_init"):
            llm.get_tokenizer()
        with pytest.raises(RequestError):
            llm.generate("text", GREEDY)


def test_after_shutdown_nothing_runs(tiny_llama_dir: Path) -> None:
    with LLM(tiny_llama_dir, **SETTINGS) as llm:
        pass
    llm.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        llm.generate("x", GREEDY)


def test_an_answer_is_checked_against_what_its_grammar_leaves_out(llm: LLM) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}

    def errors(length: int, max_tokens: int = 60) -> tuple[str, ...] | None:
        wanted = {**schema, "minItems": length, "maxItems": length}
        form = StructuredOutputsParams(json=wanted, strict=False)
        params = SamplingParams(max_tokens=max_tokens, seed=1, structured_outputs=form)
        return llm.generate("x", params)[0].outputs[0].schema_errors

    assert errors(1) == () and errors(3, max_tokens=2) is None
    (line,) = errors(3) or ()
    assert "non-unique" in line
    with pytest.raises(RequestError, match="uniqueItems"):
        form = StructuredOutputsParams(json=schema)
        llm.generate("x", SamplingParams(structured_outputs=form))
