"""Canvases that are decided apart: by calls of the model, and within one by their strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockdiff.kernels.vocabulary import Stats
from blockdiff.sampling.strategy import Canvases, Decision, Strategy, decision_of


@dataclass(frozen=True)
class Call:
    """Canvases that one call of the model takes: a slice of all rows and of all canvases.

    groups: which of them (None: all) are decided by each strategy.
    """

    rows: slice
    slots: slice
    groups: tuple[tuple[Strategy, Tensor | None], ...]


def calls_of(strategies: Sequence[Strategy], rows: int, rows_per_call: int, device: torch.device) -> list[Call]:
    """The calls for so many rows, of which the canvases, as many of each, have these strategies."""
    calls, width = [], len(strategies) // max(1, rows)
    for first in range(0, rows, rows_per_call):
        of = slice(first, min(first + rows_per_call, rows))
        slots = slice(of.start * width, of.stop * width)
        by_strategy: dict[Strategy, list[int]] = {}
        for place, strategy in enumerate(strategies[slots]):
            by_strategy.setdefault(strategy, []).append(place)
        groups = tuple(
            (strategy, torch.tensor(places, device=device) if len(by_strategy) > 1 else None)
            for strategy, places in by_strategy.items()
        )
        calls.append(Call(of, slots, groups))
    return calls


def decided(canvases: Canvases, groups: Sequence[tuple[Strategy, Tensor | None]]) -> Decision:
    """What becomes of canvases, those of each strategy decided by it."""
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


def joined(
    parts: Sequence[tuple[Stats, Tensor, Decision, Tensor]],
) -> tuple[Stats, Tensor, Decision, Tensor]:
    """What several calls gave, as if it had been one."""
    stats, unchanged, decisions, standing = zip(*parts, strict=True)

    def whole(columns: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor | None:
        if all(column is None for column in columns):
            return None
        return torch.cat([torch.zeros_like(b) if a is None else a for a, b in zip(columns, like, strict=True)])

    keep = [decision.keep_BL for decision in decisions]
    stop_B = whole([decision.stop_B for decision in decisions], [each[:, 0] for each in keep])
    stay_BL = whole([decision.stay_BL for decision in decisions], keep)
    argmax = [column.argmax for column, *_ in parts]
    final_BL = torch.cat([a if d.final_BL is None else d.final_BL for d, a in zip(decisions, argmax, strict=True)])
    return (
        Stats(*(torch.cat(columns) for columns in zip(*stats, strict=True))),
        torch.cat(unchanged),
        Decision(torch.cat(keep), stop_B, stay_BL, final_BL),
        torch.cat(standing),
    )
