"""The controls of canvases as tensors, and the statistics of a denoising step over the tokens that they allow."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockdiff.kernels.vocabulary import Classes, ClassStats, Penalty, Stats
from blockdiff.sampling.constraints.automaton import MOST_STATES, TokenAutomaton
from blockdiff.sampling.constraints.paths import paths
from blockdiff.sampling.control import CanvasControl
from blockdiff.sampling.draws import signed
from blockdiff.seeding import Stream, uniform

if TYPE_CHECKING:
    from blockdiff.models.family import BlockDiffusionModel
    from blockdiff.sampling.calls import StepInputs

NUMBERS = 4 << 20  # the most numbers, one for each (position, class), in a column of the statistics of classes


@dataclass(frozen=True, eq=False)
class CanvasControls:
    """The controls of B canvases that tell the same classes of tokens apart; `CanvasControl` says the rest.

    rows: which canvases of a step they are (None: all). pinned_BL: tokens that are given, -1 elsewhere. is_seen_BV,
    factor_B: the tokens that a penalty makes less likely, and by how much (None: no canvas has one). The fields after
    `automaton` come with it: the states before the canvases and, as is_final_BS, those allowed after them, the
    positions at which no response can end, and the addresses of their draws.
    """

    rows: list[int] | None
    classes: Classes
    pinned_BL: Tensor
    is_seen_BV: Tensor | None = None
    factor_B: Tensor | None = None
    automaton: TokenAutomaton | None = None
    state_B: Tensor | None = None
    is_final_BS: Tensor | None = None
    is_text_BL: Tensor | None = None
    seed_B: Tensor | None = None
    number_B: Tensor | None = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of canvases, by name."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield field.name, value


def controls_of(
    controls: Sequence[CanvasControl | None], length: int, vocab_size: int, device: torch.device
) -> list[CanvasControls]:
    """The controls of canvases, in groups that tell the same classes of tokens apart and are not too large.

    In a canvas that is in no group every token may stand anywhere.
    """
    groups: dict[int, list[int]] = {}
    for row, control in enumerate(controls):
        if control is not None and control.classes is not None:
            groups.setdefault(id(control.classes), []).append(row)
    found = []
    for rows in groups.values():
        some = [control for control in (controls[row] for row in rows) if control is not None]
        assert some[0].classes is not None
        most = max(1, NUMBERS // (length * len(some[0].classes.end_C)))
        for lo in range(0, len(rows), most):
            alike = _controls_alike(rows[lo : lo + most], some[lo : lo + most], length, vocab_size, device)
            found.append(replace(alike, rows=None) if alike.rows == list(range(len(controls))) else alike)
    return found


def _controls_alike(
    rows: list[int], controls: Sequence[CanvasControl], length: int, vocab_size: int, device: torch.device
) -> CanvasControls:
    classes, automaton, parts = controls[0].classes, controls[0].automaton, dict[str, Any]()
    assert classes is not None
    free_L = torch.full((length,), -1, device=device)
    if any(control.seen_V is not None for control in controls):
        nothing_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        seen = [nothing_V if control.seen_V is None else control.seen_V for control in controls]
        factors = torch.tensor([control.penalty for control in controls], device=device)
        parts |= dict(is_seen_BV=torch.stack(seen), factor_B=factors)
    if automaton is not None:
        nowhere_L = torch.zeros(length, dtype=torch.bool, device=device)
        numbers = [[signed(control.seed), control.number, control.state] for control in controls]
        seed_B, number_B, state_B = torch.tensor(numbers, device=device).unbind(-1)
        parts |= dict(
            state_B=state_B,
            is_final_BS=torch.stack([control.is_final_S for control in controls if control.is_final_S is not None]),
            is_text_BL=torch.stack([nowhere_L if c.is_text_L is None else c.is_text_L for c in controls]),
            seed_B=seed_B,
            number_B=number_B,
        )
    pinned_BL = torch.stack([free_L if control.pinned_L is None else control.pinned_L for control in controls])
    return CanvasControls(rows, classes, pinned_BL, automaton=automaton, **parts)


class ControlBuffers:
    """The controls of at most `most` canvases in buffers that stay where they are: `load` them, then `read` them."""

    def __init__(self, most: int):
        self.most = most
        self._buffers: dict[str, Tensor] = {}
        self._loaded: CanvasControls | None = None

    def load(self, controls: CanvasControls | None) -> Hashable:
        """Write the controls of canvases; returns a key: equally many canvases with the same key launch the same."""
        self._loaded = controls
        if controls is None:
            return None
        for name, x in controls.tensors():
            if name not in self._buffers:
                widest = [MOST_STATES + 1] if name == "is_final_BS" else x.shape[1:]
                self._buffers[name] = x.new_zeros(self.most, *widest)
            self._buffers[name][len(x) :] = 0  # canvases of padding
            self._buffers[name][tuple(map(slice, x.shape))] = x
        return controls.classes, controls.automaton, controls.factor_B is None

    def read(self, count: int) -> CanvasControls | None:
        """The controls of the first `count` canvases, of which there may be more than were loaded."""
        if self._loaded is None:
            return None
        parts = dict[str, Any]()
        for name, x in self._loaded.tensors():
            parts[name] = self._buffers[name][(slice(count), *map(slice, x.shape[1:]))]
        return replace(self._loaded, **parts)


def controlled_stats(
    model: BlockDiffusionModel, inputs: StepInputs, controls: CanvasControls, mask_id: int | None = None
) -> Stats:
    """The statistics of canvases under controls; nothing here waits for the device.

    Under a constraint argmax is the best canvas that satisfies it, the sample a canvas drawn from the model's
    distribution given that it is satisfied, and the entropy that of each position's marginal of that distribution.
    """
    assert inputs.step_B is not None, "canvases under controls draw by their steps"
    stats = model.vocabulary.class_stats(
        inputs.hidden_BLD, inputs.temperature, inputs.uniform_BL, controls.classes, _penalty(controls), mask_id
    )
    pinned_BL, tokens_BL = controls.pinned_BL, inputs.tokens_BL
    if mask_id is not None:  # under mask noise what is visible is given, too
        pinned_BL = pinned_BL.where(pinned_BL >= 0, tokens_BL.where(tokens_BL != mask_id, -1))
    if controls.automaton is None:
        best_BL = random_BL = torch.zeros_like(pinned_BL)
        entropy_BL, of_class_BL = stats.entropy[..., 0], torch.zeros_like(stats.entropy[..., 0])
    else:
        best_BL, random_BL, entropy_BL, of_class_BL = _constrained(
            stats, controls, controls.automaton, pinned_BL, inputs.step_B
        )
    argmax_BL, sample_BL, log_p_BL = (
        column.gather(-1, place_BL[..., None]).squeeze(-1)
        for column, place_BL in (
            (stats.argmax, best_BL), (stats.sample, random_BL), (stats.log_probability, random_BL)
        )
    )  # fmt: skip
    is_pinned_BL = pinned_BL >= 0
    return Stats(
        entropy=(entropy_BL * ~is_pinned_BL).float(),
        argmax=pinned_BL.where(is_pinned_BL, argmax_BL),
        sample=pinned_BL.where(is_pinned_BL, sample_BL),
        soft_embedding=stats.soft_embedding,
        log_probability=(of_class_BL + log_p_BL).masked_fill(is_pinned_BL, 0.0).float(),
    )


def _penalty(controls: CanvasControls) -> Penalty | None:
    if controls.is_seen_BV is None or controls.factor_B is None:
        return None
    B, L = controls.pinned_BL.shape
    row_BL = torch.arange(B, device=controls.factor_B.device)[:, None].expand(B, L)
    return Penalty(controls.is_seen_BV, controls.factor_B, row_BL.reshape(-1))


def _constrained(
    stats: ClassStats, controls: CanvasControls, automaton: TokenAutomaton, pinned_BL: Tensor, step_B: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The classes of the best and of a random canvas [B, L], the entropies, and the random ones' log-probabilities."""
    B, L = pinned_BL.shape
    assert controls.is_text_BL is not None and controls.state_B is not None and controls.is_final_BS is not None
    assert controls.seed_B is not None and controls.number_B is not None
    log_sum, maximum = _given((stats.log_sum, stats.maximum), automaton, pinned_BL, controls.is_text_BL)
    # two numbers for each position, that pick the way of the random canvas through the automaton
    uniform_BL2 = uniform(controls.seed_B, Stream.CONSTRAINT, (controls.number_B, step_B), 2 * L).view(B, L, 2)
    found = paths(automaton, log_sum, maximum, controls.state_B, controls.is_final_BS, uniform_BL2)
    share = found.share_BLC
    entropy_BL = torch.special.entr(share).sum(-1) + (share * stats.entropy).where(share > 0, 0.0).sum(-1)
    entropy_BL = entropy_BL.masked_fill(~found.is_possible_B[:, None], torch.nan)  # logits that are not finite
    of_class_BL = share.gather(-1, found.random_BL[..., None]).squeeze(-1).log()
    return found.best_BL, found.random_BL, entropy_BL, of_class_BL


def _given(
    weights: tuple[Tensor, Tensor], automaton: TokenAutomaton, pinned_BL: Tensor, is_text_BL: Tensor
) -> tuple[Tensor, Tensor]:
    """Logarithmic weights of classes [B, L, C], without ends where text stands, and at pins of their class alone."""
    first_BLC, second_BLC = (
        each.masked_fill(is_text_BL[..., None] & automaton.is_end_C, -torch.inf) for each in weights
    )
    place_BL = automaton.class_V[pinned_BL.clamp(min=0)].clamp_(max=first_BLC.shape[-1] - 1)
    certain_BLC = torch.full_like(first_BLC, -torch.inf).scatter_(-1, place_BL[..., None], 0.0)
    is_pinned_BL1 = (pinned_BL >= 0)[..., None]
    return certain_BLC.where(is_pinned_BL1, first_BLC), certain_BLC.where(is_pinned_BL1, second_BLC)
