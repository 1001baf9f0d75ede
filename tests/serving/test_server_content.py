"""Pictures in requests to a server: a line in their place, or an error."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine
from server_harness import app_client

IMAGE = "data:image/png;base64," + "A" * 4000
BLOCK = {"type": "image", "source": {"type": "base64", "data": "A" * 4000}}
CHAT = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]
BLOCKS = [{"role": "user", "content": [BLOCK]}]
ITEMS = [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]
BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": CHAT}, "messages.image_url"),
    "/tokenize": ({"messages": CHAT}, "messages.image_url"),
    "/v1/messages": ({"messages": BLOCKS, "max_tokens": 4}, "messages.image"),
    "/v1/messages/count_tokens": ({"messages": BLOCKS}, "messages.image"),
    "/v1/responses": ({"input": ITEMS}, "input.input_image"),
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_picture_is_a_line_or_an_error(path: str) -> None:
    body, name = BODIES[path]
    engine = FakeEngine()
    async with app_client(engine) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-termgen-not-used"] == name
    for call in engine.calls:
        assert "[image, 3 KB, not read by this model]" in str(call.prompt)
    async with app_client(FakeEngine(), images="refuse") as client:
        refused = await client.post(path, json=body)
        assert refused.status_code == 400 and "are not supported here" in refused.text
