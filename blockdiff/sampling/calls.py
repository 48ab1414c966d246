"""The call of a step, the inputs of its statistics, and the decision about canvases that have several strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockdiff.kernels.vocabulary import Stats
from blockdiff.sampling.canvas_control import CanvasControl
from blockdiff.sampling.strategy import Canvases, Decision, Shape, Strategy, decision_of


@dataclass(frozen=True)
class StepCall:
    """The call of a step: `count` canvases, followed by canvases of padding up to `padded`.

    ids: the ids of the canvases' sequences; groups: each strategy, with the canvases that it decides (None: all);
    controls: the controls of canvases that have one; shapes: the shape that each canvas draws from; has_signal: whether
    the signal is read, which is 0 before a canvas's first prediction; hidden_BLD: hidden states of the tokens before
    the canvases, from which next tokens are drawn (None: the canvases are denoised).
    """

    count: int
    padded: int
    ids: Sequence[str | int]
    groups: tuple[tuple[Strategy, Tensor | None], ...]
    controls: Sequence[CanvasControl]
    shapes: Sequence[Shape]
    has_signal: bool = True
    hidden_BLD: Tensor | None = None

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The strategies that decide."""
        return tuple(strategy for strategy, _ in self.groups)


@dataclass(frozen=True)
class StepInputs:
    """The inputs of the statistics of a step over B canvases.

    hidden_BLD: the model's hidden states; tokens_BL: the tokens that the step saw; temperature: one number or one per
    canvas; uniform_BL: the numbers in [0, 1) that pick the samples; step_B: the step that each canvas is at, int64, by
    which canvases under controls draw.
    """

    hidden_BLD: Tensor
    tokens_BL: Tensor
    temperature: Tensor | float
    uniform_BL: Tensor
    step_B: Tensor | None = None

    def of(self, rows: Sequence[int]) -> StepInputs:
        """The inputs of some canvases."""
        chosen = torch.tensor(rows, device=self.tokens_BL.device)
        return StepInputs(
            hidden_BLD=self.hidden_BLD[chosen],
            tokens_BL=self.tokens_BL[chosen],
            temperature=self.temperature[chosen] if isinstance(self.temperature, Tensor) else self.temperature,
            uniform_BL=self.uniform_BL[chosen],
            step_B=None if self.step_B is None else self.step_B[chosen],
        )


def groups_of(strategies: Sequence[Strategy], device: torch.device) -> tuple[tuple[Strategy, Tensor | None], ...]:
    """The pairs of each strategy and the canvases that have it (None: all have it)."""
    places: dict[Strategy, list[int]] = {}
    for place, strategy in enumerate(strategies):
        places.setdefault(strategy, []).append(place)
    if len(places) == 1:
        return ((strategies[0], None),)
    return tuple((strategy, torch.tensor(of_it, device=device)) for strategy, of_it in places.items())


def decided(canvases: Canvases, groups: Sequence[tuple[Strategy, Tensor | None]]) -> Decision:
    """The decision about all canvases, made of the decisions of each strategy about its own."""
    strategy, places = groups[0]
    if places is None:
        return decision_of(strategy, canvases)
    keep_BL = torch.zeros_like(canvases.kept_BL)
    stay_BL, stop_B = torch.zeros_like(keep_BL), torch.zeros_like(keep_BL[:, 0])
    final_BL: Tensor | None = None
    for strategy, places in groups:
        assert places is not None
        decision = decision_of(strategy, _some(canvases, places))
        keep_BL[places] = decision.keep_BL
        if decision.stay_BL is not None:
            stay_BL[places] = decision.stay_BL
        if decision.stop_B is not None:
            stop_B[places] = decision.stop_B
        if decision.final_BL is not None:
            final_BL = canvases.stats.argmax.clone() if final_BL is None else final_BL
            final_BL[places] = decision.final_BL
    return Decision(keep_BL, stop_B, stay_BL, final_BL)


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
        draw=lambda: canvases.uniform_BL[places],
    )
