"""The endpoints of Ollama's API that generate."""

from __future__ import annotations

from termgen.api.ollama.answers import AnswerLines, answer
from termgen.api.ollama.body import CHAT_BODY, GENERATE_BODY, served_name
from termgen.api.ollama.errors import ERRORS
from termgen.api.ollama.parser import (
    GENERATE_NAMES,
    NAMES,
    OllamaRequest,
    parse_chat,
    parse_generate,
)
from termgen.api.rows import GeneratingRow

ROWS: tuple[GeneratingRow[OllamaRequest], ...] = (
    GeneratingRow(
        path="/api/chat",
        summary="Ollama's chats",
        body=CHAT_BODY,
        resolve=served_name,
        parse=parse_chat,
        stream=AnswerLines,
        whole=answer,
        errors=ERRORS,
        names=NAMES,
    ),
    GeneratingRow(
        path="/api/generate",
        summary="Ollama's completions",
        body=GENERATE_BODY,
        resolve=served_name,
        parse=parse_generate,
        stream=AnswerLines,
        whole=answer,
        errors=ERRORS,
        names=GENERATE_NAMES,
        operation="text_completion",
    ),
)
