"""Every parameter of the table is in every place that must have it."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling_columns import DTYPES

from termgen.api import openapi
from termgen.api.anthropic import MESSAGES
from termgen.api.chat import CHAT
from termgen.api.completions import COMPLETIONS
from termgen.api.fields import Endpoint
from termgen.api.responses.body import RESPONSES
from termgen.api.sampling import OTHERS_WORDS, ConstraintFields, GenerationFields, parse_sampling
from termgen.commands.generate import OMITTED, add_generate_flags
from termgen.engine.device.runner.request_state import RequestState
from termgen.engine.device.sampling.penalties import Penalties
from termgen.engine.device.sampling.top_k_top_p import Cuts
from termgen.errors import RequestError
from termgen.remote.wire import Dialect, build_call, name_in
from termgen.tui.chat.saved.chat_records import PARAM_NAMES
from termgen.tui.chat.state.sampling_fields import FIELDS
from termgen.vocabulary.sampling.row import LLAMA_CPP, OPENAI, VLLM, Integers, Reals
from termgen.vocabulary.sampling_params import (
    COLUMNS,
    CUTS,
    PENALTIES,
    RECOMMENDED,
    TABLE,
    UNSUPPORTED,
    SamplingParams,
)

ROOT = Path(__file__).resolve().parents[2]
API_PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
MOST_FILES = 6
CHATS = [openapi.body_schema(endpoint)["properties"] for endpoint in (CHAT, COMPLETIONS)]
OTHERS = [openapi.body_schema(endpoint)["properties"] for endpoint in (MESSAGES, RESPONSES)]
every = pytest.mark.parametrize("name", TABLE)
every_column = pytest.mark.parametrize("name", COLUMNS)


def other_than_neutral(name: str) -> Any:
    """A value that asks for something, of a parameter that has a column."""
    low = TABLE[name].range.low  # type: ignore[union-attr]
    values = (0.5, 1.5) if TABLE[name].column == "float32" else (3, 4)
    return next(value for value in values if value != TABLE[name].default and value > low)


def test_each_field_declares_its_row() -> None:
    assert list(TABLE) == [f.name for f in fields(SamplingParams)]
    for name, row in TABLE.items():
        assert (row.name, row.default) == (name, getattr(SamplingParams(), name))
        assert row.origin in (OPENAI, VLLM, LLAMA_CPP)
        row.check(row.default)


@every_column
def test_the_annotation_is_that_of_the_column(name: str) -> None:
    (annotation,) = (f.type for f in fields(SamplingParams) if f.name == name)
    row = TABLE[name]
    assert annotation == {"float32": "float", "int32": "int"}[row.column or ""]
    assert isinstance(row.range, Reals if row.column == "float32" else Integers)


@every
def test_it_is_in_the_bodies_and_their_description(name: str) -> None:
    assert name in CHAT.fields and name in COMPLETIONS.fields
    is_shared = name in COLUMNS or name in ConstraintFields.__struct_fields__
    for properties in (*CHATS, *(OTHERS if is_shared else ())):
        assert name in properties


@every
def test_it_is_in_the_docs(name: str) -> None:
    (line,) = (line for line in API_PAGE.splitlines() if line.startswith(f"| `{name}` | both |"))
    row = TABLE[name]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[4:] == [row.meaning, row.origin]
    assert row.values_words in (None, cells[2])


@every_column
def test_a_body_with_it_becomes_the_parameter(name: str) -> None:
    def parsed(defaults: dict[str, Any], **given: Any) -> SamplingParams:
        body = GenerationFields(**given)
        wanted = {"max_tokens": None, "logprobs": None, "prompt_logprobs": None}
        return parse_sampling(body, **wanted, defaults=defaults)

    value = other_than_neutral(name)
    assert getattr(parsed({}, **{name: value}), name) == value
    assert getattr(parsed({name: value}), name) == value
    assert getattr(parsed({}), name) == TABLE[name].default


@every_column
def test_values_outside_the_range_are_refused_by_name(name: str) -> None:
    bounds = TABLE[name].range
    assert bounds is not None
    for value in (bounds.low - 2, bounds.high + 1, "x", None, True):
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name and str(caught.value).startswith(f"{name} must be ")


@every_column
def test_it_has_a_column_on_the_device(name: str) -> None:
    state = RequestState(
        max_num_seqs=2,
        max_model_len=8,
        max_blocks=2,
        vocab_size=32,
        num_eos_ids=1,
        device=torch.device("cpu"),
    )
    column = state.params[name]
    assert column.dtype == DTYPES[TABLE[name].column or ""] and len(column) == 3
    neutral = 0.0 if name == "temperature" else TABLE[name].default
    assert (column == neutral).all()


def test_parts_of_sampling_read_the_columns_of_their_rows() -> None:
    assert set(Cuts._fields) == CUTS.keys()
    assert set(Penalties._fields) == PENALTIES.keys()
    assert COLUMNS.keys() - CUTS.keys() - PENALTIES.keys() == {"temperature"}


@every_column
def test_the_step_learns_that_a_row_asks_for_it(name: str) -> None:
    asking = SamplingParams(**{name: other_than_neutral(name)})
    assert asking.has_cuts == (name in CUTS)
    assert asking.has_penalties == (name in PENALTIES)


@every
def test_the_inspector_says_it(name: str) -> None:
    assert SamplingParams().describe() == ""
    if name in COLUMNS:
        value = other_than_neutral(name)
        assert SamplingParams(**{name: value}).describe() == f"{name} {value:g}"


@every
def test_it_has_a_flag(name: str) -> None:
    parser = argparse.ArgumentParser()
    add_generate_flags(parser)
    flags = {action.dest for action in parser._actions}
    assert (name in flags) != (name in OMITTED) or name in ("logit_bias",)
    assert (name in OMITTED) == (TABLE[name].help is None)


def test_the_chat_keeps_what_its_panel_has() -> None:
    assert FIELDS.keys() == {name for name, row in TABLE.items() if row.panel is not None}
    assert FIELDS.keys() < set(PARAM_NAMES)
    assert all(len(words) <= 40 for words in FIELDS.values())


@every_column
def test_other_servers_get_it_by_their_name_or_not_at_all(name: str) -> None:
    row, value = TABLE[name], other_than_neutral(name)
    knows_it = {
        Dialect.TERMGEN: name,
        Dialect.VLLM: None if row.origin == LLAMA_CPP else name,
        Dialect.LLAMA_CPP: name if row.origin == OPENAI else row.llama_cpp,
        Dialect.OPENAI: name if row.origin == OPENAI else None,
    }
    for dialect, sent_as in knows_it.items():
        assert name_in(dialect, name) == sent_as
        params = SamplingParams(**{name: value})
        if sent_as is None:
            with pytest.raises(RequestError, match=f"^{name} is not part of"):
                build_call("a", params, model="m", dialect=dialect)
        else:
            assert build_call("a", params, model="m", dialect=dialect).body[sent_as] == value


def test_a_model_recommends_numbers_that_have_a_column() -> None:
    assert RECOMMENDED.keys() <= COLUMNS.keys()


def test_no_name_means_two_things() -> None:
    names = [*TABLE, *UNSUPPORTED, *(word for row in TABLE.values() for word in row.others)]
    assert len(names) == len(set(names))
    endpoints: tuple[Endpoint, ...] = (CHAT, COMPLETIONS)
    for word in (*UNSUPPORTED, *(word for row in TABLE.values() for word in row.others)):
        assert word in OTHERS_WORDS
        assert all(word not in endpoint.fields for endpoint in endpoints)


def test_a_new_one_takes_few_files() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipe = guide.partition("### A sampling parameter")[2].partition("\n## ")[0]
    files = [path for line in recipe.splitlines() for path in re.findall(r"^\| `(\S+)` \|", line)]
    assert 3 < len(files) <= MOST_FILES and all((ROOT / path).exists() for path in files)


def test_no_other_file_of_the_program_names_the_pattern() -> None:
    """A number that has a column is named where the table, the sampler and its kernel are."""
    package = ROOT / "termgen"
    named = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"\bmin_p\b", path.read_text(encoding="utf-8"))
    }
    assert named == {
        "vocabulary/sampling_params.py",
        "engine/device/sampling/top_k_top_p.py",
        "engine/device/kernels/sampling/top_k_top_p.py",
        "api/sampling.py",  # advice for other servers' order of samplers
        "tui/chat/state/token_scores.py",  # where a cut shows among few alternatives
    }


def test_words_of_the_panel_fit_a_line_of_a_narrow_screen() -> None:
    """At 80 columns there are 31 for them, and rows of one line each need no scrolling at 24."""
    assert max(len(row.panel) for row in TABLE.values() if row.panel) <= 31
