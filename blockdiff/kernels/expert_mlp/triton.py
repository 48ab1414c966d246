"""expert_mlp in Triton: launchers as registered ops, their gradient, and the public functions.

Forward: sort, gate_up with the activation, down with the routing weight, sum over each token's slots. No step waits for
the host and no launch depends on the routing, so a CUDA graph can capture it. For a backward only the rows' gate and up
are saved, and x if gate_up trains; the activation is recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast, is_on
from blockdiff.kernels.expert_mlp import Slots, kernels
from blockdiff.kernels.expert_mlp import kernels_backward as backward
from blockdiff.kernels.expert_mlp import kernels_slots as slot_kernels
from blockdiff.kernels.expert_mlp.activations import ACTIVATIONS, activation_named
from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.launch import (
    Launch,
    Unserved,
    cached_by_sizes,
    check_dtypes,
    check_without_gradient,
    empty,
    empty_gradients,
    launch,
    only_needed,
    registered,
)
from blockdiff.kernels.nvfp4 import Nvfp4
from blockdiff.kernels.nvfp4.triton import check_nvfp4
from blockdiff.kernels.scratch import scratch
from blockdiff.kernels.stored import StoredMatrix
from blockdiff.kernels.tiles import LEAST, Tile, decodes_fp8, elementwise, power_of_2, precision_of, tile_for, tile_of

PART, LONGEST_CHUNK = 64, 1024  # slots that a sorting program reads at a time, and at most in total
FEW_SLOTS = 8192  # up to this many every sorting program counts all slots, which saves a launch
NO_MATRICES: tuple[None, ...] = (None, None, None, None)  # no low-rank matrices
NO_SCALES: tuple[None, ...] = (None, None, None, None)  # no scales of channels and blocks
PLAIN, IN_FP8, IN_NVFP4 = "", "_fp8", "_nvfp4"  # forms of weights, as suffixes of kernels in the table of tiles

# -- launchers -------------------------------------------------------------------------------------------------


class ExpertTiles(NamedTuple):
    """The tiles of every product. Rows belong to one expert, and all but `outer` have the same number of rows."""

    gate_up: Tile
    down: Tile
    activation: Tile
    grad_x: Tile
    outer: Tile


def tiles_for(x: Tensor, slots: int, experts: int, form: str = PLAIN) -> ExpertTiles:
    """Return the table's tiles for the mean number of slots of an expert and a form of weights."""
    back = PLAIN if form == IN_FP8 else form  # gradients through fp8 use the tiles of bf16
    names = f"gate_up{form}", f"down{form}", f"activation_backward{back}", f"grad_x{back}", "outer_product"
    return ExpertTiles(*(tile_of(f"expert_mlp_{name}", x, slots / max(1, experts)) for name in names))


class Plan(NamedTuple):
    """The sorted slots and the list of row tiles, int32: views of one tensor, of lengths that the host knows."""

    order: Tensor  # the slot of each row
    starts: Tensor  # the first row of each expert, and the end of the last
    tile_expert: Tensor  # of each row tile
    tile_row: Tensor  # the first row of each row tile


@cached_by_sizes
def plan_lengths(slots: int, experts: int, rows: int) -> tuple[int, ...]:
    """Return the lengths of a plan's four views, in multiples of 16 bytes: other alignments would be compiled anew.

    The number of row tiles is at most that of full tiles plus one incomplete tile for every expert with a row.
    """
    tiles = slots // rows + min(experts, slots)
    return tuple([-(-length // 4) * 4 for length in (slots, experts + 1, tiles, tiles)])


def _plan(x: Tensor, lengths: tuple[int, ...]) -> Plan:
    """Allocate a plan of these lengths on x's device, unfilled."""
    return Plan(*x.new_empty(sum(lengths), dtype=torch.int32).split_with_sizes(lengths))


def _sort(index: Tensor, experts: int, rows: int, plan: Plan) -> None:
    """Fill the plan by a counting sort; each program handles a part of the slots."""
    slots, counts = index.numel(), None
    count, sort, tiles, programs, chunk = _sorting_of(slots, experts, rows)
    if slots > FEW_SLOTS:
        counts = empty(plan.order, programs, count.constants["EXPERTS"])
        count(index, counts, slots, experts, chunk)
    sort(index, counts, plan, slots, experts, tiles, programs, rows, chunk)


@cached_by_sizes
def _sorting_of(slots: int, experts: int, rows: int) -> tuple[Launch, Launch, int, int, int]:
    """Return the launches that count and sort slots, the numbers of row tiles and programs, and slots per program."""
    chunk = min(LONGEST_CHUNK, max(PART, power_of_2(slots) // 128))
    sizes, programs = dict(PART=PART, EXPERTS=max(LEAST, power_of_2(experts))), -(-slots // chunk)
    count = Launch(slot_kernels.expert_mlp_count_slots, (programs,), **sizes)
    sort = Launch(slot_kernels.expert_mlp_sort_slots, (programs,), **sizes)
    return count, sort, plan_lengths(slots, experts, rows)[-1], programs, chunk


def _launch_rows(kernel: Any, plan: Plan, columns: int, tile: Tile, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel with a program for each row tile of the plan and each tile of the result's columns."""
    grid = (len(plan.tile_row) * tile.grid(1, columns)[1],)
    constants |= dict(PRECISION=precision_of(arguments[0].dtype))
    if kernel is not kernels.expert_mlp_narrow:
        constants |= dict(HARDWARE=arguments[2] is not None and decodes_fp8(arguments[0]))
    launch(kernel, grid, *arguments, plan, **constants, **tile.options)


def _outer(left: Any, right: Any, out_EMN: Tensor, plan: Plan, k: int, tile: Tile, by_token: str = "") -> None:
    """Fill `out` with left^T right of each expert's rows. by_token: "left" or "right" if that one is by token."""
    E, M, N = out_EMN.shape
    tile = tile.fitted(rows=M, columns=N)
    grid = (E * math.prod(tile.grid(M, N)),)
    constants = dict(M=M, N=N, TOP_K=k, LEFT_BY_TOKEN=by_token == "left", RIGHT_BY_TOKEN=by_token == "right")
    options = dict(PRECISION=precision_of(left.dtype), **tile.options)
    launch(backward.expert_mlp_outer_product, grid, left, right, out_EMN, plan, **constants, **options)


def _narrow(
    left: Tensor, matrices: Tensor, plan: Plan, k: int, tile: Tile, *, is_transposed: bool, by_token: bool = False
) -> Tensor:
    """Multiply left by a low-rank matrix of each row's expert, A [E, r, in] transposed or B [E, out, r]; [rows, r]."""
    E, rank, inner = matrices.shape if is_transposed else (matrices.shape[i] for i in (0, 2, 1))
    out = empty(left, len(plan.order), rank)
    strides = dict(WEIGHT_K=1, WEIGHT_N=inner) if is_transposed else dict(WEIGHT_K=rank, WEIGHT_N=1)
    tile, constants = tile.fitted(columns=rank, inner=inner), dict(E=E, K=inner, N=rank, TOP_K=k, **strides)
    arguments = left, matrices, out
    _launch_rows(kernels.expert_mlp_narrow, plan, rank, tile, *arguments, LEFT_BY_TOKEN=by_token, **constants)
    return out


def _sum_slots(y_SD: Tensor, index: Tensor, experts: int, out_ND: Tensor) -> None:
    (N, D), tile = out_ND.shape, elementwise(256)
    constants = dict(D=D, TOP_K=index.shape[1], **tile.options)
    launch(slot_kernels.expert_mlp_sum_slots, tile.grid(N, D), y_SD, index, out_ND, N, experts, **constants)


@registered("expert_mlp")
def _expert_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor, activation: str, keeps_h: bool,
    gate_up_A: Tensor | None, gate_up_B: Tensor | None, down_A: Tensor | None, down_B: Tensor | None,
    gate_up_scale: Tensor | None, down_scale: Tensor | None, gate_up_blocks: Tensor | None, down_blocks: Tensor | None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Return the output [N, D], gate and up by row [N * k, 2F] (no elements unless keeps_h), the memory of the plan."""
    slots, E = index.shape[0] * index.shape[1], gate_up.shape[0]
    out, h = empty(x), empty(x, slots if keeps_h else 0, gate_up.shape[1])
    scales = gate_up_scale, down_scale, gate_up_blocks, down_blocks
    tiles = tiles_for(x, slots, E, _form_of(scales))
    memory = empty(x, sum(plan_lengths(slots, E, tiles.down.rows)), dtype=torch.int32)
    yield out, h, memory
    index, y = index.contiguous(), empty(x, slots, x.shape[1])
    low_rank = gate_up_A, gate_up_B, down_A, down_B
    arguments = x, gate_up, down, index, weight, activation, low_rank, scales
    _fill_slots(*arguments, memory, h if keeps_h else None, y)
    _sum_slots(y, index, E, out)


@registered("expert_slots")
def _expert_slots(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor, activation: str,
    gate_up_A: Tensor | None, gate_up_B: Tensor | None, down_A: Tensor | None, down_B: Tensor | None,
    gate_up_scale: Tensor | None, down_scale: Tensor | None, gate_up_blocks: Tensor | None, down_blocks: Tensor | None,
) -> Iterator[Tensor]:  # fmt: skip
    """Return the weighted output of every slot, [N, k, D], before the sum; without gradient."""
    y = x.new_empty(*index.shape, x.shape[-1])
    yield y
    low_rank, scales = (gate_up_A, gate_up_B, down_A, down_B), (gate_up_scale, down_scale, gate_up_blocks, down_blocks)
    arguments = x, gate_up, down, index.contiguous(), weight, activation, low_rank, scales
    _fill_slots(*arguments, None, None, y)


def _fill_slots(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor, activation: str,
    low_rank: Sequence[Tensor | None], scales: Sequence[Tensor | None],
    memory: Tensor | None, h: Tensor | None, y: Tensor,
) -> None:  # fmt: skip
    """Sort the slots, and write the output of each slot to y, gate and up of each row to h, the plan to `memory`.

    h, memory: None if a backward does not need them.
    """
    (N, k), (E, F2, _), D = index.shape, gate_up.shape, x.shape[-1]
    slots, F, (gate_up_A, gate_up_B, down_A, down_B) = N * k, F2 // 2, low_rank
    gate_up_scale, down_scale, gate_up_blocks, down_blocks = scales
    x, gate_up, down, weight = x.contiguous(), gate_up.contiguous(), down.contiguous(), weight.contiguous()
    ranks = (0 if gate_up_A is None else gate_up_A.shape[1]), (0 if down_A is None else down_A.shape[1])
    form = PLAIN if gate_up_scale is None else _form_of(scales)  # skip a call on the host
    sizes = slots, k, E, D, F, ranks, activation
    hardware = form != PLAIN and decodes_fp8(x)
    tile, lengths, gate_up_launch, down_launch = _forward_of(*sizes, form, hardware, x.dtype, x.device)
    plan = scratch(_plan, x, lengths) if memory is None else Plan(*memory.split_with_sizes(lengths))
    _sort(index, E, tile.rows, plan)
    a, narrow = x.new_empty(slots, F), None
    if gate_up_A is not None:
        narrow = _narrow(x, gate_up_A, plan, k, tile, is_transposed=True, by_token=True)
    gate_up_launch(x, gate_up, gate_up_scale, gate_up_blocks, narrow, gate_up_B, h, a, plan)
    narrow = None if down_A is None else _narrow(a, down_A, plan, k, tile, is_transposed=True)
    down_launch(a, down, down_scale, down_blocks, narrow, down_B, weight, y, plan)


def _form_of(scales: Sequence[Tensor | None]) -> str:
    """Return the form of weights that have these scales of channels and of blocks."""
    return PLAIN if scales[0] is None else IN_FP8 if scales[2] is None else IN_NVFP4


@cached_by_sizes
def _forward_of(
    slots: int, k: int, E: int, D: int, F: int, ranks: tuple[int, int], activation: str,
    form: str, hardware: bool, dtype: torch.dtype, device: torch.device,
) -> tuple[Tile, tuple[int, ...], Launch, Launch]:  # fmt: skip
    """Return the tile that the plan is made for, the plan's lengths, and the launches of the two products."""

    def tile_in(name: str) -> Tile:
        return tile_for(f"expert_mlp_{name}{form}", dtype, device, slots / max(1, E))

    of_plan = tile_in("down")
    lengths, both = plan_lengths(slots, E, of_plan.rows), dict(E=E, HARDWARE=hardware, PRECISION=precision_of(dtype))
    of_gate_up, of_down = (tile_in(name).fitted(rows=of_plan.rows) for name in ("gate_up", "down"))
    tile = of_gate_up.fitted(columns=F, inner=D)
    constants = dict(D=D, F=F, R=ranks[0], ACTIVATION=activation, TOP_K=k, **both, **tile.options)
    gate_up = Launch(kernels.expert_mlp_gate_up, (lengths[-1] * tile.grid(1, F)[1],), **constants)
    tile = of_down.fitted(columns=D, inner=F)
    constants = dict(K=F, N=D, WEIGHT_K=1, WEIGHT_N=F, R=ranks[1], MATRIX_R=1, MATRIX_N=ranks[1], BY_K=False)
    constants |= both | tile.options
    down = Launch(kernels.expert_mlp_product, (lengths[-1] * tile.grid(1, D)[1],), **constants)
    return of_plan, lengths, gate_up, down


ExpertGradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@registered("expert_mlp_backward")
def _expert_mlp_backward(
    grad: Tensor, x: Tensor | None, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor,
    gate_up_A: Tensor | None, gate_up_B: Tensor | None, down_A: Tensor | None, down_B: Tensor | None,
    gate_up_scale: Tensor | None, down_scale: Tensor | None, gate_up_blocks: Tensor | None, down_blocks: Tensor | None,
    h: Tensor, memory: Tensor, activation: str, needs: Sequence[bool],
) -> Iterator[ExpertGradients]:  # fmt: skip
    """Return the gradients of x, gate_up, down, the routing weights and the four low-rank matrices.

    needs: which of them to compute; the others have no elements.
    """
    low_rank = [grad if matrix is None else matrix for matrix in (gate_up_A, gate_up_B, down_A, down_B)]
    grads = empty_gradients((grad, gate_up, down, weight, *low_rank), needs)
    yield tuple(grads)  # type: ignore[misc]
    grad_x, grad_gate_up, grad_down, grad_weight, *of_low_rank = only_needed(grads, needs)
    grad_gate_up_A, grad_gate_up_B, grad_down_A, grad_down_B = of_low_rank
    slots, k, D, (E, F2, _) = index.numel(), index.shape[1], grad.shape[1], gate_up.shape
    F = F2 // 2
    if not slots:
        for gradient in grads:
            gradient.zero_()
        return
    grad, gate_up, down, index, weight = (t.contiguous() for t in (grad, gate_up, down, index, weight))
    tiles = tiles_for(grad, slots, E, _form_of((gate_up_scale, down_scale, gate_up_blocks, down_blocks)))
    plan = Plan(*memory.split(plan_lengths(slots, E, tiles.down.rows)))
    tile = tiles.activation.fitted(columns=F, inner=D)
    passes_h = any(x is not None for x in (grad_x, grad_gate_up, grad_gate_up_A, grad_gate_up_B))
    grad_h = empty(grad, slots, 2 * F) if passes_h else None
    keeps_a = any(x is not None for x in (grad_down, grad_down_A, grad_down_B))
    scaled_a = empty(grad, slots, F) if keeps_a else None
    partial = None if grad_weight is None else empty(grad, slots, tile.grid(1, F)[1], dtype=torch.float32)
    R, narrow = 0, None
    if down_B is not None:
        R, narrow = down_B.shape[2], _narrow(grad, down_B, plan, k, tiles.down, is_transposed=False, by_token=True)
    tensors = (grad, down, down_scale, down_blocks, narrow, down_A, weight, h, grad_h, scaled_a, partial)
    constants = dict(E=E, D=D, F=F, R=R, TOP_K=k, ACTIVATION=activation)
    _launch_rows(backward.expert_mlp_activation_backward, plan, F, tile, *tensors, **constants)
    if grad_down_A is not None:
        _outer(narrow, scaled_a, grad_down_A, plan, k, tiles.outer)
    if grad_down_B is not None and down_A is not None and scaled_a is not None:
        narrow = _narrow(scaled_a, down_A, plan, k, tiles.down, is_transposed=True)
        _outer(grad, narrow, grad_down_B, plan, k, tiles.outer, by_token="left")
    if partial is not None:
        has_expert_Nk = (index >= 0) & (index < E)
        grad_weight.copy_(torch.where(has_expert_Nk, partial.sum(1).view_as(weight), 0.0))
    R, narrow = 0, None
    if gate_up_B is not None and grad_h is not None:
        R, narrow = gate_up_B.shape[2], _narrow(grad_h, gate_up_B, plan, k, tiles.down, is_transposed=False)
    if grad_x is not None:
        tile, grad_slots = tiles.grad_x.fitted(columns=D, inner=2 * F), empty(grad, slots, D)
        constants = dict(E=E, K=2 * F, N=D, WEIGHT_K=D, WEIGHT_N=1, R=R, MATRIX_R=D, MATRIX_N=1)
        of_product = (grad_h, gate_up, gate_up_scale, gate_up_blocks, narrow, gate_up_A, None, grad_slots)
        by_k = gate_up_scale is not None
        _launch_rows(kernels.expert_mlp_product, plan, D, tile, *of_product, **constants, BY_K=by_k)
        _sum_slots(grad_slots, index, E, grad_x)
    x = None if x is None else x.contiguous()
    if grad_gate_up is not None:
        _outer(grad_h, x, grad_gate_up, plan, k, tiles.outer, by_token="right")
    if grad_gate_up_A is not None:
        _outer(narrow, x, grad_gate_up_A, plan, k, tiles.outer, by_token="right")
    if grad_gate_up_B is not None and gate_up_A is not None and x is not None:
        narrow = _narrow(x, gate_up_A, plan, k, tiles.down, is_transposed=True, by_token=True)
        _outer(grad_h, narrow, grad_gate_up_B, plan, k, tiles.outer)
    if grad_down is not None:
        _outer(grad, scaled_a, grad_down, plan, k, tiles.outer, by_token="left")


# -- gradient --------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, gate_up, down, index, weight, ctx.activation, _, *low_rank = inputs
    ctx.set_materialize_grads(False)  # gate, up and the plan have no gradient
    keeps_x = any(ctx.needs_input_grad[i] for i in (1, 7, 8))
    ctx.save_for_backward(x if keeps_x else None, gate_up, down, index, weight, *low_rank, *output[1:])


def _gradients(ctx: Any, grad_ND: Tensor | None, _h: None, _plan: None) -> tuple[Any, ...]:
    if grad_ND is None:
        return (None,) * 15
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 4, 7, 8, 9, 10)]
    grads = _expert_mlp_backward(grad_ND, *ctx.saved_tensors, ctx.activation, needs)
    grad_x, grad_gate_up, grad_down, grad_weight, *of_low_rank = only_needed(grads, needs)
    return grad_x, grad_gate_up, grad_down, None, grad_weight, None, None, *of_low_rank, None, None, None, None


_expert_mlp.register_autograd(_gradients, setup_context=_save)


# -- the public functions: signature and meaning as in torch.py ------------------------------------------------


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

    For fp32, bf16 or fp16 and routing weights in any of these; Unserved for other dtypes.
    """
    check_activation(activation)
    x, gate_up, down, scales, low_rank = _inputs(x_ND, gate_up_EFD, down_EDF, low_rank)
    inputs = (x, gate_up, down, expert_weight_Nk, *low_rank)
    keeps_h = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    matrices: list[Tensor | None] = [t.contiguous() for t in low_rank] or [None, None, None, None]
    of_tokens = expert_index_Nk, expert_weight_Nk, activation, keeps_h
    return _expert_mlp(x, gate_up, down, *of_tokens, *matrices, *scales)[0]


def expert_slots(
    x: Tensor,
    gate_up_EFD: Tensor | StoredMatrix,
    down_EDF: Tensor | StoredMatrix,
    expert_index_Nk: Tensor,
    expert_weight_Nk: Tensor,
    activation: str = "gelu_tanh",
    low_rank: Sequence[Tensor] = (),
) -> Slots:
    """Return the weighted output of each expert of each token as `Slots`, not summed; arguments as in torch.py.

    Raises Unserved if a gradient is needed.
    """
    check_without_gradient("expert_slots", x)
    check_activation(activation)
    x, gate_up, down, scales, low_rank = _inputs(x, gate_up_EFD, down_EDF, low_rank)
    matrices = [t.contiguous() for t in low_rank] if low_rank else NO_MATRICES
    of_experts = x, gate_up, down, expert_index_Nk, expert_weight_Nk
    values = _expert_slots(*of_experts, activation, *matrices, *scales)
    return Slots(values, expert_index_Nk.contiguous(), down.shape[0])


def check_activation(name: str) -> None:
    """Raise Unserved for an activation without a Triton kernel, BlockdiffError for an unknown name."""
    if name not in ACTIVATIONS:
        activation_named(name)
        raise Unserved(f"{name} has no Triton kernel; among swiglu_oai only the parameters of gpt-oss have one")


def _inputs(x: Tensor, gate_up: Tensor | StoredMatrix, down: Tensor | StoredMatrix, low_rank: Sequence[Tensor]) -> Any:
    """Return x, the matrices or their codes, their scales or None, and the low-rank matrices, cast to one dtype."""
    if isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        if is_on(x):
            x, gate_up, down, *low_rank = in_autocast(x, gate_up, down, *low_rank)
        check_dtypes("expert_mlp", x, gate_up, down, *low_rank)
        return x, gate_up, down, NO_SCALES, low_rank
    (x,) = in_autocast(x)
    if isinstance(gate_up, Fp8) and isinstance(down, Fp8):
        check_dtypes("expert_mlp", x)
        scales: Sequence[Tensor | None] = (gate_up.scale, down.scale, None, None)
    elif isinstance(gate_up, Nvfp4) and isinstance(down, Nvfp4):
        check_nvfp4("expert_mlp", x)
        of_blocks = (matrix.block_scale.view(torch.int8).contiguous() for matrix in (gate_up, down))
        scales = (gate_up.scale, down.scale, *of_blocks)
    else:
        raise Unserved("expert_mlp in Triton takes both matrices in fp8, both in NVFP4, or neither in fewer bits")
    codes = (matrix.codes.view(torch.int8) for matrix in (gate_up, down))
    return x, *codes, scales, [matrix.to(x.dtype) for matrix in low_rank]
