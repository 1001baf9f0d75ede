"""Tokenizers from model folders, and the guarantees of `Tokenizer` for any source."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_samples import CHATML, make_backend
from sample_texts import sample_texts
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from termgen.engine.text.tokenizer import Tokenizer, load_tokenizer
from termgen.errors import CorruptFileError, ModelError, ModelNotFoundError, RequestError

SEED = 90_210


def write_folder(
    path: Path,
    *,
    backend: Backend | None = None,
    config: dict[str, Any] | None = None,
    files: dict[str, str] | None = None,
) -> Path:
    path.mkdir(exist_ok=True)
    (backend or make_backend()).save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in (files or {}).items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    return path


def bos_backend() -> Backend:
    """A tokenizer that puts <s> before every text by itself, like Llama 3's tokenizer.json."""
    backend = make_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = "{{ '\\ud800' }}{{ messages[0].content }}"


def raises(error: BaseException) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail


class TestFolder:
    def test_round_trip(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(write_folder(tmp_path, config={"eos_token": "</s>"}))
        for text in sample_texts(SEED, 300):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids, skip_special_tokens=False) == text, (SEED, text)
        assert [tokenizer.token_text(i) for i in tokenizer.eos_token_ids] == ["</s>"]
        assert tokenizer.bos_token_id is None
        assert tokenizer.vocab_size == make_backend().get_vocab_size()

    def test_named_tokens_may_be_objects(self, tmp_path: Path) -> None:
        config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
        tokenizer = load_tokenizer(write_folder(tmp_path, config=config))
        assert tokenizer.bos_token_id == tokenizer.encode("<s>")[0]

    def test_special_tokens_map_is_read_where_the_config_is_silent(self, tmp_path: Path) -> None:
        files = {"special_tokens_map.json": json.dumps({"bos_token": "<s>", "eos_token": "<s>"})}
        tokenizer = load_tokenizer(
            write_folder(tmp_path, config={"eos_token": "</s>"}, files=files)
        )
        assert tokenizer.token_text(tokenizer.bos_token_id or -1) == "<s>"
        assert [tokenizer.token_text(i) for i in tokenizer.eos_token_ids] == ["</s>"]

    def test_named_token_is_special_even_if_the_file_forgot(self, tmp_path: Path) -> None:
        config = {"eos_token": "<think>"}
        tokenizer = load_tokenizer(write_folder(tmp_path, config=config))
        ids = tokenizer.encode("he<think>")
        assert tokenizer.decode(ids) == "he"

    @pytest.mark.parametrize(
        ("config", "starts", "ends"),
        [
            ({}, True, False),
            ({"add_bos_token": True}, True, False),
            ({"add_bos_token": False}, False, False),
            ({"add_eos_token": True}, False, True),
            ({"add_bos_token": True, "add_eos_token": True}, True, True),
        ],
    )
    def test_who_decides_about_bos(
        self, tmp_path: Path, config: dict[str, Any], starts: bool, ends: bool
    ) -> None:
        named = {"bos_token": "<s>", "eos_token": "</s>"}
        folder = write_folder(tmp_path, backend=bos_backend(), config=named | config)
        tokenizer = load_tokenizer(folder)
        bos, [eos] = tokenizer.bos_token_id, tokenizer.eos_token_ids
        ids = tokenizer.encode("he")
        assert (ids[0] == bos, ids[-1] == eos) == (starts, ends)
        plain = tokenizer.encode("he", add_special_tokens=False)
        assert bos not in plain and eos not in plain

    def test_chat_prompts_get_no_second_bos(self, tmp_path: Path) -> None:
        config = {"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
        tokenizer = load_tokenizer(write_folder(tmp_path, backend=bos_backend(), config=config))
        ids = tokenizer.apply_chat_template(MESSAGES)
        assert ids.count(tokenizer.bos_token_id or -1) == 1

    def test_truncation_and_padding_are_switched_off(self, tmp_path: Path) -> None:
        backend = make_backend()
        backend.enable_truncation(max_length=4)
        backend.enable_padding(length=64, pad_id=0, pad_token="!")
        tokenizer = load_tokenizer(write_folder(tmp_path, backend=backend))
        assert len(tokenizer.encode("a" * 50)) == 50
        assert len(tokenizer.encode("a")) == 1


class TestChatTemplateFiles:
    def render(self, folder: Path, **variables: Any) -> str:
        return load_tokenizer(folder).render_chat(MESSAGES, **variables)

    def test_field_of_the_config(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path, config={"chat_template": "from config"})
        assert self.render(folder) == "from config"

    def test_jinja_file_wins(self, tmp_path: Path) -> None:
        folder = write_folder(
            tmp_path,
            config={"chat_template": "from config"},
            files={"chat_template.jinja": "from file"},
        )
        assert self.render(folder) == "from file"

    def test_named_templates(self, tmp_path: Path) -> None:
        named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
        folder = write_folder(tmp_path, config={"chat_template": named})
        assert self.render(folder) == "d"
        assert self.render(folder, tools=[{"type": "function"}]) == "t"

    def test_additional_template_files(self, tmp_path: Path) -> None:
        files = {"chat_template.jinja": "d", "additional_chat_templates/tool_use.jinja": "t"}
        folder = write_folder(tmp_path, files=files)
        assert self.render(folder) == "d"
        assert self.render(folder, tools=[{"type": "function"}]) == "t"

    def test_none(self, tmp_path: Path) -> None:
        assert not load_tokenizer(write_folder(tmp_path, config={})).has_chat_template

    def test_broken_template_fails_the_chat_not_the_load(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(write_folder(tmp_path, config={"chat_template": "{% if %}"}))
        assert tokenizer.encode("he")
        with pytest.raises(RequestError, match="chat template is broken"):
            tokenizer.apply_chat_template(MESSAGES)


class TestFaults:
    def test_missing_tokenizer_names_the_folder_and_the_file(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError) as raised:
            load_tokenizer(tmp_path)
        assert str(tmp_path) in str(raised.value) and "tokenizer.json" in str(raised.value)

    def test_missing_path(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFoundError, match="nowhere"):
            load_tokenizer(tmp_path / "nowhere")

    @pytest.mark.parametrize("content", ["", "{}", "[1", '{"model": {"type": "BPE"}}', "\x00\xff"])
    def test_unreadable_tokenizer_json(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(CorruptFileError) as raised:
            load_tokenizer(tmp_path)
        assert "tokenizer.json" in str(raised.value) and "\n" not in str(raised.value)

    @pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000, "\udcff"])
    def test_unreadable_config(self, tmp_path: Path, content: str) -> None:
        write_folder(tmp_path)
        file = tmp_path / "tokenizer_config.json"
        file.write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(CorruptFileError, match="tokenizer_config.json"):
            load_tokenizer(tmp_path)

    def test_template_file_that_is_not_text(self, tmp_path: Path) -> None:
        write_folder(tmp_path)
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(CorruptFileError, match="chat_template.jinja"):
            load_tokenizer(tmp_path)

    def test_unpaired_surrogate_is_a_request_error(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(write_folder(tmp_path))
        with pytest.raises(RequestError, match="surrogate"):
            tokenizer.encode("a\ud800b")


def test_older_vocabulary_files_are_converted(tmp_path: Path) -> None:
    data = json.loads(make_backend().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(data["vocab"] | {"<|endoftext|>": 400}))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(m) for m in data["merges"]))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("he said: naïve")) == "he said: naïve"
    assert tokenizer.eos_token_ids == (400,)


class TestTokens:
    def test_bytes_of_all_tokens_spell_the_text(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(write_folder(tmp_path))
        for text in sample_texts(SEED + 1, 100):
            ids = tokenizer.encode(text)
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode(), (SEED, text)

    def test_text_of_part_of_a_character(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(write_folder(tmp_path))
        first = tokenizer.encode("👋")[0]
        assert tokenizer.token_bytes(first) == "👋".encode()[:1]
        assert tokenizer.token_text(first) == "\ufffd"

    def test_added_token_beyond_ascii(self, tmp_path: Path) -> None:
        backend = make_backend()
        backend.add_special_tokens([AddedToken("<｜Ende▁é｜>", special=True, normalized=False)])
        tokenizer = load_tokenizer(write_folder(tmp_path, backend=backend))
        [token_id] = tokenizer.encode("<｜Ende▁é｜>")
        assert tokenizer.token_text(token_id) == "<｜Ende▁é｜>"
        assert tokenizer.decode([token_id], skip_special_tokens=False) == "<｜Ende▁é｜>"

    def test_unknown_ids_are_empty(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(write_folder(tmp_path))
        assert tokenizer.token_text(10**6) == "" and tokenizer.token_bytes(-1) == b""

    def test_longest_token_bounds_the_number_of_tokens(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(write_folder(tmp_path, config={"chat_template": CHATML}))
        assert tokenizer.max_token_chars == len("<|start_header_id|>")
        for text in sample_texts(SEED + 2, 100):
            assert len(tokenizer.encode(text)) * tokenizer.max_token_chars >= len(text)


def test_loading_needs_neither_torch_nor_transformers(smollm2_gguf: Path, tmp_path: Path) -> None:
    write_folder(tmp_path, config={"chat_template": CHATML})
    code = (
        "import sys; from pathlib import Path\n"
        "from termgen.engine.text.tokenizer import load_tokenizer\n"
        "for path in sys.argv[1:]:\n"
        "    t = load_tokenizer(Path(path))\n"
        "    ids = t.apply_chat_template([{'role': 'user', 'content': 'hi <|im_end|>'}])\n"
        "    assert t.decode(ids)\n"
        "heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code, str(smollm2_gguf), str(tmp_path)], check=True)


class TestBrokenFiles:
    @pytest.mark.parametrize(
        "damage",
        [
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [
                        {"SpecialToken": {"id": "<undefined>", "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}},
                    ],
                    "pair": [],
                    "special_tokens": {},
                }
            },
            {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}},
            {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b c"]}},
            {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [[1, 2]]}},
            {"model": {"type": "BPE"}},
            {"model": {"type": "BPE", "vocab": {"a": "0"}, "merges": []}},
            {"model": {"type": "BPE", "vocab": ["a"], "merges": []}},
            {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []},
            {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 7}},
            {"model": {"type": "WordLevel", "vocab": {"x": 2**32 - 1}, "unk_token": "x"}},
            {"added_tokens": 5},
            {"added_tokens": [{"id": 0}]},
            {"decoder": {"type": "Unheard"}},
            {"normalizer": {"type": "Replace", "pattern": {"Regex": "(unclosed"}, "content": ""}},
            {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<undefined>"}},
        ],
        ids=[
            "post-processor",
            "merge-of-no-tokens",
            "merge-of-three",
            "merge-of-numbers",
            "no-vocab",
            "text-as-id",
            "vocab-as-list",
            "empty-vocab",
            "unknown-id-beyond",
            "huge-id",
            "added-as-number",
            "added-in-part",
            "decoder",
            "regex",
            "unknown-token",
        ],
    )
    def test_is_refused_while_loading(self, tmp_path: Path, damage: dict[str, Any]) -> None:
        folder = write_folder(tmp_path)
        file = folder / "tokenizer.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))
        with pytest.raises(CorruptFileError, match="not a readable|cannot be used") as error:
            load_tokenizer(folder)
        assert str(file) in str(error.value) and "\n" not in str(error.value)

    def test_a_panic_of_the_library_is_a_refusal_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A panic is not an `Exception`; exceptions that end the program are passed through."""
        folder = write_folder(tmp_path)
        panic = type("PanicException", (BaseException,), {})
        for fault in (panic("in native code"), ValueError("in native code")):
            monkeypatch.setattr(Tokenizer, "encode", raises(fault))
            with pytest.raises(CorruptFileError, match="cannot be used: in native code"):
                load_tokenizer(folder)
        for signal in (KeyboardInterrupt(), SystemExit()):
            monkeypatch.setattr(Tokenizer, "encode", raises(signal))
            with pytest.raises(type(signal)):
                load_tokenizer(folder)

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("tokenizer.model", b"no SentencePiece model"),
            ("vocab.json", b"[]"),
            ("vocab.json", b'{"a": "b"}'),
            ("tokenizer.tiktoken", b"\xff\xfe"),
        ],
    )
    def test_an_older_file_that_cannot_be_converted_is_refused(
        self, tmp_path: Path, name: str, content: bytes
    ) -> None:
        (tmp_path / name).write_bytes(content)
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(ModelError) as error:
            load_tokenizer(tmp_path)
        assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)

    def test_text_that_is_not_unicode(self, tmp_path: Path) -> None:
        write_folder(tmp_path, config={"eos_token": "\ud800"})
        with pytest.raises(CorruptFileError, match=r"tokenizer_config.json .* not valid Unicode"):
            load_tokenizer(tmp_path)
        tokenizer = load_tokenizer(write_folder(tmp_path, config={"chat_template": TEMPLATE}))
        with pytest.raises(RequestError, match="unpaired surrogate"):
            tokenizer.apply_chat_template(MESSAGES)

    def test_a_truncated_file_is_refused(self, tmp_path: Path) -> None:
        file = write_folder(tmp_path) / "tokenizer.json"
        text = file.read_text()
        for size in range(0, len(text), len(text) // 20):
            file.write_text(text[:size])
            with pytest.raises(CorruptFileError, match="not a readable tokenizer"):
                load_tokenizer(tmp_path)
