"""A strategy made of three rules: what is kept, at which temperature it is drawn, and when a canvas is finished."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from blockdiff.checkpoint.generation import Generation
from blockdiff.sampling.strategies.acceptance import Acceptance, EntropyBound
from blockdiff.sampling.strategies.stopping import StableAndConfident, Stopping
from blockdiff.sampling.strategies.temperature import LinearTemperature, Temperature
from blockdiff.sampling.strategy import Canvases, Decision, Shape


@dataclass(frozen=True)
class Composed:
    """Any acceptance with any temperature and any stopping; the defaults are the released model's rules."""

    acceptance: Acceptance = field(default_factory=EntropyBound)
    temperature: Temperature = field(default_factory=LinearTemperature)
    stopping: Stopping = field(default_factory=StableAndConfident)

    def shape(self, step: int, steps: int) -> Shape:
        """The temperature of the step."""
        return _shape(self, step, steps)

    def decide(self, canvases: Canvases) -> Decision:
        """What the acceptance keeps, and which canvases the stopping ends."""
        return replace(self.acceptance.accept(canvases), stop_B=self.stopping.stop(canvases))


@lru_cache(maxsize=1024)
def _shape(strategy: Composed, step: int, steps: int) -> Shape:
    """Every canvas of a batch asks for the same few shapes, step after step."""
    return Shape(strategy.temperature.at(step, steps))


def released(generation: Generation) -> Composed:
    """The strategy of the released model, as generation settings (transformers' names) say it."""
    return Composed(
        EntropyBound(generation.entropy_bound),
        LinearTemperature(generation.t_min, generation.t_max),
        StableAndConfident(generation.stability, generation.confidence),
    )
