"""`termgen generate`: one prompt in, text (or one JSON object) out. For scripts and pipes.

Checks all input before it loads a model. Text is streamed to standard output, everything else goes
to standard error. Called by `cli` only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import signal
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from termgen.commands.exit_codes import INTERRUPTED, OK
from termgen.commands.settings import SettingLayers, add_flags, add_server_flags
from termgen.config import EngineConfig
from termgen.errors import ConfigError, ContextLengthError, RequestError
from termgen.vocabulary.sampling_params import TABLE, SamplingParams
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from termgen.client import (
        EngineClient,
        ModelInfo,
        Prompt,
        RequestTimings,
        TokenDelta,
        TokenLogprob,
    )
    from termgen.engine.loop.engine import SyncEngine
    from termgen.vocabulary.request import GenerationRequest


DEFAULT_MAX_TOKENS = 512

SAMPLING_HELP = {
    **{name: row.flag_help for name, row in TABLE.items() if row.help is not None},
    "max_tokens": f"{TABLE['max_tokens'].help} "
    f"(default: {DEFAULT_MAX_TOKENS}, or what the context leaves if that is less)",
}
OMITTED = tuple(name for name, row in TABLE.items() if row.help is None)
"""Fields without a generated flag: one run is one completion, `--seed` of the engine group is the
request's seed too, and the others have flags of their own."""

KINDS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
"""Flag -> the field of `StructuredOutputsParams`."""


def add_generate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; `-` or none: read standard input")
    group = parser.add_argument_group("prompt and output")
    group.add_argument(
        "--messages", metavar="FILE.json", help="a conversation: a JSON list of role and content"
    )
    group.add_argument(
        "--prompt-token-ids", metavar="IDS", help="token ids, comma-separated, instead of text"
    )
    group.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    group.add_argument(
        "--raw", action="store_true", help="continue the plain text: no chat template"
    )
    group.add_argument("--json", action="store_true", help="print one JSON object at the end")
    add_server_flags(parser, "answer with")
    add_flags(parser, SamplingParams, title="sampling", omit=OMITTED, help_texts=SAMPLING_HELP)
    form = add_format_flags(parser)
    form.add_argument(
        "--logit-bias",
        metavar="ID=BIAS",
        type=_bias,
        action="append",
        default=argparse.SUPPRESS,
        help="add this, -100 to 100, to the logit of the token with this id; may be repeated",
    )


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be ID=BIAS, not {text!r}") from None


@dataclass(frozen=True, slots=True)
class Input:
    """The input, read and checked, before a model is loaded to render it."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    system: str | None = None
    raw: bool = False

    def prompt(self, *, has_chat_template: bool) -> Prompt:
        """The prompt; text becomes a user message if the model is a chat model, unless `raw`."""
        from termgen.client import ChatPrompt

        if self.token_ids is not None:
            return self.token_ids
        is_chat = not self.raw and (has_chat_template or self.messages is not None)
        if not is_chat:
            assert self.text is not None
            if self.system is not None:
                raise ConfigError("--system needs a model with a chat template")
            return self.text
        messages = self.messages or ({"role": "user", "content": self.text},)
        if self.system is not None:
            messages = ({"role": "system", "content": self.system}, *messages)
        return ChatPrompt(messages)


def read_input(args: argparse.Namespace) -> Input:
    """Read the prompt from its one source. Raises `ConfigError` for none, two or a bad file."""
    given = [
        name
        for name, value in (
            ("a prompt", args.prompt),
            ("--messages", args.messages),
            ("--prompt-token-ids", args.prompt_token_ids),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise ConfigError(f"give {given[0]} or {given[1]}, not both")
    if args.raw and args.system is not None:
        raise ConfigError("--raw and --system exclude each other: plain text has no system message")
    if args.messages is not None:
        if args.raw:
            raise ConfigError("--raw and --messages exclude each other")
        return Input(messages=_read_messages(args.messages), system=args.system)
    if args.prompt_token_ids is not None:
        if args.raw or args.system is not None:
            raise ConfigError("--prompt-token-ids takes neither --raw nor --system")
        return Input(token_ids=_parse_ids(args.prompt_token_ids))
    text = args.prompt
    if text is None or text == "-":
        if text is None and sys.stdin.isatty():
            raise ConfigError("no prompt: give one as an argument, pipe it in, or use --messages")
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError:
            raise ConfigError("standard input is not UTF-8 text") from None
    if any("\ud800" <= c <= "\udfff" for c in text):  # undecodable bytes of an argument
        raise ConfigError("the prompt is not UTF-8 text")
    if not text.strip():
        raise ConfigError("the prompt is empty")
    return Input(text=text, system=args.system, raw=args.raw)


def read_params(layers: SettingLayers) -> SamplingParams:
    """Sampling parameters from the flags alone, to check them before the model is known."""
    return SamplingParams(**_given(layers))


def _given(layers: SettingLayers) -> dict[str, Any]:
    names = [f.name for f in fields(SamplingParams) if f.name != "n"]
    given = {name: value for name in names if (value := layers.given(name)) is not None}
    form = read_format({name: layers.given(name) for name in KINDS})
    return given if form is None else {**given, "structured_outputs": form}


def _completed(layers: SettingLayers, model: ModelInfo) -> SamplingParams:
    """Sampling parameters from the flags over the model's defaults."""
    known = {f.name for f in fields(SamplingParams)}
    defaults = {name: value for name, value in model.default_params.items() if name in known}
    return SamplingParams(**{**defaults, **_given(layers)})


def _limited(request: GenerationRequest, params: SamplingParams) -> GenerationRequest:
    """Without `--max-tokens`, limit the answer to `DEFAULT_MAX_TOKENS` or the context's rest."""
    if params.max_tokens is not None:
        return request
    room = request.params.max_tokens
    assert room is not None, "the input processor fills it in"
    length = min(room, max(DEFAULT_MAX_TOKENS, params.min_tokens))
    return replace(request, params=replace(request.params, max_tokens=length))


def _read_messages(path: str) -> tuple[dict[str, Any], ...]:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        messages = json.loads(text)
    except OSError as error:
        raise ConfigError(f"--messages {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--messages {path}: not valid JSON: {error}") from None
    if isinstance(messages, dict) and "messages" in messages:  # a saved API request
        messages = messages["messages"]
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"--messages {path}: expected a list of messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"--messages {path}: message {i} has no role")
        if not isinstance(message.get("content"), (str, list)):
            raise ConfigError(f"--messages {path}: message {i} has no content")
    return tuple(messages)


def _parse_ids(text: str) -> tuple[int, ...]:
    try:
        ids = tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise ConfigError(f"--prompt-token-ids must be integers, not {text!r}") from None
    if not ids or min(ids) < 0:
        raise ConfigError("--prompt-token-ids must be one or more ids, none below 0")
    return ids


@dataclass(slots=True)
class Answer:
    """The completion as it grows."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: tuple[int, ...] = ()
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    timings: RequestTimings | None = None

    def add(self, delta: TokenDelta) -> None:
        if delta.error is not None:
            raise delta.error
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.prompt_token_ids = delta.prompt_token_ids or self.prompt_token_ids
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *delta.logprobs]
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason.value, delta.stop_reason
        self.num_prompt_tokens = delta.num_prompt_tokens or self.num_prompt_tokens
        self.num_output_tokens = delta.num_output_tokens or self.num_output_tokens
        self.num_cached_tokens = delta.num_cached_tokens
        self.timings = delta.timings or self.timings

    def as_json(self, *, model: str) -> dict[str, Any]:
        num_prompt, num_output = self.num_prompt_tokens, self.num_output_tokens
        of_prompt = self.prompt_logprobs
        return {
            "model": model,
            "text": "".join(self.text),
            "token_ids": self.token_ids,
            "prompt_token_ids": list(self.prompt_token_ids),
            "logprobs": None if self.logprobs is None else [_logprob(x) for x in self.logprobs],
            "prompt_logprobs": None if of_prompt is None else [None, *map(_logprob, of_prompt[1:])],
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_output,
                "total_tokens": num_prompt + num_output,
                "cached_tokens": self.num_cached_tokens,
            },
            "timings": None if self.timings is None else _timings(self.timings, num_output),
        }


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    from termgen.api.logprobs import json_logprob

    def one(token_id: int, token: str, raw: bytes, logprob: float) -> dict[str, Any]:
        value = json_logprob(logprob)
        return {"token_id": token_id, "token": token, "bytes": list(raw), "logprob": value}

    return {
        **one(entry.token_id, entry.token, entry.token_bytes, entry.logprob),
        "rank": entry.rank,
        "top_logprobs": [one(*top) for top in entry.top],
    }


def _timings(timings: RequestTimings, num_output: int) -> dict[str, float | None]:
    return {
        "queue_s": timings.queue_s,
        "ttft_s": timings.ttft_s,
        "e2e_s": timings.e2e_s,
        "decode_tokens_per_second": timings.tokens_per_s(num_output),
    }


def run(args: argparse.Namespace, layers: SettingLayers, config: EngineConfig) -> int:
    """Run the command. Returns the exit code: 0, or 130 after Ctrl-C."""
    if args.url is None:
        for name in ("api_key", "wait"):
            if getattr(args, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} needs --url: it is about a server", param=name)
    asked, early = read_input(args), read_params(layers)
    if not args.json:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(early, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} needs --json: plain text has no place for them")
    if args.url is not None:
        return asyncio.run(_run_remote(args, asked, layers))
    from termgen.library.catalog import ensure_model
    from termgen.library.progress import TerminalProgress

    with TerminalProgress() as progress:
        ensure_model(config.model, progress)
        # a script's log should report fetching weights, but not loading them
        watched = sys.stderr.isatty()
        with collections_put_off():
            from termgen.engine.loop.engine import SyncEngine  # imports torch: most of a second

            engine = SyncEngine(config, on_progress=progress if watched else None)
    try:
        prompt = asked.prompt(has_chat_template=engine.model.has_chat_template)
        params = _completed(layers, engine.model)
        answer, code = stream(engine, prompt, params, show=not args.json)
        if args.json:
            print(json.dumps(answer.as_json(model=engine.model.model_id), ensure_ascii=False))
        return code
    finally:
        engine.shutdown()


@contextlib.contextmanager
def collections_put_off() -> Iterator[None]:
    """Start an engine in the `with` block without looking for garbage.

    Modules and models are made of a million objects that stay until the end. Collections would go
    over them a dozen times, and once more when the process ends: a tenth of a second or two.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


async def _run_remote(args: argparse.Namespace, asked: Input, layers: SettingLayers) -> int:
    """Run the command with a remote server."""
    from termgen.commands.remote_command import RemoteHolder, read_target
    from termgen.library.progress import TerminalProgress

    own = ("model", "seed")
    target = read_target(args.url, args.api_key, layers, wait_s=args.wait, own=own)
    params = read_params(layers)
    holder = RemoteHolder(target, given=_given(layers).keys())
    try:
        with TerminalProgress() as progress:
            client = await holder.start(progress.of_server)
        prompt = asked.prompt(has_chat_template=True)
        answer, code = await stream_remote(client, prompt, params, show=not args.json)
        if args.json:
            print(json.dumps(answer.as_json(model=client.model.model_id), ensure_ascii=False))
        return code
    finally:
        await holder.stop()


async def stream_remote(
    client: EngineClient, prompt: Prompt, params: SamplingParams, *, show: bool
) -> tuple[Answer, int]:
    """Run one request to its end, or to Ctrl-C, writing text to standard output as it comes."""
    from termgen.commands.plain.interrupt import REQUEST_ID, Interrupt

    limited = params
    if params.max_tokens is None:
        limited = replace(params, max_tokens=max(DEFAULT_MAX_TOKENS, params.min_tokens))
    answer = Answer()
    write = _writer(show)
    with Interrupt(partial(client.abort, REQUEST_ID)) as interrupt:
        try:
            await _take(client, prompt, limited, answer, write)
        except ContextLengthError:
            if limited is params or answer.text:
                raise
            # the context leaves less than the default length: take what it leaves
            await _take(client, prompt, params, answer, write)
    write("\n")
    return answer, INTERRUPTED if interrupt.came else OK


async def _take(
    client: EngineClient,
    prompt: Prompt,
    params: SamplingParams,
    answer: Answer,
    write: Callable[[str], None],
) -> None:
    from termgen.commands.plain.interrupt import REQUEST_ID

    stream = client.generate(prompt, params, request_id=REQUEST_ID)
    async with contextlib.aclosing(stream) as deltas:
        async for delta in deltas:
            answer.add(delta)
            write(delta.text)


def _writer(show: bool) -> Callable[[str], None]:
    """A function that writes to standard output if `show`, else discards its text."""
    printable = _printable if sys.stdout.isatty() else str

    def write(text: str) -> None:
        if show and text:
            sys.stdout.write(printable(text))
            sys.stdout.flush()

    return write


def stream(
    engine: SyncEngine, prompt: Prompt, params: SamplingParams, *, show: bool
) -> tuple[Answer, int]:
    """Run one request to its end, or to Ctrl-C, writing text to standard output as it comes."""
    request = _limited(engine.input_processor.process(prompt, params), params)
    answer = Answer(prompt_token_ids=request.prompt_token_ids)
    write = _writer(show)
    engine.add(request)
    with _Interrupt() as interrupt:
        while engine.has_unfinished:
            for delta in engine.step():
                answer.add(delta)
                write(delta.text)
            if interrupt.take():
                engine.abort(request.request_id)  # its last delta has the text held back so far
    write("\n")
    return answer, INTERRUPTED if interrupt.came else OK


class _Interrupt:
    """Defers the first Ctrl-C to the end of the current step; a second one interrupts at once."""

    def __init__(self) -> None:
        self.came = False
        self._is_new = False
        self._previous: Any = None

    def take(self) -> bool:
        """True once, after Ctrl-C."""
        is_new, self._is_new = self._is_new, False
        return is_new

    def __enter__(self) -> _Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _note(self, signum: int, frame: object) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = self._is_new = True


def _printable(text: str) -> str:
    """Make control characters visible: a model's text must not control the terminal."""
    return "".join(
        c if c in "\n\t" or not unicodedata.category(c) == "Cc" else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )


# Flags for structured outputs.


def add_format_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags; returns the group, to which `--logit-bias` is added."""
    form = parser.add_argument_group("form of the answer (one of these at most, and --logit-bias)")
    group = form.add_mutually_exclusive_group()
    suppress = argparse.SUPPRESS
    group.add_argument(
        "--json-schema",
        metavar="FILE.json",
        default=suppress,
        help="answer with JSON that this JSON schema accepts",
    )
    group.add_argument(
        "--json-object",
        action="store_true",
        default=suppress,
        help="answer with a JSON object",
    )
    group.add_argument(
        "--regex",
        metavar="TEXT",
        default=suppress,
        help="answer with text that this regular expression matches as a whole",
    )
    group.add_argument(
        "--choice",
        metavar="TEXT",
        action="append",
        default=suppress,
        help="answer with this text; repeat the flag to name several, of which the model takes one",
    )
    group.add_argument(
        "--grammar",
        metavar="FILE",
        default=suppress,
        help="answer with text of this grammar, in Lark's or llama.cpp's (GBNF) notation",
    )
    return form


def read_format(flags: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Build the params from the given flags. Raises `ConfigError` naming the flag."""
    name = next((name for name in KINDS if flags.get(name) is not None), None)
    if name is None:
        return None
    flag, value = "--" + name.replace("_", "-"), flags[name]
    if name in ("json_schema", "grammar"):
        try:
            value = Path(value).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{flag} {value}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{flag} {value}: not UTF-8 text") from None
    try:
        return StructuredOutputsParams(**{KINDS[name]: value}, param=flag)
    except RequestError as error:
        raise ConfigError(str(error)) from None
