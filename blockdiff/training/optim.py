"""AdamW and its parameter groups, the learning rate as a function of the step, the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

EMBEDDING_TABLE = "vocabulary.table"


@dataclass(frozen=True)
class WarmupCosine:
    """A line up to `peak` at `warmup_steps`, then half a cosine down to `final_ratio * peak` at `steps`."""

    peak: float
    steps: int
    warmup_steps: int = 0
    final_ratio: float = 0.1

    def lr(self, step: int) -> float:
        """The learning rate of optimiser step `step`, counted from 1; constant after the last one."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return self.peak * (self.final_ratio + (1 - self.final_ratio) * 0.5 * (1 + math.cos(math.pi * done)))


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that receive gradients, by name, in the module's order."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay pulls on a parameter: on matrices, not on norms, scales or the embedding table."""
    return parameter.dim() > 1 and not name.endswith(EMBEDDING_TABLE)


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups for an optimiser: decayed and not decayed; empty ones are left out."""
    named = trainable(module)
    decayed = [parameter for name, parameter in named.items() if decays(name, parameter)]
    free = [parameter for name, parameter in named.items() if not decays(name, parameter)]
    groups = [(decayed, weight_decay), (free, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def adamw(
    module: nn.Module,
    lr: float,
    betas: tuple[float, float] = (0.95, 0.99),
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, in one fused kernel where torch has it (CPU and CUDA)."""
    devices = {parameter.device.type for parameter in trainable(module).values()}
    fused = devices <= {"cpu", "cuda"}
    return torch.optim.AdamW(
        parameter_groups(module, weight_decay), lr=lr, betas=betas, eps=eps, fused=fused or None
    )


def set_lr(optimiser: torch.optim.Optimizer, lr: float) -> None:
    """Give every group of the optimiser this learning rate."""
    for group in optimiser.param_groups:
        group["lr"] = lr


def fill_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give a zero gradient to parameters that no micro-batch reached, as DDP does.

    An optimiser passes over a missing gradient, so momentum and decay would depend on the number of ranks.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The 2-norm of all gradients together, in fp32; waits for the device.

    Under DDP every rank holds the averaged gradient, so every rank gets the norm of the global gradient.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0.0
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    return float(torch.linalg.vector_norm(torch.stack(list(norms))))


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale all gradients, whose common norm is `norm`, down to a norm of at most `limit`; 0 = leave them."""
    if limit > 0 and norm > limit:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, limit / norm)
