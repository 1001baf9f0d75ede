"""A program of its own: turns GBNF into Lark, which takes Python many milliseconds.

`GrammarCompiler` asks it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # wherever this process was started

from termgen.engine.grammar_source import from_gbnf
from termgen.helper_process import answer_questions

if __name__ == "__main__":
    answer_questions(lambda grammar, _: from_gbnf(grammar))
