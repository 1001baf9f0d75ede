"""Text to token ids and back, and chats to prompts.

`load_tokenizer` reads a model folder or a GGUF file; the input and output processors and the front
ends use `Tokenizer`. Immutable after construction, so any thread may encode. No torch, and
usually no transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from termgen.client import Message, TokenizerInfo
from termgen.engine.text.chat_encoding import ChatEncoder, encode_ids
from termgen.engine.text.detokenizer import BytesDecoder, TokenDecoder, WindowDecoder
from termgen.engine.text.tokenizer_files import TokenizerParts, read_folder
from termgen.errors import CorruptFileError, ModelError, ModelNotFoundError, RequestError
from termgen.system.native_stderr import without_panic_traces
from termgen.vocabulary.request import TurnEnds

SPACE_MARK = "\u2581"
"""Spelling of a space in SentencePiece vocabularies."""

BEHIND = "☺"
"""A character that no token contains together with others."""

MAX_VOCAB_SIZE = 1 << 24
"""Limit of the tables with a row per id, which a hostile file could make huge."""

PROOF_TEXT = "One text, 2 lines:\n\tna\u00efve \u4f60\u597d \U0001f600 it's."

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

PREFIX = "{prefix}"
SUFFIX = "{suffix}"
"""Placeholders for the text before and after the gap."""


def load_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer of a model folder or of a .gguf file. Raises ModelError.

    It encodes and decodes a text as a check: some faults of a file show only in use, and as a panic
    of the native library, which is no `Exception`.
    """
    if not path.is_dir() and not path.is_file():
        raise ModelNotFoundError(f"no tokenizer: {path} does not exist")
    try:
        with without_panic_traces():
            return _read_and_prove(path)
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        file = path / "tokenizer.json"
        reason = str(error).strip().split("\n", 1)[0][:200]
        raise CorruptFileError(
            f"the tokenizer of {file if file.is_file() else path} cannot be used:"
            f" {reason or 'no reason given'}"
        ) from None


def _read_and_prove(path: Path) -> Tokenizer:
    if path.is_dir():
        tokenizer = Tokenizer(read_folder(path))
    else:
        from termgen.engine.text.gguf_tokenizer import read_gguf

        tokenizer = Tokenizer(read_gguf(path))
    for add_special_tokens in (True, False):
        ids = tokenizer.encode(PROOF_TEXT, add_special_tokens=add_special_tokens)
        tokenizer.decode(ids, skip_special_tokens=False)
    if not ids:
        raise ValueError("its vocabulary has no token for a plain text")
    return tokenizer


class Tokenizer:
    """A model's tokenizer with its chat template."""

    def __init__(self, parts: TokenizerParts) -> None:
        backend = parts.backend
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._prefix_ids = parts.prefix_ids
        self._suffix_ids = parts.suffix_ids
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        num_ids = parts.num_ids
        if num_ids is None:
            num_ids = 1 + max(backend.get_vocab(with_added_tokens=False).values(), default=-1)
        self.vocab_size: int = max(num_ids, 1 + max(added, default=-1))
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(f"a token has the id {self.vocab_size - 1}")
        self._bytes_of, self._strip_leading_space = _byte_decoding(parts)
        self._all_bytes = _BytesTable(self._raw_bytes, frozenset())
        self._text_bytes = _BytesTable(self._raw_bytes, self.special_token_ids)
        self.info = TokenizerInfo(dict(parts.named_tokens), parts.chat_templates.get("default"))
        self._max_token_chars: int | None = None
        self._chat = ChatEncoder(backend, parts)
        self.chat_templates = parts.chat_templates
        self.response_template = parts.response_template
        self.fill_tokens = find_fill_tokens(backend.token_to_id)
        """Layout of prompts with a gap; None if the model cannot fill gaps."""

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_templates)

    @property
    def max_token_chars(self) -> int:
        """Length of the longest token: a text has at least len(text) / max_token_chars tokens."""
        if self._max_token_chars is None:
            self._max_token_chars = max(map(len, self._backend.get_vocab()), default=1) or 1
        return self._max_token_chars

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of raw text. Text that spells a special token becomes that token."""
        check_encodable(text, param="prompt")
        if self._prefix_ids is None and self._suffix_ids is None:
            return encode_ids(self._backend, text, add_special_tokens=add_special_tokens)
        ids = encode_ids(self._backend, text, add_special_tokens=False)
        if not add_special_tokens:
            return ids
        return [*(self._prefix_ids or ()), *ids, *(self._suffix_ids or ())]

    @property
    def num_last_tokens(self) -> int:
        """Tokens that the tokenizer puts behind every text."""
        ids, bare = self.encode("a"), self.encode("a", add_special_tokens=False)
        num_added = len(ids) - len(bare)
        starts = (i for i in range(num_added + 1) if ids[i : i + len(bare)] == bare)
        return num_added - next(starts, num_added)

    def encode_fill(self, prefix: str, suffix: str) -> list[int]:
        """Token ids of a prompt whose gap the model is to fill. Raises RequestError."""
        if self.fill_tokens is None:
            raise RequestError(
                "suffix needs a model that fills gaps: this one has no tokens for it",
                param="suffix",
                code="unsupported_parameter",
            )
        check_encodable(suffix, param="suffix")
        begin = self.encode("")[:1]
        ids = self.fill_tokens.prompt_ids(
            self.encode(prefix, add_special_tokens=False), self._encode_behind(suffix)
        )
        return [*begin, *ids] if begin == [self.bos_token_id] else ids

    def _encode_behind(self, text: str) -> list[int]:
        """Ids of text that follows other text, without the space that some tokenizers prepend."""
        ids, mark = (self.encode(t, add_special_tokens=False) for t in (text, BEHIND))
        if not mark or not self._all_bytes[mark[0]].startswith(b" "):
            return ids
        both = self.encode(BEHIND + text, add_special_tokens=False)
        return both[len(mark) :] if both[: len(mark)] == mark else ids

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation. Nothing in the messages can become a special token.

        `kwargs`: the template's variables (`tools`, `enable_thinking`). `chat_template`: replaces
        the model's, and is rendered in a helper process. Raises RequestError.
        """
        ids, _ = self.encode_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=kwargs,
            chat_template=chat_template,
        )
        return ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        chat_template: str | None,
        marks_turns: bool = False,
    ) -> tuple[list[int], TurnEnds]:
        """The ids of `apply_chat_template`, and with marks_turns where turns end in them."""
        return self._need_chat(chat_template).encode(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
            chat_template=chat_template,
            marks_turns=marks_turns,
        )

    def render_chat(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text that `apply_chat_template` encodes."""
        return self._need_chat(chat_template).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=kwargs,
            chat_template=chat_template,
        )

    def refuse_unread_variables(
        self, variables: Mapping[str, Any], chat_template: str | None = None
    ) -> None:
        """Raises RequestError for a chat template variable that the template does not read."""
        self._need_chat(chat_template).refuse_unread(variables, chat_template)

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that all of its chat templates read."""
        return self._chat.template_variables()

    @property
    def runs_template_elsewhere(self) -> bool:
        """True if the model's chat template may never end, so that a helper process renders it."""
        return self._chat.runs_elsewhere

    def prewarm(self) -> None:
        """Build now what the first message that spells a control token would otherwise wait for."""
        self._chat.prewarm()

    def close(self) -> None:
        """End its helper processes; everything else still works."""
        self._chat.close()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The full text of `ids`, which a `token_decoder` yields piece by piece."""
        if self._bytes_of is None:
            return self._backend_decode(skip_special_tokens)(ids)
        table = self._table(skip_special_tokens)
        text = b"".join([table[i] for i in ids]).decode("utf-8", "replace")
        return text[1:] if self._strip_leading_space and text.startswith(" ") else text

    def token_decoder(self, *, skip_special_tokens: bool = True) -> TokenDecoder:
        """A fresh incremental decoder for one sequence."""
        if self._bytes_of is None:
            return WindowDecoder(self._backend_decode(skip_special_tokens))
        return BytesDecoder(
            self._table(skip_special_tokens), strip_leading_space=self._strip_leading_space
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; for special tokens those of their spelling."""
        return self._all_bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """The token's text; replacement characters stand for a partial character."""
        return self._all_bytes[token_id].decode("utf-8", "replace")

    def special_token_id(self, text: str) -> int | None:
        """The id of a special token spelled like this."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id if token_id in self.special_token_ids else None

    def to_json(self) -> str:
        """The backend as the text of a tokenizer.json."""
        return self._backend.to_str()

    def _need_chat(self, chat_template: str | None) -> ChatEncoder:
        if chat_template is None and not self.has_chat_template:
            raise RequestError(
                "this model has no chat template; send a plain prompt instead", param="messages"
            )
        return self._chat

    def _table(self, skip_special_tokens: bool) -> Mapping[int, bytes]:
        return self._text_bytes if skip_special_tokens else self._all_bytes

    def _backend_decode(self, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
        def decode(ids: Sequence[int]) -> str:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

        return decode

    def _raw_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:  # embeddings are often padded beyond the vocabulary
            return b""
        if self._bytes_of is not None:
            return self._bytes_of(token)
        return token.replace(SPACE_MARK, " ").encode()


class _BytesTable(dict[int, bytes]):
    """Token id -> bytes, filled on first use: no cost at start, later a lookup in C."""

    def __init__(self, compute: Callable[[int], bytes], silent: frozenset[int]) -> None:
        super().__init__()
        self._compute = compute
        self._silent = silent

    def __missing__(self, token_id: int) -> bytes:
        value = b"" if token_id in self._silent else self._compute(token_id)
        self[token_id] = value
        return value


def check_encodable(text: str, *, param: str) -> None:
    """Refuse text that has no UTF-8 form, such as half of a surrogate pair from JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(
            "the text contains an unpaired surrogate and is not valid Unicode", param=param
        ) from None


def _byte_decoding(parts: TokenizerParts) -> tuple[Callable[[str], bytes] | None, bool]:
    """(function from a token's spelling to its bytes, a text's first space is dropped).

    (None, False) for decoders that are not a plain concatenation of tokens.
    """
    decoder = parts.backend.decoder
    if decoder is None:
        return None, False
    steps = json.loads(decoder.__getstate__())
    steps = steps["decoders"] if steps["type"] == "Sequence" else [steps]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes, False
    strips = kinds[3:] == ["Strip"] and steps[3] == {
        "type": "Strip",
        "content": " ",
        "start": 1,
        "stop": 0,
    }
    if (
        kinds[:3] == ["Replace", "ByteFallback", "Fuse"]
        and steps[0].get("pattern") == {"String": SPACE_MARK}
        and steps[0].get("content") == " "
        and (strips or len(kinds) == 3)
    ):
        return _byte_fallback_bytes, strips
    return None, False


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's character -> byte: printable Latin-1 characters are themselves, the other
    bytes are numbered from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): b for b in printable}
    return alphabet | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF_CHAR: Mapping[str, int] = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHAR[c] for c in token])
    except KeyError:  # an added token spelled as plain text
        return token.encode()


def _byte_fallback_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE_MARK, " ").encode()


# Fill-in-the-middle: the tokens that mark the text before and after a gap.
#
# Models trained for it have special tokens, whose names and order depend on the family. The
# vocabulary shows whether a model has them. Used by the tokenizer; knows no tokenizer itself.


@dataclass(frozen=True, slots=True)
class _Family:
    layout: tuple[str, ...]
    """Tokens and the two texts, in the order of the model's training."""
    ends: tuple[str, ...] = ()
    """Tokens that the model may write after the gap's text, besides end-of-sequence."""


FAMILIES = (
    _Family(  # Qwen, CodeGemma, Granite
        ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    _Family(  # StarCoder
        ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),
        ("<|endoftext|>", "<fim_pad>", "<file_sep>"),
    ),
    _Family(  # SantaCoder
        ("<fim-prefix>", PREFIX, "<fim-suffix>", SUFFIX, "<fim-middle>"),
        ("<|endoftext|>", "<fim-pad>"),
    ),
    _Family(("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>")),  # DeepSeek
    _Family(("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"), ("▁<EOT>",)),  # Code Llama
    _Family(("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX)),  # Codestral
)


@dataclass(frozen=True, slots=True)
class FillTokens:
    """One vocabulary's marks of a gap."""

    layout: tuple[int | str, ...]
    """Token ids, and `PREFIX` and `SUFFIX`."""
    ends: tuple[int, ...]

    def prompt_ids(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        texts = {PREFIX: prefix, SUFFIX: suffix}
        ids: list[int] = []
        for item in self.layout:
            ids += [item] if isinstance(item, int) else texts[item]
        return ids


def find_fill_tokens(id_of: Callable[[str], int | None]) -> FillTokens | None:
    """A vocabulary's marks; None for a model without them. id_of: the id of a token."""
    for family in FAMILIES:
        marks = [name for name in family.layout if name not in (PREFIX, SUFFIX)]
        ids = {name: token_id for name in marks if (token_id := id_of(name)) is not None}
        if len(ids) == len(marks):
            ends = [id_of(name) for name in family.ends]
            return FillTokens(
                layout=tuple(ids.get(name, name) for name in family.layout),
                ends=tuple(token_id for token_id in ends if token_id is not None),
            )
    return None
