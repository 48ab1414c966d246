"""expert_mlp in plain torch: tokens sorted by expert, one matrix product per expert, a hand-written backward.

If the weights are frozen, nothing that only their gradients need is saved. On a GPU the activation is recomputed in the
backward instead of saved, and if torch has a grouped product the host never waits. For a few tokens without gradient
all experts run densely, which takes a few launches instead of a few per expert.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.expert_mlp import Slots
from blockdiff.kernels.expert_mlp.activations import Activation, activation_named
from blockdiff.kernels.once_differentiable import once_differentiable
from blockdiff.kernels.op import Ops
from blockdiff.kernels.stored import Decoded, StoredMatrix

DENSE_FLOPS = 3e7  # up to this size dense products cost less than sorting and one launch per expert


def _has_grouped_mm(x_M: Tensor, weights_E: Tensor) -> bool:
    """Whether torch's grouped product supports these: rows of 16-byte multiples, fp32 on a CPU or bf16 anywhere."""
    if x_M.dtype != torch.bfloat16 and not (x_M.is_cpu and x_M.dtype == torch.float32):
        return False
    aligned = 16 // x_M.element_size()
    return x_M.shape[0] > 0 and all(size % aligned == 0 for size in weights_E.shape[1:])


def _trims(index_Nk: Tensor) -> bool:
    """Whether to cut off slots without an expert; that reads their number, which on a GPU blocks the host."""
    return index_Nk.is_cpu


class _Groups:
    """The N * k slots (choices of an expert) sorted by expert into M rows, slots without an expert last.

    Rows from ends_E[-1] on are cut off or undefined; `combine` and `to_slots` leave them out.
    """

    def __init__(self, expert_index_Nk: Tensor, experts: int):
        flat = expert_index_Nk.reshape(-1)
        self.k, self.slots = expert_index_Nk.shape[1], flat.numel()
        self.has_expert_Nk: Tensor | None = None
        row = torch.arange(self.slots, device=flat.device)
        if _trims(flat):
            order = flat.argsort(stable=True)
            self.ends_E = torch.bincount(flat, minlength=experts + 1)[:experts].cumsum(0).to(torch.int32)
            self.rows = int(self.ends_E[-1])
            if self.rows < self.slots:
                row.clamp_(max=self.rows)  # a row past the end, which combine leaves out
        else:
            chosen, order = flat.sort(stable=True)
            expert_E = torch.arange(experts, device=flat.device, dtype=flat.dtype)
            self.ends_E = torch.searchsorted(chosen, expert_E, right=True, out_int32=True)
            self.rows, self.has_expert_Nk = self.slots, expert_index_Nk < experts
        self.slot = order[: self.rows]
        self.token = torch.div(self.slot, self.k, rounding_mode="floor")
        self.place_Nk = torch.empty_like(order).scatter_(0, order, row).view_as(expert_index_Nk)

    def bounds(self) -> list[tuple[int, int, int]]:
        """List (expert, first row, end row) of every expert that has tokens."""
        ends = [0, *self.ends_E.tolist()]
        return [(e, lo, hi) for e, (lo, hi) in enumerate(itertools.pairwise(ends)) if lo < hi]

    def product(self, x_M: Tensor, weights_E: Tensor | Decoded) -> Tensor:
        """Multiply each row of x [M, in] by its expert's matrix [in, out]."""
        if isinstance(weights_E, Tensor) and _has_grouped_mm(x_M, weights_E):
            return F.grouped_mm(x_M, weights_E, offs=self.ends_E)
        out = x_M.new_empty(x_M.shape[0], weights_E.shape[2])
        for e, lo, hi in self.bounds():
            torch.mm(x_M[lo:hi], weights_E[e], out=out[lo:hi])
        return out

    def outer(self, left_M: Tensor, right_M: Tensor, like: Tensor) -> Tensor:
        """Compute left^T right over the rows of each expert, [E, ...] like `like`: the gradient of its matrix."""
        if self.has_expert_Nk is not None and _has_grouped_mm(left_M, like):
            return F.grouped_mm(left_M.t(), right_M, offs=self.ends_E)
        grad = torch.zeros_like(like)
        for e, lo, hi in self.bounds():
            torch.mm(left_M[lo:hi].t(), right_M[lo:hi], out=grad[e])
        return grad

    def add_low_rank(
        self, out_M: Tensor, x_M: Tensor, first_E: Tensor | None, second_E: Tensor | None
    ) -> Tensor | None:
        """Add B (A x) of each row's expert to `out_M`, and return A x [M, r] (None without matrices).

        first_E: A [E, r, in]; second_E: B [E, out, r].
        """
        if first_E is None or second_E is None:
            return None
        between_M = self.product(x_M, first_E.transpose(1, 2))
        out_M.add_(self.product(between_M, second_E.transpose(1, 2)))
        return between_M

    def combine(self, y_M: Tensor, weight_Nk: Tensor | None) -> Tensor:
        """Sum the rows of each token's k slots, weighted if weights are given, in a fixed order; [N, D]."""
        if self.rows < self.slots:
            y_M = F.pad(y_M, (0, 0, 0, 1))
        is_bag = y_M.is_cpu and y_M.dtype == torch.float32 and (weight_Nk is None or weight_Nk.dtype == y_M.dtype)
        if self.slots and is_bag and self.has_expert_Nk is None:
            return F.embedding_bag(self.place_Nk, y_M, mode="sum", per_sample_weights=weight_Nk)
        y_NkD = y_M.index_select(0, self.place_Nk.reshape(-1)).view(-1, self.k, y_M.shape[1])
        if weight_Nk is not None:
            y_NkD = y_NkD * weight_Nk[..., None]
        if self.has_expert_Nk is not None:
            y_NkD = torch.where(self.has_expert_Nk[..., None], y_NkD, 0.0)
        return y_NkD.sum(1)

    def to_slots(self, values_M: Tensor, like_Nk: Tensor) -> Tensor:
        """Scatter one number per row to slots [N, k], 0 for slots without an expert."""
        out_Nk = like_Nk.new_zeros(like_Nk.shape)  # contiguous, even if like_Nk is not
        out_Nk.view(-1)[self.slot] = values_M.to(out_Nk.dtype)
        return out_Nk if self.has_expert_Nk is None else torch.where(self.has_expert_Nk, out_Nk, 0.0)


class _ExpertMLP(torch.autograd.Function):
    """The sorted experts. With low-rank matrices only the rows' r numbers between A and B are saved in addition."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        gate_up_EFD: Tensor | Decoded,
        down_EDF: Tensor | Decoded,
        expert_index_Nk: Tensor,
        expert_weight_Nk: Tensor,
        activation: Activation,
        gate_up_A: Tensor | None,
        gate_up_B: Tensor | None,
        down_A: Tensor | None,
        down_B: Tensor | None,
    ) -> Tensor:
        groups = _Groups(expert_index_Nk, gate_up_EFD.shape[0])
        x_MD = x_ND.index_select(0, groups.token)
        h = groups.product(x_MD, gate_up_EFD.transpose(1, 2))
        between_h = groups.add_low_rank(h, x_MD, gate_up_A, gate_up_B)
        gate, up = h.chunk(2, -1)
        activated = activation.gate(gate)
        a = activated * activation.linear(up)
        y = groups.product(a, down_EDF.transpose(1, 2))
        between_y = groups.add_low_rank(y, a, down_A, down_B)
        ctx.groups, ctx.activation = groups, activation
        activations = (activated, a) if x_ND.is_cpu else (None, None)
        low_rank = (gate_up_A, gate_up_B, down_A, down_B, between_h, between_y)
        ctx.decoded = (gate_up_EFD, down_EDF) if isinstance(gate_up_EFD, Decoded) else None
        weights: Any = (gate_up_EFD, down_EDF) if ctx.decoded is None else (None, None)
        ctx.save_for_backward(x_ND, h, *activations, *weights, expert_weight_Nk, *low_rank)
        return groups.combine(y, expert_weight_Nk).to(x_ND.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, h, activated, a, gate_up_EFD, down_EDF, expert_weight_Nk, *low_rank = ctx.saved_tensors
        gate_up_A, gate_up_B, down_A, down_B, between_h, between_y = low_rank
        if ctx.decoded is not None:
            gate_up_EFD, down_EDF = ctx.decoded
        groups: _Groups = ctx.groups
        activation: Activation = ctx.activation
        gate, up = h.chunk(2, -1)
        linear = activation.linear(up)
        if activated is None:
            activated = activation.gate(gate)
            a = activated * linear
        grad_y = grad_ND.index_select(0, groups.token)
        weight_M1 = expert_weight_Nk.reshape(-1).index_select(0, groups.slot)[:, None].to(grad_y.dtype)
        grad_a = groups.product(grad_y, down_EDF)  # before the routing weight
        grad_between_y = groups.add_low_rank(grad_a, grad_y, _transposed(down_B), _transposed(down_A))
        grad_weight = None
        if ctx.needs_input_grad[4]:
            grad_weight = groups.to_slots((a * grad_a).sum(-1), expert_weight_Nk)
        grad_a.mul_(weight_M1)
        grad_h = torch.empty_like(h)
        grad_gate, grad_up = grad_h.chunk(2, -1)
        torch.mul(grad_a, activated, out=grad_up)
        if activation.up_backward is not None:
            grad_up.copy_(activation.up_backward(grad_up, up))
        grad_gate.copy_(activation.gate_backward(grad_a.mul_(linear), gate))
        grad_x = grad_gate_up = grad_down = None
        grads: list[Tensor | None] = [None] * 4
        if grad_between_y is not None:
            assert down_A is not None and down_B is not None and between_y is not None
            grads[2] = groups.outer(grad_between_y.mul_(weight_M1), a, down_A)
            grads[3] = groups.outer(grad_y * weight_M1, between_y, down_B)
        grad_rows = groups.product(grad_h, gate_up_EFD) if ctx.needs_input_grad[0] else None
        if gate_up_A is not None:
            assert gate_up_B is not None and between_h is not None
            grad_between_h = groups.product(grad_h, gate_up_B)
            if grad_rows is not None:
                grad_rows.add_(groups.product(grad_between_h, gate_up_A))
            grads[0] = groups.outer(grad_between_h, x_ND.index_select(0, groups.token), gate_up_A)
            grads[1] = groups.outer(grad_h, between_h, gate_up_B)
        if grad_rows is not None:
            grad_x = groups.combine(grad_rows, None)
        if ctx.needs_input_grad[1]:
            grad_gate_up = groups.outer(grad_h, x_ND.index_select(0, groups.token), gate_up_EFD)
        if ctx.needs_input_grad[2]:
            grad_down = groups.outer(grad_y.mul_(weight_M1), a, down_EDF)
        return grad_x, grad_gate_up, grad_down, None, grad_weight, None, *grads


def _transposed(matrices_E: Tensor | None) -> Tensor | None:
    return None if matrices_E is None else matrices_E.transpose(1, 2)


def _dense(
    x_ND: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    index_Nk: Tensor,
    weight_Nk: Tensor,
    activation: Activation,
    low_rank: Sequence[Tensor],
) -> Tensor:
    """Compute every expert on every token, weighted by the routing matrix, which is mostly zero."""
    E, N = gate_up_EFD.shape[0], x_ND.shape[0]
    routing = weight_Nk.new_zeros(N, E + 1).scatter_(1, index_Nk, weight_Nk)[:, :E]
    h = torch.matmul(x_ND, gate_up_EFD.transpose(1, 2))
    if low_rank:
        h.baddbmm_(torch.matmul(x_ND, low_rank[0].transpose(1, 2)), low_rank[1].transpose(1, 2))
    gate, up = h.chunk(2, -1)
    a = activation.gate(gate).mul_(activation.linear(up))
    y = torch.matmul(a, down_EDF.transpose(1, 2))
    if low_rank:
        y.baddbmm_(torch.bmm(a, low_rank[2].transpose(1, 2)), low_rank[3].transpose(1, 2))
    return (y * routing.t()[:, :, None]).sum(0).to(x_ND.dtype)


def expert_mlp(
    x_ND: Tensor,
    gate_up_EFD: Tensor | StoredMatrix,
    down_EDF: Tensor | StoredMatrix,
    expert_index_Nk: Tensor,
    expert_weight_Nk: Tensor,
    activation: str = "gelu_tanh",
    low_rank: Sequence[Tensor] = (),
) -> Tensor:
    """Compute `sum_k weight_k * down_e(f(gate_e x) * g(up_e x))`, e = index_k, for every token; [N, D] in x's dtype.

    x_ND: tokens. gate_up_EFD: [E, 2F, D], gate rows first. down_EDF: [E, D, F]. expert_index_Nk: int64; E means no
    expert, for padding, and contributes 0. expert_weight_Nk: routing weights. activation: "gelu_tanh", "silu" or
    "swiglu_oai" (activations.py). low_rank: (), or matrices whose B A is added to each expert's: A [E, r, D] and B
    [E, 2F, r] of gate_up, A [E, r', F] and B [E, D, r'] of down, including their scale factors.

    Stored matrices are frozen, and are decoded to x's dtype one expert at a time. Gradients flow to x, the routing
    weights, the low-rank matrices and the weights that require them; the order of their sums depends on the inputs
    alone. Raises BlockdiffError for an unknown activation.
    """
    gated = activation_named(activation)
    matrices: Sequence[Tensor | None]
    if not isinstance(gate_up_EFD, Tensor) or not isinstance(down_EDF, Tensor):
        assert not isinstance(gate_up_EFD, Tensor) and not isinstance(down_EDF, Tensor)
        (x_ND,) = in_autocast(x_ND)
        matrices = [matrix.to(x_ND.dtype) for matrix in low_rank] or (None,) * 4
        decoded = Decoded(gate_up_EFD, x_ND.dtype), Decoded(down_EDF, x_ND.dtype)
        return _ExpertMLP.apply(x_ND, *decoded, expert_index_Nk, expert_weight_Nk, gated, *matrices)
    x_ND, gate_up_EFD, down_EDF, *low_rank = in_autocast(x_ND, gate_up_EFD, down_EDF, *low_rank)
    if not torch.is_grad_enabled() and 6 * x_ND.shape[0] * down_EDF.numel() <= DENSE_FLOPS:
        return _dense(x_ND, gate_up_EFD, down_EDF, expert_index_Nk, expert_weight_Nk, gated, low_rank)
    matrices = low_rank or (None,) * 4
    return _ExpertMLP.apply(x_ND, gate_up_EFD, down_EDF, expert_index_Nk, expert_weight_Nk, gated, *matrices)


def expert_slots(
    ops: Ops,
    x: Tensor,
    gate_up_EFD: Tensor | StoredMatrix,
    down_EDF: Tensor | StoredMatrix,
    expert_index_Nk: Tensor,
    expert_weight_Nk: Tensor,
    activation: str = "gelu_tanh",
    low_rank: Sequence[Tensor] = (),
) -> Slots:
    """Return `expert_mlp` of tokens [..., D] as `Slots`; here they are already summed to one slot per token."""
    of_tokens = expert_index_Nk, expert_weight_Nk, activation, low_rank
    summed_ND = ops.expert_mlp(x.flatten(0, -2), gate_up_EFD, down_EDF, *of_tokens)
    return Slots(summed_ND.unsqueeze(1), None, 0)
