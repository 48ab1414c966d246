"""Corruptions, which make noisy canvases of clean ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockdiff.seeding import Stream, integers, uniform


class Corruption(Protocol):
    """Replaces each token of a canvas independently with probability 1 - alpha; seed and address key the draws."""

    def corrupt(self, canvas_BCL: Tensor, alpha_BC: Tensor, address_BC3: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return the noisy canvas int64 [B, C, L], and is_corrupted [B, C, L]: which tokens were replaced.

        address_BC3: (epoch, sample id, canvas index) of each canvas; it keys the draws.
        """


@dataclass(frozen=True)
class UniformCorruption:
    """Replaces each token with probability 1 - alpha by a uniformly drawn token, possibly the same one.

    q(x_t | x) = alpha [x_t = x] + (1 - alpha) / V, independently for each position.
    """

    vocab_size: int

    def corrupt(self, canvas_BCL: Tensor, alpha_BC: Tensor, address_BC3: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return noisy tokens; is_corrupted is also True if the true token was drawn again."""
        is_corrupted_BCL = _is_corrupted(canvas_BCL, alpha_BC, address_BC3, seed)
        length = canvas_BCL.shape[-1]
        token_BCL = integers(seed, Stream.CORRUPT_TOKEN, address_BC3.unbind(-1), length, self.vocab_size)
        return token_BCL.where(is_corrupted_BCL, canvas_BCL), is_corrupted_BCL


@dataclass(frozen=True)
class MaskCorruption:
    """Replaces each token with probability 1 - alpha by the mask token (absorbing kernel, arXiv 2107.03006).

    q(x_t | x) = alpha [x_t = x] + (1 - alpha) [x_t = mask_id], independently for each position. With the same address
    `UniformCorruption` replaces the same positions.
    """

    mask_id: int

    def corrupt(self, canvas_BCL: Tensor, alpha_BC: Tensor, address_BC3: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return noisy tokens: the mask token where is_corrupted, else the true one."""
        is_corrupted_BCL = _is_corrupted(canvas_BCL, alpha_BC, address_BC3, seed)
        return torch.where(is_corrupted_BCL, self.mask_id, canvas_BCL), is_corrupted_BCL


def _is_corrupted(canvas_BCL: Tensor, alpha_BC: Tensor, address_BC3: Tensor, seed: int) -> Tensor:
    where_BCL = uniform(seed, Stream.CORRUPT_WHERE, address_BC3.unbind(-1), canvas_BCL.shape[-1])
    return where_BCL < (1 - alpha_BC).unsqueeze(-1)
