"""What sharded weights (FSDP2) take beside a rank's pieces, when a step is run on tensors without memory.

A unit's weights are gathered when it is called and when its gradients begin, the next unit's ahead of time, and given
back after; its gradients are whole until they are added up over the ranks. Nothing is gathered here: bytes are counted
where torch.distributed.fsdp would hold them, in `LiveBytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from blockdiff.training.plan.live_bytes import LiveBytes

PART = "gathered layer"


class _Unit:
    """A module whose own weights are gathered together. size: of them, bytes; ranks: that share them."""

    def __init__(self, module: nn.Module, own: Sequence[nn.Parameter], ranks: int) -> None:
        self.module, self.own, self.ranks = module, own, ranks
        self.size = sum(x.nbytes for x in own)
        self.trained = [x for x in own if x.requires_grad]
        self.missing = len(self.trained)  # gradients that have not come yet
        self.whole = sum(x.numel() * 4 for x in self.trained)  # bytes of their gradients, before and after
        self.piece = self.whole // ranks
        self.is_gathered = self.is_ahead = self.is_backward = False


class Gathering:
    """Hooks on the units of a model that count what is gathered.

    units: modules, inner ones before those that hold them, each with the number of ranks that share its weights.
    has_gradients: whether a micro-batch before has left its gradients.
    """

    def __init__(self, units: Sequence[tuple[nn.Module, int]], counted: LiveBytes, has_gradients: bool) -> None:
        self.counted, self.has_gradients = counted, has_gradients
        self.last = 0  # bytes of the newest gathering, before they are copied to the weights
        self.reduced = 0  # bytes of gradients that are being added up over the ranks
        self.trail: list[_Unit] = []  # units whose forward has ended
        self.units = []
        seen: set[nn.Parameter] = set()
        for module, ranks in units:
            own = [x for x in module.parameters() if x not in seen]
            seen |= set(own)
            unit = _Unit(module, own, ranks)
            self.units.append(unit)
            if has_gradients:
                self.counted.hold(unit.piece, "gradients")
            self._watch(unit)

    def finish(self) -> None:
        """Give back everything at the end of a backward."""
        for unit in self.units:
            self._give_back(unit)
            unit.is_backward = False
            unit.missing = len(unit.trained)
        self.counted.hold(-self.last - self.reduced, PART)
        self.last = self.reduced = 0
        self.trail.clear()

    def _watch(self, unit: _Unit) -> None:
        def before(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            self._before_forward(unit)
            if not torch.is_grad_enabled():
                return None
            after = _After(lambda: self._after_backward(unit))
            return tuple(after.put_on(each) for each in args), named

        def after(module: nn.Module, args: Any, out: Any) -> None:
            self._after_forward(unit, out)

        unit.module.register_forward_pre_hook(before, with_kwargs=True)
        unit.module.register_forward_hook(after)
        for parameter in unit.trained:
            parameter.register_post_accumulate_grad_hook(lambda _: self._gradient_came(unit))

    def _gather(self, unit: _Unit, is_forward: bool) -> None:
        if unit.is_gathered:
            return
        if not unit.is_ahead:
            self.counted.hold(unit.size, PART)
            self.counted.work.exchanged += unit.size * (unit.ranks - 1) / unit.ranks
        unit.is_ahead, unit.is_gathered = False, True
        self.counted.hold(-self.last, PART)
        self.last = 0
        self.counted.hold(unit.size, PART)  # copied out of what came
        if is_forward:
            self.last = unit.size
        else:
            self.counted.hold(-unit.size, PART)

    def _give_back(self, unit: _Unit) -> None:
        if unit.is_gathered or unit.is_ahead:
            self.counted.hold(-unit.size, PART)
        unit.is_gathered = unit.is_ahead = False

    def _before_forward(self, unit: _Unit) -> None:
        self._gather(unit, is_forward=True)

    def _after_forward(self, unit: _Unit, out: Any) -> None:
        if not unit.is_backward:
            self._give_back(unit)
        tensors = [x for x in _leaves(out) if x.requires_grad]
        if tensors and torch.is_grad_enabled():
            self.trail.append(unit)
            register_multi_grad_hook(tensors, lambda *_: self._before_backward(unit), mode="any")

    def _before_backward(self, unit: _Unit) -> None:
        unit.is_backward = True
        self._gather(unit, is_forward=False)
        while self.trail and self.trail.pop() is not unit:
            pass
        following = self.trail[-1] if self.trail else None
        if following is not None and not following.is_gathered and not following.is_ahead:
            following.is_ahead = True
            self.counted.hold(following.size, PART)
            self.counted.work.exchanged += following.size * (following.ranks - 1) / following.ranks

    def _after_backward(self, unit: _Unit) -> None:
        unit.is_backward = False
        self._give_back(unit)

    def _gradient_came(self, unit: _Unit) -> None:
        unit.missing -= 1
        if unit.missing:
            return
        unit.missing = len(unit.trained)
        self.counted.hold(-self.reduced, PART)
        self.reduced = unit.whole
        self.counted.hold(self.reduced, PART)
        self.counted.hold(unit.piece, "gradients")
        self.counted.work.exchanged += self.reduced * (unit.ranks - 1) / unit.ranks
        for parameter in unit.trained:
            parameter.grad = None
        if self.has_gradients:  # the piece is added to the one that is there
            self.counted.hold(-unit.piece, "gradients")


class _After:
    """Calls something once when the gradients of a module's inputs have been computed."""

    def __init__(self, call: Any) -> None:
        self.call, self.is_used = call, False

    def put_on(self, value: Any) -> Any:
        """The argument; the first tensor with a gradient passes through what calls."""
        if self.is_used or not isinstance(value, Tensor) or not value.requires_grad:
            return value
        self.is_used = True
        return _Passed.apply(value, self.call)


class _Passed(torch.autograd.Function):
    """The identity, whose backward calls something."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Any) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.call()
        return gradients[0], None


def _leaves(value: Any) -> list[Tensor]:
    """The tensors of what a module returns."""
    if isinstance(value, Tensor):
        return [value]
    return [x for each in value for x in _leaves(each)] if isinstance(value, list | tuple) else []
