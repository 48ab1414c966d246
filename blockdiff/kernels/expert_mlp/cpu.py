"""Routed experts, their routing and gated activations by the C functions of cpu.c for fp32 on a CPU; else natively.

A row of the routing weights is multiplied into the activation, so that neither the sum over a token's experts nor the
gradient of a matrix needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.c_library import BLOCKS, call, serves
from blockdiff.kernels.expert_mlp import native
from blockdiff.kernels.fp8 import Fp8

KINDS = {"gelu_tanh": 0, "silu": 1}  # the activations that cpu.c has


class _Groups(native._Groups):
    """The grouping of native.py, made by one call; rows are gathered and added up without a copy for each slot."""

    def __init__(self, expert_index_Nk: Tensor, experts: int):
        self.k, self.slots, self.has_expert_Nk = expert_index_Nk.shape[1], expert_index_Nk.numel(), None
        self.ends_E = torch.empty(experts, dtype=torch.int32)
        slot, self.place_Nk = torch.empty(2, *expert_index_Nk.shape, dtype=torch.int64).unbind(0)
        index = expert_index_Nk.contiguous()
        call("group_by_expert", index, self.slots, experts, self.ends_E, slot, self.place_Nk)
        self.ends = self.ends_E.tolist()
        self.rows = self.ends[-1]
        self.slot = slot.view(-1)[: self.rows]

    def gather(self, x_ND: Tensor) -> Tensor:
        """The rows of x that stand for the slots, expert by expert."""
        out = x_ND.new_empty(self.rows, x_ND.shape[1])
        call("gather_tokens", x_ND, self.slot, self.rows, self.k, x_ND.shape[1], out)
        return out

    def sum_of_slots(self, y_M: Tensor) -> Tensor:
        """The sum over each token's k slots, in a fixed order."""
        N, D = self.place_Nk.shape[0], y_M.shape[1]
        out = y_M.new_empty(N, D)
        call("combine_slots", y_M, self.place_Nk, N, self.k, self.rows, D, out)
        return out

    def outer(self, left_M: Tensor, right_M: Tensor, like: Tensor) -> Tensor:
        """Per expert left^T right: the gradient of its matrix."""
        grad, first = torch.empty_like(like), 0
        for e, end in enumerate(self.ends):
            if first < end:
                torch.mm(left_M[first:end].t(), right_M[first:end], out=grad[e])
            else:
                grad[e].zero_()
            first = end
        return grad


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, index_Nk: Tensor, weight_Nk: Tensor, kind: int
    ) -> Tensor:
        groups = _Groups(index_Nk, gate_up_EFD.shape[0])
        h = groups.product(groups.gather(x_ND), gate_up_EFD.transpose(1, 2))
        weight_M = weight_Nk.reshape(-1).index_select(0, groups.slot)
        a = _gated_halves(h, weight_M, kind)
        ctx.groups, ctx.kind = groups, kind
        ctx.save_for_backward(x_ND, h, a, weight_M, gate_up_EFD, down_EDF)
        return groups.sum_of_slots(groups.product(a, down_EDF.transpose(1, 2)))

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, h, a, weight_M, gate_up_EFD, down_EDF = ctx.saved_tensors
        groups: _Groups = ctx.groups
        grad_y = groups.gather(grad_ND.contiguous())
        grad_a = groups.product(grad_y, down_EDF)
        grad_h, rows, width = torch.empty_like(h), h.shape[0], a.shape[1]
        of_weight_M = torch.empty_like(weight_M)
        (gate, up), (of_gate, of_up) = h.chunk(2, -1), grad_h.chunk(2, -1)
        line = (rows, width, 2 * width, weight_M, ctx.kind)
        call("gated_backward", grad_a, gate, up, *line, of_gate, of_up, 2 * width, of_weight_M)
        grad_x = grad_gate_up = grad_down = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = groups.sum_of_slots(groups.product(grad_h, gate_up_EFD))
        if ctx.needs_input_grad[1]:
            grad_gate_up = groups.outer(grad_h, groups.gather(x_ND), gate_up_EFD)
        if ctx.needs_input_grad[2]:
            grad_down = groups.outer(grad_y, a, down_EDF)
        if ctx.needs_input_grad[4]:
            flat = weight_M.new_zeros(groups.slots).index_copy_(0, groups.slot, of_weight_M)
            grad_weight = flat.view_as(groups.place_Nk)
        return grad_x, grad_gate_up, grad_down, None, grad_weight, None


def _gated_halves(h: Tensor, weight_M: Tensor | None, kind: int) -> Tensor:
    """f(gate) * up * weight of rows [M, 2F] whose first half is the gate."""
    gate, up = h.chunk(2, -1)
    rows, width = h.shape[0], gate.shape[1]
    out = h.new_empty(rows, width)
    call("gated", gate, up, rows, width, 2 * width, weight_M, kind, out)
    return out


def _dense(
    x_ND: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, index_Nk: Tensor, weight_Nk: Tensor, kind: int
) -> Tensor:
    """Every expert on every token, weighted by the (mostly zero) routing matrix."""
    E, N = gate_up_EFD.shape[0], x_ND.shape[0]
    routing_EN = weight_Nk.new_zeros(E + 1, N).scatter_(0, index_Nk.t(), weight_Nk.t())
    h = torch.matmul(x_ND, gate_up_EFD.transpose(1, 2))
    a = _gated_halves(h.view(E * N, -1), routing_EN, kind)
    return torch.bmm(a.view(E, N, -1), down_EDF.transpose(1, 2)).sum(0)


def expert_mlp(
    x_ND: Tensor,
    gate_up_EFD: Tensor | Fp8,
    down_EDF: Tensor | Fp8,
    expert_index_Nk: Tensor,
    expert_weight_Nk: Tensor,
    activation: str = "gelu_tanh",
    low_rank: Sequence[Tensor] = (),
) -> Tensor:
    """See `native.expert_mlp`."""
    if isinstance(gate_up_EFD, Fp8) or isinstance(down_EDF, Fp8):
        of_tokens = expert_index_Nk, expert_weight_Nk, activation, low_rank
        return native.expert_mlp(x_ND, gate_up_EFD, down_EDF, *of_tokens)
    inputs = (x_ND, gate_up_EFD, down_EDF, expert_index_Nk, expert_weight_Nk)
    is_served = activation in KINDS and not low_rank and x_ND.shape[0] > 0
    if not is_served or torch.is_autocast_enabled("cpu") or not serves(x_ND, gate_up_EFD, down_EDF, expert_weight_Nk):
        return native.expert_mlp(*inputs, activation, low_rank)
    x_ND = x_ND.contiguous()
    if not torch.is_grad_enabled() and 6 * x_ND.shape[0] * down_EDF.numel() <= native.DENSE_FLOPS:
        return _dense(x_ND, *inputs[1:], KINDS[activation])
    return _ExpertMLP.apply(x_ND, *inputs[1:], KINDS[activation])


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: int) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return _gated(gate, up, kind)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        width, of_gate, of_up = gate.shape[-1], torch.empty_like(gate), torch.empty_like(up)
        line = (gate.numel() // max(width, 1), width, width, None, ctx.kind)
        call("gated_backward", grad.contiguous(), gate, up, *line, of_gate, of_up, width, None)
        return of_gate, of_up, None


def _gated(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    out, width = torch.empty_like(gate), gate.shape[-1]
    call("gated", gate, up, gate.numel() // max(width, 1), width, width, None, kind, out)
    return out


def gated(gate: Tensor, up: Tensor, activation: str = "gelu_tanh") -> Tensor:
    """See `native.gated`."""
    if activation not in KINDS or not serves(gate, up):
        return native.gated(gate, up, activation)
    gate, up = gate.contiguous(), up.contiguous()
    if torch.is_grad_enabled():
        return _Gated.apply(gate, up, KINDS[activation])
    return _gated(gate, up, KINDS[activation])


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_NE: Tensor, scale_E: Tensor, k: int) -> tuple[Tensor, Tensor]:
        index_Nk, share_Nk, weight_Nk = _route(scores_NE, scale_E, k)
        ctx.save_for_backward(index_Nk, share_Nk, scale_E)
        ctx.mark_non_differentiable(index_Nk)
        return index_Nk, weight_Nk

    @staticmethod
    def backward(ctx: Any, _: Any, grad_Nk: Tensor) -> tuple[Tensor | None, ...]:
        index_Nk, share_Nk, scale_E = ctx.saved_tensors
        (N, k), E = index_Nk.shape, scale_E.shape[0]
        of_scores, of_scale = share_Nk.new_empty(N, E), torch.empty_like(scale_E)
        partial = share_Nk.new_empty(BLOCKS, E)
        saved = (scale_E, index_Nk, share_Nk)
        call("route_backward", grad_Nk.contiguous(), N, E, k, *saved, partial, of_scores, of_scale)
        return of_scores, of_scale, None


def _route(scores_NE: Tensor, scale_E: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    N, E = scores_NE.shape
    index_Nk = torch.empty(N, k, dtype=torch.int64)
    share_Nk, weight_Nk = scores_NE.new_empty(2, N, k).unbind(0)
    call("route", scores_NE, N, E, k, scale_E, index_Nk, share_Nk, weight_Nk)
    return index_Nk, share_Nk, weight_Nk


def route(scores_NE: Tensor, scale_E: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `native.route`."""
    if not serves(scores_NE, scale_E):
        return native.route(scores_NE, scale_E, k)
    scores_NE = scores_NE.contiguous()
    if torch.is_grad_enabled():
        return _Route.apply(scores_NE, scale_E, k)
    index_Nk, _, weight_Nk = _route(scores_NE, scale_E, k)
    return index_Nk, weight_Nk
