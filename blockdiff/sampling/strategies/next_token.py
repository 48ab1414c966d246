"""Next-token sampling: a response grows by one token a step, drawn from what the clean tokens before it predict.

Nothing is denoised. A "canvas" is one token then, its hidden state is that of the token before it, and it is finished
after one step; so requests, constraints, scores and pages are those of denoising. Every model encodes causally, so
every model can be sampled this way, as well as its next-token loss is low; a causal model can be sampled in no other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from blockdiff.checkpoint.generation import Generation
from blockdiff.sampling.strategy import Canvases, Decision, Shape


@dataclass(frozen=True)
class NextToken:
    """Greedy at temperature 0, else a draw from the tempered distribution that the filters of `Shape` leave.

    The draw is that of every sampling here: one addressed number in [0, 1) into the cumulative distribution. race: as
    in MinivLLM that number is the seed of an Exponential(1) number E for each token, and the highest p / E wins, which
    is the Gumbel trick: the same distribution, other tokens.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    race: bool = False

    def __post_init__(self) -> None:
        rules = {
            f"temperature must be at least 0, got {self.temperature}": 0 <= self.temperature < math.inf,
            f"top_k must be at least 1, got {self.top_k}": self.top_k is None or self.top_k >= 1,
            f"top_p must be more than 0 and at most 1, got {self.top_p}": 0 < self.top_p <= 1,
            f"min_p must be at least 0 and at most 1, got {self.min_p}": 0 <= self.min_p <= 1,
        }
        for rule, is_met in rules.items():
            if not is_met:
                raise ValueError(rule)

    @classmethod
    def of(cls, generation: Generation) -> NextToken:
        """The strategy of a model's settings, with transformers' names and meaning."""
        return cls(generation.temperature, generation.top_k, generation.top_p)

    def shape(self, step: int, steps: int) -> Shape:
        """The tempered distribution with the filters; greedy decoding looks at the argmax alone."""
        if not self.temperature:
            return Shape(1.0)
        return Shape(self.temperature, self.top_k, self.top_p, self.min_p, race=self.race)

    def decide(self, canvases: Canvases) -> Decision:
        """Every canvas is finished, with its sample."""
        stats, is_all_BL = canvases.stats, torch.ones_like(canvases.kept_BL)
        final_BL = stats.sample if self.temperature else stats.argmax
        return Decision(is_all_BL, is_all_BL[:, 0], final_BL=final_BL)
