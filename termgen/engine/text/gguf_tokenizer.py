"""Builds a tokenizer from a GGUF file's metadata.

A GGUF file has no tokenizer.json: it lists tokens, merges or scores, token types and ids of special
tokens, and names the rule that splits text into words. Three kinds cover the supported models:
`gpt2` (byte-level BPE), `llama` (SentencePiece BPE with byte fallback) and `gemma4` (the same with
its merges in the file). The file is untrusted:
every list is checked before the `tokenizers` library sees it, and a fault raises a ModelError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from termgen.engine.gguf.gguf_file import GGUFFile
from termgen.engine.text.tokenizer_files import TokenizerParts
from termgen.errors import CorruptFileError, ModelError, UnsupportedModelError
from termgen.library.user_cache import UserCache, digest

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of tokenizer.ggml.token_type."""

SPACE_MARK = "\u2581"

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_SPLIT = None
"""The split built into the byte-level pre-tokenizer."""

SPLITS: Mapping[str, str | None] = {
    "default": GPT2_SPLIT,
    "gpt-2": GPT2_SPLIT,
    "gpt2": GPT2_SPLIT,
    # The form that transformers reads. Digits are single tokens anyway: no merge joins two of them.
    "smollm": GPT2_SPLIT,
    "llama-bpe": LLAMA3_SPLIT,
    "llama3": LLAMA3_SPLIT,
    "llama-v3": LLAMA3_SPLIT,
    "smaug-bpe": LLAMA3_SPLIT,
    "qwen2": QWEN2_SPLIT,
    "deepseek-r1-qwen": QWEN2_SPLIT,
    "qwen35": QWEN35_SPLIT,
    "tekken": TEKKEN_SPLIT,
    "gpt-4o": GPT4O_SPLIT,
    "llama4": GPT4O_SPLIT,
}
"""tokenizer.ggml.pre -> the regular expression that splits text into words."""

WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken"})
"""Vocabularies in which a word that is a token is encoded as that token, ignoring merges. Their
models also expect a beginning-of-sequence token unless the file says otherwise."""

NFC_NORMALISED = frozenset({"qwen2", "deepseek-r1-qwen", "qwen35"})

MERGED_BY_POSITION = frozenset({"gemma2", "gemma3", "gemma3n"})
"""Values of general.architecture whose merges are ordered by token id: runs of spaces are
user-defined tokens there, without usable scores."""

ENDS = {"muse-glimmer": ("eos", "eot"), "gpt-oss": ("eos",)}
"""general.architecture -> named tokens that end an answer, where that has several messages: the
token that ends a message (eom, of harmony's messages eot, too) does not end the answer."""
_ALL_ENDS = ("eos", "eot", "eom")

HARMONY_ENDS = ("<|return|>", "<|call|>")
"""Tokens that end an answer in a vocabulary that has both. `<|end|>` ends a message there."""

GEMMA4_ENDS = ("<turn|>", "<|tool_response>")
"""Tokens that end an answer in a vocabulary of the kind `gemma4`. The second asks for the result of
a call; files list it among the tokens to be shown."""

MAX_MERGED_CHARS = 256
"""Longer tokens are not searched for merges, as the work is quadratic in the length."""

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
"""Tokens that end an answer if the chat template writes them. Some files name only the token that
ends a document as end-of-sequence, so their models would never stop."""


_BUILT = UserCache("tokenizers", most_entries=8)
"""Tokenizers built before: reading one of 262,144 tokens takes a third of the time that it takes to
find its merges."""


def read_gguf(path: Path) -> TokenizerParts:
    """The tokenizer described by a .gguf file. Raises ModelError."""
    with GGUFFile.open(path) as file:
        entry = _entry_name(file.raw_metadata)
        if (built := _BUILT.read(entry)) is not None:
            return _unpack(built)
        parts = build_parts(file.metadata, source=str(path))
    _BUILT.write(entry, _pack(parts))
    return parts


def _entry_name(raw_metadata: bytes) -> str:
    """The name under which a tokenizer is kept: what it is made from, and by what."""
    here = Path(__file__)
    files = (here, here.with_name("tokenizer_files.py"))
    return digest(raw_metadata, tokenizers.__version__, *(file.read_bytes() for file in files))


def _pack(parts: TokenizerParts) -> bytes:
    """A line with all but the backend, and the backend as tokenizer.json has it."""
    names = [field.name for field in fields(parts) if field.name != "backend"]
    line = json.dumps({name: getattr(parts, name) for name in names})
    return f"{line}\n{parts.backend.to_str()}".encode()


def _unpack(packed: bytes) -> TokenizerParts:
    line, _, backend = packed.partition(b"\n")
    lists: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in json.loads(line).items()
    }
    return TokenizerParts(backend=Backend.from_buffer(backend), **lists)


def build_parts(metadata: Mapping[str, Any], *, source: str) -> TokenizerParts:
    """The tokenizer described by GGUF metadata; `source` names the file in errors."""
    return _Builder(metadata, source).build()


class _Builder:
    """One file's tokenizer metadata, checked, and the steps from there to a backend."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._metadata = metadata
        self._source = source
        self._kind = metadata.get("tokenizer.ggml.model")
        if self._kind is None:
            raise ModelError(
                f"no tokenizer in {source}: expected the metadata key tokenizer.ggml.model"
            )
        self._tokens: list[str] = self._list("tokens", str)
        if not self._tokens:
            raise self._corrupt("tokenizer.ggml.tokens is empty or missing")
        self._types: list[int] = self._list("token_type", int) or [NORMAL] * len(self._tokens)
        if len(self._types) != len(self._tokens):
            raise self._corrupt(
                f"tokenizer.ggml.token_type has {len(self._types)} entries"
                f" for {len(self._tokens)} tokens"
            )
        self._pre = metadata.get("tokenizer.ggml.pre", "default")
        self._merges_by_position = metadata.get("general.architecture") in MERGED_BY_POSITION
        if self._kind == "llama" and self._merges_by_position:
            self._respell_spaces()

    def build(self) -> TokenizerParts:
        bos, eos = self._id("bos_token_id"), self._id("eos_token_id")
        named_ids = {
            "bos_token": bos,
            "eos_token": eos,
            "unk_token": self._id("unknown_token_id"),
            "pad_token": self._id("padding_token_id"),
        }
        if self._kind == "gpt2":
            backend, bos_by_default = self._byte_level(), self._pre in WHOLE_WORDS_FIRST
        elif self._kind in ("llama", "gemma4"):
            backend, bos_by_default = self._sentencepiece(named_ids["unk_token"]), True
        else:
            raise UnsupportedModelError(
                f"{self._source}: tokenizer.ggml.model {self._kind!r} is not supported"
                " (supported: gpt2, llama, gemma4)"
            )
        named = {name: self._tokens[i] for name, i in named_ids.items() if i is not None}
        self._add_tokens(backend, named)
        templates = self._chat_templates()
        return TokenizerParts(
            backend=backend,
            named_tokens=named,
            bos_token_id=bos,
            eos_token_ids=self._eos_ids(templates),
            chat_templates=templates,
            prefix_ids=self._ids_if("add_bos_token", bos_by_default, bos),
            suffix_ids=self._ids_if("add_eos_token", False, eos),
            num_ids=len(self._tokens),
        )

    def _respell_spaces(self) -> None:
        """Turn tokens of several spaces into normal ones.

        A Gemma file has them as user-defined tokens made of spaces. The model's own tokenizer.json
        spells them with `SPACE_MARK` and merges them like others.
        """
        self._tokens, self._types = list(self._tokens), list(self._types)  # keep the metadata's
        present = set(self._tokens)
        for i, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            marks = SPACE_MARK * len(token)
            if kind == USER_DEFINED and token and not token.strip(" ") and marks not in present:
                self._tokens[i], self._types[i] = marks, NORMAL

    def _byte_level(self) -> Backend:
        if self._pre not in SPLITS:
            raise UnsupportedModelError(
                f"{self._source}: tokenizer.ggml.pre {self._pre!r} is not supported"
                f" (supported: {', '.join(SPLITS)})"
            )
        merges = self._list("merges", str)
        if not merges:
            raise self._corrupt("tokenizer.ggml.merges is empty or missing")
        alphabet = frozenset(pre_tokenizers.ByteLevel.alphabet())
        vocab = {self._spelled(i, alphabet): i for i in range(len(self._tokens))}
        backend = self._bpe(
            vocab,
            [self._pair(merge) for merge in merges],
            ignore_merges=self._pre in WHOLE_WORDS_FIRST,
        )
        split = SPLITS[self._pre]
        if split is None:
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        else:
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(split), behavior="isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        if self._pre in NFC_NORMALISED:
            backend.normalizer = normalizers.NFC()
        backend.decoder = decoders.ByteLevel()
        return backend

    def _spelled(self, token_id: int, alphabet: frozenset[str]) -> str:
        """A token's spelling in byte-level BPE; added tokens are unchanged."""
        token = self._tokens[token_id]
        if alphabet.issuperset(token) or self._types[token_id] in (CONTROL, USER_DEFINED):
            return token
        pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return "".join(piece for piece, _ in pieces.pre_tokenize_str(token))

    def _pair(self, merge: str) -> tuple[str, str]:
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise self._corrupt(f"tokenizer.ggml.merges has a malformed entry {merge!r}")
        return left, right

    def _sentencepiece(self, unknown_id: int | None) -> Backend:
        vocab = {token: i for i, token in enumerate(self._tokens)}
        written = self._list("merges", str)
        if not written and self._kind == "gemma4":
            raise self._corrupt("tokenizer.ggml.merges is empty or missing")
        merges = [self._pair(m) for m in written] if written else self._derived_merges(vocab)
        unknown = None if unknown_id is None else self._tokens[unknown_id]
        backend = self._bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
        undo: list[decoders.Decoder] = [
            decoders.Replace(SPACE_MARK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
        if self._flag("add_space_prefix", self._kind == "llama"):
            steps.insert(0, normalizers.Prepend(SPACE_MARK))
            undo.append(decoders.Strip(" ", 1, 0))
        backend.normalizer = normalizers.Sequence(steps)
        backend.decoder = decoders.Sequence(undo)
        return backend

    def _derived_merges(self, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
        """All pairs of tokens that form a token, best score first; for the same token the pair with
        the longer left half first, as in a converted tokenizer.json.

        Control, unused and byte tokens are excluded: text must not merge into a control token.
        """
        scores: list[float] = self._list("scores", (int, float))
        if len(scores) != len(self._tokens):
            raise self._corrupt(
                f"tokenizer.ggml.scores has {len(scores)} entries for {len(self._tokens)} tokens"
            )
        if self._merges_by_position:
            scores = [-float(i) for i in range(len(scores))]
        usable = {t for t, i in vocab.items() if self._types[i] in (NORMAL, USER_DEFINED)}
        found: list[tuple[float, int, int, int, str, str]] = []
        for token in usable:
            length, token_id = len(token), vocab[token]
            if length > MAX_MERGED_CHARS:
                continue
            rank = -scores[token_id]
            for cut in range(1, length):
                if (left := token[:cut]) in usable and (right := token[cut:]) in usable:
                    found.append((rank, -cut, cut - length, token_id, left, right))
        found.sort()
        return [(left, right) for *_, left, right in found]

    def _bpe(
        self, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: Any
    ) -> Backend:
        try:
            return Backend(BPE(vocab=dict(vocab), merges=list(merges), **options))
        except Exception as error:  # the library raises bare Exception for a bad merge
            raise self._corrupt(f"vocabulary and merges do not fit: {error}") from error

    def _add_tokens(self, backend: Backend, named: Mapping[str, str]) -> None:
        """Control tokens are special; user-defined ones are only matched whole."""
        special = dict.fromkeys(
            token
            for token, kind in zip(self._tokens, self._types, strict=True)
            if kind == CONTROL and token
        )
        special |= dict.fromkeys(named.values())
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
        backend.add_tokens(
            [
                AddedToken(token, special=False, normalized=False)
                for token, kind in zip(self._tokens, self._types, strict=True)
                if kind == USER_DEFINED and token and token not in special
            ]
        )

    def _chat_templates(self) -> dict[str, str]:
        names = self._metadata.get("tokenizer.chat_templates", [])
        keys = {"default": "tokenizer.chat_template"}
        if isinstance(names, list):
            keys |= {name: f"tokenizer.chat_template.{name}" for name in map(str, names)}
        found = {name: self._metadata.get(key) for name, key in keys.items()}
        return {name: source for name, source in found.items() if isinstance(source, str)}

    def _eos_ids(self, templates: Mapping[str, str]) -> tuple[int, ...]:
        architecture = self._metadata.get("general.architecture")
        names = ENDS.get(architecture, _ALL_ENDS) if isinstance(architecture, str) else _ALL_ENDS
        listed = [self._id(f"{name}_token_id") for name in names]
        ids = dict.fromkeys(i for i in listed if i is not None)
        control = {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if kind == CONTROL
        }
        if all(token in control for token in HARMONY_ENDS):
            return tuple(ids | {control[token]: None for token in HARMONY_ENDS})
        if self._kind == "gemma4":
            named = {token: i for i, token in enumerate(self._tokens) if token in GEMMA4_ENDS}
            return tuple(ids | {named[token]: None for token in GEMMA4_ENDS if token in named})
        template = templates.get("default", "")
        ends = [token for token in END_OF_TURN if token in control and token in template]
        return tuple(ids | {control[token]: None for token in ends})

    def _id(self, key: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._corrupt(f"tokenizer.ggml.{key} is not a number")
        if not 0 <= value < len(self._tokens):
            raise self._corrupt(
                f"tokenizer.ggml.{key} is {value}, outside the vocabulary of {len(self._tokens)}"
            )
        return value

    def _flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise self._corrupt(f"tokenizer.ggml.{key} is not true or false")
        return value

    def _ids_if(self, flag: str, default: bool, token_id: int | None) -> tuple[int, ...]:
        return (token_id,) if self._flag(flag, default) and token_id is not None else ()

    def _list(self, key: str, item_type: type | tuple[type, ...]) -> list[Any]:
        value = self._metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(value, list) or not all(isinstance(item, item_type) for item in value):
            raise self._corrupt(f"tokenizer.ggml.{key} is not a list of the expected type")
        return value

    def _corrupt(self, message: str) -> CorruptFileError:
        return CorruptFileError(f"{self._source}: {message}")
