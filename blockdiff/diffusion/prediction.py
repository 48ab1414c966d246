"""The bonus that makes a posterior given all tokens of logits that predict a token from the others alone."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdiff.diffusion.schedule import Schedule

# Below this share of replaced tokens the bonus is held: it grows without bound as the noise goes to 0.
SMALLEST_NOISE = 1e-10


def leave_one_out_bonus(schedule: Schedule, t_BC: Tensor, vocab_size: int) -> Tensor:
    """log(1 + alpha V / (1 - alpha)): what the observed token's logit gains, float32 [B, C].

    Uniform noise keeps x with probability alpha and else draws one of V tokens, so seeing x_i multiplies the odds of
    x_i that the other tokens give by 1 + alpha V / (1 - alpha) (arXiv 2605.22765). 0 at alpha 0: noise says nothing;
    1 - alpha is taken as at least 1e-10: below 36 for 2^18 tokens.
    """
    t = t_BC.double()
    return torch.log1p(schedule.alpha(t) * vocab_size / schedule.noise(t).clamp(min=SMALLEST_NOISE)).float()
