"""A little net and its training, for tests of optimisers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from blockdiff.training import optimiser as optim

WIDTH = 64


def net() -> nn.Sequential:
    """The same random weights every time, two matrices and a bias."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def learn(module: nn.Module, optimiser: torch.optim.Optimizer, steps: Iterable[int], lr: float = 1e-2) -> list[float]:
    """The losses of optimiser steps, counted from 1, of which the first five warm up."""
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))
    losses = []
    for step in steps:
        optim.set_lr(optimiser, lr * min(1, step / 5))
        optimiser.zero_grad()
        loss = (module(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses
