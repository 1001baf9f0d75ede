"""The tokens of the last recorded steps, in rows that are written in turn.

Which row is next is device memory, so that a recorded step writes another one at each replay. Where
kernels do the writing, the rows themselves are the host's: once a step has ended its tokens are
there, with no copy to launch.
"""

from __future__ import annotations

import torch

from termgen.vocabulary.request import IntArray


class TokenRing:
    """`num_steps` rows of `size` tokens."""

    def __init__(
        self, num_steps: int, size: int, device: torch.device, *, is_mapped: bool = False
    ) -> None:
        """is_mapped: the rows lie in memory of the host that kernels of a CUDA device can write."""
        where = torch.device("cpu") if is_mapped else device
        self.tokens = torch.full((num_steps, size), -1, dtype=torch.int32, device=where)
        self.host: IntArray | None = None
        """The rows, where the host sees them."""
        if is_mapped:
            self.tokens = self.tokens.pin_memory()
        if where.type == "cpu":
            self.host = self.tokens.numpy()
        self.index = torch.zeros(1, dtype=torch.int64, device=device)
        """The row that the next step writes."""
        self.arrivals = torch.zeros(1, dtype=torch.int32, device=device)
        """Count of the fused kernel: rows of its launch that are done. 0 between launches."""

    def push(self, tokens: torch.Tensor) -> None:
        """Write the tokens [B] int32 of a step."""
        self.tokens[:, : len(tokens)].index_copy_(0, self.index, tokens[None])
        self.index.add_(1).remainder_(len(self.tokens))

    def restart(self) -> None:
        """The next step writes the first row again."""
        self.index.zero_()
