"""How a clean canvas becomes a noisy one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from blockdiff.seeding import Stream, integers, uniform


@dataclass(frozen=True)
class UniformCorruption:
    """Every token is replaced with probability 1 - alpha by a uniform vocabulary token, maybe by itself.

    q(x_t | x) = alpha [x_t = x] + (1 - alpha) / V, independently for each position.
    """

    vocab_size: int

    def corrupt(
        self, canvas_BCL: Tensor, alpha_BC: Tensor, address_BC3: Tensor, seed: int
    ) -> tuple[Tensor, Tensor]:
        """The noisy canvas int64 [B, C, L] and is_corrupted [B, C, L]: which tokens were replaced.

        `address_BC3` is (epoch, sample id, canvas index) and addresses the draws.
        """
        length = canvas_BCL.shape[-1]
        address = address_BC3.unbind(-1)
        where_BCL = uniform(seed, Stream.CORRUPT_WHERE, address, length)
        token_BCL = integers(seed, Stream.CORRUPT_TOKEN, address, length, self.vocab_size)
        is_corrupted_BCL = where_BCL < (1 - alpha_BC).unsqueeze(-1)
        return token_BCL.where(is_corrupted_BCL, canvas_BCL), is_corrupted_BCL
