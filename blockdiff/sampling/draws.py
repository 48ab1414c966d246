"""The random numbers of a batch of canvases, each addressed by (request seed, canvas, step, position)."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdiff.seeding import Stream, to_integers, to_uniform, uniform, words

# One call of the generator covers this many steps: most canvases stop before they need a second one.
STEPS_AHEAD = 8


class Draws:
    """For every step the uniform numbers that pick samples, and the noise that fills what is not accepted."""

    def __init__(self, seed_B: Tensor, canvas: int, length: int, vocab_size: int):
        self.seed_B = seed_B
        self.canvas, self.length, self.vocab_size = canvas, length, vocab_size
        self._first, self._uniform_TBL, self._noise_TBL = 0, *self._draw(0)

    def of_step(self, step: int) -> tuple[Tensor, Tensor]:
        """Uniform float32 [B, L] in [0, 1) and noise tokens int64 [B, L] of a step, counted from 0."""
        if not self._first <= step < self._first + STEPS_AHEAD:
            self._first, self._uniform_TBL, self._noise_TBL = step, *self._draw(step)
        return self._uniform_TBL[step - self._first], self._noise_TBL[step - self._first]

    def second(self, step: int) -> Tensor:
        """A second uniform number per position, float32 [B, L], for strategies that draw what to keep."""
        return uniform(self.seed_B, Stream.DECIDE, (self.canvas, step), self.length)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the batch."""
        self.seed_B = self.seed_B[rows]
        self._uniform_TBL, self._noise_TBL = self._uniform_TBL[:, rows], self._noise_TBL[:, rows]

    def _draw(self, first: int) -> tuple[Tensor, Tensor]:
        """The numbers of STEPS_AHEAD steps from `first` on."""
        steps = torch.arange(first, first + STEPS_AHEAD, device=self.seed_B.device)[:, None]
        words_TBN = words(self.seed_B, Stream.SAMPLE, (self.canvas, steps), 2 * self.length)
        uniform_TBL = to_uniform(words_TBN[..., : self.length])
        return uniform_TBL, to_integers(words_TBN[..., self.length :], self.vocab_size)


def signed(seed: int) -> int:
    """A seed's 64 bits as an int64 holds them."""
    return (seed + 2**63) % 2**64 - 2**63
