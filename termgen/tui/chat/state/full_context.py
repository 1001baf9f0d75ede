"""How much of a chat fits into the context of its model. No Textual."""

from __future__ import annotations

from collections.abc import Callable

from termgen.client import ChatPrompt, EngineClient
from termgen.errors import ContextLengthError, EngineError, RequestError


async def least_that_fits(
    client: EngineClient, prompt_of: Callable[[int], ChatPrompt], room: int, low: int, high: int
) -> int | None:
    """The least number, from `low` to `high`, whose prompt has at most `room` tokens; None if the
    engine cannot count them."""
    while low < high:
        middle = (low + high) // 2
        try:
            fits = len(await client.tokenize(prompt_of(middle))) <= room
        except ContextLengthError:
            fits = False
        except (RequestError, EngineError):
            return None
        low, high = (low, middle) if fits else (middle + 1, high)
    return low
