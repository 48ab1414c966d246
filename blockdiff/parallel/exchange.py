"""Expert parallelism: every rank of a group holds some of each layer's experts, and tokens are sent to them and back.

A token is sent to a rank once, however many of its experts are there, and one row returns: their weighted sum. All
ranks of the group must make the same calls in the same order, in the forward and in the backward, whichever experts
their tokens choose. Activation checkpointing repeats the forward's calls.
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

    Their parameters become DTensors, Shard(0), of which a rank keeps only its slice (none on the meta device). An
    expert's gradient is then a sum over all ranks' tokens, and the gradient of another parameter a sum over one rank's
    tokens: when averaging gradients, divide both by the same number. Raises RunError if the number of experts is not
    divisible by the number of ranks.
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
        # the numbers of tokens differ from call to call, which torch.compile does not support
        module.split = torch.compiler.disable(Exchange(mesh.get_group()).__call__)


@dataclass(frozen=True, eq=False)
class Exchange:
    """Send tokens to the ranks of their experts and the results back; the `split` of `Experts`.

    Rank r holds the experts from r * E / ranks on. The host waits for the device once per call, to read the numbers of
    tokens. Tokens are sent in the dtype that the experts compute in, routing weights in at least fp32. Results are
    weighted where they are computed, so they differ from one process only by rounding each rank's part to that dtype.
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
        """Return the weighted sum over each token's experts; index `experts` means none, as for padding.

        compute: (tokens, index, weight) -> weighted sums of this rank's experts, index 0 being the first of them and
        their number meaning an expert of another rank.
        """
        (x_ND,) = in_autocast(x_ND)
        local_experts, k = experts // self.group.size(), index_Nk.shape[1]
        routes = _routes(index_Nk // local_experts, self.group)
        wide = weight_Nk.to(torch.promote_types(weight_Nk.dtype, torch.float32))
        chosen = torch.cat([wide, index_Nk.to(wide.dtype)], 1)  # indices are small enough to be exact
        x_MD, chosen = _ToExperts.apply(routes, x_ND, chosen)
        weight_Mk, index_Mk = chosen[:, :k], chosen[:, k:].detach().long() - self.group.rank() * local_experts
        is_here = (index_Mk >= 0) & (index_Mk < local_experts)
        y_MD = compute(x_MD, torch.where(is_here, index_Mk, local_experts), weight_Mk.to(weight_Nk.dtype))
        return _FromExperts.apply(routes, y_MD)


@dataclass(frozen=True, eq=False)
class _Routes:
    """The ranks that tokens are sent to.

    tokens: N. token_M: indices of the tokens to send, sorted by rank. send_counts, receive_counts: number of tokens
    sent to and received from each rank.
    """

    group: dist.ProcessGroup
    tokens: int
    token_M: Tensor
    send_counts: list[int]
    receive_counts: list[int]

    def there(self, values_N: Tensor) -> Tensor:
        """Send each token's values to its ranks; return the values received, sorted by rank."""
        rows = values_N.index_select(0, self.token_M)
        out = rows.new_empty(sum(self.receive_counts), *rows.shape[1:])
        dist.all_to_all_single(out, rows, self.receive_counts, self.send_counts, group=self.group)
        return out

    def back(self, values_M: Tensor) -> Tensor:
        """Send results back to their ranks; return for each token the sum of its results, added in at least fp32."""
        rows = values_M.new_empty(sum(self.send_counts), *values_M.shape[1:])
        dist.all_to_all_single(rows, values_M.contiguous(), self.send_counts, self.receive_counts, group=self.group)
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = rows.new_zeros(self.tokens, *rows.shape[1:], dtype=wide)
        for token, part in zip(self.token_M.split(self.send_counts), rows.split(self.send_counts), strict=True):
            total.index_add_(0, token, part.to(wide))  # each token at most once: sums are in the order of ranks
        return total.to(rows.dtype)


def _routes(rank_Nk: Tensor, group: dist.ProcessGroup) -> _Routes:
    """Return the routes of tokens to the ranks in rank_Nk; the world size or more means none."""
    world, N = group.size(), rank_Nk.shape[0]
    is_needed_NR = torch.zeros(N, world + 1, dtype=torch.bool, device=rank_Nk.device)
    is_needed_RN = is_needed_NR.scatter_(1, rank_Nk, True)[:, :world].t()
    send_R = is_needed_RN.sum(1)
    receive_R = torch.empty_like(send_R)
    dist.all_to_all_single(receive_R, send_R, group=group)
    send_counts, receive_counts = torch.stack([send_R, receive_R]).tolist()
    order = is_needed_RN.reshape(-1).to(torch.int8).argsort(descending=True, stable=True)
    return _Routes(group, N, order[: sum(send_counts)] % max(N, 1), send_counts, receive_counts)


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
