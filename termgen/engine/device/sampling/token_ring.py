"""The results of recorded steps, where the host reads them while later steps run."""

from __future__ import annotations

import torch

from termgen.engine.device.sampling.logprobs import LogprobTensors
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import StepLogprobs


class TokenRing:
    """The tokens of the last `num_steps` steps, in rows of `size` written in turn, and the
    log-probabilities of those that asked for any.

    Which row is next is device memory, so that a recorded step writes another one at each replay.
    Where kernels do the writing, the rows themselves are the host's: once a step has ended its
    results are there, with no copy to launch.
    """

    def __init__(
        self,
        num_steps: int,
        size: int,
        device: torch.device,
        *,
        num_logprobs: int = 0,
        is_mapped: bool = False,
    ) -> None:
        """num_logprobs: the most likely tokens of a row. is_mapped: the rows lie in memory of the
        host that kernels of a CUDA device can write."""
        where = torch.device("cpu") if is_mapped else device

        def rows(*columns: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            made = torch.full((num_steps, size, *columns), -1, dtype=dtype, device=where)
            return made.pin_memory() if is_mapped else made

        self.tokens = rows()
        self.drafts = rows()
        """[num_steps, size] the drafts that each row of a step with drafts had."""
        columns = 1 + num_logprobs
        self.logprobs = LogprobTensors(rows(columns), rows(columns, dtype=torch.float32), rows())
        """[num_steps, size, 1 + num_logprobs] twice and [num_steps, size]: as many rows and columns
        of a step are written as it asks for."""
        self.host: IntArray | None = None
        """The rows of tokens, where the host sees them."""
        if where.type == "cpu":
            self.host = self.tokens.numpy()
            self.host_drafts = self.drafts.numpy()
            self._host_logprobs = StepLogprobs(*(t.numpy() for t in self.logprobs))
        self.index = torch.zeros(1, dtype=torch.int64, device=device)
        """The row that the next step writes."""
        self.arrivals = torch.zeros(1, dtype=torch.int32, device=device)
        """Count of the fused kernel: rows of its launch that are done. 0 between launches."""

    def push(
        self,
        tokens: torch.Tensor,
        logprobs: LogprobTensors | None = None,
        drafts: torch.Tensor | None = None,
    ) -> None:
        """Write the results of a step: tokens [S] int32, what `gather_logprobs` gives, and drafts
        [B] where rows have several samples."""
        if drafts is not None:
            self.drafts[:, : len(drafts)].index_copy_(0, self.index, drafts.int()[None])
        if logprobs is not None:
            for rows, values in zip(self.logprobs, logprobs, strict=True):
                where = rows[(slice(None), *(slice(0, count) for count in values.shape))]
                where.index_copy_(0, self.index, values[None])
        self.tokens[:, : len(tokens)].index_copy_(0, self.index, tokens[None])
        self.index.add_(1).remainder_(len(self.tokens))

    def restart(self) -> None:
        """The next step writes the first row again."""
        self.index.zero_()

    def host_logprobs(self, row: int, num_rows: int, num_likeliest: int) -> StepLogprobs:
        """The log-probabilities of a step, where the host sees the rows: valid for `num_steps`."""
        rows, columns = (row, slice(num_rows)), slice(1 + num_likeliest)
        every = self._host_logprobs
        return StepLogprobs(
            every.token_ids[(*rows, columns)], every.logprobs[(*rows, columns)], every.ranks[rows]
        )

    def device_logprobs(self, row: int, num_rows: int, num_likeliest: int) -> LogprobTensors:
        """The same in the device's memory."""
        ids, values, ranks = (rows[row, :num_rows] for rows in self.logprobs)
        return LogprobTensors(ids[:, : 1 + num_likeliest], values[:, : 1 + num_likeliest], ranks)
