"""The method of guessing that a drafter's folder is for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from drafted_runs import engine_of, note_drafts, run, runner_of
from tiny_heads import make_eagle3

from termgen.engine.device.config.drafter_kind import method_of
from termgen.errors import ConfigError, ModelError


@pytest.mark.parametrize(
    ("raw", "method"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "eagle3"),
        ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}, "eagle3"),
        ({"architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"architectures": ["MuseGlimmerAssistantModel"]}, "dflash"),
        ({"architectures": ["Gemma4AssistantForCausalLM"]}, "assistant"),
        ({"architectures": ["LlamaForCausalLM"]}, "draft_model"),
        ({"architectures": ["Mamba2ForCausalLM"]}, "draft_model"),
    ],
)
def test_known_architectures(raw: dict[str, object], method: str) -> None:
    assert method_of(raw) == method


def test_a_folder_alone_is_enough(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    target = tiny_model_dir("llama", num_hidden_layers=4)
    make_eagle3(target, tmp_path / "head", layers=(1, 2, 3))
    expected_engine = engine_of(target)
    expected = run(expected_engine)
    expected_engine.shutdown()
    for folder, kept in ((tmp_path / "head", (1, 2, 3)), (target, ())):
        engine = engine_of(target, speculative_config=f'{{"model": "{folder}"}}')
        assert runner_of(engine).drafts.drafter.model.kept_layers == kept
        written = note_drafts(engine)
        assert run(engine) == expected and written
        engine.shutdown()


def test_a_folder_that_is_none_is_named(tiny_llama_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises((ModelError, ConfigError), match="speculative_config: .*config.json"):
        engine_of(tiny_llama_dir, speculative_config=f'{{"model": "{tmp_path}"}}')
