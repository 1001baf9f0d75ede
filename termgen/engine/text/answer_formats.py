"""Formats of answers that no model's files declare, as transformers' response parser takes them.

Each has words by which a chat template shows that it writes the format. `tool_detection` picks one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CALL = {"function": {"name": "{name}", "arguments": "{content}"}}
_HARMONY_ENDS = ["<|end|>", "<|call|>", "<|return|>", "<|start|>"]
_MUSE_ENDS = ["<|eom|>", "<|eot|>", "<|start|>"]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    name: str
    words: tuple[str, ...]
    """What the chat template contains, all of it."""
    declaration: dict[str, Any]
    """The `response_template`."""


HARMONY = AnswerFormat(
    "harmony",
    ("<|start|>assistant", "<|channel|>analysis<|message|>", "<|channel|>final"),
    {
        "start_anchor": "<|start|>assistant",
        "fields": {
            "thinking": {
                "open_pattern": r"<\|channel\|>analysis(?:(?!<\|message\|>).)*<\|message\|>",
                "close": _HARMONY_ENDS,
            },
            # The recipient stands before the channel or behind it.
            "tool_calls": {
                "open_pattern": r"\bto=(?:functions\.)?(?P<name>[^\s<]+)"
                r"(?:\s*<\|channel\|>commentary)?"
                r"(?:(?!<\|message\|>|<\|channel\|>).)*<\|message\|>",
                "close": _HARMONY_ENDS,
                "content": "json",
                "repeats": True,
                "transform": _CALL,
            },
            # Commentary without a recipient is for the user: what the model says before it calls.
            "content": {
                "open_pattern": r"<\|channel\|>(?:final|commentary)"
                r"(?:(?!<\|message\|>|\bto=).)*<\|message\|>",
                "close": _HARMONY_ENDS,
            },
        },
    },
)
"""gpt-oss: messages of an answer, with thoughts, calls and text in channels."""

QWEN_XML = AnswerFormat(
    "xml",
    ("<tool_call>", "<function=", "<parameter="),
    {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open_pattern": r"<think>\s*", "close_pattern": r"\s*</think>\s*"},
            # Models of this format leave out the first tag at times.
            "tool_calls": {
                "open_pattern": r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
                "close": "</tool_call>",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
                },
                "repeats": True,
                "transform": _CALL,
            },
            "content": {},
        },
    },
)
"""Qwen3.5, Qwen3-Coder: arguments between tags, as text; their schema says what it stands for."""

GEMMA4 = AnswerFormat(
    "gemma4",
    ("<|turn>", "<|tool_call>", "<|channel>"),
    {
        # An answer goes on behind the results of the calls that it made.
        "start_anchor": ["<|turn>model\n", "<tool_response|>"],
        "fields": {
            "thinking": {
                "open_pattern": r"<\|channel>thought\s*",
                "close_pattern": r"\s*<channel\|>\s*",
            },
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>[^\s{]+)(?=\{)",
                "close": "<tool_call|>",
                "content": "json",
                "content_args": {
                    "string_delims": [['<|"|>', '<|"|>']],
                    "unquoted_keys": True,
                },
                "repeats": True,
                "transform": _CALL,
            },
            "content": {"close": ["<turn|>", "<|tool_response>"]},
        },
    },
)
"""Gemma 4: objects without quotes around keys, and with quotes of their own around strings."""

MUSE = AnswerFormat(
    "muse",
    ("<atem:function_calls>", "<|message|>"),
    {
        "start_anchor": "<|start|>assistant",
        "fields": {
            "thinking": {"open_pattern": r"\bto=self\s*<\|message\|>", "close": _MUSE_ENDS},
            "content": {"open_pattern": r"\bto=user\s*<\|message\|>", "close": _MUSE_ENDS},
            "tool_calls": {
                "open_pattern": r'<atem:invoke\s+name="(?P<name>[^"]+)"\s*>',
                "close": "</atem:invoke>",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r'<atem:parameter\s+name="(?P<key>[^"]+)"\s*>'
                    r"(?P<value>.*?)</atem:parameter>"
                },
                "repeats": True,
                "transform": _CALL,
            },
        },
    },
)
"""Muse Glimmer: messages to oneself, to the user and to functions."""

FORMATS = (HARMONY, QWEN_XML, GEMMA4, MUSE)


def format_of(source: str) -> AnswerFormat | None:
    """The format that a chat template writes."""
    return next((one for one in FORMATS if all(word in source for word in one.words)), None)
