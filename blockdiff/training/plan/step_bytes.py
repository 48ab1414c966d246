"""Bytes that a step adds to those that a rank keeps. One layer of each kind runs on shapes, and counts for its kind.

The activations that a layer saves for its backward count once per layer of the kind, until the backward has run; then
its gradients count. Sharded weights are gathered, a unit at a time, while the unit runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from blockdiff.canvas import Batch
from blockdiff.layers.experts import Experts
from blockdiff.models.adapters import is_adapter
from blockdiff.training.plan.live_bytes import LiveBytes

GATHERED, LATE = "gathered layer", "given back late"


def keep_one_of_each(model: Any) -> dict[nn.Module, int]:
    """Keep only the last layer of each kind of a model without memory. Returns how many layers each represents.

    Layers are of one kind if they see the same tokens and their weights have the same shapes, dtypes and
    `requires_grad`.
    """
    kinds: dict[Any, list[int]] = {}
    for number, (kind, layer) in enumerate(zip(model.layer_kinds, model.layers, strict=True)):
        weights = tuple((name, x.shape, x.dtype, x.requires_grad) for name, x in layer.named_parameters())
        kinds.setdefault((kind, weights), []).append(number)
    numbers = sorted(each[-1] for each in kinds.values())
    counts = {each[-1]: len(each) for each in kinds.values()}
    layers = [model.layers[number] for number in numbers]
    model.layers = nn.ModuleList(layers)
    model.layer_kinds = tuple(model.layer_kinds[number] for number in numbers)
    return dict(zip(layers, (counts[number] for number in numbers), strict=True))


class Step:
    """Forward and backward of a micro-batch on shapes, by an objective whose model has one layer of each kind.

    counts: how many layers each of them represents.
    sharing: how many ranks share the weights of each sharding unit, inner ones first; empty if weights are not sharded.
    has_gradients: whether gradients exist before the step, of an earlier micro-batch or in the buckets that ranks
    exchange.
    is_late: whether gradients that ranks have summed are freed late, as gloo's threads do: measured, those of four more
    units, and after another micro-batch those of all units.
    experts_apart: whether the experts have no gradients before the step, because DDP leaves them alone.
    stored: the dtype of the weights that a rank keeps, and of their gradients; adapters have fp32 at least.
    beside: the models of the objective in addition to the one that trains.
    """

    def __init__(
        self,
        objective: Any,
        counts: dict[nn.Module, int],
        sharing: dict[nn.Module, int],
        has_gradients: bool,
        is_late: bool = False,
        experts_apart: bool = False,
        stored: torch.dtype = torch.float32,
        beside: Iterable[nn.Module] = (),
    ) -> None:
        self.is_late = is_late
        self.objective, self.has_gradients, self.is_sharded = objective, has_gradients, bool(sharing)
        self.counts = {**counts, objective.model.vocabulary: 1}
        self.counted = LiveBytes(objective.model.vocabulary.table.shape[0])
        self.counted.fill(objective)
        for other in beside:
            self.counted.fill(other)
        split = {id(x) for part in objective.modules() if isinstance(part, Experts) for x in part.parameters()}
        apart = split if experts_apart else set()
        self.there = {id(x) for x in _trained(objective) if has_gradients and id(x) not in apart}
        wide = torch.promote_types(stored, torch.float32)
        named = objective.named_parameters()
        self.widths = {id(x): (wide if is_adapter(name) else stored).itemsize for name, x in named}
        self.units = _units(sharing)
        self.sharers = {id(x): ranks for unit, ranks in sharing.items() for x in self.units[unit]}
        self.open: tuple[nn.Module, int] | None = None  # the layer whose backward runs, and the bytes saved for it
        self.live = 0
        self.calls: Counter[nn.Module] = Counter()  # forwards whose backward has not run yet
        self.waiting: Counter[nn.Module] = Counter()  # bytes of gradients until those of the layer's other calls exist

    def run(self, batch: Batch, autocast: torch.dtype | None) -> LiveBytes:
        """Run the step and return the count of its bytes: gradients are in it, weights and optimiser state are not."""
        counted = self.counted
        if self.has_gradients:
            for module in (self.objective, *self.counts):
                counted.hold((self.counts.get(module, 2) - 1) * self._gradients(module, True), "gradients")
            for module, count in self.counts.items() if self.is_sharded and self.is_late else ():
                counted.hold(count * sum(4 * x.numel() for x in _trained(module)), LATE)
            for parameter in _trained(self.objective) if not self.is_sharded else ():
                if id(parameter) not in self.there:
                    continue
                parameter.grad = counted.empty(parameter.shape, parameter.dtype)
        for module in self.counts:
            module.register_forward_pre_hook(self._before)
            module.register_forward_hook(self._after)
        with counted:
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):  # not the autocast of the caller
                losses = self.objective(batch)
            torch.stack([*losses.values()]).sum().backward()
            self._begin(self.objective.model.vocabulary, 0)
            self._close()
        return counted

    def _before(self, module: nn.Module, args: Any) -> None:
        self.live = self.counted.live
        self.counted.hold(self._gathered(module), GATHERED)

    def _after(self, module: nn.Module, args: Any, out: Any) -> None:
        self.counted.hold(-self._gathered(module), GATHERED)
        hidden = out[0] if isinstance(out, tuple) else out
        if torch.is_grad_enabled() and isinstance(hidden, Tensor) and hidden.requires_grad:
            activations = (self.counts[module] - 1) * (self.counted.live - self.live)
            self.counted.hold(activations, "activations")
            self.calls[module] += 1
            register_multi_grad_hook([hidden], lambda _: self._begin(module, activations), mode="any")

    def _begin(self, module: nn.Module, activations: int) -> None:
        self._close()
        self.open = module, activations
        self.counted.begin_interval()
        self._hold_units(module, 1)

    def _close(self) -> None:
        """End the backward of a layer: free its activations and count its gradients, for all layers of its kind.

        The peak is the larger of two: the last layer's backward, with the activations of all, and the first one's, with
        the gradients of all. If a layer is called several times, the gradients of the calls are kept until the last
        call, and then added to existing ones.
        """
        if self.open is None:
            return
        (module, activations), self.open = self.open, None
        self.calls[module] -= 1
        is_first, is_last = module not in self.waiting, self.calls[module] <= 0
        of_others, to_be_added = ((self.counts[module] - 1) * self._gradients(module, there) for there in (False, True))
        new = of_others * is_first + to_be_added * (is_first and not is_last)
        self.counted.note_recent(new, "gradients", activations, "activations")
        self._hold_units(module, -1)
        self.counted.hold(-activations, "activations")
        self.counted.hold(new, "gradients")
        self.waiting[module] += new - of_others * is_first
        if is_last:
            self.counted.hold(-self.waiting[module], "gradients")
            self.waiting[module] = 0
        if self.is_sharded and is_last:  # a rank keeps only its shards
            self.counted.hold(self._gradients(module, False), "gradients")
            for parameter in _trained(module):
                parameter.grad = None

    def _gradients(self, module: nn.Module, there: bool) -> int:
        """Return a rank's bytes of a module's gradients: those allocated before the step (`there`) or the others."""
        weights = [x for x in _trained(module) if (id(x) in self.there) is there]
        return sum(x.numel() * self.widths[id(x)] // self.sharers.get(id(x), 1) for x in weights)

    def _gathered(self, module: nn.Module) -> int:
        """Bytes of the weights of a module's units, plus the largest unit once more while it comes from other ranks."""
        sizes = [sum(x.nbytes for x in weights) for weights in self._units_of(module)]
        return sum(sizes) + max(sizes, default=0)

    def _hold_units(self, module: nn.Module, sign: int) -> None:
        """Count (sign 1) or uncount (-1) what ranks exchange in the backward of a layer.

        These are its gathered weights, the outer ones of the next layer, and the gradients that are added up.
        """
        sizes = [sum(x.nbytes for x in weights) for weights in self._units_of(module)]
        added_up = max(
            (sum(4 * x.numel() for x in weights if x.requires_grad) for weights in self._units_of(module)), default=0
        )
        self.counted.hold(sign * (sum(sizes) + sum(sizes[-1:]) + added_up), GATHERED)
        if self.is_late and not self.has_gradients:
            self.counted.hold(sign * 4 * added_up, LATE)

    def _units_of(self, module: nn.Module) -> list[list[nn.Parameter]]:
        return [weights for unit, weights in self.units.items() if any(unit is part for part in module.modules())]


def _units(sharing: dict[nn.Module, int]) -> dict[nn.Module, list[nn.Parameter]]:
    """Return the weights that are gathered with each unit: its own, without those of units inside it."""
    seen, units = set[int](), dict[nn.Module, list[nn.Parameter]]()
    for unit in sharing:
        units[unit] = [x for x in unit.parameters() if id(x) not in seen]
        seen |= {id(x) for x in units[unit]}
    return units


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [x for x in module.parameters() if x.requires_grad]
