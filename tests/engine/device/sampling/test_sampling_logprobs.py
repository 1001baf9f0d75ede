"""Log-probabilities and ranks against torch.log_softmax and a full sort."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from termgen.engine.device.sampling.logprobs import gather_logprobs
from termgen.engine.device.sampling.metadata import SamplingMetadata
from termgen.engine.device.sampling.sampler import Sampler

MakeMeta = Callable[..., SamplingMetadata]
RandomLogits = Callable[..., torch.Tensor]


@pytest.mark.parametrize("max_logprobs", [0, 1, 5, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_and_ranks(
    random_logits: RandomLogits, make_meta: MakeMeta, max_logprobs: int, temperature: float
) -> None:
    logits = random_logits(25, 1001)
    meta = make_meta(25, temperature=temperature, max_logprobs=max_logprobs)
    output = Sampler()(logits, meta)
    assert output.logprobs is not None
    ids, values, ranks = output.logprobs
    assert ids.dtype == ranks.dtype == torch.int32 and values.dtype == torch.float32
    assert ids.shape == values.shape == (25, 1 + max_logprobs) and ranks.shape == (25,)
    exact = logits.double().log_softmax(-1)
    assert torch.equal(ids[:, 0].long(), output.token_ids)
    torch.testing.assert_close(values.double(), exact.gather(1, ids.long()), rtol=1e-5, atol=1e-5)
    order = logits.argsort(dim=-1, descending=True)
    assert torch.equal(ids[:, 1:].long(), order[:, :max_logprobs])
    position = (order == output.token_ids.unsqueeze(1)).int().argmax(-1)
    assert torch.equal(ranks.long(), position + 1)


def test_ranks_of_ties_and_small_vocabularies(make_meta: MakeMeta) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    logprobs = Sampler()(logits, make_meta(1, temperature=0.0, max_logprobs=20)).logprobs
    assert logprobs is not None
    assert logprobs.token_ids.shape == (1, 5)
    assert logprobs.ranks.tolist() == [1]
    assert float(logprobs.logprobs[0, 1:].exp().sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_of_equally_likely_tokens_the_lower_id_comes_first(device: str) -> None:
    logits = torch.zeros(4, 3000, device=device)
    logits[1, [7, 2999, 5, 1500]] = torch.tensor([2.0, 2.0, 3.0, 3.0], device=device)
    logits[2] = torch.arange(3000, device=device)
    logits[3] = torch.arange(3000, device=device).bfloat16()  # in which many are equal
    ids = gather_logprobs(logits, torch.zeros(4, dtype=torch.int64, device=device), 6).token_ids
    assert ids[0, 1:].tolist() == [0, 1, 2, 3, 4, 5]
    assert ids[1, 1:].tolist() == [5, 1500, 7, 2999, 0, 1]
    assert ids[2, 1:].tolist() == [2999, 2998, 2997, 2996, 2995, 2994]
    assert ids[3, 1:].tolist() == logits[3].sort(descending=True, stable=True).indices[:6].tolist()
