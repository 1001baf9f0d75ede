"""Tells when a request's parameters leave its grammar no token to draw.

Where nothing may be drawn the device draws something all the same: what the mask forbids, or what
those parameters do. Asked by `constraints` for each token that lands; most requests under a grammar
have no such parameter, and cost three looks.
"""

from __future__ import annotations

from bisect import bisect_left

from termgen.errors import RequestError
from termgen.vocabulary.request import IntArray, Request


def fault_of(request: Request, answer: IntArray, mask: IntArray) -> RequestError | None:
    """What is wrong with the newest token of the answer [N], drawn under mask [num_words]."""
    params, token = request.params, int(answer[-1])
    names = [name for name in ("allowed_token_ids", "bad_words") if getattr(params, name)]
    if len(answer) <= params.min_tokens:
        names.append("min_tokens")
    if not names:
        return None
    fits = int(mask[token // 32]) >> token % 32 & 1
    if params.allowed_token_ids is not None:
        place = bisect_left(params.allowed_token_ids, token)
        fits = fits and params.allowed_token_ids[place : place + 1] == (token,)
    is_bad = any(tuple(answer[-len(ids) :].tolist()) == ids for ids in request.bad_token_ids)
    if fits and not is_bad:
        return None
    return RequestError(
        f"{' and '.join(names)}: token {len(answer)} of the answer cannot be both what this allows"
        " and what the grammar does",
        param=names[0],
    )
