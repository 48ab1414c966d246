"""Calls of a step, and canvases within one that several strategies decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockdiff.kernels.vocabulary import Stats
from blockdiff.sampling.canvas_controls import CanvasControls
from blockdiff.sampling.strategy import Canvases, Decision, Shape, Strategy, decision_of


@dataclass(frozen=True)
class StepCall:
    """One call of a step: rows from `first` on, `rows` of them and then those that pad the call up to `padded` rows.

    ids: of the requests of the canvases. groups: which canvases of the call (None: all) are decided by each strategy;
    controls: what may stand in them; shapes: what each draws from. guided: the canvases of the call that are denoised
    without their prompts, too, whose rows come from the place `first_guided` on (None: all; empty: none). has_signal: a
    prediction before this one is there for some canvas; has_pins: tokens are given in some. hidden_BLD: hidden states
    that are there, of tokens before the canvases.
    """

    first: int
    rows: int
    padded: int
    ids: Sequence[str | int]
    groups: tuple[tuple[Strategy, Tensor | None], ...]
    controls: Sequence[CanvasControls]
    shapes: Sequence[Shape]
    guided: Tensor | None
    first_guided: int = 0
    has_signal: bool = True
    has_pins: bool = True
    hidden_BLD: Tensor | None = None

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Those that decide."""
        return tuple(strategy for strategy, _ in self.groups)


def groups_of(strategies: Sequence[Strategy], device: torch.device) -> tuple[tuple[Strategy, Tensor | None], ...]:
    """Every strategy once, with the canvases that have it (None: all)."""
    places: dict[Strategy, list[int]] = {}
    for place, strategy in enumerate(strategies):
        places.setdefault(strategy, []).append(place)
    if len(places) == 1:
        return ((strategies[0], None),)
    return tuple((strategy, torch.tensor(of_it, device=device)) for strategy, of_it in places.items())


def decided(canvases: Canvases, groups: Sequence[tuple[Strategy, Tensor | None]]) -> Decision:
    """The decision about canvases, those of each strategy decided by it."""
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
    """Some of the canvases."""
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
        is_pinned_BL=None if canvases.is_pinned_BL is None else canvases.is_pinned_BL[places],
        draw=lambda: canvases.uniform_BL[places],
    )
