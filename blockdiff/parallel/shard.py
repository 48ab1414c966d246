"""How a model is spread over the ranks. Today every rank holds all of it: DDP, which averages the gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

from torch import Tensor, autograd, nn
from torch.nn.parallel import DistributedDataParallel

from blockdiff.errors import RunError
from blockdiff.parallel.ranks import Ranks


def replicate(objective: nn.Module, ranks: Ranks) -> nn.Module:
    """What training calls: the objective itself, or with several ranks DDP around it, whose weights are rank 0's."""
    if ranks.world == 1:
        return objective
    # Buffers are constants; the switch that leaves them alone was renamed in torch 2.13.
    known = signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    leave: dict[str, Any] = {name: False}
    return DistributedDataParallel(_TouchEveryParameter(objective), gradient_as_bucket_view=True, **leave)


def exchanging(module: nn.Module, now: bool) -> AbstractContextManager[Any]:
    """Surrounds forward and backward of a micro-batch; the ranks exchange gradients only if `now`."""
    if isinstance(module, DistributedDataParallel) and not now:
        return module.no_sync()
    return nullcontext()


def require_sums(losses: Any) -> None:
    """Raises RunError for what an objective must not return: anything but two losses, a number each."""
    sums = [getattr(losses, name, None) for name in ("canvas_sum", "ar_sum")]
    if not all(isinstance(each, Tensor) and each.dim() == 0 for each in sums):
        shapes = [list(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in sums]
        raise RunError(
            f"objective: its forward gave a {type(losses).__name__} whose canvas_sum is {shapes[0]} and ar_sum "
            f"{shapes[1]}; return blockdiff.objective.Losses of two sums, tensors without dimensions"
        )


class _Touch(autograd.Function):
    """Identity on a loss that puts parameters into its graph without giving them a gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (gradients[0], *[None] * ctx.count)


class _TouchEveryParameter(nn.Module):
    """DDP waits for every parameter in every backward; a rank without a canvas or a coin leaves some unused.

    Touching them all keeps it from waiting forever, and costs neither a graph walk nor a zero gradient.
    """

    def __init__(self, objective: nn.Module) -> None:
        super().__init__()
        self.objective = objective

    def _trainable(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self.objective.parameters() if parameter.requires_grad)

    def forward(self, batch: Any) -> Any:
        losses = self.objective(batch)
        require_sums(losses)
        return losses._replace(canvas_sum=_Touch.apply(losses.canvas_sum, *self._trainable()))
