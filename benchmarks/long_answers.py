"""The longest turn of the screen's loop while long answers are laid out, in processor time.

python benchmarks/long_answers.py
"""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

from machine import LoopWatch
from textual.app import App, ComposeResult

from termgen.system.cpu_slices import share_lock_quickly
from termgen.tui.chat.state.conversation import AnswerState, Turn
from termgen.tui.chat.widgets.entries import AnswerEntry, QuestionEntry
from termgen.tui.chat.widgets.transcript import Transcript
from termgen.tui.paint.palette import Palette

TABLE = "| name | value | note |\n|---|--:|---|\n" + "".join(
    f"| row {i} | {7 * i} | some `text` of {i} |\n" for i in range(1000)
)
PAGE = (
    "A **word** here, then more of it that is longer than a line.\n\n- an item\n- another\n\n" * 10
)
CODE = "```python\n" + "".join(f"x{i} = f({i})  # and more of it\n" for i in range(1000))
LONG = "Words of somebody who takes his time, and ends a line at times.\n" * 460
MODEL: Any = SimpleNamespace(model_id="a model")
PIECE = 400
SETTLE_S = 1.0
"""Longer than the whole layout takes."""


class Sheet(App[None]):
    CSS = "Transcript { overflow-x: hidden; overflow-y: scroll; }"

    def compose(self) -> ComposeResult:
        yield Transcript()

    def on_mount(self) -> None:
        palette = Palette({"foreground": "#e0e0e0", "background": "#101010"})
        self.query_one(Transcript).set_palette(palette)


def answer(text: str, *, is_open: bool = False) -> AnswerEntry:
    turn = Turn("q", answer=text)
    turn.stats.output_tokens = 1
    entry = AnswerEntry(turn, MODEL, lambda action: action)
    entry.feed(text)
    if not is_open:
        turn.end(AnswerState.DONE)
        entry.close()
    return entry


async def stream(sheet: Transcript, entry: AnswerEntry, text: str) -> None:
    for at in range(0, len(text), PIECE):
        entry.feed(text[at : at + PIECE])
        sheet.update(entry)
        await asyncio.sleep(0)


async def measure(watch: LoopWatch) -> None:
    app = Sheet()

    async def report(name: str) -> None:
        await asyncio.sleep(SETTLE_S)
        print(f"{watch.longest_ns / 1e6:6.1f} ms  {name}", flush=True)
        watch.reset()

    async with app.run_test(size=(110, 40)) as pilot:
        sheet = app.query_one(Transcript)
        answer(f"{PAGE}{CODE}")(80)  # imports the code highlighter
        gc.collect()
        gc.disable()  # as the command line has it while an engine computes
        await asyncio.sleep(0)
        watch.reset()
        sheet.set_entries([answer(text) for text in [TABLE, *[PAGE] * 30]])
        sheet.to_end()
        await report("opening an old chat: a table of 1,000 rows, and 30 answers of a page")
        await pilot.resize_terminal(80, 40)
        await report("resizing it")
        streaming = answer("", is_open=True)
        streaming.turn.thought.text = LONG
        streaming.turn.thought.is_over = True
        sheet.add(streaming)
        await stream(sheet, streaming, TABLE)
        await report("the same table as it is streamed, by 400 characters")
        await pilot.resize_terminal(90, 40)
        await report("another width while it is streamed")
        await stream(sheet, streaming, f"| {'a wider name ' * 2} | 1 | |\n\nThe end [of][it].\n\n")
        await report("its end, after a line of wider columns")
        await stream(sheet, streaming, CODE)
        await report("1,000 lines of code behind it, by 400 characters")
        await pilot.resize_terminal(100, 40)
        await report("another width while they are streamed")
        await stream(sheet, streaming, "```\n\n")
        await stream(sheet, streaming, PAGE * 30)
        await report("30 pages behind them, by 400 characters")
        await pilot.resize_terminal(70, 40)
        await report("another width while they are streamed")
        await stream(sheet, streaming, "\n[it]: http://x.y\n")
        streaming.turn.end(AnswerState.DONE)
        streaming.close()
        sheet.update(streaming)
        await report("the end of the answer, with a link that is defined there")
        streaming.fold_thoughts()
        sheet.update(streaming)
        await report("unfolding 30,000 characters of thoughts")
        question = QuestionEntry(Turn(LONG), lambda action: action)
        sheet.add(question)
        await asyncio.sleep(SETTLE_S)
        watch.reset()
        question.is_marked = True
        sheet.update(question)
        await report("marking a question of 30,000 characters")


if __name__ == "__main__":
    share_lock_quickly()  # as the command line does
    longest = LoopWatch()
    with longest.watching():
        asyncio.run(measure(longest))
