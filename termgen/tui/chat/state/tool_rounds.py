"""A round of an answer: what the model said, the tools it called, and what they gave. No Textual.

A turn has as many as the model called tools; its answer is what follows the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from termgen.tools.calls import CallState, ToolCall
from termgen.tui.chat.state.thoughts import Thought


@dataclass(slots=True, eq=False)
class ToolRound:
    said: str = ""
    """The model's text before or between its calls."""
    thought: Thought = field(default_factory=Thought)
    calls: list[ToolCall] = field(default_factory=list)

    def messages(self, result_chars: int) -> list[dict[str, Any]]:
        """An assistant's message with calls, and one with the result of each."""
        pairs = [call.messages(result_chars) for call in self.calls]
        asked: dict[str, Any] = {"role": "assistant", "content": self.said}
        if self.thought.text:
            asked["reasoning_content"] = self.thought.text
        asked["tool_calls"] = [call for call, _ in pairs]
        return [asked, *(answer for _, answer in pairs)]


def as_records(rounds: Sequence[ToolRound]) -> list[dict[str, Any]]:
    """Plain data for the store."""
    return [
        {
            "said": one.said,
            "thought": {
                "text": one.thought.text,
                "tokens": one.thought.num_tokens,
                "seconds": one.thought.seconds,
            },
            "calls": [
                {
                    "id": call.call_id,
                    "name": call.name,
                    "arguments": call.arguments,
                    "state": call.state.value,
                    "result": call.result,
                    "seconds": call.seconds,
                }
                for call in one.calls
            ],
        }
        for one in rounds
    ]


def call_of(record: Mapping[str, Any]) -> ToolCall:
    """A call from its record, which may be of any shape. One that had not ended is cancelled.
    Raises ValueError or TypeError."""
    texts = {name: record.get(name) for name in ("id", "name", "arguments", "result")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("a tool call has no text where it must")
    number = record.get("seconds", 0.0)
    if type(number) not in (int, float) or not 0 <= number < float("inf"):
        raise ValueError("a tool call took no number of seconds")
    call = ToolCall(
        str(texts["name"]),
        str(texts["arguments"]),
        CallState(record.get("state")),
        str(texts["result"]),
        float(number),
        str(texts["id"]),
    )
    call.cancel()
    return call
