"""The contract of a strategy: the distribution that a denoising step draws from, and the samples that stay.

The strategies there are lie in `strategies/`. Tensors: B canvases, L positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from numbers import Integral, Real
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from blockdiff.errors import RequestError
from blockdiff.field_rules import Rule, broken_rule
from blockdiff.kernels.vocabulary import Stats

SHAPE_RULES = {
    "temperature": Rule(Real, "a number more than 0", lambda value: 0 < value < math.inf),
    "top_k": Rule(Integral, "an integer of at least 1", lambda value: value >= 1),
    "top_p": Rule(Real, "a number more than 0 and at most 1", lambda value: 0 < value <= 1),
    "min_p": Rule(Real, "a number from 0 to 1", lambda value: 0 <= value <= 1),
}


@dataclass(frozen=True)
class Shape:
    """The distribution that one step of a canvas draws from, made of the model's logits; ValueError if none can be.

    temperature: logits are divided by it. top_k, top_p, min_p: of every position's tempered distribution only the k
    likeliest tokens are left, the fewest likeliest ones whose probabilities reach top_p, those at least min_p times as
    likely as the likeliest. The soft embedding that the next step is conditioned on is made of the model's own tempered
    logits. greedy: nothing is drawn: the sample is the likeliest token, with the probability that the model itself
    gives it, at temperature 1 and before filters; entropies stay those of the tempered distribution.
    """

    temperature: float
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    greedy: bool = False

    def __post_init__(self) -> None:
        if broken := broken_rule(self, SHAPE_RULES):
            raise ValueError(broken)

    @property
    def is_plain(self) -> bool:
        """True if no filter leaves tokens out."""
        return self.top_k is None and self.top_p == 1 and self.min_p == 0


@dataclass
class Canvases:
    """B canvases that a strategy decides for, after a step has seen them.

    Every row is decided on its own: the others of the step change nothing. Tensors lie on the model's device, and
    reading one on the host makes that wait. Steps that follow write over them: clone what `decide` keeps for itself.
    """

    ids: Sequence[str | int]  # the requests they belong to
    step_B: Tensor  # int64: this step of the canvas, counted from 0
    steps_B: Tensor  # int64: the most steps that the canvas may take
    temperature_B: Tensor  # fp32
    tokens_BL: Tensor  # int64: what the step saw
    stats: Stats  # of this step, as the shape says; of visible tokens under masks only `best` is the model's own
    previous_BL: Tensor  # int64: the argmax of the step before; -1 in a canvas's first step
    unchanged_B: Tensor  # int64: for how many steps in a row the argmax has been the same
    kept_BL: Tensor  # bool: positions whose token was kept or stayed at the step before; False in the first step
    is_pinned_BL: Tensor  # bool: positions whose token is given
    is_masked_BL: Tensor  # bool: positions that the step saw masked; under other noise none is
    whole_B: Tensor  # int64: for how many steps in a row, this one included, no position has been masked; else 0
    end_ids: Sequence[int]  # the tokens that end a response
    noise_probability: float  # of each token under the noise: 1 / V, or 0 where all noise is the mask
    draw: Callable[[], Tensor]  # what `uniform_BL` is made by, for strategies that ask for it

    @cached_property
    def uniform_BL(self) -> Tensor:
        """Numbers in [0, 1), fp32, one per position, independent of those that picked the samples."""
        return self.draw()

    @property
    def are_masks(self) -> bool:
        """True if all noise is the mask."""
        return self.noise_probability == 0

    @property
    def is_open_BL(self) -> Tensor:
        """Positions that a token is new to, bool: masks, or where other noise is what was neither kept nor given."""
        return self.is_masked_BL if self.are_masks else ~(self.kept_BL | self.is_pinned_BL)


@dataclass(frozen=True)
class Decision:
    """A decision about every position, and about every canvas.

    keep_BL: the sample, or the token of `tokens_BL`, stands in the canvas of the next step. stay_BL: the token that the
    step saw stands there again (where both are True, it is the new one). Every other position gets fresh noise. stop_B:
    the canvas is finished; None = no canvas is, before its last step. final_BL: what a canvas that is finished becomes;
    None = its argmax. tokens_BL: tokens in the place of the samples; None = the samples.
    """

    keep_BL: Tensor
    stop_B: Tensor | None = None
    stay_BL: Tensor | None = None
    final_BL: Tensor | None = None
    tokens_BL: Tensor | None = None

    def new(self, canvases: Canvases) -> Tensor:
        """The tokens that stand wherever `keep_BL` is True, int64 [B, L]."""
        return canvases.stats.sample if self.tokens_BL is None else self.tokens_BL

    def standing(self, canvases: Canvases) -> Tensor:
        """The tokens of the next step's canvas wherever `kept_BL` is True, int64 [B, L]; elsewhere any."""
        new_BL = self.new(canvases)
        return new_BL if self.stay_BL is None else new_BL.where(self.keep_BL, canvases.tokens_BL)

    @property
    def kept_BL(self) -> Tensor:
        """`Canvases.kept_BL` of the next step."""
        return self.keep_BL if self.stay_BL is None else self.keep_BL | self.stay_BL


class Strategy(Protocol):
    """A frozen dataclass: canvases of equal strategies are decided together.

    A class with `is_capturable = True` (or a property) says that its steps can be captured in a CUDA graph: `decide`
    computes with the tensors of canvases alone, without reading one on the host, and never looks at `ids`. A class
    that inherits it says nothing. One with `post_steps` (a number) may
    take so many steps more than a canvas has otherwise.
    """

    def __hash__(self) -> int:
        """The hash of its fields: equal strategies decide alike."""

    def shape(self, step: int, steps: int) -> Shape:
        """The distribution that step `step` (from 0) of at most `steps` draws from."""

    def decide(self, canvases: Canvases) -> Decision:
        """The decision about the step's samples, and about the canvases that are finished."""


@dataclass(frozen=True)
class Key:
    """A field of a strategy, or of a part of one, as its text form `NAME:key=value,...` has it.

    It annotates the field, whose type says which words are values. meaning: its purpose, in the help; settings: the
    field of `Generation` that has the value of a text without the key (None: the default of the field).
    """

    meaning: str
    settings: str | None = None


TopK = Annotated[int | None, Key("draw from so many likeliest tokens")]
TopP = Annotated[float, Key("draw from the fewest likeliest tokens that have this probability together")]
MinP = Annotated[float, Key("draw from tokens that are at least so many times as likely as the likeliest")]


def checked_decision(strategy: Strategy, canvases: Canvases) -> Decision:
    """The decision of a strategy; RequestError if that is no decision about these canvases."""
    decision = strategy.decide(canvases)
    if not isinstance(decision, Decision):
        raise _refusal(strategy, f"decide() gave a {type(decision).__name__}, not a Decision")
    of_positions = canvases.kept_BL.shape
    shapes = dict.fromkeys(("keep_BL", "stay_BL", "final_BL", "tokens_BL"), of_positions) | {"stop_B": of_positions[:1]}
    for name, shape in shapes.items():
        value: Any = getattr(decision, name)
        if value is None and name != "keep_BL":
            continue
        dtype = torch.int64 if name in ("final_BL", "tokens_BL") else torch.bool
        if not isinstance(value, Tensor) or value.dtype is not dtype or value.shape != shape:
            given = f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise _refusal(strategy, f"decide() gave {name} as {given}, not {dtype} {[*shape]}")
    return decision


def _refusal(strategy: Strategy, given: str) -> RequestError:
    return RequestError(f"strategy {type(strategy).__name__}: {given}; change it (docs/extending.md)")


@lru_cache(maxsize=64)
def require_shapes(strategy: Strategy, steps: int) -> None:
    """Raise RequestError if a strategy gives something else than shapes that a step can draw from."""
    for step in range(steps):
        try:
            shape: object = strategy.shape(step, steps)
        except ValueError as error:
            raise _refusal(strategy, f"shape() gave no shape for step {step}: {error}") from None
        if not isinstance(shape, Shape):
            raise _refusal(strategy, f"shape() gave a {type(shape).__name__}, not a Shape, for step {step}")


def declares_capturable(rule: object) -> bool:
    """True if the class of a strategy or a rule itself says that a CUDA graph can hold it (see `Strategy`)."""
    return "is_capturable" in vars(type(rule)) and bool(rule.is_capturable)  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def captured_shape(strategy: Strategy, steps: int) -> Shape | None:
    """The shape that all of so many steps share at temperature 1, where they can be captured in CUDA graphs; else None.

    That is where the strategy says so, and its shapes have the same filters.
    """
    if not declares_capturable(strategy):
        return None
    shapes = {replace(strategy.shape(step, steps), temperature=1.0) for step in range(steps)}
    return shapes.pop() if len(shapes) == 1 else None


def group_canvases(strategies: Sequence[Strategy], device: torch.device) -> tuple[tuple[Strategy, Tensor | None], ...]:
    """The pairs of each strategy and the canvases that have it (None: all have it)."""
    places: dict[Strategy, list[int]] = {}
    for place, strategy in enumerate(strategies):
        places.setdefault(strategy, []).append(place)
    if len(places) == 1:
        return ((strategies[0], None),)
    return tuple((strategy, torch.tensor(of_it, device=device)) for strategy, of_it in places.items())


def decide_groups(canvases: Canvases, groups: Sequence[tuple[Strategy, Tensor | None]]) -> Decision:
    """The decision about all canvases, made of the decisions of each strategy about its own."""
    strategy, places = groups[0]
    if places is None:
        return checked_decision(strategy, canvases)
    keep_BL = torch.zeros_like(canvases.kept_BL)
    stay_BL, stop_B = torch.zeros_like(keep_BL), torch.zeros_like(keep_BL[:, 0])
    final_BL, tokens_BL = canvases.stats.argmax.clone(), canvases.stats.sample.clone()
    for strategy, places in groups:
        assert places is not None
        decision = checked_decision(strategy, _some(canvases, places))
        keep_BL[places] = decision.keep_BL
        if decision.stay_BL is not None:
            stay_BL[places] = decision.stay_BL
        if decision.stop_B is not None:
            stop_B[places] = decision.stop_B
        if decision.final_BL is not None:
            final_BL[places] = decision.final_BL
        if decision.tokens_BL is not None:
            tokens_BL[places] = decision.tokens_BL
    return Decision(keep_BL, stop_B, stay_BL, final_BL, tokens_BL)


def _some(canvases: Canvases, places: Tensor) -> Canvases:
    """The canvases in some places."""
    return replace(
        canvases,
        ids=[canvases.ids[place] for place in places.tolist()],
        step_B=canvases.step_B[places],
        steps_B=canvases.steps_B[places],
        temperature_B=canvases.temperature_B[places],
        tokens_BL=canvases.tokens_BL[places],
        stats=Stats(*(column[places] for column in canvases.stats)),
        previous_BL=canvases.previous_BL[places],
        unchanged_B=canvases.unchanged_B[places],
        kept_BL=canvases.kept_BL[places],
        is_pinned_BL=canvases.is_pinned_BL[places],
        is_masked_BL=canvases.is_masked_BL[places],
        whole_B=canvases.whole_B[places],
        draw=lambda: canvases.uniform_BL[places],
    )
