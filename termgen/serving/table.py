"""The endpoints of the server, one row each. A new dialect adds its rows here, and nothing else
outside of its own folder."""

from __future__ import annotations

from termgen.api import anthropic, chat, completions, embeddings, models
from termgen.api.ollama import rows as ollama
from termgen.api.responses import answer as responses
from termgen.api.rows import Row
from termgen.serving.admin_routes import ADMIN_ROWS
from termgen.serving.event_routes import EVENT_ROWS
from termgen.serving.ollama_routes import OLLAMA_ROWS
from termgen.serving.state_routes import STATE_ROWS

ENDPOINTS: tuple[Row, ...] = (
    chat.ROW,
    completions.ROW,
    embeddings.ROW,
    responses.ROW,
    *anthropic.ROWS,
    *ollama.ROWS,
    *models.ROWS,
    *STATE_ROWS,
    *ADMIN_ROWS,
    *EVENT_ROWS,
    *OLLAMA_ROWS,
)
