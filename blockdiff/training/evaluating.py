"""Looking at a model in training without disturbing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Surrounds an evaluation: no gradient, every part in eval mode; afterwards each returns to its own mode."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode
