"""transformers' code on a GPU: recorded steps give the tokens of eager ones, and a capture that
fails leaves the device usable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mixed_load import run_mixed_load
from transformers import AutoConfig, AutoModelForCausalLM

from termgen.config import EngineConfig
from termgen.engine.device.runner.cuda_graphs import CudaRecorder, RecordingError
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def olmo2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("olmo2")
    with torch.random.fork_rng():
        torch.manual_seed(20)
        config = AutoConfig.for_model(
            "olmo2",
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            pad_token_id=None,
            eos_token_id=1,
            initializer_range=0.1,
        )
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def make_engine(folder: Path, **options: object) -> SyncEngine:
    settings: dict[str, object] = {
        "dtype": "bfloat16",
        "max_num_seqs": 20,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 200,
        "max_model_len": 128,
        "skip_tokenizer_init": True,
        **options,
    }
    return SyncEngine(EngineConfig(model=str(folder), device="cuda", **settings))  # type: ignore[arg-type]


def test_recorded_steps_give_the_tokens_of_eager_ones(olmo2_dir: Path) -> None:
    """The type is float32, in which padding cannot change a choice."""
    seed = 7
    print(f"seed {seed}")

    def run(**options: object) -> tuple[dict[str, list[int]], list[str]]:
        engine = make_engine(olmo2_dir, dtype="float32", **options)
        tokens, steps = run_mixed_load(
            engine, seed, num_requests=24, longest_prompt=89, most_tokens=25
        )
        full = [s for s in steps if s.graph_mode == "FULL"]
        engine.shutdown()
        return tokens, ["prompts" if s.num_prefill_tokens else "decodes" for s in full]

    eager, recorded_steps = run(enforce_eager=True)
    assert not recorded_steps
    recorded, recorded_steps = run()
    assert recorded == eager
    assert {"prompts", "decodes"} <= set(recorded_steps)
    reference, _ = run(attention_backend="torch_reference")
    assert reference == recorded


def test_logits_in_bfloat16_are_near_float32(olmo2_dir: Path) -> None:
    """Log-probabilities of the first token of a long and a short prompt."""
    model = AutoModelForCausalLM.from_pretrained(olmo2_dir, dtype=torch.float32).eval()
    engine = make_engine(olmo2_dir)
    prompts = [tuple(range(3, 3 + n)) for n in (100, 5)]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(GenerationRequest(request_id=str(i), prompt_token_ids=prompt, params=params))
    found = {}
    while engine.has_unfinished:
        for delta in engine.step():
            assert delta.error is None and delta.logprobs is not None
            found[int(delta.request_id)] = delta.logprobs[0].top
    engine.shutdown()
    for i, prompt in enumerate(prompts):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        ids, values = [entry[0] for entry in found[i]], [entry[3] for entry in found[i]]
        error = (torch.tensor(values) - expected[ids]).norm() / expected[ids].norm()
        assert len(ids) == 5 and error < 0.03


def test_recorded_decodes_in_bfloat16_equal_eager_ones_of_the_same_shape(olmo2_dir: Path) -> None:
    """Eight rows from the first decode to the last: no padding, so every product is the same."""
    outputs = []
    for mode in ("none", "full_decode_only"):
        engine = make_engine(olmo2_dir, cudagraph_mode=mode)
        ring = engine.core.bus.subscribe()
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        for i in range(8):
            request = GenerationRequest(
                request_id=str(i), prompt_token_ids=tuple(range(3 + i, 15 + i)), params=params
            )
            engine.add(request)
        tokens: dict[str, list[int]] = {}
        while engine.has_unfinished:
            for delta in engine.step():
                assert delta.error is None, delta.error
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        steps = [e for e in ring.drain() if isinstance(e, StepRecord)]
        decodes = {s.graph_mode for s in steps if s.num_decode_rows == 8}
        assert decodes == {"NONE" if mode == "none" else "FULL"}
        outputs.append(tokens)
        engine.shutdown()
    assert outputs[0] == outputs[1]


def test_a_failed_capture_leaves_the_device_usable() -> None:
    device = torch.device("cuda:0")
    x = torch.ones(8, device=device)
    total = torch.zeros((), device=device)

    def waits() -> None:
        y = torch.empty(1 << 20, device=device).fill_(float(x.sum().item()))
        total.add_(y[0])

    with pytest.raises(RecordingError):
        CudaRecorder(device)(waits)
    torch.cuda.synchronize()
    assert torch.randn(4, device=device, generator=torch.Generator(device)).isfinite().all()

    def adds() -> None:
        total.add_(x.sum())

    total.zero_()
    replay: Callable[[], None] = CudaRecorder(device)(adds)
    total.zero_()
    replay()
    replay()
    torch.cuda.synchronize()
    assert float(total) == 16.0
    torch.cuda.empty_cache()
