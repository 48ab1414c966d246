"""AdamW and Muon over parameters that may be split over ranks.

Muon steps matrices by their orthogonalised momentum, and everything else by AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockdiff.parallel.reduce import stacked
from blockdiff.tensor_pieces import gathered, is_spread, like, local_of, piece_of

# Of the quintic iteration and the number of times (arXiv 2502.16982 section 2.1): singular values end in 0.7 to 1.2.
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
RMS = 0.2  # of a step at a learning rate of 1, as AdamW's steps have it (arXiv 2502.16982 equation 4)
AT_ONCE = 2**27  # numbers of the matrices that are brought together, orthogonalised and exchanged at once


class AdamWOfPieces(torch.optim.AdamW):
    """AdamW of which each rank steps what it holds: elementwise, so that pieces of tensors are as good as whole ones.

    torch's kernels take no DTensors beside other tensors; here they get the local ones of all. The state consists of
    DTensors where the parameters do.
    """

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        is_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:  # parameters, gradients, moments, and counters of steps
            tensors[:] = [local_of(tensor) for tensor in tensors]
        return is_complex


class Muon(AdamWOfPieces):
    """Muon (arXiv 2502.16982) in the groups that say how many `matrices` a parameter has, AdamW in the others.

    A step moves a matrix of m rows and n columns by lr * 0.2 * sqrt(max(m, n)) along its orthogonalised Nesterov
    momentum, so that one learning rate and one weight decay suit both kinds of groups. A parameter is a batch of
    matrices over its leading dimensions; in a group with `matrices: 2` each of them is two, one above the other.
    Ranks share the work: each orthogonalises a part of the matrices and hands the results to the others. Of parameters
    that are split over ranks between matrices, each rank orthogonalises those that it holds.
    """

    def __init__(self, groups: list[dict[str, Any]], momentum: float = 0.95, **options: Any) -> None:
        super().__init__(groups, **options)
        for group in self.param_groups:
            if group.get("matrices"):
                group["momentum"] = momentum

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's wants a count of steps in the state of matrices, too

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        return False if group.get("matrices") else super()._init_group(group, *lists)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step along the gradients that are there. closure: computes them, and the loss, which is returned."""
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
        for is_apart in (False, True):
            for some in _at_once([move for move in moves if move.is_apart is is_apart]):
                _take(some, is_shared=not is_apart)
        super().step()
        return loss

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> _Move:
        """Take the gradient into a parameter's momentum, and say where it is to go."""
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        gradient, momentum = local_of(gradient), local_of(state["momentum"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        return _Move(parameter, gradient.lerp(momentum, group["momentum"]), group)


class _Move:
    """A parameter and the direction in which this process's part of it is to go.

    rows, columns: of each of its matrices. is_apart: whether ranks hold whole matrices of their own.
    """

    def __init__(self, parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
        self.parameter, self.direction, self.group = parameter, direction, group
        self.rows, self.columns = parameter.shape[-2] // group["matrices"], parameter.shape[-1]
        placements = getattr(parameter, "placements", ())
        self.is_apart = is_spread(parameter) and all(
            each.is_replicate() or each.dim < parameter.dim() - 2 for each in placements
        )

    @property
    def size(self) -> tuple[int, int]:
        """Of its matrices, the smaller number first: those of a size are orthogonalised together."""
        return min(self.rows, self.columns), max(self.rows, self.columns)

    def matrices(self) -> Tensor:
        """The directions of all its matrices, or where they lie apart of this rank's: [N, m, n] with m <= n.

        What is kept on the host beside a GPU is brought there.
        """
        direction = self.direction
        if self.is_apart:
            spread: Any = self.parameter
            direction = direction.to(spread.device_mesh.device_type)
        else:
            direction = gathered(like(self.parameter, direction))
        direction = direction.reshape(-1, self.rows, self.columns)
        return direction.mT if self.rows > self.columns else direction

    def apply(self, steps: Tensor) -> None:
        """Decay the weights and take the steps, which are as `matrices` gave their directions."""
        steps = (steps.mT if self.rows > self.columns else steps).reshape(-1, *self.parameter.shape[1:])
        piece, lr = piece_of(self.parameter), self.group["lr"]
        if not self.is_apart:
            steps = steps[piece.block.slices]
        piece.local.mul_(1 - lr * self.group["weight_decay"])
        piece.local.add_(steps.to(piece.local), alpha=-lr * RMS * max(self.rows, self.columns) ** 0.5)


def _at_once(moves: list[_Move]) -> Iterator[list[_Move]]:
    """The same moves in turns of at most AT_ONCE numbers, or one."""
    turn: list[_Move] = []
    for move in moves:
        if turn and sum(each.parameter.numel() for each in turn) + move.parameter.numel() > AT_ONCE:
            yield turn
            turn = []
        turn.append(move)
    if turn:
        yield turn


def _take(moves: list[_Move], is_shared: bool) -> None:
    """Take the steps of some moves, whose matrices are orthogonalised at once, those of a size together."""
    sizes: dict[tuple[int, int], list[_Move]] = {}
    for move in moves:
        sizes.setdefault(move.size, []).append(move)
    matrices = [[move.matrices() for move in of_a_size] for of_a_size in sizes.values()]
    batches = orthogonalised([torch.cat(each) for each in matrices], is_shared)
    for of_a_size, each, steps in zip(sizes.values(), matrices, batches, strict=True):
        for move, step in zip(of_a_size, steps.split([len(x) for x in each]), strict=True):
            move.apply(step)


def orthogonalised(batches: list[Tensor], is_shared: bool = False) -> list[Tensor]:
    """Matrices [N, m, n], m <= n, of every batch, with the same singular vectors and all singular values near 1.

    is_shared: all ranks of the process group have the same matrices; each does a part of every batch, and they exchange
    the results of all batches at once. On a GPU the products are in bf16, on a CPU in fp32 at least.
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
    """The Newton-Schulz iteration from each matrix divided by its norm, so that singular values begin in [0, 1]."""
    matrices = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    x = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=1e-7)
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(ITERATIONS):
        squares = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(squares, squares, squares, beta=B, alpha=C), x, beta=A)
    return x
