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


class Draws:
    """The draws of canvases that run in lockstep: the same canvas and step of every row."""

    def __init__(self, seed_B: Tensor, canvas: int, length: int, vocab_size: int):
        self.seed_B, self.canvas_B = seed_B, torch.full_like(seed_B, canvas)
        self.length, self.vocab_size = length, vocab_size
        self._first, self._uniform_BTL, self._noise_BTL = 0, *self._draw(0)

    def of_step(self, step: int) -> tuple[Tensor, Tensor]:
        """Uniform float32 [B, L] in [0, 1) and noise tokens int64 [B, L] of a step, counted from 0."""
        if not self._first <= step < self._first + STEPS_AHEAD:
            self._first, self._uniform_BTL, self._noise_BTL = step, *self._draw(step)
        return self._uniform_BTL[:, step - self._first], self._noise_BTL[:, step - self._first]

    def second(self, step: int) -> Tensor:
        """A second uniform number per position, float32 [B, L]."""
        return second_draws(self.seed_B, self.canvas_B, torch.full_like(self.seed_B, step), self.length)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the batch."""
        self.seed_B, self.canvas_B = self.seed_B[rows], self.canvas_B[rows]
        self._uniform_BTL, self._noise_BTL = self._uniform_BTL[rows], self._noise_BTL[rows]

    def _draw(self, first: int) -> tuple[Tensor, Tensor]:
        """The numbers of STEPS_AHEAD steps from `first` on."""
        return draw_ahead(self.seed_B, self.canvas_B, torch.full_like(self.seed_B, first), self.length, self.vocab_size)


def signed(seed: int) -> int:
    """A seed's 64 bits as an int64 holds them."""
    return (seed + 2**63) % 2**64 - 2**63
