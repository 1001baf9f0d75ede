"""The sampler as a whole: the distribution of samples, and their dependencies."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from no_waits import no_waits
from sampling_columns import asks
from transformers import TopKLogitsWarper

from termgen.engine.device.sampling import sampler
from termgen.engine.device.sampling.gumbel import Stream
from termgen.engine.device.sampling.metadata import SamplingMetadata
from termgen.engine.device.sampling.sampler import Sampler
from termgen.vocabulary.step import CORRUPT_TOKEN

MakeMeta = Callable[..., SamplingMetadata]
RandomLogits = Callable[..., torch.Tensor]
AssertChiSquare = Callable[[torch.Tensor, torch.Tensor], None]


def draw_many(
    make_meta: MakeMeta, logits: torch.Tensor, size: int, *, chunk: int = 4096, **parameters: Any
) -> torch.Tensor:
    """[V] logits -> [size] draws at `size` different positions."""
    device = str(logits.device)
    draws = []
    for start in range(0, size, chunk):
        rows = min(chunk, size - start)
        positions = torch.arange(start, start + rows)
        meta = make_meta(rows, seeds=17, positions=positions, device=device, **parameters)
        draws.append(Sampler()(logits.expand(rows, -1), meta).token_ids.cpu())
    return torch.cat(draws)


def fit(draws: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and expected counts; values too rare for chi-square share one cell."""
    counts = torch.bincount(draws, minlength=len(probs)).double()
    assert len(counts) == len(probs) and not counts[probs == 0].any()
    expected = probs * len(draws)
    rare = expected < 5
    return (
        torch.cat((counts[~rare], counts[rare].sum().reshape(1))),
        torch.cat((expected[~rare], expected[rare].sum().reshape(1))),
    )


def assert_mass(draws: torch.Tensor, probability: float, hit: torch.Tensor) -> None:
    expected = probability * len(draws)
    sigma = math.sqrt(expected * (1.0 - probability))
    assert abs(float(hit.sum()) - expected) < 10 * sigma, (int(hit.sum()), expected)


@pytest.mark.parametrize("vocab_size", [7, 103, 1001])
def test_draws_follow_softmax(
    random_logits: RandomLogits,
    assert_chi_square: AssertChiSquare,
    make_meta: MakeMeta,
    vocab_size: int,
) -> None:
    logits = random_logits(1, vocab_size, scale=2.0)[0]
    draws = draw_many(make_meta, logits, 2_000_000 // (vocab_size + 50), temperature=0.8)
    assert_chi_square(*fit(draws, (logits / 0.8).double().softmax(-1)))


def test_filtered_draws_follow_the_renormalised_softmax(
    random_logits: RandomLogits, assert_chi_square: AssertChiSquare, make_meta: MakeMeta
) -> None:
    logits = random_logits(1, 2003, scale=2.0)[0]
    draws = draw_many(make_meta, logits, 20_000, chunk=2000, top_k=12, temperature=1.3)
    kept = TopKLogitsWarper(12)(None, logits.unsqueeze(0))[0]
    assert_chi_square(*fit(draws, (kept / 1.3).double().softmax(-1)))


def test_head_and_tail_mass(make_meta: MakeMeta) -> None:
    vocab_size = 49_152
    for gap, size in ((8.0, 600), (18.0, 1200)):
        logits = torch.full((vocab_size,), -gap)
        logits[4321] = 0.0
        head = 1.0 / (1.0 + (vocab_size - 1) * math.exp(-gap))
        draws = draw_many(make_meta, logits, size, chunk=16)
        assert_mass(draws, head, draws == 4321)
        assert_mass(draws, 1.0 - head, draws != 4321)


@pytest.mark.gpu
def test_head_and_far_tail_mass_at_18_nats(make_meta: MakeMeta) -> None:
    """Enough draws to see the tail itself: about 400 expected."""
    vocab_size, gap = 65_537, 18.0
    logits = torch.full((vocab_size,), -gap, device="cuda")
    logits[4321] = 0.0
    head = 1.0 / (1.0 + (vocab_size - 1) * math.exp(-gap))
    draws = draw_many(make_meta, logits, 400_000, chunk=4000)
    assert_mass(draws, head, draws == 4321)
    assert_mass(draws, 1.0 - head, draws != 4321)
    tail = draws[draws != 4321]
    assert len(tail.unique()) > 0.9 * len(tail)


@pytest.mark.parametrize("vocab_size", [1, 5, 1001])
def test_greedy_is_argmax(
    random_logits: RandomLogits, make_meta: MakeMeta, vocab_size: int
) -> None:
    logits = random_logits(40, vocab_size)
    output = Sampler()(logits, make_meta(40, temperature=0.0))
    assert torch.equal(output.token_ids, logits.argmax(-1)) and output.logprobs is None
    assert output.token_ids.dtype == torch.int64


@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}])
def test_greedy_rows_share_a_batch_with_random_ones(
    random_logits: RandomLogits, make_meta: MakeMeta, filters: Any
) -> None:
    logits = random_logits(200, 1001)
    temperature = torch.tensor([0.0, 1.0, 9e-6, 1.7]).repeat(50)
    tokens = Sampler()(logits, make_meta(200, temperature=temperature, **filters)).token_ids
    greedy = temperature < 1e-5
    best = logits.argmax(-1)
    assert torch.equal(tokens[greedy], best[greedy])
    assert (tokens[~greedy] != best[~greedy]).sum() > 10


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9999}, {"top_k": 900}])
def test_minus_infinity_is_never_drawn(
    random_logits: RandomLogits, make_meta: MakeMeta, filters: Any
) -> None:
    logits = random_logits(500, 1001, scale=0.1)
    allowed = torch.zeros(1001, dtype=torch.bool)
    allowed[[0, 13, 500, 1000]] = True
    logits[:, ~allowed] = -torch.inf
    tokens = Sampler()(logits, make_meta(500, temperature=2.0, **filters)).token_ids
    assert allowed[tokens].all() and len(tokens.unique()) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}])
@pytest.mark.parametrize("is_masked", [False, True])
def test_rows_that_are_no_numbers_are_marked_and_harm_no_other(
    random_logits: RandomLogits,
    make_meta: MakeMeta,
    temperature: float,
    filters: Any,
    is_masked: bool,
) -> None:
    logits = random_logits(6, 1001)
    healthy = logits[5:].clone()
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2] = torch.inf
    logits[3, 7] = torch.nan
    logits[4, 8] = torch.inf
    meta = make_meta(6, temperature=temperature, seeds=3, max_logprobs=4, **filters)
    meta.may_hide = torch.tensor([False, is_masked, True, True, True, True])
    output = Sampler()(logits, meta)
    corrupt = (output.token_ids == CORRUPT_TOKEN).tolist()
    # The request's own masks may leave a row nothing but -inf.
    assert corrupt == [True, not is_masked, True, True, True, False]
    assert output.logprobs is not None
    assert 0 <= int(output.logprobs.token_ids.min()) <= int(output.logprobs.token_ids.max()) < 1001
    assert not output.logprobs.logprobs[5].isnan().any()
    alone = Sampler()(healthy, make_meta(1, temperature=temperature, seeds=3, **filters))
    assert int(output.token_ids[5]) == int(alone.token_ids)


def test_an_infinity_of_the_requests_own_making_is_no_fault(
    random_logits: RandomLogits, make_meta: MakeMeta
) -> None:
    logits = random_logits(2, 50, scale=10.0)
    meta = make_meta(
        2,
        temperature=0.0,
        repetition=[1e-38, 1.0],
        output_counts=torch.ones(2, 50, dtype=torch.int32),
        prompt_mask=torch.zeros(2, 50, dtype=torch.bool),
    )
    assert (Sampler()(logits, meta).token_ids >= 0).all()


def mixed_batch(make_meta: MakeMeta, num_rows: int, vocab_size: int) -> SamplingMetadata:
    """Every kind of row: greedy, random, every kind of cut, penalised, with stops suppressed."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)

    def column(*choices: float) -> list[float]:
        return [rng.choice(choices) for _ in range(num_rows)]

    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, vocab_size)
    return make_meta(
        num_rows,
        temperature=column(0.0, 0.7, 1.0, 1.6),
        top_k=column(0, 0, 4, 60),
        top_p=column(1.0, 1.0, 0.6, 0.95),
        min_p=column(0.0, 0.0, 0.05),
        seeds=[rng.randrange(-(2**63), 2**63) for _ in range(num_rows)],
        positions=[rng.randrange(2**17) for _ in range(num_rows)],
        repetition=column(1.0, 1.2),
        presence=column(0.0, 0.5),
        frequency=column(0.0, 0.3),
        output_counts=torch.randint(0, 3, shape, generator=generator, dtype=torch.int32),
        prompt_mask=torch.rand(shape, generator=generator) < 0.1,
        stop_token_ids=torch.tensor([[1, 2, -1], [5, -1, -1], [-1, -1, -1]]).repeat(
            -(-num_rows // 3), 1
        )[:num_rows],
        suppress_stop=[rng.random() < 0.5 for _ in range(num_rows)],
    )


def rows_of(meta: SamplingMetadata, rows: torch.Tensor) -> SamplingMetadata:
    picked = {
        name: getattr(meta, name)[rows]
        for name in SamplingMetadata.__slots__
        if isinstance(getattr(meta, name), torch.Tensor)
    }
    return replace(meta, **picked, cuts=meta.cuts.of(rows), penalties=meta.penalties.of(rows))


def test_a_draw_does_not_depend_on_the_batch(
    random_logits: RandomLogits, make_meta: MakeMeta
) -> None:
    logits = random_logits(48, 1001, scale=2.0)
    meta = mixed_batch(make_meta, 48, 1001)
    together = Sampler()(logits, meta).token_ids
    for _ in range(5):
        rows = torch.randperm(48)[: random.randrange(1, 49)]
        part = Sampler()(logits[rows], rows_of(meta, rows)).token_ids
        assert torch.equal(part, together[rows]), rows
    for row in range(48):
        one = torch.tensor([row])
        alone = rows_of(meta, one)
        # Alone, the host flags say exactly what this row needs.
        alone.needs = alone.needs._replace(
            all_greedy=float(alone.temperature) < 1e-5,
            filters=asks(alone.cuts),
            min_tokens=bool(alone.suppress_stop),
        )
        assert int(Sampler()(logits[one], alone).token_ids) == int(together[row]), row


def test_a_draw_does_not_depend_on_what_else_survives(
    random_logits: RandomLogits, make_meta: MakeMeta
) -> None:
    """A cut that keeps the drawn token keeps the draw: its noise is the same."""
    logits = random_logits(300, 1001, scale=2.0)
    free = Sampler()(logits, make_meta(300)).token_ids
    ranks = (logits > logits.gather(1, free.unsqueeze(1))).sum(-1)
    for top_k in (1, 10, 100, 800):
        limited = Sampler()(logits, make_meta(300, top_k=top_k)).token_ids
        kept = ranks < top_k
        assert kept.any() and torch.equal(limited[kept], free[kept])


def test_seed_position_and_stream_matter(make_meta: MakeMeta) -> None:
    logits = torch.zeros(64, 1001)
    base = Sampler()(logits, make_meta(64, seeds=5, positions=torch.arange(64))).token_ids
    again = Sampler()(logits, make_meta(64, seeds=5, positions=torch.arange(64))).token_ids
    assert torch.equal(base, again)
    assert len(base.unique()) > 50
    other_seed = Sampler()(logits, make_meta(64, seeds=6, positions=torch.arange(64)))
    other_stream = Sampler(Stream.DRAFT)(logits, make_meta(64, seeds=5, positions=torch.arange(64)))
    for other in (other_seed.token_ids, other_stream.token_ids):
        assert int((other == base).sum()) < 5


@pytest.mark.parametrize("what", ["seeds", "positions"])
def test_tokens_at_neighbouring_keys_are_independent(
    assert_chi_square: AssertChiSquare, make_meta: MakeMeta, what: str
) -> None:
    logits = torch.tensor([0.5, 0.0, -0.5, 0.2, 1.0, 0.0])
    size = 20_000
    pairs = []
    for step in (0, 1):
        key = {"seeds": torch.full((size,), 9), "positions": torch.full((size,), 9)}
        key[what] = torch.arange(size) * 2 + step
        other = "positions" if what == "seeds" else "seeds"
        key[other] = torch.arange(size) // 100
        pairs.append(Sampler()(logits.expand(size, -1), make_meta(size, **key)).token_ids)
    probs = logits.double().softmax(-1)
    joint = torch.bincount(pairs[0] * 6 + pairs[1], minlength=36).double()
    expected = (probs[:, None] * probs[None, :]).flatten() * size
    assert_chi_square(joint, expected)


def test_the_logits_are_only_read(random_logits: RandomLogits, make_meta: MakeMeta) -> None:
    logits = random_logits(30, 1001)
    before = logits.clone()
    Sampler()(logits, mixed_batch(make_meta, 30, 1001))
    Sampler()(logits, make_meta(30, temperature=1.0))
    assert torch.equal(logits, before)


def test_suppressed_stops_are_not_drawn(random_logits: RandomLogits, make_meta: MakeMeta) -> None:
    logits = random_logits(4, 101, scale=0.1)
    logits[:, 7] = 50.0
    stop = torch.tensor([[7, -1]] * 4)
    suppress = torch.tensor([True, False, True, False])
    for temperature in (0.0, 1.0):
        meta = make_meta(4, temperature=temperature, stop_token_ids=stop, suppress_stop=suppress)
        drawn = Sampler()(logits, meta).token_ids
        assert torch.equal(drawn == 7, ~suppress)
        meta.needs = meta.needs._replace(min_tokens=False)
        assert (Sampler()(logits, meta).token_ids == 7).all()


@pytest.mark.gpu
def test_cuda_draws_the_same_tokens(random_logits: RandomLogits, make_meta: MakeMeta) -> None:
    rows, vocab = 512, 4999
    logits = random_logits(rows, vocab, scale=2.5)
    meta = mixed_batch(make_meta, rows, vocab)
    meta.needs = meta.needs._replace(max_logprobs=5)
    tensors = {
        name: getattr(meta, name).cuda()
        for name in SamplingMetadata.__slots__
        if isinstance(getattr(meta, name), torch.Tensor)
    }
    cpu = Sampler()(logits, meta)
    cuda = Sampler()(logits.cuda(), replace(meta, **tensors))
    assert torch.equal(cuda.token_ids.cpu(), cpu.token_ids)
    assert cuda.logprobs is not None and cpu.logprobs is not None
    assert torch.equal(cuda.logprobs.ranks.cpu(), cpu.logprobs.ranks)
    torch.testing.assert_close(cuda.logprobs.logprobs.cpu(), cpu.logprobs.logprobs)


@pytest.mark.gpu
def test_cuda_step_never_waits_for_the_device(
    random_logits: RandomLogits, make_meta: MakeMeta
) -> None:
    logits = random_logits(8, 1001).cuda()
    meta = mixed_batch(make_meta, 8, 1001)
    tensors = {
        name: getattr(meta, name).cuda()
        for name in SamplingMetadata.__slots__
        if isinstance(getattr(meta, name), torch.Tensor)
    }
    meta = replace(meta, **tensors, needs=meta.needs._replace(max_logprobs=5))
    Sampler()(logits, meta)
    with no_waits():
        Sampler()(logits, meta)


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9, "top_k": 40}, {"min_p": 0.05}])
def test_rows_drawn_in_parts_are_drawn_as_one(
    random_logits: RandomLogits,
    make_meta: MakeMeta,
    monkeypatch: pytest.MonkeyPatch,
    limits: dict[str, Any],
) -> None:
    """The CPU samples in parts, so that many rows take no more memory at a time than a few."""
    logits = random_logits(23, 257)
    temperature = torch.tensor([0.0, 0.8, 1.3] * 8)[:23]
    meta = make_meta(23, seeds=5, temperature=temperature, **limits)
    whole = Sampler()(logits, meta).token_ids
    sizes, real = [], sampler.gumbel_argmax

    def noted(logits: torch.Tensor, **more: Any) -> torch.Tensor:
        sizes.append(len(logits))
        return real(logits, **more)

    monkeypatch.setattr(sampler, "PART_LOGITS", 2 * 257)
    monkeypatch.setattr(sampler, "gumbel_argmax", noted)
    assert Sampler()(logits, meta).token_ids.tolist() == whole.tolist()
    assert sizes == [2] * 11 + [1]
