"""From hidden states to what a denoising step needs of every position: the one place where this happens."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.kernels.vocabulary import Stats, pack_allowed

if TYPE_CHECKING:
    from blockdiff.models.family import BlockDiffusionModel


def predict(
    model: BlockDiffusionModel,
    hidden_BLD: Tensor,
    canvas_BL: Tensor,
    temperature: Tensor | float,
    uniform_BL: Tensor,
    mask_id: int | None = None,
) -> Stats:
    """The statistics of a step over B canvases, each [B, L] (the soft embedding [B, L, D]).

    `canvas_BL` is what the step saw; `temperature` is one number or one per row; `uniform_BL` picks the samples. With
    mask noise the mask is never predicted, and a token that is not a mask stays what it is.
    """
    if mask_id is None:
        return model.vocabulary.stats(hidden_BLD, temperature, uniform_BL)
    allowed_BLW = _all_but(mask_id, model.vocab_size, canvas_BL.device).expand(*canvas_BL.shape, -1)
    stats = model.vocabulary.stats(hidden_BLD, temperature, uniform_BL, allowed_BLW=allowed_BLW)
    return carried_over(stats, canvas_BL, mask_id)


def carried_over(stats: Stats, canvas_BL: Tensor, mask_id: int) -> Stats:
    """Statistics in which a token that is not masked stays what it is, with certainty (entropy 0).

    Under mask noise a visible token is the true one, so the reverse process never changes it (carry-over unmasking,
    arXiv 2406.07524): what is accepted stays, and masks are filled in the order of their entropies.
    """
    is_masked_BL = canvas_BL == mask_id
    return stats._replace(
        entropy=stats.entropy * is_masked_BL,
        log_probability=stats.log_probability * is_masked_BL,
        argmax=stats.argmax.where(is_masked_BL, canvas_BL),
        sample=stats.sample.where(is_masked_BL, canvas_BL),
    )


@functools.lru_cache(maxsize=4)
def _all_but(token: int, vocab_size: int, device: torch.device) -> Tensor:
    """The packed set [1, W] of all tokens but one."""
    return pack_allowed((torch.arange(vocab_size, device=device) != token)[None])
