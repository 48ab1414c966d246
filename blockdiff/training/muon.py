"""AdamW and Muon for parameters that may be sharded. Muon steps matrices, AdamW everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockdiff.parallel.reduce import stacked
from blockdiff.tensor_pieces import gathered, is_spread, like, local_of, piece_of

# Coefficients of the quintic iteration (arXiv 2502.16982 section 2.1), which moves singular values to 0.7 to 1.2.
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
RMS = 0.2  # of a step at a learning rate of 1, like AdamW's steps (arXiv 2502.16982 equation 4)
GROUP_NUMBERS = 2**27  # the largest number of elements that are gathered, orthogonalised and exchanged together


class AdamWOfPieces(torch.optim.AdamW):
    """AdamW in which each rank steps its local pieces of parameters, since AdamW is elementwise.

    torch's kernels accept no mix of DTensors and other tensors, so they receive local tensors only. The state of a
    DTensor parameter is a DTensor.
    """

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        is_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:  # parameters, gradients, moments, and counters of steps
            tensors[:] = [local_of(tensor) for tensor in tensors]
        return is_complex


class Muon(AdamWOfPieces):
    """Muon (arXiv 2502.16982) for parameter groups with a key `matrices`, AdamW for the others.

    A step moves a matrix of m rows and n columns by lr * 0.2 * sqrt(max(m, n)) along its orthogonalised Nesterov
    momentum, so that one learning rate and one weight decay suit both kinds of groups. The leading dimensions of a
    parameter are batch dimensions; with `matrices: 2` each matrix of the batch is two matrices stacked along the rows.
    Each rank orthogonalises a part of the matrices and the ranks exchange the results. If whole matrices are sharded
    over ranks, each rank orthogonalises its own.
    """

    def __init__(self, groups: list[dict[str, Any]], momentum: float = 0.95, **options: Any) -> None:
        super().__init__(groups, **options)
        for group in self.param_groups:
            if group.get("matrices"):
                group["momentum"] = momentum

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's requires step counts, which matrices do not have

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        return False if group.get("matrices") else super()._init_group(group, *lists)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step with the present gradients. closure: computes them first; its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moves = [
            self._move(parameter, parameter.grad, group)
            for group in self.param_groups
            if group.get("matrices")
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for is_local in (False, True):
            for group_of_moves in _groups([move for move in moves if move.is_local is is_local]):
                _take(group_of_moves, is_shared=not is_local)
        super().step()
        return loss

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> _Move:
        """Update a parameter's momentum with its gradient, and return the parameter's move."""
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        gradient, momentum = local_of(gradient), local_of(state["momentum"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        return _Move(parameter, gradient.lerp(momentum, group["momentum"]), group)


class _Move:
    """A parameter and the direction in which to move this process's piece of it.

    rows, columns: the shape of each of its matrices. is_local: whether every rank has whole matrices of its own.
    """

    def __init__(self, parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
        self.parameter, self.direction, self.group = parameter, direction, group
        self.rows, self.columns = parameter.shape[-2] // group["matrices"], parameter.shape[-1]
        placements = getattr(parameter, "placements", ())
        self.is_local = is_spread(parameter) and all(
            each.is_replicate() or each.dim < parameter.dim() - 2 for each in placements
        )

    @property
    def size(self) -> tuple[int, int]:
        """The shape of its matrices, the smaller dimension first. Matrices of one size are orthogonalised together."""
        return min(self.rows, self.columns), max(self.rows, self.columns)

    def matrices(self) -> Tensor:
        """The directions [N, m, n], m <= n, of all its matrices, or of this rank's if `is_local`, on the device."""
        direction = self.direction
        if self.is_local:
            spread: Any = self.parameter
            direction = direction.to(spread.device_mesh.device_type)
        else:
            direction = gathered(like(self.parameter, direction))
        direction = direction.reshape(-1, self.rows, self.columns)
        return direction.mT if self.rows > self.columns else direction

    def apply(self, steps: Tensor) -> None:
        """Decay the weights and apply orthogonalised steps, which have the form that `matrices` returned."""
        steps = (steps.mT if self.rows > self.columns else steps).reshape(-1, *self.parameter.shape[1:])
        piece, lr = piece_of(self.parameter), self.group["lr"]
        if not self.is_local:
            steps = steps[piece.block.slices]
        piece.local.mul_(1 - lr * self.group["weight_decay"])
        piece.local.add_(steps.to(piece.local), alpha=-lr * RMS * max(self.rows, self.columns) ** 0.5)


def _groups(moves: list[_Move]) -> Iterator[list[_Move]]:
    """Yield groups of moves of at most GROUP_NUMBERS elements, or of one move."""
    group: list[_Move] = []
    for move in moves:
        if group and sum(each.parameter.numel() for each in group) + move.parameter.numel() > GROUP_NUMBERS:
            yield group
            group = []
        group.append(move)
    if group:
        yield group


def _take(moves: list[_Move], is_shared: bool) -> None:
    """Orthogonalise the matrices of some moves, those of one size together, and apply the steps."""
    sizes: dict[tuple[int, int], list[_Move]] = {}
    for move in moves:
        sizes.setdefault(move.size, []).append(move)
    matrices = [[move.matrices() for move in same_size] for same_size in sizes.values()]
    batches = orthogonalised([torch.cat(each) for each in matrices], is_shared)
    for same_size, each, steps in zip(sizes.values(), matrices, batches, strict=True):
        for move, step in zip(same_size, steps.split([len(x) for x in each]), strict=True):
            move.apply(step)


def orthogonalised(batches: list[Tensor], is_shared: bool = False) -> list[Tensor]:
    """Orthogonalise batches of matrices [N, m, n], m <= n: keep singular vectors, move all singular values near 1.

    is_shared: all ranks of the process group have the same matrices. Each computes a part of every batch, and they
    exchange the results of all batches at once. Products are in bf16 on a GPU, and at least in fp32 on a CPU.
    """
    ranks = dist.get_world_size() if is_shared and dist.is_initialized() else 1
    if ranks == 1:
        return [_iterated(matrices) for matrices in batches]
    parts, results = [-(-len(matrices) // ranks) for matrices in batches], []
    for matrices, part in zip(batches, parts, strict=True):
        result = _iterated(matrices[part * dist.get_rank() :][:part])
        results.append(torch.cat([result, result.new_zeros(part - len(result), *matrices.shape[1:])]).flatten())
    pieces = stacked(torch.cat(results)).split([len(result) for result in results], 1)
    return [piece.reshape(-1, *each.shape[1:])[: len(each)] for piece, each in zip(pieces, batches, strict=True)]


def _iterated(matrices: Tensor) -> Tensor:
    """Run the Newton-Schulz iteration on each matrix divided by its norm, so that singular values begin in [0, 1]."""
    matrices = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    x = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=1e-7)
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(ITERATIONS):
        squares = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(squares, squares, squares, beta=B, alpha=C), x, beta=A)
    return x
