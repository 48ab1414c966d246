"""The random numbers of a batch of canvases, each addressed by (request seed, canvas, step, position)."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdiff.seeding import Stream, to_integers, to_uniform, uniform, words

# One call of the generator covers this many steps: most canvases stop before they need a second one.
STEPS_AHEAD = 8


def draw_ahead(
    seed_B: Tensor, canvas_B: Tensor, first_B: Tensor, length: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The draws of STEPS_AHEAD steps of every canvas, from its own first one on (all int64 [B]).

    The numbers that pick samples, float32 [B, STEPS_AHEAD, L] in [0, 1), and the noise that fills what is not accepted,
    int64 tokens of that shape.
    """
    step_BT = first_B[:, None] + torch.arange(STEPS_AHEAD, device=seed_B.device)
    words_BTN = words(seed_B[:, None], Stream.SAMPLE, (canvas_B[:, None], step_BT), 2 * length)
    return to_uniform(words_BTN[..., :length]), to_integers(words_BTN[..., length:], vocab_size)


def second_draws(seed_B: Tensor, canvas_B: Tensor, step_B: Tensor, length: int) -> Tensor:
    """A second uniform number per position of a step, float32 [B, L], for strategies that draw what to keep."""
    return uniform(seed_B, Stream.DECIDE, (canvas_B, step_B), length)


def signed(seed: int) -> int:
    """A seed's 64 bits as an int64 holds them."""
    return (seed + 2**63) % 2**64 - 2**63
