"""How many JSON schemas of a folder are taken, with `strict` and without.

    git clone https://github.com/guidance-ai/jsonschemabench
    python benchmarks/schema_rate.py jsonschemabench/data [--sample 1500]

Every schema is read, cut to what is enforced and compiled as for a request, for a vocabulary of
bytes, and without `strict` the check of answers is made ready. Prints the parts that are taken and
why the others are not, most frequent reasons first. Needs no model.
"""

from __future__ import annotations

import random
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from machine import parser_of, print_rows, write_report

from termgen.engine.grammar.grammar_source import compile_source, source_of
from termgen.engine.grammar.schema_check import SchemaChecker
from termgen.errors import RequestError
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

LIMIT_S = 5
NUM_REASONS = 12
_DETAILS = re.compile(r"'[^']*'|\"[^\"]*\"|/.*/|\d+")


def refusal(text: str, *, strict: bool, vocabulary: Any, checker: SchemaChecker) -> str:
    """Why the schema is not taken; empty if it is."""
    signal.alarm(LIMIT_S)
    try:
        wanted = StructuredOutputsParams(json=text, strict=strict)
        source = source_of("json", wanted.value, is_strict=strict)
        compile_source(source, "json", vocabulary)
        if not strict:
            checker.check_of(str(wanted.json))
    except (RequestError, ValueError) as error:
        return _DETAILS.sub("...", str(error))[:90]
    except TimeoutError:
        return f"more than {LIMIT_S} s"
    finally:
        signal.alarm(0)
    return ""


def _stop(*_: object) -> None:
    raise TimeoutError


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sample", type=int, default=1500, help="schemas, drawn at random")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    from llguidance import LLTokenizer

    files = sorted(args.folder.rglob("*.json"))
    chosen = random.Random(args.seed).sample(files, min(args.sample, len(files)))
    vocabulary, checker = LLTokenizer("byte"), SchemaChecker()
    signal.signal(signal.SIGALRM, _stop)
    rows = []
    for strict in (True, False):
        reasons = Counter(
            refusal(file.read_text(), strict=strict, vocabulary=vocabulary, checker=checker)
            for file in chosen
        )
        taken = reasons.pop("", 0)
        rows.append({"strict": strict, "schemas": len(chosen), "taken": taken / len(chosen)})
        for reason, count in reasons.most_common(NUM_REASONS):
            print(f"{count:6}  {reason}")
    checker.close()
    print_rows(rows)
    write_report(args, rows)


if __name__ == "__main__":
    main()
