"""The contract of a strategy: the distribution that a denoising step draws from, and the samples that are kept.

The strategies are in `strategies/`. Tensors: B canvases, L positions.
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
    """The distribution that one step of a canvas draws from, made of the model's logits; ValueError for bad values.

    temperature: logits are divided by it. These filter every position's tempered distribution: top_k keeps the k
    likeliest tokens, top_p the fewest likeliest tokens whose probabilities reach top_p, min_p the tokens at least min_p
    times as likely as the likeliest. The soft embedding for the next step is made of the model's own tempered logits.
    greedy: nothing is drawn: the sample is the likeliest token, with the probability that the model itself gives it, at
    temperature 1 and before filters; entropies are still computed from the tempered distribution.
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
    """B canvases after a step, as input of a strategy's decision.

    Each row is decided independently of the others. Tensors are on the model's device; reading one on the host waits
    for the device. Later steps overwrite them: `decide` must clone the tensors that it keeps.
    """

    ids: Sequence[str | int]  # the ids of their requests
    step_B: Tensor  # int64: this step of the canvas, counted from 0
    steps_B: Tensor  # int64: the most steps that the canvas may take
    temperature_B: Tensor  # fp32
    tokens_BL: Tensor  # int64: the step's input tokens
    stats: Stats  # of this step's shaped distributions; under masks, only `best` of visible tokens is the model's own
    previous_BL: Tensor  # int64: the argmax of the step before; -1 in a canvas's first step
    unchanged_B: Tensor  # int64: for how many steps in a row the argmax has been the same
    kept_BL: Tensor  # bool: positions whose token the step before kept, new or old; False in the first step
    is_pinned_BL: Tensor  # bool: positions whose token is given
    is_masked_BL: Tensor  # bool: positions that are masked in the input; none under other noise
    whole_B: Tensor  # int64: for how many steps in a row, this one included, no position has been masked; else 0
    end_ids: Sequence[int]  # the tokens that end a response
    noise_probability: float  # of each token under the noise: 1 / V, or 0 if the noise is the mask
    draw: Callable[[], Tensor]  # makes `uniform_BL`, for strategies that read it

    @cached_property
    def uniform_BL(self) -> Tensor:
        """Numbers in [0, 1), fp32, one per position, independent of those that drew the samples."""
        return self.draw()

    @property
    def are_masks(self) -> bool:
        """True if the noise is the mask token."""
        return self.noise_probability == 0

    @property
    def is_open_BL(self) -> Tensor:
        """Positions without a settled token, bool: masks, or under other noise positions neither kept nor given."""
        return self.is_masked_BL if self.are_masks else ~(self.kept_BL | self.is_pinned_BL)


@dataclass(frozen=True)
class Decision:
    """A decision about every position and every canvas.

    keep_BL: the sample, or the token of `tokens_BL`, is in the next step's canvas. stay_BL: the step's input token
    remains there (where both are True, the new token wins). Every other position gets fresh noise. stop_B: the canvas
    is finished (None: no canvas finishes before its last step). final_BL: the tokens of a finished canvas (None: its
    argmax). tokens_BL: replacements for the samples (None: the samples).
    """

    keep_BL: Tensor
    stop_B: Tensor | None = None
    stay_BL: Tensor | None = None
    final_BL: Tensor | None = None
    tokens_BL: Tensor | None = None

    def new(self, canvases: Canvases) -> Tensor:
        """Return the tokens that are used where `keep_BL` is True, int64 [B, L]."""
        return canvases.stats.sample if self.tokens_BL is None else self.tokens_BL

    def standing(self, canvases: Canvases) -> Tensor:
        """Return the next canvas's tokens where `kept_BL` is True, int64 [B, L]; other values have no meaning."""
        new_BL = self.new(canvases)
        return new_BL if self.stay_BL is None else new_BL.where(self.keep_BL, canvases.tokens_BL)

    @property
    def kept_BL(self) -> Tensor:
        """The positions that keep a token, new or old: `Canvases.kept_BL` of the next step."""
        return self.keep_BL if self.stay_BL is None else self.keep_BL | self.stay_BL


class Strategy(Protocol):
    """A frozen dataclass that decides denoising steps. Canvases of equal strategies are decided together.

    A class with `is_capturable = True` (or a property) declares that a CUDA graph can hold its steps: `decide` only
    computes with the tensors of canvases, reads none on the host, and ignores `ids`. The declaration is not inherited.
    A class with `post_steps` (a number) may take that many steps more than `max_steps`.
    """

    def __hash__(self) -> int:
        """The hash of its fields: equal strategies decide alike."""

    def shape(self, step: int, steps: int) -> Shape:
        """Return the distribution that step `step` (from 0) of at most `steps` draws from."""

    def decide(self, canvases: Canvases) -> Decision:
        """Return the decision about a step's samples, and about the canvases that are finished."""


@dataclass(frozen=True)
class Key:
    """The annotation of a strategy's field that the text form `NAME:key=value,...` can set.

    The field's type decides which values are allowed. meaning: the field's purpose, for the help; settings: the field
    of `Generation` that provides the default (None: the field's own default).
    """

    meaning: str
    settings: str | None = None


TopK = Annotated[int | None, Key("draw from so many likeliest tokens")]
TopP = Annotated[float, Key("draw from the fewest likeliest tokens that have this probability together")]
MinP = Annotated[float, Key("draw from tokens that are at least so many times as likely as the likeliest")]


def checked_decision(strategy: Strategy, canvases: Canvases) -> Decision:
    """Return a strategy's decision; RequestError if its types or shapes do not fit the canvases."""
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
            form = f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise _refusal(strategy, f"decide() gave {name} as {form}, not {dtype} {[*shape]}")
    return decision


def _refusal(strategy: Strategy, reason: str) -> RequestError:
    return RequestError(f"strategy {type(strategy).__name__}: {reason}; change it (docs/extending.md)")


@lru_cache(maxsize=64)
def require_shapes(strategy: Strategy, steps: int) -> None:
    """Raise RequestError if a strategy's `shape` does not return a valid `Shape` for every step."""
    for step in range(steps):
        try:
            shape: object = strategy.shape(step, steps)
        except ValueError as error:
            raise _refusal(strategy, f"shape() gave no shape for step {step}: {error}") from None
        if not isinstance(shape, Shape):
            raise _refusal(strategy, f"shape() gave a {type(shape).__name__}, not a Shape, for step {step}")


def declares_capturable(rule: object) -> bool:
    """True if the class of a strategy or rule itself declares that a CUDA graph can hold it (see `Strategy`)."""
    return "is_capturable" in vars(type(rule)) and bool(rule.is_capturable)  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def captured_shape(strategy: Strategy, steps: int) -> Shape | None:
    """Return the shape, at temperature 1, that all steps share if they can be captured in CUDA graphs, else None.

    They can if the strategy declares it and all of its shapes have the same filters.
    """
    if not declares_capturable(strategy):
        return None
    shapes = {replace(strategy.shape(step, steps), temperature=1.0) for step in range(steps)}
    return shapes.pop() if len(shapes) == 1 else None


def group_canvases(strategies: Sequence[Strategy], device: torch.device) -> tuple[tuple[Strategy, Tensor | None], ...]:
    """Group canvases by strategy: pairs of a strategy and the indices of its canvases (None: all canvases)."""
    places: dict[Strategy, list[int]] = {}
    for index, strategy in enumerate(strategies):
        places.setdefault(strategy, []).append(index)
    if len(places) == 1:
        return ((strategies[0], None),)
    return tuple((strategy, torch.tensor(of_it, device=device)) for strategy, of_it in places.items())


def decide_groups(canvases: Canvases, groups: Sequence[tuple[Strategy, Tensor | None]]) -> Decision:
    """Let each group's strategy decide its canvases, and merge the decisions into one for all canvases.

    groups: a strategy with the indices of its canvases; None in an only group: all canvases.
    """
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
    """Select canvases by index."""
    return replace(
        canvases,
        ids=[canvases.ids[index] for index in places.tolist()],
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
