"""What a request finds in the prefix cache, and the reason that it found no more."""

from __future__ import annotations

import pytest
from scheduler_harness import make_request

from termgen.engine.schedule.kv_cache import KVCacheManager
from termgen.engine.schedule.state_cache import StateCache
from termgen.vocabulary.cache_groups import Chunk, Window
from termgen.vocabulary.events import PrefixHit

SIZE = 4
WINDOW = 9


def make_kv(
    *windows: Window | None, caching: bool = True, states: StateCache | None = None
) -> KVCacheManager:
    return KVCacheManager(
        num_blocks=64,
        block_size=SIZE,
        max_num_seqs=2,
        max_model_len=128,
        enable_prefix_caching=caching,
        windows=windows or (None,),
        states=states,
    )


def keep(kv: KVCacheManager, num_tokens: int) -> list[bytes]:
    """Have the cache hold these tokens in all groups. Returns their hashes."""
    request = make_request("kept", range(num_tokens))
    cached = kv.find_cached(request)
    kv.admit(0, num_tokens, cached, num_tokens)
    kv.register(0, num_tokens, request, request.token_ids)
    kv.pool.release(kv.take_all(0))
    return request.block_hashes


def hit(kv: KVCacheManager, *tokens: range, **options: int) -> PrefixHit:
    prompt = [token for some in tokens for token in some]
    found = kv.find_cached(make_request("asked", prompt, **options))
    assert found.hit.num_tokens == found.num_blocks * SIZE
    return found.hit


def test_the_reason_of_a_hit_in_one_group() -> None:
    kv = make_kv()
    keep(kv, 20)
    new = range(100, 120)
    assert str(hit(kv, range(20))) == "all blocks before the last token were found, 16 tokens"
    assert str(hit(kv, range(3))) == "no full block lies before the last token"
    assert str(hit(kv, range(14), new)) == "no cached block continues after token 12"
    assert str(hit(kv, new)) == "no cached block begins with these tokens"
    off = hit(make_kv(caching=False), range(20))
    assert str(off) == "the prefix cache is off"
    logprobs = hit(kv, range(20), prompt_logprobs=0)
    assert logprobs.num_tokens == 0 and str(logprobs).startswith("log-probabilities of the prompt")


def test_the_reason_names_the_window_that_lacks_blocks() -> None:
    kv = make_kv(None, WINDOW, 2 * WINDOW)
    hashes = keep(kv, 60)
    kv.pool.forget(kv.pool._by_hash[hashes[9] + b"\x01"][:])
    found = hit(kv, range(46))
    assert str(found) == (
        "full up to 44, window 9 up to 36, window 18 up to 36;"
        " the window of 9 before token 44 is not all cached"
    )
    assert hit(kv, range(60)).reason == "all blocks before the last token were found, 56 tokens"
    kv.pool.forget(kv.pool._by_hash[hashes[8] + b"\x02"][:])
    assert hit(kv, range(46)).reason == "the window of 18 before token 36 is not all cached"


def test_the_reason_names_the_chunk_that_lacks_blocks() -> None:
    kv = make_kv(None, Chunk(24))
    hashes = keep(kv, 60)
    kv.pool.forget(kv.pool._by_hash[hashes[8] + b"\x01"][:])
    assert str(hit(kv, range(46))) == (
        "full up to 44, chunk 24 up to 32; the chunk of 24 before token 44 is not all cached"
    )
    assert hit(kv, range(49)).reason == "all blocks before the last token were found, 48 tokens"


@pytest.mark.parametrize("position", [24, 0])
def test_the_reason_names_the_copy_of_the_states(position: int) -> None:
    states = StateCache(block_size=SIZE, max_num_seqs=2, first_place=3, num_places=2)
    kv = make_kv(states=states)
    if position:
        states.copy(0, position, is_answer=False)
    keep(kv, 60)
    found = hit(kv, range(46))
    between = "between tokens 24 and 44" if position else "up to token 44"
    assert str(found) == f"full up to 44, states up to {position}; no copy of the states {between}"
    assert hit(kv, range(position + 1)).reason.startswith(("all blocks", "no full block"))
