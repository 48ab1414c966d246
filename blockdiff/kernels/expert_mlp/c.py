"""Routed experts by the C functions in expert_mlp.c, for fp32 on a CPU.

The routing weight of a row is multiplied into its activation, so that neither the sum over a token's experts nor the
gradients of the matrices need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.c_library import call, serves_products
from blockdiff.kernels.expert_mlp import torch as in_torch
from blockdiff.kernels.launch import Unserved
from blockdiff.kernels.nvfp4 import Nvfp4
from blockdiff.kernels.nvfp4 import c as nvfp4
from blockdiff.kernels.once_differentiable import once_differentiable
from blockdiff.kernels.stored import Decoded, StoredMatrix

STEP = 16  # products.c multiplies matrices whose sides are multiples of it
KINDS = {"gelu_tanh": 0, "silu": 1}  # the activations that expert_mlp.c implements


class _Groups(in_torch._Groups):
    """The grouping of torch.py by one C call; rows are gathered and summed without a copy for each slot."""

    def __init__(self, expert_index_Nk: Tensor, experts: int):
        self.k, self.slots, self.has_expert_Nk = expert_index_Nk.shape[1], expert_index_Nk.numel(), None
        self.ends_E = torch.empty(experts, dtype=torch.int32)
        slot, token, self.place_Nk = torch.empty(3, *expert_index_Nk.shape, dtype=torch.int64).unbind(0)
        index = expert_index_Nk.contiguous()
        next_E = torch.empty(experts + 2, dtype=torch.int64)
        call("group_by_expert", index, self.slots, self.k, experts, next_E, self.ends_E, slot, token, self.place_Nk)
        self.rows = int(self.ends_E[-1])
        self.slot, self.token = slot.view(-1)[: self.rows], token.view(-1)[: self.rows]

    def gather(self, x_ND: Tensor) -> Tensor:
        """Return the token of each row, [M, D], sorted by expert."""
        out = x_ND.new_empty(self.rows, x_ND.shape[1])
        call("gather_tokens", x_ND, self.token, self.rows, x_ND.shape[1], out)
        return out

    def product(self, x_M: Tensor, weights_E: Any) -> Tensor:
        """Multiply each row of x by its expert's matrix [in, out], in one C call if its sides are multiples of STEP."""
        E, depth, wide = weights_E.shape
        if isinstance(weights_E, Decoded):
            return nvfp4.product(x_M, self.ends_E, weights_E.weight, weights_E.is_transposed)
        if depth % STEP or wide % STEP or 1 not in weights_E.stride()[1:]:
            return super().product(x_M, weights_E)
        out = x_M.new_empty(self.rows, wide)
        call("grouped_product", x_M, self.ends_E, E, depth, weights_E, *weights_E.stride(), wide, out)
        return out

    def outer(self, left_M: Tensor, right_M: Tensor, like: Tensor) -> Tensor:
        """Compute left^T right over the rows of each expert, [E, ...] like `like`: the gradient of its matrix."""
        E, wide, depth = like.shape
        if depth % STEP or wide % STEP:
            return super().outer(left_M, right_M, like)
        grad = torch.empty(like.shape, dtype=like.dtype)
        call("grouped_outer_product", left_M, right_M, self.ends_E, E, wide, depth, grad)
        return grad

    def sum_of_slots(self, y_M: Tensor) -> Tensor:
        """Return the sum over each token's k slots, in a fixed order."""
        N, D = self.place_Nk.shape[0], y_M.shape[1]
        out = y_M.new_empty(N, D)
        call("combine_slots", y_M, self.place_Nk, N, self.k, self.rows, D, out)
        return out


class _ExpertMLP(torch.autograd.Function):
    """Experts without stored activations: the backward recomputes them in the pass that computes their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        gate_up_EFD: Tensor | Decoded,
        down_EDF: Tensor | Decoded,
        index_Nk: Tensor,
        weight_Nk: Tensor,
        kind: int,
        gate_up_A: Tensor | None,
        gate_up_B: Tensor | None,
        down_A: Tensor | None,
        down_B: Tensor | None,
    ) -> Tensor:
        groups = _Groups(index_Nk, gate_up_EFD.shape[0])
        x = groups.gather(x_ND)
        h = groups.product(x, gate_up_EFD.transpose(1, 2))
        between_h = groups.add_low_rank(h, x, gate_up_A, gate_up_B)
        del x
        weight_M = weight_Nk.reshape(-1).index_select(0, groups.slot)
        a = _gated_halves(h, weight_M, kind)
        y = groups.product(a, down_EDF.transpose(1, 2))
        between_y = groups.add_low_rank(y, a, down_A, down_B)
        ctx.groups, ctx.kind = groups, kind
        low_rank = (gate_up_A, gate_up_B, down_A, down_B, between_h, between_y)
        ctx.decoded = (gate_up_EFD, down_EDF) if isinstance(gate_up_EFD, Decoded) else None
        weights: Any = (gate_up_EFD, down_EDF) if ctx.decoded is None else (None, None)
        ctx.save_for_backward(x_ND, h, weight_M, *weights, *low_rank)
        return groups.sum_of_slots(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, h, weight_M, gate_up_EFD, down_EDF, *low_rank = ctx.saved_tensors
        gate_up_A, gate_up_B, down_A, down_B, between_h, between_y = low_rank
        if ctx.decoded is not None:
            gate_up_EFD, down_EDF = ctx.decoded
        groups: _Groups = ctx.groups
        grads: list[Tensor | None] = [None] * 10
        grad_y = groups.gather(grad_ND.contiguous())
        grad_a = groups.product(grad_y, down_EDF)
        grad_between_y = groups.add_low_rank(grad_a, grad_y, in_torch._transposed(down_B), in_torch._transposed(down_A))
        grad_h, rows, width = torch.empty_like(h), h.shape[0], grad_a.shape[1]
        of_weight_M, a = torch.empty_like(weight_M), grad_a  # each row overwrites its gradient
        (gate, up), (of_gate, of_up) = h.chunk(2, -1), grad_h.chunk(2, -1)
        line = (rows, width, 2 * width, weight_M, ctx.kind)
        call("gated_backward", grad_a, gate, up, *line, of_gate, of_up, 2 * width, of_weight_M, a)
        if ctx.needs_input_grad[2]:
            grads[2] = groups.outer(grad_y, a, down_EDF)
        if grad_between_y is not None:
            grads[8] = groups.outer(grad_between_y, a, down_A)
            grads[9] = groups.outer(grad_y, between_y, down_B)
        del grad_y, grad_a, a, grad_between_y
        grad_rows = groups.product(grad_h, gate_up_EFD) if ctx.needs_input_grad[0] else None
        grad_between_h = None if gate_up_B is None else groups.product(grad_h, gate_up_B)
        if grad_rows is not None:
            if grad_between_h is not None:
                grad_rows.add_(groups.product(grad_between_h, gate_up_A))
            grads[0] = groups.sum_of_slots(grad_rows)
            del grad_rows
        if ctx.needs_input_grad[1] or grad_between_h is not None:
            x = groups.gather(x_ND)
            if ctx.needs_input_grad[1]:
                grads[1] = groups.outer(grad_h, x, gate_up_EFD)
            if grad_between_h is not None:
                grads[6] = groups.outer(grad_between_h, x, gate_up_A)
                grads[7] = groups.outer(grad_h, between_h, gate_up_B)
        if ctx.needs_input_grad[4]:
            flat = weight_M.new_zeros(groups.slots).index_copy_(0, groups.slot, of_weight_M)
            grads[4] = flat.view_as(groups.place_Nk)
        return tuple(grads)


def _gated_halves(h: Tensor, weight_M: Tensor | None, kind: int) -> Tensor:
    """Compute f(gate) * up * weight of rows h [M, 2F] whose first half is the gate (weight None: 1)."""
    gate, up = h.chunk(2, -1)
    rows, width = h.shape[0], gate.shape[1]
    out = h.new_empty(rows, width)
    call("gated", gate, up, rows, width, 2 * width, weight_M, kind, out)
    return out


def _dense(
    x_ND: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    index_Nk: Tensor,
    weight_Nk: Tensor,
    kind: int,
    low_rank: Sequence[Tensor],
) -> Tensor:
    """Compute every expert on every token, weighted by the routing matrix, which is mostly zero."""
    E, N = gate_up_EFD.shape[0], x_ND.shape[0]
    routing_EN = weight_Nk.new_zeros(E + 1, N).scatter_(0, index_Nk.t(), weight_Nk.t())
    h = torch.matmul(x_ND, gate_up_EFD.transpose(1, 2))
    if low_rank:
        h.baddbmm_(torch.matmul(x_ND, low_rank[0].transpose(1, 2)), low_rank[1].transpose(1, 2))
    a = _gated_halves(h.view(E * N, -1), routing_EN, kind).view(E, N, -1)
    y = torch.bmm(a, down_EDF.transpose(1, 2))
    if low_rank:
        y.baddbmm_(torch.bmm(a, low_rank[2].transpose(1, 2)), low_rank[3].transpose(1, 2))
    return y.sum(0)


def expert_mlp(
    x_ND: Tensor,
    gate_up_EFD: Tensor | StoredMatrix,
    down_EDF: Tensor | StoredMatrix,
    expert_index_Nk: Tensor,
    expert_weight_Nk: Tensor,
    activation: str = "gelu_tanh",
    low_rank: Sequence[Tensor] = (),
) -> Tensor:
    """Return the weighted sum [N, D] of the MLPs of each token's experts; arguments as in torch.py.

    Raises Unserved unless tensors are fp32 on a CPU, and for weights stored in another form than NVFP4.
    """
    is_plain = isinstance(gate_up_EFD, Tensor) and isinstance(down_EDF, Tensor)
    if not is_plain and not (isinstance(gate_up_EFD, Nvfp4) and isinstance(down_EDF, Nvfp4)):
        raise Unserved("expert_mlp in C takes weights in NVFP4 or not stored in fewer bits")
    tensors = [x for x in (x_ND, gate_up_EFD, down_EDF, expert_weight_Nk, *low_rank) if isinstance(x, Tensor)]
    is_served = activation in KINDS and x_ND.shape[0] > 0 and expert_index_Nk.dtype is torch.int64
    if not is_served or not serves_products(*tensors):
        raise Unserved(f"expert_mlp in C takes fp32 tensors of a CPU, some tokens, and {' or '.join(KINDS)}")
    x_ND, kind = x_ND.contiguous(), KINDS[activation]
    gate_up: Any = gate_up_EFD
    down: Any = down_EDF
    if not is_plain:
        gate_up, down = Decoded(gate_up, x_ND.dtype), Decoded(down, x_ND.dtype)
    of_tokens = x_ND, gate_up, down, expert_index_Nk, expert_weight_Nk, kind
    if is_plain and not torch.is_grad_enabled() and 6 * x_ND.shape[0] * down.numel() <= in_torch.DENSE_FLOPS:
        return _dense(*of_tokens, low_rank)
    return _ExpertMLP.apply(*of_tokens, *(low_rank or (None,) * 4))
