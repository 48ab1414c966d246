"""expert_mlp in plain torch: tokens sorted by expert, one matrix product per expert, a hand-written backward.

The backward recomputes the gated activation from the saved first product and saves nothing that only a weight
gradient needs when the weights are frozen. A handful of tokens without gradient runs all experts densely instead,
which is a few launches rather than a few per expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DENSE_FLOPS = 2e7  # dense products up to this size cost less than sorting and one launch per expert


def _gated(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def _gated_backward(h: Tensor, grad_a: Tensor) -> tuple[Tensor, Tensor]:
    """The activation again, and the gradient of its input, both from the first product h [M, 2F]."""
    gate, up = h.chunk(2, -1)
    activated = F.gelu(gate, approximate="tanh")
    grad_h = torch.empty_like(h)
    grad_gate, grad_up = grad_h.chunk(2, -1)
    torch.mul(grad_a, activated, out=grad_up)
    torch.mul(torch.ops.aten.gelu_backward(grad_a, gate, approximate="tanh"), up, out=grad_gate)
    return activated.mul_(up), grad_h


class _Groups:
    """Where each expert's tokens stand after sorting the N * k assignments by expert."""

    def __init__(self, expert_index_Nk: Tensor, experts: int):
        flat = expert_index_Nk.reshape(-1)
        self.slots = flat.numel()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=experts + 1)[:experts].tolist()
        self.bounds: list[tuple[int, int, int]] = []
        end = 0
        for e, count in enumerate(counts):
            if count:
                self.bounds.append((e, end, end + count))
            end += count
        self.assigned = end
        self.slot = order[:end]
        self.token = torch.div(self.slot, expert_index_Nk.shape[1], rounding_mode="floor")

    def product(self, x_M: Tensor, weights_E: Tensor) -> Tensor:
        """Rows of x times their own expert's matrix [in, out]."""
        out = x_M.new_empty(x_M.shape[0], weights_E.shape[2])
        for e, lo, hi in self.bounds:
            torch.mm(x_M[lo:hi], weights_E[e], out=out[lo:hi])
        return out

    def outer(self, left_M: Tensor, right_M: Tensor, like: Tensor) -> Tensor:
        """Per expert left^T right: the gradient of its matrix."""
        grad = torch.zeros_like(like) if len(self.bounds) < like.shape[0] else torch.empty_like(like)
        for e, lo, hi in self.bounds:
            torch.mm(left_M[lo:hi].t(), right_M[lo:hi], out=grad[e])
        return grad

    def combine(self, y_M: Tensor, k: int) -> Tensor:
        """The sum over each token's k assignments, in a fixed order."""
        if self.assigned < self.slots:
            unsorted = y_M.new_zeros(self.slots, y_M.shape[1])
        else:
            unsorted = y_M.new_empty(self.slots, y_M.shape[1])
        unsorted[self.slot] = y_M
        return unsorted.view(-1, k, y_M.shape[1]).sum(1)


@torch.library.custom_op("blockdiff::expert_mlp_native", mutates_args=())
def _forward_op(
    x_ND: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, expert_index_Nk: Tensor, expert_weight_Nk: Tensor
) -> tuple[Tensor, Tensor]:
    groups = _Groups(expert_index_Nk, gate_up_EFD.shape[0])
    h = groups.product(x_ND[groups.token], gate_up_EFD.transpose(1, 2))
    y = groups.product(_gated(h), down_EDF.transpose(1, 2))
    y = y * expert_weight_Nk.reshape(-1)[groups.slot, None]
    out = groups.combine(y, expert_index_Nk.shape[1]).to(x_ND.dtype)
    if groups.assigned < groups.slots:  # a fixed shape for the saved product
        h = torch.cat([h, h.new_zeros(groups.slots - groups.assigned, h.shape[1])])
    return out, h


@_forward_op.register_fake
def _(
    x_ND: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, expert_index_Nk: Tensor, expert_weight_Nk: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_ND), x_ND.new_empty(expert_index_Nk.numel(), gate_up_EFD.shape[1])


@torch.library.custom_op("blockdiff::expert_mlp_native_backward", mutates_args=())
def _backward_op(
    grad_ND: Tensor,
    x_ND: Tensor,
    h: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    expert_index_Nk: Tensor,
    expert_weight_Nk: Tensor,
    needs_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    groups = _Groups(expert_index_Nk, gate_up_EFD.shape[0])
    h = h[: groups.assigned]
    weight = expert_weight_Nk.reshape(-1)[groups.slot, None].to(grad_ND.dtype)
    grad_y = grad_ND[groups.token]
    grad_a = groups.product(grad_y, down_EDF)
    a, grad_h = _gated_backward(h, grad_a * weight)
    grad_weight = torch.zeros_like(expert_weight_Nk).view(-1)
    grad_weight[groups.slot] = (a * grad_a).sum(-1).to(grad_weight.dtype)
    grad_x = groups.combine(groups.product(grad_h, gate_up_EFD), expert_index_Nk.shape[1])
    if needs_weights:
        grad_gate_up = groups.outer(grad_h, x_ND[groups.token], gate_up_EFD)
        grad_down = groups.outer(grad_y.mul_(weight), a, down_EDF)
    else:
        grad_gate_up, grad_down = grad_ND.new_empty(0), grad_ND.new_empty(0)
    return grad_x, grad_gate_up, grad_down, grad_weight.view_as(expert_weight_Nk)


@_backward_op.register_fake
def _(
    grad_ND: Tensor,
    x_ND: Tensor,
    h: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    expert_index_Nk: Tensor,
    expert_weight_Nk: Tensor,
    needs_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    none = grad_ND.new_empty(0)
    grad_gate_up = torch.empty_like(gate_up_EFD) if needs_weights else none
    grad_down = torch.empty_like(down_EDF) if needs_weights else none
    return torch.empty_like(x_ND), grad_gate_up, grad_down, torch.empty_like(expert_weight_Nk)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x_ND, gate_up_EFD, down_EDF, expert_index_Nk, expert_weight_Nk = inputs
    ctx.save_for_backward(x_ND, output[1], gate_up_EFD, down_EDF, expert_index_Nk, expert_weight_Nk)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_ND: Tensor, grad_h: Tensor | None) -> tuple[Tensor | None, ...]:
    x_ND, h, gate_up_EFD, down_EDF, expert_index_Nk, expert_weight_Nk = ctx.saved_tensors
    needs_weights = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    grad_x, grad_gate_up, grad_down, grad_weight = _backward_op(
        grad_ND.contiguous(), x_ND, h, gate_up_EFD, down_EDF, expert_index_Nk, expert_weight_Nk, needs_weights
    )
    return (
        grad_x,
        grad_gate_up if ctx.needs_input_grad[1] else None,
        grad_down if ctx.needs_input_grad[2] else None,
        None,
        grad_weight,
    )


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def _dense(x_ND: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, index_Nk: Tensor, weight_Nk: Tensor) -> Tensor:
    """Every expert on every token, weighted by the (mostly zero) routing matrix."""
    E, N = gate_up_EFD.shape[0], x_ND.shape[0]
    routing = weight_Nk.new_zeros(N, E + 1).scatter_(1, index_Nk, weight_Nk)[:, :E]
    h = torch.matmul(x_ND, gate_up_EFD.transpose(1, 2))
    y = torch.matmul(_gated(h), down_EDF.transpose(1, 2))
    return (y * routing.t()[:, :, None]).sum(0).to(x_ND.dtype)


def expert_mlp(
    x_ND: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    expert_index_Nk: Tensor,
    expert_weight_Nk: Tensor,
    activation: str = "gelu_tanh",
) -> Tensor:
    if activation != "gelu_tanh":
        raise NotImplementedError(f"expert_mlp: activation {activation!r}; gelu_tanh is what there is")
    if not torch.is_grad_enabled() and 3 * 2 * x_ND.shape[0] * down_EDF.numel() <= DENSE_FLOPS:
        return _dense(x_ND, gate_up_EFD, down_EDF, expert_index_Nk, expert_weight_Nk)
    return _forward_op(x_ND, gate_up_EFD, down_EDF, expert_index_Nk, expert_weight_Nk)[0]
