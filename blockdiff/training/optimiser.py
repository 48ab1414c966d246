"""The optimiser with its parameter groups, the gradient norm and clipping, and the moving average of the weights.

Learning rates are in `schedule`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from blockdiff.checkpoint.files import first_line
from blockdiff.errors import RunError
from blockdiff.models.weights import notice_steps
from blockdiff.parallel.ranks import Ranks
from blockdiff.tensor_pieces import is_spread, local_of
from blockdiff.training.muon import AdamWOfPieces, Muon

EMBEDDING_TABLE = "vocabulary.table"
TRAINED_ROWS = "vocabulary.token_rows"


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name, in the module's order."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def decays(name: str, parameter: Tensor) -> bool:
    """Whether a parameter has weight decay: matrices have, but not norms, scales and the embedding table."""
    return parameter.dim() > 1 and not name.endswith(EMBEDDING_TABLE)


def matrix_count(name: str, parameter: Tensor) -> int:
    """The number of matrices stacked along the second-to-last dimension of a parameter; 0 = it is no matrix.

    The gate and up projections of routed experts are one parameter of two matrices. Rows of the embedding table are
    vectors.
    """
    if not decays(name, parameter) or name.endswith(TRAINED_ROWS):
        return 0
    return 2 if name.endswith(("gate_up_proj", "gate_up_lora_B")) else 1


def parameter_groups(module: nn.Module, weight_decay: float, by_matrices: bool = False) -> list[dict[str, Any]]:
    """Return an optimiser's groups of trainable parameters: those with weight decay, and those without.

    by_matrices: split groups by `matrix_count`, too, and store it as `matrices`. Empty groups are left out.
    """
    groups: dict[tuple[bool, int], dict[str, Any]] = {}
    for name, parameter in trainable(module).items():
        is_decayed = decays(name, parameter)
        matrices = matrix_count(name, parameter) if by_matrices else 0
        empty = {"params": [], "weight_decay": weight_decay if is_decayed else 0.0}
        empty |= {"matrices": matrices} if by_matrices else {}
        groups.setdefault((is_decayed, matrices), empty)["params"].append(parameter)
    return [groups[key] for key in sorted(groups, reverse=True)]


def build(
    module: nn.Module,
    *,
    name: str | Callable[..., torch.optim.Optimizer] = "adamw",
    lr: float,
    betas: tuple[float, float] = (0.95, 0.99),
    eps: float = 1e-8,
    momentum: float = 0.95,
    weight_decay: float = 1e-4,
) -> torch.optim.Optimizer:
    """Construct the optimiser of a module's trainable parameters: "adamw", "muon", or "adamw_8bit" of bitsandbytes.

    AdamW (arXiv 1711.05101) runs in one fused kernel on CPU and CUDA. Muon, with its `momentum`, steps matrices, and
    AdamW the rest. Norms, scales and the embedding table have no weight decay.

    name: or a function that constructs an optimiser from the parameters, with its own settings. The learning rates of
        its groups become the peaks of the schedule.

    Raises RunError if nothing trains, or bitsandbytes is not installed.
    """
    groups = parameter_groups(module, weight_decay, by_matrices=name == "muon")
    if not groups:
        raise RunError("no parameter trains; look at optim.freeze")
    if not isinstance(name, str):
        optimiser = name([parameter for group in groups for parameter in group["params"]])
        if not isinstance(optimiser, torch.optim.Optimizer):
            raise RunError(
                f"optimiser: its function returned a {type(optimiser).__name__}; it should return an optimiser"
            )
        if signature(optimiser.step).parameters["closure"].default is Parameter.empty:
            raise RunError(
                f"optimiser: {type(optimiser).__name__} computes the loss several times in a step, but a run computes "
                "it once; choose one whose step() needs no closure"
            )
        for group in optimiser.param_groups:
            group["lr_scale"] = float(group["lr"]) / lr
    elif name == "adamw_8bit":
        optimiser = adamw_8bit(groups, lr, betas, eps)
    elif name in ("adamw", "muon"):
        devices = {parameter.device.type for group in groups for parameter in group["params"]}
        fused = devices <= {"cpu", "cuda"} or None
        is_split = any(is_spread(parameter) for group in groups for parameter in group["params"])
        kind = partial(Muon, momentum=momentum) if name == "muon" else AdamWOfPieces if is_split else torch.optim.AdamW
        optimiser = kind(groups, lr=lr, betas=betas, eps=eps, fused=fused)
    else:
        raise RunError(f"optim.name: there is no optimiser {name!r}; choose adamw, muon or adamw_8bit")
    notice_steps(optimiser)
    return optimiser


def adamw_8bit(
    groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """Construct bitsandbytes' AdamW, whose moments of at least 4,096 numbers have 8 bits (arXiv 2110.02861)."""
    if find_spec("bitsandbytes") is None:
        raise RunError(
            "optim.name: adamw_8bit needs bitsandbytes, which is not installed; "
            "`pip install bitsandbytes` or choose adamw"
        )
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on a CPU it warns of kernels that no optimiser needs
    try:
        kind = import_module("bitsandbytes.optim").AdamW8bit
    except Exception as error:  # a library built for another torch fails in its own ways
        raise RunError(
            f"optim.name: adamw_8bit: bitsandbytes cannot be imported ({first_line(error)}); repair it or choose adamw"
        ) from error
    optimiser: torch.optim.Optimizer = kind(groups, lr=lr, betas=betas, eps=eps)
    return optimiser


def set_lr(optimiser: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to `lr` times its `lr_scale` (1 if it has none)."""
    for group in optimiser.param_groups:
        rate = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], Tensor):  # a compiled step would compile again for another number
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def fill_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set the gradient of parameters that no micro-batch reached to zero, like DDP.

    An optimiser skips a missing gradient, so momentum and decay would depend on the number of ranks otherwise.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def gradient_norm(parameters: Iterable[nn.Parameter], ranks: Ranks | None = None) -> float:
    """The 2-norm of all gradients together, the same on all ranks, at least in fp32. Waits for the device.

    With DDP every rank has whole gradients. Of sharded gradients, the squares of the pieces are summed over `ranks`.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0.0
    if ranks is not None and any(is_spread(gradient) for gradient in gradients):
        return _norm_of_pieces(gradients, ranks)
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = torch._foreach_norm(gradients, 2, dtype=dtype)
    return float(torch.linalg.vector_norm(torch.stack(list(norms))))


def _norm_of_pieces(gradients: list[Tensor], ranks: Ranks) -> float:
    """The norm of gradients of which some are sharded, over some or all ranks, and others are equal on all ranks."""
    pieces = [local_of(gradient) for gradient in gradients]
    dtype = torch.promote_types(pieces[0].dtype, torch.float32)
    norms = torch.stack(list(torch._foreach_norm(pieces, 2, dtype=dtype))).double()
    copies = [ranks.world // _piece_count(gradient) for gradient in gradients]  # the ranks that have the same piece
    squares = norms.square() / torch.tensor(copies, dtype=norms.dtype, device=norms.device)
    return float(ranks.sum(squares.sum()).sqrt())


def _piece_count(tensor: Tensor) -> int:
    """The number of pieces that a tensor is sharded into."""
    if not is_spread(tensor):
        return 1
    spread: Any = tensor
    sizes = zip(spread.device_mesh.shape, spread.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())  # _StridedShard is no Shard


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale all gradients so that their common norm, now `norm`, is at most `limit`; 0 = no limit."""
    if limit > 0 and norm > limit:
        gradients = [local_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, limit / norm)


class Ema:
    """A moving average, in fp32, of a module's trainable weights: average <- d average + (1 - d) weight, every step.

    d = min(`decay`, (1 + step) / (10 + step)) forgets the random start early (the warm-up of TensorFlow's
    ExponentialMovingAverage). Every rank averages its own pieces of the weights.
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
        """Average in the weights after optimiser step `step`, counted from 1."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        averages, weights = list[Tensor](), list[Tensor]()
        for name, parameter in self._parameters.items():
            average, trained = local_of(self._average[name]), local_of(parameter)
            if trained.dtype == average.dtype:
                averages.append(average)
                weights.append(trained)
            else:  # one at a time, so that there is never a second copy of all weights
                average.lerp_(trained.to(average.dtype), weight)
        if averages:
            torch._foreach_lerp_(averages, weights, weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the module its averaged weights around a block, and its trained ones, bit for bit, afterwards."""
        with torch.no_grad():
            trained = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
            self._write(self._average)
        try:
            yield
        finally:
            self._write(trained)

    def state(self) -> dict[str, Tensor]:
        """The averages by parameter name. They are not copies: save them before the next update."""
        return dict(self._average)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore averages that `state` returned. Raises RunError with the first tensor of another shape or dtype."""
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
