"""The `options` of a request: sampling in Ollama's words, and settings of a model's start.

Each is honoured, accepted because the start of the server has decided it, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, defstruct

from termgen.api.errors import unsupported
from termgen.api.fields import Check, Endpoint, is_empty, is_true, never, read, wanted
from termgen.api.sampling import OTHERS_WORDS, PositiveInt, Seed, number_field
from termgen.errors import RequestError
from termgen.vocabulary.sampling.row import MAX_INT
from termgen.vocabulary.sampling_params import COLUMNS, PENALTIES, TABLE

NAMES: Mapping[str, str] = {
    **{name: row.llama_cpp or name for name, row in COLUMNS.items()},
    "max_tokens": "num_predict",
    "seed": "seed",
    "stop": "stop",
}
"""A chat's name of a parameter -> Ollama's, within `options`."""

AT_START = frozenset(
    {
        *("num_gpu", "main_gpu", "num_thread", "num_batch", "use_mmap", "use_mlock", "low_vram"),
        *("numa", "f16_kv", "draft_num_predict"),
    }
)
"""Options of a model's start, which flags of the server have decided."""

WITHOUT_EFFECT = frozenset({"num_keep", "mirostat_tau", "mirostat_eta"})
"""Options of what never happens here: a context that is shifted, and mirostat, which is refused."""

_REFUSED: dict[str, Check] = {
    **OTHERS_WORDS,
    **dict.fromkeys(TABLE, never),
    **dict.fromkeys(("vocab_only", "logits_all", "embedding_only"), is_empty),
    "penalize_newline": is_true,
}


class FixedOptions(Struct, frozen=True):
    """Options that are no plain numbers of the table."""

    seed: Annotated[Seed | None, Meta(description="-1: a random one")] = None
    stop: Annotated[str | list[str], wanted("a string or a list of strings")] = []
    num_predict: Annotated[
        Annotated[int, Meta(ge=-2, le=MAX_INT)] | None,
        Meta(description="longest answer in tokens; -1 and -2: what the context leaves"),
    ] = None
    num_ctx: Annotated[
        PositiveInt | None, Meta(description="a context that the server must have")
    ] = None
    repeat_last_n: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_INT)] | None,
        Meta(description="-1: penalties look at all tokens, as they do here; 0: none"),
    ] = None


def _field(name: str) -> tuple[str, Any, None]:
    _, kind, default = number_field(COLUMNS[name])
    return NAMES[name], kind, default


if TYPE_CHECKING:
    OptionFields = FixedOptions
else:
    OptionFields = defstruct(
        "OptionFields",
        map(_field, COLUMNS),
        bases=(FixedOptions,),
        namespace={"__doc__": "The options of Ollama, with every number of the table."},
        module=__name__,
        frozen=True,
    )

OPTIONS = Endpoint((OptionFields,), harmless=AT_START | WITHOUT_EFFECT, refused=_REFUSED)


@dataclass(frozen=True, slots=True)
class Options:
    """The options in a chat's words."""

    chat: Mapping[str, Any]
    ignored: tuple[str, ...]
    """Names that are not known."""
    not_used: tuple[str, ...]
    """Names that are known and have no effect."""


def parse_options(
    given: Mapping[str, Any], *, defaults: Mapping[str, Any], max_model_len: int
) -> Options:
    """defaults: the model's own sampling. Raises RequestError, which names `options.NAME`."""
    data = {name: _whole(value) for name, value in given.items() if value is not None}
    body = read(OptionFields, data, "options.")
    chat: dict[str, Any] = {}
    for name, theirs in NAMES.items():
        if theirs in data:
            chat[name] = getattr(body, theirs)
    if body.seed == -1:
        del chat["seed"]
    if body.num_predict == 0:
        message = "options.num_predict must be 1 or more, or -1 for no limit, not 0"
        raise RequestError(message, param="options.num_predict")
    if body.num_predict is not None:
        chat["max_tokens"] = max(body.num_predict, -1)
    if body.num_ctx is not None and body.num_ctx > max_model_len:
        raise unsupported(
            "options.num_ctx",
            f"options.num_ctx is {body.num_ctx}, and this server's context has {max_model_len} "
            "tokens; it is set when the server starts, with --max-model-len",
        )
    _look_back(body.repeat_last_n, chat, defaults)
    known = [name for name in data if name in OPTIONS.harmless]
    return Options(chat, _unknown(data), tuple(f"options.{name}" for name in known))


def _whole(value: Any) -> Any:
    """A number without a fraction as an integer: some clients have only one kind of numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _look_back(num_tokens: int | None, chat: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Apply `repeat_last_n`. Penalties look at all tokens here, so another number would change what
    they do."""
    if num_tokens is None or num_tokens == -1:
        return
    if num_tokens == 0:
        chat |= PENALTIES
        return
    for name, neutral in PENALTIES.items():
        if chat.get(name, defaults.get(name, neutral)) != neutral:
            raise unsupported(
                "options.repeat_last_n",
                f"options.repeat_last_n must be -1, or 0 for no penalties, not {num_tokens}: "
                f"{NAMES[name]} looks at all tokens here",
            )


def _unknown(data: Mapping[str, Any]) -> tuple[str, ...]:
    for name, value in data.items():
        check = OPTIONS.refused.get(name)
        if name in OPTIONS.fields or name in OPTIONS.harmless or check is None:
            continue
        hint = f"; its name here is options.{NAMES[name]}" if name in NAMES else ""
        if not check(value):
            raise unsupported(f"options.{name}", f"options.{name} is not supported here{hint}")
    return tuple(f"options.{name}" for name in OPTIONS.unknown(data))
