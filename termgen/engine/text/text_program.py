"""A helper program that tokenises long prompts for `text_process.py`.

    python -P text_program.py TOKENIZER MAX_MODEL_LEN VOCAB_SIZE

It has an `InputProcessor`, so it checks prompts in the same way.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # independent of the working directory

from termgen.client import Prompt
from termgen.engine.text.input_processor import InputProcessor
from termgen.engine.text.tokenizer import load_tokenizer
from termgen.system.helper_process import answer_questions

Asked = tuple[Prompt, bool, bool, bool, int | None]
"""(prompt, add special tokens to raw text, prompt has to fit the context, note its turns' ends,
number of ids to keep)."""


def tokenizing(source: str, max_model_len: str, vocab_size: str) -> Callable[[Asked, bytes], bytes]:
    tokenizer = load_tokenizer(Path(source))
    processor = InputProcessor(tokenizer, int(max_model_len), int(vocab_size))

    def answer(asked: Asked, _: bytes) -> bytes:
        prompt, add_special_tokens, has_to_fit, marks_turns, keep = asked
        ids, turn_ends = processor.read(
            prompt,
            add_special_tokens=add_special_tokens,
            has_to_fit=has_to_fit,
            marks_turns=marks_turns,
            keep=keep,
        )
        return array("I", [*turn_ends, *ids]).tobytes()

    return answer


if __name__ == "__main__":
    answer_questions(tokenizing(*sys.argv[1:]))
