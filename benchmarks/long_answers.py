"""The longest turn of the screen's loop while long answers are laid out, in processor time.

    python benchmarks/long_answers.py

open     an old chat: a table of 1,000 rows, and 30 answers of a page
resize   the same for another width
stream   a table of 1,000 rows, by 400 characters
wider    another width while it is streamed
end      a line of wider columns, and what ends the table
code     1,000 lines of it, by 400 characters
wide     another width while they are streamed
go on    30 pages behind it, by 400 characters
narrow   another width while they are streamed
close    the end of it, with a link that is defined there
unfold   30,000 characters of thoughts
mark     a question of 30,000 characters
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

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


class Turns:
    """Times every iteration of the loop."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        run = asyncio.Handle._run

        def timed(handle: Any) -> None:
            began_ns = time.thread_time_ns()
            run(handle)
            self.longest_ms = max(self.longest_ms, (time.thread_time_ns() - began_ns) / 1e6)

        asyncio.Handle._run = timed  # type: ignore[method-assign]

    async def told(self, name: str) -> None:
        await asyncio.sleep(SETTLE_S)
        print(f"{name:8}{self.longest_ms:8.1f} ms")
        self.longest_ms = 0.0


def answer(text: str, model: Any, *, is_open: bool = False) -> AnswerEntry:
    turn = Turn("q", answer=text)
    turn.stats.output_tokens = 1
    entry = AnswerEntry(turn, model, lambda action: action)
    entry.feed(text)
    if not is_open:
        turn.end(AnswerState.DONE)
        entry.close()
    return entry


class Model:
    model_id = "a model"


async def stream(sheet: Transcript, entry: AnswerEntry, text: str) -> None:
    for at in range(0, len(text), PIECE):
        entry.feed(text[at : at + PIECE])
        sheet.update(entry)
        await asyncio.sleep(0)


async def measure() -> None:
    app, turns = Sheet(), Turns()
    async with app.run_test(size=(110, 40)) as pilot:
        sheet = app.query_one(Transcript)
        answer(f"{PAGE}{CODE}", Model)(80)  # imports the code highlighter
        gc.collect()
        gc.disable()  # as the command line has it while an engine computes
        await asyncio.sleep(0)
        turns.longest_ms = 0.0
        sheet.set_entries([answer(text, Model) for text in [TABLE, *[PAGE] * 30]])
        sheet.to_end()
        await turns.told("open")
        await pilot.resize_terminal(80, 40)
        await turns.told("resize")
        streaming = answer("", Model, is_open=True)
        streaming.turn.thought.text = LONG
        streaming.turn.thought.is_over = True
        sheet.add(streaming)
        await stream(sheet, streaming, TABLE)
        await turns.told("stream")
        await pilot.resize_terminal(90, 40)
        await turns.told("wider")
        await stream(sheet, streaming, f"| {'a wider name ' * 2} | 1 | |\n\nThe end [of][it].\n\n")
        await turns.told("end")
        await stream(sheet, streaming, CODE)
        await turns.told("code")
        await pilot.resize_terminal(100, 40)
        await turns.told("wide")
        await stream(sheet, streaming, "```\n\n")
        await stream(sheet, streaming, PAGE * 30)
        await turns.told("go on")
        await pilot.resize_terminal(70, 40)
        await turns.told("narrow")
        await stream(sheet, streaming, "\n[it]: http://x.y\n")
        streaming.turn.end(AnswerState.DONE)
        streaming.close()
        sheet.update(streaming)
        await turns.told("close")
        streaming.fold_thoughts()
        sheet.update(streaming)
        await turns.told("unfold")
        question = QuestionEntry(Turn(LONG), lambda action: action)
        sheet.add(question)
        await asyncio.sleep(SETTLE_S)
        turns.longest_ms = 0.0
        question.is_marked = True
        sheet.update(question)
        await turns.told("mark")


if __name__ == "__main__":
    share_lock_quickly()  # as the command line does
    asyncio.run(measure())
