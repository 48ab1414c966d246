"""expert_mlp in Triton: launchers, the op for torch, its gradient, and the public function.

Forward: sort, gate_up with the activation, down with the routing weight, sum over each token's slots. No step waits
for the host and no launch depends on the routing, so a CUDA graph can hold it. For a backward only the rows' gate
and up are kept, and x where gate_up trains; the activation is computed again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from blockdiff.errors import BlockdiffError
from blockdiff.kernels.expert_mlp import triton_kernels
from blockdiff.kernels.expert_mlp.activations import activation_of
from blockdiff.kernels.expert_mlp.tiles import Tile, Tiles, tiles_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUM_TILE = dict(ROWS=8, COLUMNS=256, num_warps=4)
PART, LONGEST_CHUNK = 64, 1024  # slots that a sorting program looks at together, and in all


def expert_mlp(
    x_ND: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    expert_index_Nk: Tensor,
    expert_weight_Nk: Tensor,
    activation: str = "gelu_tanh",
) -> Tensor:
    """The public op (see `ExpertMLP` for shapes): fp32, bf16 or fp16, routing weights in any of them.

    Raises BlockdiffError for an unknown activation, and where x and the weights differ in dtype.
    """
    activation_of(activation)
    if torch.is_autocast_enabled(x_ND.device.type):
        dtype = torch.get_autocast_dtype(x_ND.device.type)
        x_ND, gate_up_EFD, down_EDF = x_ND.to(dtype), gate_up_EFD.to(dtype), down_EDF.to(dtype)
    dtypes = {x_ND.dtype, gate_up_EFD.dtype, down_EDF.dtype}
    if len(dtypes) > 1 or x_ND.dtype not in DTYPES:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise BlockdiffError(
            f"expert_mlp in Triton takes x, gate_up and down in one of float32, bfloat16, float16, not {names}; "
            'kernels="torch" takes float64 too'
        )
    tensors = x_ND, gate_up_EFD, down_EDF, expert_weight_Nk
    keeps_h = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return _expert_mlp(x_ND, gate_up_EFD, down_EDF, expert_index_Nk, expert_weight_Nk, activation, keeps_h)[0]


# -- launchers -------------------------------------------------------------------------------------------------


def _options(tile: Tile) -> dict[str, int]:
    return dict(
        ROWS=tile.rows, COLUMNS=tile.columns, INNER=tile.inner, num_warps=tile.warps, num_stages=tile.stages
    )


def _precision(x: Tensor) -> str:
    """fp32 products are made of three tf32 ones, as good as fp32 arithmetic; half precision ignores this."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


class _Plan:
    """The sorted slots and the list of row tiles: views of one int32 tensor, all of a size known to the host."""

    def __init__(self, plan: Tensor, slots: int, experts: int, tiles: Tiles):
        self.tiles, self.count = tiles, _tile_count(slots, experts, tiles)
        parts = plan.split([slots, experts + 1, self.count, self.count])
        self.order, self.starts, self.tile_expert, self.tile_row = parts
        self.of_rows = parts  # what a kernel over row tiles takes


def _tile_count(slots: int, experts: int, tiles: Tiles) -> int:
    """The most row tiles there can be: full ones, and one begun for every expert that has a row."""
    return slots // tiles.down.rows + min(experts, slots)


def _plan_size(slots: int, experts: int, tiles: Tiles) -> int:
    return slots + experts + 1 + 2 * _tile_count(slots, experts, tiles)


def _sort(index_Nk: Tensor, experts: int, tiles: Tiles) -> Tensor:
    slots, width = index_Nk.numel(), max(16, triton.next_power_of_2(experts))
    plan = torch.empty(_plan_size(slots, experts, tiles), dtype=torch.int32, device=index_Nk.device)
    chunk = min(LONGEST_CHUNK, max(PART, triton.next_power_of_2(slots) // 128))
    programs = triton.cdiv(slots, chunk)
    counts = torch.empty(programs, width, dtype=torch.int32, device=index_Nk.device)
    views, sizes = _Plan(plan, slots, experts, tiles), dict(CHUNK=chunk, PART=PART, EXPERTS=width, num_warps=4)
    triton_kernels.count_slots[programs,](index_Nk, counts, slots, experts, **sizes)
    triton_kernels.sort_slots[programs,](
        index_Nk, counts, *views.of_rows, slots, experts, views.count, programs, ROWS=tiles.down.rows, **sizes
    )
    return plan


def _sum_slots(y_SD: Tensor, index_Nk: Tensor, experts: int, out_ND: Tensor) -> None:
    N, D = out_ND.shape
    grid = triton.cdiv(N, SUM_TILE["ROWS"]), triton.cdiv(D, SUM_TILE["COLUMNS"])
    triton_kernels.sum_slots[grid](y_SD, index_Nk, out_ND, N, experts, D=D, TOP_K=index_Nk.shape[1], **SUM_TILE)


def _shape(down_EDF: Tensor) -> dict[str, int]:
    E, D, F = down_EDF.shape
    return dict(E=E, D=D, F=F)


@torch.library.custom_op("blockdiff::expert_mlp", mutates_args=())
def _expert_mlp(
    x_ND: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    index_Nk: Tensor,
    weight_Nk: Tensor,
    activation: str,
    keeps_h: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [N, D]; gate and up by row [N * k, 2F], without elements unless kept; the plan."""
    x, gate_up, down, index, weight = (t.contiguous() for t in (x_ND, gate_up_EFD, down_EDF, index_Nk, weight_Nk))
    slots, k, (E, D, F) = index.numel(), index.shape[1], down.shape
    tiles = tiles_of(slots, E, x.element_size())
    out, h = torch.empty_like(x), _new(x, slots if keeps_h else 0, 2 * F)
    if not slots:
        return out.zero_(), h, torch.zeros(_plan_size(0, E, tiles), dtype=torch.int32, device=x.device)
    plan = _sort(index, E, tiles)
    views, same = _Plan(plan, slots, E, tiles), dict(E=E, PRECISION=_precision(x))
    a, y = _new(x, slots, F), _new(x, slots, D)
    tile = tiles.gate_up.fitted(F, D)
    triton_kernels.gate_up[views.count * triton.cdiv(F, tile.columns),](
        x, gate_up, h, a, *views.of_rows, D=D, F=F, TOP_K=k, ACTIVATION=activation, KEEPS_H=keeps_h,
        **same, **_options(tile),
    )  # fmt: skip
    tile = tiles.down.fitted(D, F)
    triton_kernels.scattered_product[views.count * triton.cdiv(D, tile.columns),](
        a, down, weight, y, *views.of_rows, K=F, N=D, WEIGHT_K=1, WEIGHT_N=F, HAS_SCALE=True, **same, **_options(tile)
    )
    _sum_slots(y, index, E, out)
    return out, h, plan


@torch.library.custom_op("blockdiff::expert_mlp_backward", mutates_args=())
def _expert_mlp_backward(
    grad_ND: Tensor,
    x_ND: Tensor | None,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    index_Nk: Tensor,
    weight_Nk: Tensor,
    h: Tensor,
    plan: Tensor,
    activation: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, gate_up, down and the routing weights; needs: which (the others have no elements)."""
    grad, gate_up, down, index, weight = (
        t.contiguous() for t in (grad_ND, gate_up_EFD, down_EDF, index_Nk, weight_Nk)
    )
    grads = _gradients(grad, gate_up, down, weight, needs)
    grad_x, grad_gate_up, grad_down, grad_weight = grads
    slots, k, (E, D, F) = index.numel(), index.shape[1], down.shape
    if not slots or not any(needs):
        return grad_x.zero_(), grad_gate_up.zero_(), grad_down.zero_(), grad_weight.zero_()
    tiles = tiles_of(slots, E, grad.element_size())
    views, precision = _Plan(plan, slots, E, tiles), _precision(grad)
    needs_x, needs_gate_up, needs_down, needs_weight = needs
    needs_h = needs_x or needs_gate_up
    tile = tiles.activation.fitted(F, D)
    column_tiles = triton.cdiv(F, tile.columns)
    grad_h = _new(grad, slots if needs_h else 0, 2 * F)
    scaled_a = _new(grad, slots if needs_down else 0, F)
    partial = torch.empty(slots if needs_weight else 0, column_tiles, dtype=torch.float32, device=grad.device)
    triton_kernels.activation_gradient[views.count * column_tiles,](
        grad, down, weight, h, grad_h, scaled_a, partial, *views.of_rows, E=E, D=D, F=F, TOP_K=k,
        ACTIVATION=activation, NEEDS_H=needs_h, NEEDS_A=needs_down, NEEDS_SCALE=needs_weight, PRECISION=precision,
        **_options(tile),
    )  # fmt: skip
    if needs_weight:
        has_expert_Nk = (index >= 0) & (index < E)
        grad_weight.copy_(torch.where(has_expert_Nk, partial.sum(1).view_as(weight), 0.0))
    if needs_x:
        tile, grad_slots = tiles.grad_x.fitted(D, 2 * F), _new(grad, slots, D)
        triton_kernels.scattered_product[views.count * triton.cdiv(D, tile.columns),](
            grad_h, gate_up, weight, grad_slots, *views.of_rows, E=E, K=2 * F, N=D, WEIGHT_K=D, WEIGHT_N=1,
            HAS_SCALE=False, PRECISION=precision, **_options(tile),
        )  # fmt: skip
        _sum_slots(grad_slots, index, E, grad_x)
    if needs_gate_up:
        assert x_ND is not None
        _outer(grad_h, x_ND.contiguous(), grad_gate_up, views, k, False)
    if needs_down:
        _outer(grad, scaled_a, grad_down, views, k, True)
    return grads


def _outer(left: Tensor, right: Tensor, out_EMN: Tensor, plan: _Plan, k: int, left_by_token: bool) -> None:
    """Per expert left^T right, into all of `out`."""
    E, M, N = out_EMN.shape
    tile = plan.tiles.outer.fitted(N, plan.tiles.outer.inner)
    triton_kernels.outer_product[E * triton.cdiv(M, tile.rows) * triton.cdiv(N, tile.columns),](
        left, right, out_EMN, plan.order, plan.starts, M=M, N=N, TOP_K=k, LEFT_BY_TOKEN=left_by_token,
        PRECISION=_precision(left), **_options(tile),
    )  # fmt: skip


def _new(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(*shape, dtype=like.dtype, device=like.device)


def _gradients(
    grad: Tensor, gate_up: Tensor, down: Tensor, weight: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors for the gradients that are needed, without elements for the others."""
    tensors = zip((grad, gate_up, down, weight), needs, strict=True)
    grad_x, grad_gate_up, grad_down, grad_weight = (_new(t, *(t.shape if need else (0,))) for t, need in tensors)
    return grad_x, grad_gate_up, grad_down, grad_weight


@_expert_mlp.register_fake
def _expert_mlp_shapes(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor, activation: str, keeps_h: bool
) -> tuple[Tensor, Tensor, Tensor]:
    slots, (E, _, F) = index.shape[0] * index.shape[1], down.shape
    size = _plan_size(slots, E, tiles_of(slots, E, x.element_size()))
    plan = torch.empty(size, dtype=torch.int32, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), _new(x, slots if keeps_h else 0, 2 * F), plan


@_expert_mlp_backward.register_fake
def _expert_mlp_backward_shapes(
    grad: Tensor, x: Tensor | None, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor,
    h: Tensor, plan: Tensor, activation: str, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _gradients(grad, gate_up, down, weight, needs)


# -- autograd --------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, gate_up, down, index, weight, ctx.activation, _ = inputs
    _, h, plan = output
    ctx.set_materialize_grads(False)  # h and plan have none
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, gate_up, down, index, weight, h, plan)


def _backward(ctx: Any, grad_ND: Tensor | None, _h: None, _plan: None) -> tuple[Any, ...]:
    if grad_ND is None:
        return (None,) * 7
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 4)]
    grads = torch.ops.blockdiff.expert_mlp_backward(grad_ND, *ctx.saved_tensors, ctx.activation, needs)
    grad_x, grad_gate_up, grad_down, grad_weight = (
        grad if need else None for grad, need in zip(grads, needs, strict=True)
    )
    return grad_x, grad_gate_up, grad_down, None, grad_weight, None, None


_expert_mlp.register_autograd(_backward, setup_context=_save)
