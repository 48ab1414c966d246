"""Expert parallelism: every rank of a group holds some of each layer's experts, and tokens travel to those and back.

A token goes to a rank once, however many of its experts lie there, and comes back as one row: their weighted sum.
All ranks of the group make the same calls in the same order, whatever their tokens choose, in the forward and in the
backward. Activation checkpointing makes the forward's calls again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, autograd, nn

from blockdiff.errors import RunError
from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.once_differentiable import once_differentiable
from blockdiff.layers.experts import Experts
from blockdiff.tensor_pieces import keep_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the experts of every layer, and their adapters, over the ranks of a mesh of one dimension, in place.

    Their parameters become DTensors, Shard(0), of which a rank keeps its slice only (or none, on the meta device).
    The gradient of an expert then is the sum over the tokens of all ranks of the mesh, as each rank's loss has them,
    where that of any other parameter is one rank's: who averages gradients has to divide both by the same number.
    Raises RunError where the ranks do not divide the experts.
    """
    world = mesh.size()
    for name, module in model.named_modules():
        if not isinstance(module, Experts):
            continue
        for leaf, whole in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if whole.shape[0] % world:
                raise RunError(
                    f"parallel.experts: {world} does not divide the {whole.shape[0]} experts of {name}; choose another "
                    "number"
                )
            keep_part(module, leaf, mesh, 0)
        # torch.compile takes no numbers of tokens that differ from call to call
        module.split = torch.compiler.disable(Exchange(mesh.get_group()).__call__)


@dataclass(frozen=True, eq=False)
class Exchange:
    """Tokens to the ranks of their experts and the results back, over a process group; the `split` of `Experts`.

    Rank r holds the experts from r * E / ranks on. The host waits for the device once per call, for the numbers of
    tokens. Tokens travel in the dtype that the experts compute in, routing weights in fp32 at least. The experts
    weigh their results, so only rounding each rank's part to that dtype differs from one process.
    """

    group: dist.ProcessGroup

    def __call__(
        self,
        x_ND: Tensor,
        index_Nk: Tensor,
        weight_Nk: Tensor,
        experts: int,
        compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """The weighted sum of each token's experts; an index of `experts` is none, as padding has.

        compute: of tokens that came here, indices that count from this rank's first expert (their number: one that
        lies elsewhere) and weights, the weighted sums.
        """
        (x_ND,) = in_autocast(x_ND)
        held, k = experts // self.group.size(), index_Nk.shape[1]
        routes = _routes(index_Nk // held, self.group)
        wide = weight_Nk.to(torch.promote_types(weight_Nk.dtype, torch.float32))
        chosen = torch.cat([wide, index_Nk.to(wide.dtype)], 1)  # indices are small enough to be exact
        x_MD, chosen = _ToExperts.apply(routes, x_ND, chosen)
        weight_Mk, index_Mk = chosen[:, :k], chosen[:, k:].detach().long() - self.group.rank() * held
        is_here = (index_Mk >= 0) & (index_Mk < held)
        y_MD = compute(x_MD, torch.where(is_here, index_Mk, held), weight_Mk.to(weight_Nk.dtype))
        return _FromExperts.apply(routes, y_MD)


@dataclass(frozen=True, eq=False)
class _Routes:
    """The ranks to which tokens go.

    tokens: N; token_M: those to send, rank after rank; sent, received: how many go to each rank and come from it.
    """

    group: dist.ProcessGroup
    tokens: int
    token_M: Tensor
    sent: list[int]
    received: list[int]

    def there(self, values_N: Tensor) -> Tensor:
        """The values that the ranks sent here for their tokens, rank after rank."""
        rows = values_N.index_select(0, self.token_M)
        out = rows.new_empty(sum(self.received), *rows.shape[1:])
        dist.all_to_all_single(out, rows, self.received, self.sent, group=self.group)
        return out

    def back(self, values_M: Tensor) -> Tensor:
        """For each token the sum of what the ranks that it went to give back, added up in fp32 at least."""
        rows = values_M.new_empty(sum(self.sent), *values_M.shape[1:])
        dist.all_to_all_single(rows, values_M.contiguous(), self.sent, self.received, group=self.group)
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = rows.new_zeros(self.tokens, *rows.shape[1:], dtype=wide)
        for token, part in zip(self.token_M.split(self.sent), rows.split(self.sent), strict=True):
            total.index_add_(0, token, part.to(wide))  # a token at most once, so the order of sums is the ranks'
        return total.to(rows.dtype)


def _routes(rank_Nk: Tensor, group: dist.ProcessGroup) -> _Routes:
    """The routes of tokens to the ranks that they need; a number beyond the ranks is none."""
    world, N = group.size(), rank_Nk.shape[0]
    is_needed_NR = torch.zeros(N, world + 1, dtype=torch.bool, device=rank_Nk.device)
    is_needed_RN = is_needed_NR.scatter_(1, rank_Nk, True)[:, :world].t()
    sent_R = is_needed_RN.sum(1)
    received_R = torch.empty_like(sent_R)
    dist.all_to_all_single(received_R, sent_R, group=group)
    sent, received = torch.stack([sent_R, received_R]).tolist()
    order = is_needed_RN.reshape(-1).to(torch.int8).argsort(descending=True, stable=True)
    return _Routes(group, N, order[: sum(sent)] % max(N, 1), sent, received)


class _ToExperts(autograd.Function):
    @staticmethod
    def forward(ctx: Any, routes: _Routes, x_ND: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        ctx.routes = routes
        return routes.there(x_ND), routes.there(chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x_MD: Tensor, grad_chosen: Tensor) -> tuple[None, Tensor, Tensor]:
        return None, ctx.routes.back(grad_x_MD), ctx.routes.back(grad_chosen)


class _FromExperts(autograd.Function):
    @staticmethod
    def forward(ctx: Any, routes: _Routes, y_MD: Tensor) -> Tensor:
        ctx.routes = routes
        return routes.back(y_MD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[None, Tensor]:
        return None, ctx.routes.there(grad_ND)
