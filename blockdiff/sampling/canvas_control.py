"""The control of canvases as tensors: which tokens are given, and which are allowed at the other positions.

Pinned tokens, holes, banned tokens and constraints have one form: for every position a set of allowed tokens, which may
depend on the tokens before and after it. `predict` computes distributions over those sets only.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.vocabulary import Classes
from blockdiff.sampling.constraints.token_automaton import MOST_STATES, TokenAutomaton

FREE = -1  # instead of a token id: the model decides
NUMBERS = 4 << 20  # the most numbers, one for each (position, class), in a column of the statistics of classes


@dataclass(frozen=True, eq=False)
class CanvasControl:
    """The control of B canvases that share one division of the tokens into classes, on the model's device.

    pinned_BL: tokens that are given at every step, FREE elsewhere; start_BL: input tokens of the first step, FREE at
    positions that get noise (None: noise everywhere). rows: the indices of these canvases in a step's batch (None: all
    of it). tail: the number of first positions that hold the prompt's last tokens, which the automaton does not read.

    classes: the tokens that are allowed at free positions, as one class if no automaton decides (None: every token).
    is_seen_BV, factor_B: the tokens that a repetition penalty makes less likely, and its factor (None: no canvas has a
    penalty). The fields after `automaton` are set together with it: state_B, the automaton's state before each canvas;
    is_final_BS, the states allowed after it; is_text_BL, the positions at which the response cannot end; seed_B and
    number_B, the seed of the draws and the index of the canvas.
    """

    pinned_BL: Tensor
    start_BL: Tensor | None = None
    rows: list[int] | None = None
    tail: int = 0
    classes: Classes | None = None
    is_seen_BV: Tensor | None = None
    factor_B: Tensor | None = None
    automaton: TokenAutomaton | None = None
    state_B: Tensor | None = None
    is_final_BS: Tensor | None = None
    is_text_BL: Tensor | None = None
    seed_B: Tensor | None = None
    number_B: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Any]:
        """The fields that are tensors, by name."""
        return {each.name: x for each in fields(self) if isinstance(x := getattr(self, each.name), Tensor)}

    @property
    def key(self) -> Hashable:
        """A key that is equal for controls whose steps launch the same kernels, if they have equally many canvases."""
        return self.classes, self.automaton, self.factor_B is None, self.tail

    def behind(self, tokens: Sequence[int]) -> CanvasControl:
        """Return the control of canvases that begin with `tokens`, the last ones of the prompt, pinned."""
        if not tokens:
            return self
        count, padded = len(tokens), dict[str, Any]()
        for name in ("pinned_BL", "start_BL", "is_text_BL"):
            if (x := getattr(self, name)) is not None:
                padded[name] = F.pad(x, (count, 0), value=False if x.dtype is torch.bool else FREE)
        padded["pinned_BL"][:, :count] = torch.tensor(tokens, device=self.pinned_BL.device)
        return replace(self, tail=count, **padded)

    def in_buffers(self, buffers: dict[str, Tensor], most: int, count: int) -> CanvasControl:
        """Return the control of `count` canvases as views of fixed buffers that hold up to `most`.

        buffers: by field, made here at the first use; rows beyond these canvases are set to 0, as padding.
        """
        parts = dict[str, Any]()
        for name, x in self.tensors.items():
            if name not in buffers:
                widest = [MOST_STATES + 1] if name == "is_final_BS" else x.shape[1:]
                buffers[name] = x.new_zeros(most, *widest)
            buffers[name][len(x) :] = 0  # canvases of padding
            buffers[name][tuple(map(slice, x.shape))] = x
            parts[name] = buffers[name][(slice(count), *map(slice, x.shape[1:]))]
        return replace(self, **parts)


def grouped(controls: Sequence[CanvasControl | None]) -> list[CanvasControl]:
    """Join the controls of a step's canvases that have the same classes of tokens.

    A None in `controls` is one canvas without control. Canvases whose positions all allow every token are in no group.
    A group is split if its positions times classes exceed `NUMBERS`.
    """
    groups: dict[Hashable, list[tuple[int, CanvasControl]]] = {}
    count = 0
    for control in controls:
        if control is not None and control.classes is not None:
            key = id(control.classes), control.tail if control.automaton is not None else 0
            groups.setdefault(key, []).append((count, control))
        count += 1 if control is None else len(control.pinned_BL)
    chunks = []
    for members in groups.values():
        joined = _joined([control for _, control in members])
        rows = [first + n for first, control in members for n in range(len(control.pinned_BL))]
        assert joined.classes is not None
        most = max(1, NUMBERS // (joined.pinned_BL.shape[1] * len(joined.classes.end_C)))
        for lo in range(0, len(rows), most):
            some = {name: x[lo : lo + most] for name, x in joined.tensors.items()}
            chunk_rows = rows[lo : lo + most]
            chunks.append(replace(joined, **some, rows=None if len(chunk_rows) == count else chunk_rows))
    return chunks


def _joined(controls: list[CanvasControl]) -> CanvasControl:
    """Concatenate controls of the same classes into one, without `start_BL`."""
    if any(each.factor_B is not None for each in controls):
        controls = [_with_penalty(each, controls) for each in controls]
    columns = [replace(each, start_BL=None).tensors for each in controls]
    parts: dict[str, Any] = {name: torch.cat([column[name] for column in columns]) for name in columns[0]}
    return replace(controls[0], start_BL=None, **parts)


def _with_penalty(control: CanvasControl, others: list[CanvasControl]) -> CanvasControl:
    """Give a control the penalty tensors that others have; with its own factor of 1 they change nothing."""
    if control.factor_B is not None:
        return control
    seen_BV = next(each.is_seen_BV for each in others if each.is_seen_BV is not None)
    B = len(control.pinned_BL)
    nothing_BV = seen_BV.new_zeros(B, seen_BV.shape[1])
    return replace(control, is_seen_BV=nothing_BV, factor_B=torch.ones(B, device=seen_BV.device))
