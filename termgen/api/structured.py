"""Body fields that say what the answer must look like -> `StructuredOutputsParams`.

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*` fields. Of all of
them a request gives one.
"""

from __future__ import annotations

from typing import Any

from termgen.api.errors import unsupported
from termgen.api.fields import Fields, wrong_type
from termgen.errors import RequestError
from termgen.vocabulary.structured_outputs import KINDS, StructuredOutputsParams

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older names of the kinds."""


def parse_structured(body: Fields) -> StructuredOutputsParams | None:
    """None where any text will do."""
    found = [wanted for wanted in (_response_format(body), _structured_outputs(body)) if wanted]
    for name, kind in GUIDED.items():
        value = body.take(name)
        if value is not None:
            found.append(_make({kind: value}, name))
    if len(found) > 1:
        raise RequestError(
            f"{found[0].param} and {found[1].param} exclude each other", param=found[1].param
        )
    return found[0] if found else None


def _response_format(body: Fields) -> StructuredOutputsParams | None:
    name = "response_format"
    value = body.take(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")  # as llama.cpp's clients send it
        return _make({"json_object": True} if schema is None else {"json": schema}, name)
    if kind == "json_schema":
        wrapper = value.get("json_schema")
        if not isinstance(wrapper, dict):
            raise wrong_type(f"{name}.json_schema", "an object", wrapper)
        schema = wrapper.get("schema")
        if not isinstance(schema, dict):
            raise wrong_type(f"{name}.json_schema.schema", "an object", schema)
        return _make({"json": schema}, name)
    raise unsupported(name, f"{name}.type must be text, json_object or json_schema")


def _structured_outputs(body: Fields) -> StructuredOutputsParams | None:
    name = "structured_outputs"
    value = body.take(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    given = {key: item for key, item in value.items() if item is not None}
    unknown = sorted(given.keys() - set(KINDS))
    if unknown:
        raise unsupported(name, f"{name}.{unknown[0]:.40} is not supported by this server")
    return _make(given, name) if given else None


def _make(given: dict[str, Any], name: str) -> StructuredOutputsParams:
    choice = given.get("choice")
    if isinstance(choice, list):
        given = {**given, "choice": tuple(choice)}
    return StructuredOutputsParams(**given, param=name)
