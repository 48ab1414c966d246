"""A bonus on logits: it turns a prediction of each token from the others into a posterior given all tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdiff.diffusion.schedule import Schedule

# Below this share of replaced tokens the bonus is constant: else it would grow without bound.
SMALLEST_NOISE = 1e-10


def leave_one_out_bonus(schedule: Schedule, t_BC: Tensor, vocab_size: int) -> Tensor:
    """Return log(1 + alpha V / (1 - alpha)), to be added to the observed token's logit, float32 [B, C].

    Uniform noise keeps x with probability alpha and else draws one of V tokens. So observing x_i multiplies the odds
    that the other tokens give it by 1 + alpha V / (1 - alpha) (arXiv 2605.22765). At alpha = 0 the bonus is 0, since
    noise tells nothing. 1 - alpha is clamped to at least 1e-10, which keeps the bonus below 36 for 2^18 tokens.
    """
    t = t_BC.double()
    return torch.log1p(schedule.alpha(t) * vocab_size / schedule.noise(t).clamp(min=SMALLEST_NOISE)).float()
