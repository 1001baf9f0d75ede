"""Encode a conversation as prompt ids such that no message can forge a special token.

A template's output mixes the template's text with user text, and a tokenizer cannot tell them
apart: `<|im_end|>` typed by a user would end the user's turn. So the chat is rendered a second time
with every character that occurs in special tokens masked, in user text only, by an unused private
character. Lengths stay equal, so comparing the two renders shows the origin of each character, even
where the template trims, slices, joins or serialises user text:

  - the masked render, unmasked, equals the plain one: a special token with a masked character was
    spelled by a user and is encoded as text; the rest is encoded as usual;
  - they differ (the template inspects the text): the prompt is accepted if it has exactly the
    special tokens of the masked render and no message spells one, and refused otherwise.

Control tokens that are not "special" but that the template writes (such as `<tool_call>`) are
guarded too, except in assistant messages, which are the model's own text. Thread-safe: only caches
change after construction.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from termgen.client import Message
from termgen.engine.text.chat_template import (
    ChatTemplate,
    is_bounded,
    last_text,
    select_template,
    template_error,
)
from termgen.engine.text.request_template import OF_MODEL, RequestTemplate, TemplateWorkers
from termgen.engine.text.tokenizer_files import TokenizerParts
from termgen.engine.text.turn_ends import Mark, other_conversation, turn_ends, up_to_question
from termgen.errors import RequestError
from termgen.vocabulary.request import TurnEnds

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Field names for a message's reasoning; templates read the first or the second."""

MAX_DEPTH = 64
"""Levels of nested values in messages and template variables."""

UNMASKABLE = frozenset('"\\')
"""JSON escapes these characters, so masking them would change lengths."""

PIECE_CHARS = 2**14
"""Long texts are processed in pieces of this length, as the GIL is held for each piece."""

RESERVED_VARIABLES = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
)

NUM_KEPT_TEMPLATES = 16
"""Cache size for compiled templates of requests."""

STANDARD_VARIABLES = frozenset({"tools", "documents"})
"""Variables that may be passed to any template, even if it does not read them."""

LONG_TEXT_CHARS = 1024
"""Shorter texts take a negligible time, and are faster without a thread."""


def _fault(message: str) -> RequestError:
    return RequestError(message, param="messages")


def normalise_messages(messages: object) -> list[dict[str, Any]]:
    """Checked copies of the messages: string content, known roles, no None values."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise _fault("messages must be a list of messages")
    if not messages:
        raise _fault("messages must not be empty")
    return [_normalise(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _normalise(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _fault(f"{where} must be an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise _fault(f"{where}.role must be one of {', '.join(ROLES)}, not {role!r}")
    out: dict[str, Any] = plain({k: v for k, v in message.items() if v is not None}, where)
    out["role"] = "system" if role == "developer" else role
    if "tool_calls" in out:
        out["tool_calls"] = _tool_calls(where, out["tool_calls"], role)
        if not out["tool_calls"]:
            del out["tool_calls"]
    out["content"] = _content(where, out)
    reasoning = next((out[k] for k in REASONING_FIELDS if k in out), None)
    if reasoning is not None:
        out.setdefault("thinking", reasoning)
        out["reasoning_content"] = reasoning
    return out


def _content(where: str, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if message["role"] == "assistant" and message.get("tool_calls"):
            return ""
        raise _fault(f"{where}.content is missing")
    if not isinstance(content, list):
        raise _fault(f"{where}.content must be a string or a list of parts")
    return "".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))


def _part(where: str, part: object) -> str:
    if not isinstance(part, dict):
        raise _fault(f"{where} must be an object with a type")
    kind = part.get("type")
    if kind != "text":
        raise _fault(f"{where}: content of type {kind!r} is not supported, only 'text' is")
    text = part.get("text")
    if not isinstance(text, str):
        raise _fault(f"{where}.text must be a string")
    return text


def _tool_calls(where: str, calls: object, role: str) -> list[dict[str, Any]]:
    if role != "assistant":
        raise _fault(f"{where}.tool_calls is only allowed in assistant messages")
    if not isinstance(calls, list):
        raise _fault(f"{where}.tool_calls must be a list")
    return [_tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]


def _tool_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise _fault(f"{where} must be an object with a function")
    if not isinstance(function.get("name"), str):
        raise _fault(f"{where}.function.name must be a string")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # Clients send a JSON string, templates expect the object.
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise _fault(f"{where}.function.arguments must be a JSON object")
    return {**call, "function": {**function, "arguments": plain(arguments, where)}}


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """A deep copy with JSON types only: a template must not get a live object."""
    if depth > MAX_DEPTH:
        raise _fault(f"{where} is nested more than {MAX_DEPTH} levels deep")
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, str):  # such as an enum
        return str.__str__(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise _fault(f"{where}: keys must be strings, not {key!r}")
        return {str.__str__(k): plain(v, where, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, where, depth + 1) for item in value]
    raise _fault(f"{where}: a value of type {type(value).__name__} is not JSON data")


def count_chars(value: Any) -> int:
    """Characters in all strings of plain data, keys included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(k) + count_chars(v) for k, v in value.items())
    if isinstance(value, list):
        return sum(map(count_chars, value))
    return 0


Table = Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Chat:
    """A checked conversation, ready to be rendered."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    add_generation_prompt: bool
    continued: str | None
    """Marker character at the end of the final message, where the prompt is cut."""
    num_chars: int


def strings(value: Any) -> Iterator[str]:
    """All client strings in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def unused_chars(text: str) -> Iterator[str]:
    """Private-use characters that do not occur in `text`."""
    used: set[str] = set()
    for piece in _pieces(text):
        used.update(piece)
    private = itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
    return (c for c in map(chr, private) if c not in used)


def _pieces(text: str) -> Iterator[str]:
    return (text[i : i + PIECE_CHARS] for i in range(0, len(text), PIECE_CHARS))


def _translate(text: str, table: Table) -> str:
    return "".join([piece.translate(table) for piece in _pieces(text)])


class Mask:
    """Replaces an alphabet by private characters in clients' text, and restores it."""

    def __init__(
        self,
        alphabet: str,
        punctuation: str,
        kept: re.Pattern[str] | None,
        *,
        avoid: str,
    ) -> None:
        private = unused_chars(avoid)
        self._table: Table = {ord(c): next(private) for c in alphabet}
        # Templates branch on keys and types, so only non-identifier characters are masked in them.
        self._key_table: Table = {ord(c): self._table[ord(c)] for c in punctuation}
        self._inverse: Table = {ord(v): chr(k) for k, v in self._table.items()}
        self._kept = kept

    def undo(self, text: str) -> str:
        return _translate(text, self._inverse)

    def shorten(self, text: str) -> tuple[str, Callable[[int], int]]:
        """The text with each run of masked characters shortened to one, as tokenizers make several
        tokens of each; and a function from its positions to those in `text`."""
        runs = re.compile("[" + "".join(self._table.values()) + "]{2,}")
        pieces: list[str] = []
        places, lost = [0], [0]  # characters removed before each position
        end = 0
        for run in runs.finditer(text):
            pieces.append(text[end : run.start() + 1])
            end = run.end()
            lost.append(lost[-1] + len(run[0]) - 1)
            places.append(end - lost[-1])
        pieces.append(text[end:])
        return "".join(pieces), lambda place: place + lost[bisect_right(places, place) - 1]

    def apply(self, chat: Chat) -> Chat:
        return replace(
            chat,
            messages=[self._message(m) for m in chat.messages],
            variables=self._value(chat.variables, self._table),
        )

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        own_words = message["role"] == "assistant"
        for key, value in message.items():
            if key == "role":  # checked against a fixed list
                out[key] = value
            elif own_words and isinstance(value, str) and key in ("content", *REASONING_FIELDS):
                out[key] = self._own(value)
            else:
                out[key.translate(self._key_table)] = self._value(value, self._table)
        return out

    def _own(self, text: str) -> str:
        if self._kept is None:
            return _translate(text, self._table)
        parts = self._kept.split(text)  # odd parts are the matches
        return "".join(p if i % 2 else _translate(p, self._table) for i, p in enumerate(parts))

    def _value(self, value: Any, table: Table) -> Any:
        if isinstance(value, str):
            return _translate(value, table)
        if isinstance(value, list):
            return [self._value(item, table) for item in value]
        if isinstance(value, dict):
            return {
                k.translate(self._key_table): self._value(
                    v, self._key_table if k == "type" else table
                )
                for k, v in value.items()
            }
        return value


def alphabets(contents: list[str]) -> tuple[str, str]:
    """Characters to mask: all those of control tokens, and a subset without letters.

    The subset keeps words, for templates that search for some; it still has at least one character
    of every control token.
    """
    letters: set[str] = set()
    punctuation: set[str] = set()
    for content in contents:
        usable = [c for c in content if not c.isspace() and c not in UNMASKABLE]
        letters.update(usable)
        marks = [c for c in usable if not c.isalnum() and c != "_"]
        punctuation.update(marks or usable)
    return "".join(sorted(letters)), "".join(sorted(punctuation))


Template = ChatTemplate | RequestTemplate


Marked = tuple[list[int], list[Mark]]
"""A prompt's tokens, and the control tokens among them that the template wrote."""


class ChatEncoder:
    """Renders and encodes chats for one tokenizer."""

    def __init__(self, backend: Backend, parts: TokenizerParts) -> None:
        self._backend = backend
        self._named_tokens = dict(parts.named_tokens)
        self._sources = dict(parts.chat_templates)
        self._guards: dict[str, _Guard] = {}
        self._workers = TemplateWorkers()
        self._request_guard = functools.lru_cache(NUM_KEPT_TEMPLATES)(self._make_request_guard)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        chat_template: str | None = None,
    ) -> str:
        """The prompt as text. chat_template: replaces the model's."""
        chat = _check(messages, add_generation_prompt, continue_final_message, variables)
        return self._render(self._guard_for(chat.variables, chat_template).template, chat)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        chat_template: str | None = None,
        marks_turns: bool = False,
    ) -> tuple[list[int], TurnEnds]:
        """The prompt as token ids, control tokens only where the template wrote them; and where
        turns end in it, if that is asked for and can be found."""
        chat = _check(messages, add_generation_prompt, continue_final_message, variables)
        guard = self._guard_for(chat.variables, chat_template)
        text = self._render(guard.template, chat)
        ids, marks = self._encode(chat, guard, text)
        if not (marks_turns and marks and chat_template is None):  # a request's may take long
            return ids, TurnEnds()
        return ids, self._turn_ends(chat, guard, text, marks)

    def _turn_ends(self, chat: Chat, guard: _Guard, text: str, marks: list[Mark]) -> TurnEnds:
        """Where turns end in the chat's text, from other texts without a generation prompt."""

        def rendered(messages: list[dict[str, Any]]) -> str:
            if not messages:
                return ""
            bare = replace(chat, messages=messages, add_generation_prompt=False, continued=None)
            try:
                return self._render(guard.template, bare)
            except RequestError:  # the template requires other messages
                return ""

        return turn_ends(
            text,
            marks,
            bare=rendered(chat.messages if chat.add_generation_prompt else []),
            question=rendered(up_to_question(chat.messages)),
            other=rendered(other_conversation(chat.messages)),
        )

    def _encode(self, chat: Chat, guard: _Guard, text: str) -> Marked:
        encoding = encode_text(self._backend, text, add_special_tokens=False)
        controls = guard.controls(encoding, text)
        if not controls:
            return list(encoding.ids), []
        masked: str | None = None
        for alphabet in guard.alphabets:
            mask = Mask(alphabet, guard.alphabets[-1], guard.kept, avoid=text)
            try:
                masked = self._render(guard.template, mask.apply(chat))
            except RequestError:  # the template requires certain words
                masked = None
                continue
            if mask.undo(masked) == text:
                if all(text[c.start : c.end] == masked[c.start : c.end] for c in controls):
                    return list(encoding.ids), controls
                return guard.encode_guarded(text, masked, mask)
        return guard.encode_compared(chat, encoding, controls, masked)

    def prewarm(self) -> None:
        """Build now what the first message that spells a control token would otherwise wait for. A
        template's error is reported to the requests that use it."""
        for name in self._sources:
            with contextlib.suppress(RequestError):
                self._guard_of(name).text_backend()

    def template_variables(self) -> frozenset[str]:
        """Names that all chat templates read. A broken template counts as reading none, as it
        refuses every chat."""
        read: list[frozenset[str]] = []
        for name in self._sources.keys() & {"default", "tool_use"}:
            try:
                read.append(self._guard_of(name).template.variables)
            except RequestError:
                read.append(frozenset())
        return frozenset.intersection(*read) if read else frozenset()

    def close(self) -> None:
        """Stop rendering templates of requests."""
        self._workers.close()

    def refuse_unread(self, variables: Mapping[str, Any], chat_template: str | None = None) -> None:
        """Refuse variables that the template does not read, such as misspelt ones."""
        read = self._guard_for(variables, chat_template).template.variables
        for name in variables:
            if name not in read and name not in STANDARD_VARIABLES:
                raise RequestError(
                    f"{name} has no effect here: the chat template does not read it",
                    param=name if name == "reasoning_effort" else "chat_template_kwargs",
                    code="unsupported_parameter",
                )

    def _guard_for(self, variables: Mapping[str, Any], chat_template: str | None) -> _Guard:
        if chat_template is not None:
            return self._request_guard(chat_template)
        return self._guard_of(select_template(self._sources, variables))

    def _guard_of(self, name: str) -> _Guard:
        guard = self._guards.get(name)
        if guard is None:
            guard = self._guards[name] = _Guard(self._backend, self._template_of(name))
        return guard

    def _template_of(self, name: str) -> Template:
        source = self._sources[name]
        if self._is_bounded(name):
            return ChatTemplate(source)
        return RequestTemplate(source, self._workers, whose=OF_MODEL)

    def _is_bounded(self, name: str) -> bool:
        try:
            return is_bounded(self._sources[name])
        except (jinja2.TemplateError, RecursionError):
            return True  # it is broken, as `ChatTemplate` reports without running it

    @functools.cached_property
    def runs_elsewhere(self) -> bool:
        """True if the model's template may never end, and is rendered in a helper process."""
        return not all(map(self._is_bounded, self._sources))

    def _make_request_guard(self, source: str) -> _Guard:
        _refuse_surrogates(source)
        return _Guard(self._backend, RequestTemplate(source, self._workers))

    def _render(self, template: Template, chat: Chat) -> str:
        text = template.render(
            {
                **self._named_tokens,
                "tools": None,
                "documents": None,
                **chat.variables,
                "messages": chat.messages,
                "add_generation_prompt": chat.add_generation_prompt,
            },
            num_input_chars=chat.num_chars,
        )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError(
                "the chat template wrote an unpaired surrogate, which is not valid Unicode",
                param="messages",
            ) from None
        return text if chat.continued is None else _cut(text, chat.continued)


def _check(
    messages: Sequence[Message],
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> Chat:
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt cannot both be true",
            param="continue_final_message",
        )
    for name in RESERVED_VARIABLES:
        if name in variables:
            raise RequestError(
                f"{name} cannot be set as a chat template variable", param="chat_template_kwargs"
            )
    checked = normalise_messages(messages)
    extra: dict[str, Any] = plain(variables, "chat template variables")
    for text in strings([checked, extra]):
        _refuse_surrogates(text)
    continued = None
    if continue_final_message:
        content = last_text(checked)
        continued = next(unused_chars("".join(strings([checked, extra]))))
        # The space shows afterwards whether the template trims its input.
        checked[-1]["content"] = f"{content}{continued} "
    return Chat(
        messages=checked,
        variables=extra,
        add_generation_prompt=add_generation_prompt,
        continued=continued,
        num_chars=count_chars(checked) + count_chars(extra),
    )


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise template_error(
            "a message contains an unpaired surrogate and is not valid Unicode"
        ) from None


def _cut(text: str, end: str) -> str:
    place = text.rfind(end)
    if place < 0:
        raise RequestError(
            "continue_final_message: the chat template does not show the final message",
            param="continue_final_message",
        )
    kept_space = text[place + 1 : place + 2] == " "
    return text[:place] if kept_space else text[:place].rstrip()


class _Guard:
    """One template with the control tokens that only it may write."""

    def __init__(self, backend: Backend, template: Template) -> None:
        self._backend = backend
        self.template = template
        added = backend.get_added_tokens_decoder()
        guarded = {
            token_id: token
            for token_id, token in added.items()
            if not token.content.isspace()
            and (token.special or token.content in template.literal_text)
        }
        self._special_ids = frozenset(i for i, token in guarded.items() if token.special)
        self._guarded = guarded
        unknown = getattr(backend.model, "unk_token", None)
        self._unknown = (None, "") if unknown is None else (backend.token_to_id(unknown), unknown)
        self._contents = [token.content for token in guarded.values()]
        self._special_text = _any_of([t.content for t in guarded.values() if t.special])
        self.kept = _any_of([t.content for t in guarded.values() if not t.special])
        self.alphabets = alphabets(self._contents)
        self._as_text: tuple[Backend, str, int] | None = None

    def controls(self, encoding: Encoding, text: str) -> list[Mark]:
        """Guarded tokens in an encoded text, in order."""
        hits = [i for i, token_id in enumerate(encoding.ids) if token_id in self._guarded]
        if not hits:
            return []
        ids = encoding.ids
        found = []
        for i in hits:
            # Not `offsets`, which builds a pair for every token under the GIL.
            place = encoding.token_to_chars(i)
            assert place is not None, "every token has a place"
            found.append(Mark(ids[i], *place, i))
        unknown_id, unknown = self._unknown
        # The unknown token also stands for characters the vocabulary lacks.
        return [
            c for c in found if c.token_id != unknown_id or text[c.start : c.end].strip() == unknown
        ]

    def encode_guarded(self, text: str, masked: str, mask: Mask) -> Marked:
        """Encode `text` with control tokens only where `masked` has them too."""
        backend, anchor, anchor_id = self.text_backend()
        short, place_of = mask.shorten(masked)
        own = self.controls(encode_text(self._backend, short, add_special_tokens=False), short)
        # An anchor, itself an added token, replaces each of the template's control tokens: the text
        # between them is then split and normalised exactly as next to those.
        pieces: list[str] = []
        places = [(place_of(control.start), place_of(control.end)) for control in own]
        position = 0
        for start, end in places:
            pieces += (text[position:start], anchor)
            position = end
        pieces.append(text[position:])
        ids = encode_ids(backend, "".join(pieces), add_special_tokens=False)
        for token_id in ids:
            if token_id in self._guarded and token_id != self._unknown[0]:
                raise _refusal(self._guarded[token_id].content)
        positions = [i for i, token_id in enumerate(ids) if token_id == anchor_id]
        assert len(positions) == len(own), "an anchor was lost"
        marks = []
        for control, place, i in zip(own, places, positions, strict=True):
            ids[i] = control.token_id
            marks.append(Mark(control.token_id, *place, i))
        return ids, marks

    def encode_compared(
        self, chat: Chat, encoding: Encoding, controls: list[Mark], masked: str | None
    ) -> Marked:
        """Encode for a template whose output depends on the wording: accept or refuse."""
        if self._special_text is not None:
            clients = [{k: v for k, v in m.items() if k != "role"} for m in chat.messages]
            for text in strings([clients, chat.variables]):
                spelled = self._special_text.search(text)
                if spelled is not None:
                    raise _refusal(spelled[0])
        expected = None
        if masked is not None:
            found = self.controls(
                encode_text(self._backend, masked, add_special_tokens=False), masked
            )
            expected = [c.token_id for c in found if c.token_id in self._special_ids]
        if [c.token_id for c in controls if c.token_id in self._special_ids] != expected:
            raise template_error(
                "this model's chat template turns these messages into control tokens; send them"
                " without text such as " + " or ".join(sorted(self._contents)[:2])
            )
        return list(encoding.ids), controls

    def text_backend(self) -> tuple[Backend, str, int]:
        """A copy of the tokenizer that treats guarded tokens as text. Built on first use."""
        if self._as_text is None:
            data = json.loads(self._backend.to_str())
            for entry in data["added_tokens"]:
                entry["special"] = entry["id"] in self._guarded
            backend = Backend.from_str(json.dumps(data))
            anchor = f"\U000f0000{secrets.token_hex(8)}\U000f0001"
            backend.add_tokens([AddedToken(anchor, normalized=False)])
            backend.encode_special_tokens = True
            anchor_id = backend.token_to_id(anchor)
            assert anchor_id is not None
            self._as_text = (backend, anchor, anchor_id)
        return self._as_text


def _any_of(contents: list[str]) -> re.Pattern[str] | None:
    if not contents:
        return None
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")


def _refusal(token: str) -> RequestError:
    return template_error(
        f"the messages spell the control token {token!r}, which this model's chat template cannot"
        " show as plain text"
    )


def encode_text(backend: Any, text: str, *, add_special_tokens: bool) -> Any:
    """`backend.encode`, as an `Encoding`."""
    if len(text) < LONG_TEXT_CHARS:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def encode_ids(backend: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """The ids alone, for a long text in a third of the time, as offsets are not computed."""
    if len(text) < LONG_TEXT_CHARS:
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
    return list(backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
