"""The tokens of the last steps on the device, in rows that are written in turn.

Which row is next is device memory too, so that a recorded step writes another one at each replay.
"""

from __future__ import annotations

import torch


class TokenRing:
    """`num_steps` rows of `size` tokens."""

    def __init__(self, num_steps: int, size: int, device: torch.device) -> None:
        self.tokens = torch.full((num_steps, size), -1, dtype=torch.int32, device=device)
        self.index = torch.zeros(1, dtype=torch.int64, device=device)
        """The row that the next step writes."""
        self.arrivals = torch.zeros(1, dtype=torch.int32, device=device)
        """Of the fused kernel: rows of its launch that are done. 0 between launches."""

    def push(self, tokens: torch.Tensor) -> None:
        """Write the tokens [B] int32 of a step."""
        self.tokens[:, : len(tokens)].index_copy_(0, self.index, tokens[None])
        self.index.add_(1).remainder_(len(self.tokens))

    def restart(self) -> None:
        """The next step writes the first row again."""
        self.index.zero_()
