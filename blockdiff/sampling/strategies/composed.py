"""A strategy made of rules: what is kept, what it is drawn from, and when a canvas is finished."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from numbers import Integral, Real

from blockdiff.checkpoint.generation import Generation
from blockdiff.errors import RequestError
from blockdiff.sampling.strategies.acceptance import Acceptance, EntropyBound, declares_capturable
from blockdiff.sampling.strategies.stopping import StableAndConfident, Stopping
from blockdiff.sampling.strategies.temperature import LinearTemperature, Temperature
from blockdiff.sampling.strategy import Canvases, Decision, Shape, Strategy


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The common part of strategies: the temperature, the stopping, and filters and guidance as `Shape` has them."""

    temperature: Temperature = field(default_factory=LinearTemperature)
    stopping: Stopping = field(default_factory=StableAndConfident)
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    guidance: float = 0.0

    def __post_init__(self) -> None:
        rules = {
            f"top_k must be at least 1, got {self.top_k}": self.top_k is None or self.top_k >= 1,
            f"top_p must be more than 0 and at most 1, got {self.top_p}": 0 < self.top_p <= 1,
            f"min_p must be at least 0 and at most 1, got {self.min_p}": 0 <= self.min_p <= 1,
            f"guidance must be at least -1 and finite, got {self.guidance}": -1 <= self.guidance < math.inf,
        }
        for rule, is_met in rules.items():
            if not is_met:
                raise ValueError(rule)

    def shape(self, step: int, steps: int) -> Shape:
        """The temperature of the step, with the filters and the guidance."""
        return _shape(self, step, steps)


@lru_cache(maxsize=1024)
def _shape(rules: Rules, step: int, steps: int) -> Shape:
    """Every canvas of a batch asks for the same few shapes, step after step."""
    return Shape(rules.temperature.at(step, steps), rules.top_k, rules.top_p, rules.min_p, rules.guidance)


@dataclass(frozen=True)
class Composed(Rules):
    """Any acceptance with any temperature and any stopping; the defaults are the released model's rules."""

    acceptance: Acceptance = field(default_factory=EntropyBound)

    @property
    def is_capturable(self) -> bool:
        """True where both rules are."""
        return declares_capturable(self.acceptance) and declares_capturable(self.stopping)

    def decide(self, canvases: Canvases) -> Decision:
        """The decision: positions that the acceptance keeps, canvases that the stopping ends."""
        return replace(self.acceptance.accept(canvases), stop_B=self.stopping.stop(canvases))


@lru_cache(maxsize=64)
def is_guided(strategy: Strategy, steps: int) -> bool:
    """True where any of so many steps wants guidance, and with it a prefix without the prompt.

    Raises RequestError where a strategy gives something else than shapes that a step can draw from.
    """
    shapes = [strategy.shape(step, steps) for step in range(steps)]
    for step, shape in enumerate(shapes):
        if obstacle := _obstacle(shape):
            said = f"shape() gave {obstacle} for step {step}; change it (docs/extending.md)"
            raise RequestError(f"strategy {type(strategy).__name__}: {said}")
    return any(shape.guidance for shape in shapes)


def _obstacle(shape: object) -> str | None:
    """The part of a shape that no step can draw from, in words; None where there is none."""
    if not isinstance(shape, Shape):
        return f"a {type(shape).__name__}, not a Shape,"
    between = {
        "temperature": (math.ulp(0.0), math.inf, "more than 0 and finite"),
        "top_p": (math.ulp(0.0), 1, "more than 0 and at most 1"),
        "min_p": (0, 1, "at least 0 and at most 1"),
        "guidance": (-1, math.inf, "at least -1 and finite"),
    }
    for name, (least, most, wanted) in between.items():
        value = getattr(shape, name)
        if not isinstance(value, Real) or not least <= float(value) <= most or math.isinf(value):
            return f"{name} {value!r:.80}, which must be a number {wanted},"
    if shape.top_k is not None and (not isinstance(shape.top_k, Integral) or shape.top_k < 1):
        return f"top_k {shape.top_k!r:.80}, which must be an integer of at least 1,"
    return None


@lru_cache(maxsize=64)
def captured_shape(
    strategy: Strategy, steps: int, prediction: str = "posterior", mask_id: int | None = None
) -> Shape | None:
    """The shape that all of so many steps share at temperature 1, where they can be captured in CUDA graphs; else None.

    That is where the strategy says so, and its shapes have the same filters and the same guidance, and nothing else but
    a temperature each.
    """
    if not declares_capturable(strategy):
        return None
    shapes = [strategy.shape(step, steps) for step in range(steps)]
    alike = {replace(shape, temperature=1.0, alpha=None) for shape in shapes}
    if len(alike) > 1 or any(shape.corrects(prediction, mask_id) for shape in shapes):
        return None
    [shape] = alike
    return shape if shape == Shape(1.0, shape.top_k, shape.top_p, shape.min_p, shape.guidance) else None


def released(generation: Generation) -> Composed:
    """The strategy of the released model, as generation settings (transformers' names) say it."""
    return Composed(
        EntropyBound(generation.entropy_bound),
        temperature=LinearTemperature(generation.t_min, generation.t_max),
        stopping=StableAndConfident(generation.stability, generation.confidence),
    )
