"""The exponential moving average of the weights: what is evaluated and exported while training goes on beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from blockdiff.errors import RunError
from blockdiff.tensor_pieces import local_of
from blockdiff.training.optimiser import trainable


class Ema:
    """An fp32 average of what trains in `module`: average <- d average + (1 - d) weight, after every step.

    d = min(`decay`, (1 + step) / (10 + step)), so that the random start does not linger (the warm-up of
    TensorFlow's ExponentialMovingAverage). Every rank keeps the average of what it holds of the weights.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = trainable(module)
        self._average = {
            name: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimiser step `step`, counted from 1."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        averages, weights = list[Tensor](), list[Tensor]()
        for name, parameter in self._parameters.items():
            average, trained = local_of(self._average[name]), local_of(parameter)
            if trained.dtype == average.dtype:
                averages.append(average)
                weights.append(trained)
            else:  # one after the other, so that no second copy of all weights is made
                average.lerp_(trained.to(average.dtype), weight)
        if averages:
            torch._foreach_lerp_(averages, weights, weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the module has the averaged weights; after it the trained ones, bit for bit."""
        with torch.no_grad():
            trained = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
            self._write(self._average)
        try:
            yield
        finally:
            self._write(trained)

    def state(self) -> dict[str, Tensor]:
        """The averages by parameter name: not copies, so save them before the next update."""
        return dict(self._average)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from averages that `state` gave. Raises RunError naming the first tensor that differs in kind."""
        for name in sorted({*self._average, *state}):
            ours, saved = _kind(self._average.get(name)), _kind(state.get(name))
            if ours != saved:
                raise RunError(f"EMA of {name}: {saved} in the checkpoint, {ours} in this run")
        for name, average in self._average.items():
            average.copy_(state[name])

    @torch.no_grad()
    def _write(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local_of(parameter).copy_(local_of(weights[name]))


def _kind(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
