"""expert_mlp in Triton against the reference in fp64, in the interpreter or on the GPU there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdiff.errors import BlockdiffError
from blockdiff.kernels.expert_mlp import torch as in_torch
from blockdiff.kernels.expert_mlp import triton as ours
from blockdiff.kernels.tiles import SHARED_MEMORY, table
from tests.oracles import expert_mlp as reference
from tests.support.closeness import relative_error
from tests.support.expert_choices import chosen

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = 3e-6  # relative
ALL = (True, True, True, True)  # x, gate_up, down and the routing weights


def case(N: int, E: int, k: int, D: int = 44, F: int = 20, choice: str = "random") -> tuple[list[Tensor], Tensor]:
    """x, gate_up, down and routing weights in fp32 on the CPU, and which experts; E among them means no expert."""
    g = torch.Generator().manual_seed(N + 10 * E + k)
    x, weight = torch.randn(N, D, generator=g), torch.rand(N, k, generator=g)
    gate_up = torch.randn(E, 2 * F, D, generator=g) * 2 / D**0.5
    down = torch.randn(E, D, F, generator=g) / F**0.5
    return [x, gate_up, down, weight], chosen(N, E, k, choice, g)


def run(op: Callable[..., Tensor], tensors: list[Tensor], index: Tensor, activation: str = "gelu_tanh") -> list[Any]:
    """The output, and the gradients (None where none is required) of a sum with arbitrary weights."""
    x, gate_up, down, weight = tensors
    out = op(x, gate_up, down, index.to(x.device), weight, activation)
    if out.requires_grad:
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        (out.double() * direction.to(out.device)).sum().backward()
    return [out, *(t.grad for t in tensors)]


def leaves(
    tensors: list[Tensor], dtype: torch.dtype, device: str = DEVICE, needs: tuple[bool, ...] = ALL
) -> list[Tensor]:
    return [t.detach().to(device, dtype).requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]


def compare(tensors: list[Tensor], index: Tensor, needs: tuple[bool, ...] = ALL, activation: str = "gelu_tanh") -> None:
    got = run(ours.expert_mlp, leaves(tensors, torch.float32, needs=needs), index, activation)
    truth = run(reference.expert_mlp, leaves(tensors, torch.float64, "cpu", needs), index, activation)
    for name, x, y in zip(("out", "x", "gate_up", "down", "weight"), got, truth, strict=True):
        assert (x is None) == (y is None), name
        assert x is None or (x.dtype == torch.float32 and relative_error(x, y) < FP32), name


# -- sorting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [8, 64])  # 8: many programs, each with a few parts, as many slots have them
@pytest.mark.parametrize("N,E,k,choice", [(550, 5, 2, "padding"), (70, 130, 3, "random")])
def test_slots_are_sorted_by_expert_and_cut_into_tiles_of_one_expert(N, E, k, choice, part, monkeypatch):
    monkeypatch.setattr(ours, "PART", part)
    (x, *_), index = case(N, E, k, choice=choice)
    rows, flat = ours.tiles_for(x, N * k, E).down.rows, index.flatten()
    lengths = ours.plan_lengths(N * k, E, rows)
    plan = ours.Plan(*torch.empty(sum(lengths), dtype=torch.int32, device=DEVICE).split(lengths))
    assert all(view.data_ptr() % 16 == 0 for view in plan)
    ours._sort(index.to(DEVICE), E, rows, plan)
    plan = ours.Plan(*(view.cpu() for view in plan))
    counts = torch.bincount(flat, minlength=E + 1)
    assert plan.starts[: E + 1].tolist() == [0, *counts[:E].cumsum(0).tolist()]
    assigned = int(plan.starts[E])
    assert torch.equal(plan.order[:assigned].long(), flat.argsort(stable=True)[:assigned])
    expected = [
        (e, row)
        for e in range(E)
        for row in range(int(plan.starts[e]), int(plan.starts[e + 1]), rows)
    ]  # fmt: skip
    listed = list(zip(plan.tile_expert.tolist(), plan.tile_row.tolist(), strict=True))
    assert listed[: len(expected)] == expected
    assert all(e == E for e, _ in listed[len(expected) :])


@pytest.mark.parametrize("rows", [32, 64, 128])
def test_the_list_of_tiles_is_long_enough_for_the_worst_routing(rows):
    for E, slots in [(1, 1), (3, 2), (8, 300), (128, 2048), (128, 1)]:
        used = min(E, slots)  # one row each, and all that is left to the first
        needed = used - 1 + -(-(slots - used + 1) // rows)
        assert needed <= ours.plan_lengths(slots, E, rows)[2]


def test_all_products_over_rows_share_their_row_tiles():
    in_nvfp4 = [f"{name}_nvfp4" for name in ("gate_up", "down", "activation_backward", "grad_x")]
    others = ["gate_up", "down", "gate_up_fp8", "down_fp8", "activation_backward", "grad_x"]
    for architecture, size, names in itertools.product(SHARED_MEMORY, (2, 4), (in_nvfp4, others)):
        lines = [table()[f"expert_mlp_{name}", architecture, size] for name in names]
        for same in zip(*lines, strict=True):
            assert len({(limit, tile.rows) for limit, tile in same}) == 1


# -- against the reference -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("N", [0, 1, 63, 257])
@pytest.mark.parametrize("E,k", [(1, 1), (8, 2)])
def test_outputs_and_gradients_match_the_reference(N, E, k):
    compare(*case(N, E, k))


def test_128_experts_of_which_a_token_takes_8():
    compare(*case(63, 128, 8, 20, 12), needs=(True, False, False, True))


@pytest.mark.quick
@pytest.mark.parametrize("D,F", [(16, 16), (64, 32), (70, 33), (33, 130), (128, 64)])
def test_sizes_that_are_and_are_not_multiples_of_a_tile(D, F):
    compare(*case(9, 2, 1, D, F))


@pytest.mark.parametrize("choice", ["one", "some empty", "none", "padding"])
@pytest.mark.parametrize("E,k", [(3, 1), (8, 2)])
def test_empty_experts_and_tokens_without_one(choice, E, k):
    tensors, index = case(37, E, k, choice=choice)
    compare(tensors, index)
    if choice in ("none", "padding"):
        without = (index == E).all(-1)
        out, grad_x, *_, grad_weight = run(ours.expert_mlp, leaves(tensors, torch.float32), index)
        assert without.any() and not out[without].any() and not grad_x[without].any() and not grad_weight[without].any()


@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=4) if any(n)])
def test_whatever_is_not_frozen_gets_its_gradient(needs):
    compare(*case(11, 3, 2, 20, 12, "padding"), needs=needs)


# -- low-rank matrices ---------------------------------------------------------------------------------------------


def with_low_rank(
    op: Callable[..., Tensor], tensors: list[Tensor], index: Tensor, rank: int, dtype: torch.dtype, device: str,
    needs: tuple[bool, ...],
) -> list[Any]:  # fmt: skip
    """The output and all gradients of an op with low-rank matrices."""
    x, gate_up, down, weight = leaves(tensors, dtype, device, needs)
    (E, D, F), g = down.shape, torch.Generator().manual_seed(rank)
    shapes = (E, rank, D), (E, 2 * F, rank), (E, rank, F), (E, D, rank)
    low_rank = [(torch.randn(*shape, generator=g) / rank).to(device, dtype).requires_grad_() for shape in shapes]
    out = op(x, gate_up, down, index.to(device), weight, "gelu_tanh", low_rank)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    (out.double() * direction.to(device)).sum().backward()
    return [out, *(t.grad for t in (x, gate_up, down, weight, *low_rank))]


@pytest.mark.quick
@pytest.mark.parametrize(
    "rank,choice,needs",
    [
        (1, "random", ALL),
        (8, "padding", ALL),
        (8, "padding", (True, False, False, True)),
        (8, "padding", (False, False, False, False)),
        (40, "some empty", ALL),
        (8, "none", ALL),
    ],
)
def test_low_rank_matrices_and_their_gradients_match_the_reference(rank, choice, needs):
    tensors, index = case(75, 4, 2, choice=choice)
    got = with_low_rank(ours.expert_mlp, tensors, index, rank, torch.float32, DEVICE, needs)
    truth = with_low_rank(reference.expert_mlp, tensors, index, rank, torch.float64, "cpu", needs)
    for x, y in zip(got, truth, strict=True):
        assert (x is None) == (y is None)
        assert x is None or relative_error(x, y) < 2 * FP32


@pytest.mark.gpu
def test_low_rank_matrices_in_bf16_are_about_as_close_to_fp64_as_torch_in_bf16():
    tensors, index = case(700, 8, 2, D=256, F=128)
    mine, theirs = (
        with_low_rank(op, tensors, index, 8, torch.bfloat16, DEVICE, ALL)
        for op in (ours.expert_mlp, in_torch.expert_mlp)
    )
    truth = with_low_rank(reference.expert_mlp, tensors, index, 8, torch.float64, "cpu", ALL)
    for x, y, true in zip(mine, theirs, truth, strict=True):
        assert relative_error(x, true) < 1.5 * relative_error(y, true) + 1e-3


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_other_activations(activation):
    (x, *rest), index = case(37, 3, 2, 20, 12)
    compare([x * 3, *rest], index, activation=activation)  # gates and ups on both sides of the clamps at 7
    gate, up = (x * 3 @ rest[0][0].T).chunk(2, -1)
    assert (gate > 7).any() and (up > 7).any() and (up < -7).any()


def test_activations_stay_finite_far_out():
    (x, *rest), index = case(9, 3, 2, 20, 12)
    for activation in ("gelu_tanh", "silu", "swiglu_oai"):
        for value in run(ours.expert_mlp, leaves([x * 1e4, *rest], torch.float32), index, activation):
            assert value.isfinite().all()


def test_nothing_beyond_the_end_of_an_input_is_used():
    tensors, index = case(9, 2, 1, 33, 20)

    def before_nans(t: Tensor) -> Tensor:
        return torch.cat([t.flatten(), torch.full((500,), float("nan"))])[: t.numel()].view_as(t)

    got = run(ours.expert_mlp, [before_nans(t).to(DEVICE).requires_grad_() for t in tensors], index)
    truth = run(ours.expert_mlp, leaves(tensors, torch.float32), index)
    assert all(torch.equal(a, b) for a, b in zip(got, truth, strict=True))


def test_any_layout_is_taken():
    tensors, index = case(37, 3, 2)
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors]
    index_strided = torch.stack([index, index], -1)[..., 0]
    assert not any(t.is_contiguous() for t in strided)
    got = run(ours.expert_mlp, leaves(strided, torch.float32), index_strided)
    truth = run(ours.expert_mlp, leaves(tensors, torch.float32), index)
    assert all(torch.equal(a, b) for a, b in zip(got, truth, strict=True))
    x, *rest = leaves(tensors, torch.float32)
    ours.expert_mlp(x, *rest[:2], index.to(DEVICE), rest[2]).sum().backward()  # an expanded gradient
    assert x.grad.isfinite().all()


def test_routing_weights_may_have_another_dtype():
    tensors, index = case(37, 3, 2)
    x, gate_up, down, weight = leaves(tensors, torch.float32)
    wide = weight.detach().double().requires_grad_()
    a = run(ours.expert_mlp, [x, gate_up, down, wide], index)
    b = run(ours.expert_mlp, leaves(tensors, torch.float32), index)
    assert a[0].dtype == torch.float32 and a[4].dtype == torch.float64
    assert all(relative_error(x, y) < FP32 for x, y in zip(a, b, strict=True))


def test_the_same_inputs_give_the_same_bits():
    tensors, index = case(63, 3, 2)
    first, second = (run(ours.expert_mlp, leaves(tensors, torch.float32), index) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# -- what is kept --------------------------------------------------------------------------------------------------


def saved_by(needs: tuple[bool, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """The inputs, and what a forward keeps for its backward."""
    tensors, index = case(37, 3, 2)
    inputs, saved = leaves(tensors, torch.float32, needs=needs), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours.expert_mlp(*inputs[:3], index.to(DEVICE), inputs[3])
    return inputs, saved


def test_frozen_experts_keep_nothing_that_only_their_gradient_needs():
    slots, F = 37 * 2, 20
    x, saved = saved_by((True, False, False, True))[0][0], saved_by((True, False, False, True))[1]
    assert not any(t.shape == x.shape for t in saved)
    assert sum(t.numel() for t in saved if t.shape[:1] == (slots,)) == slots * 2 * F  # gate and up, no more
    assert any(t.shape == x.shape for t in saved_by(ALL)[1])


def test_gate_and_up_are_stored_for_a_gradient_alone(monkeypatch):
    sizes, op = [], ours._expert_mlp
    monkeypatch.setattr(ours, "_expert_mlp", lambda *a: (outs := op(*a), sizes.append(outs[1].numel()))[0])
    tensors, index = case(37, 3, 2)
    for needs, with_grad in (((True, False, False, False), True), ((False,) * 4, True), (ALL, False)):
        x, gate_up, down, weight = leaves(tensors, torch.float32, needs=needs)
        with torch.set_grad_enabled(with_grad):
            ours.expert_mlp(x, gate_up, down, index.to(DEVICE), weight)
    assert sizes == [37 * 2 * 2 * 20, 0, 0]


# -- as torch sees it ----------------------------------------------------------------------------------------------


def test_torch_sees_one_sound_op():
    # all slots have an expert, and are a multiple of four: other rows of the plan hold anything
    tensors, index = case(10, 3, 2, 20, 12)
    x, gate_up, down, weight = leaves(tensors, torch.float32)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    shapes = (3, 4, 20), (3, 24, 4), (3, 4, 12), (3, 20, 4)
    low_rank = [torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in shapes]
    for matrices in ([None] * 4, low_rank):
        arguments = (x, gate_up, down, index.to(DEVICE), weight, "gelu_tanh", True, *matrices, *[None] * 4)
        torch.library.opcheck(torch.ops.blockdiff.expert_mlp, arguments, test_utils=checks)

    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(ours.expert_mlp, backend=backend, fullgraph=True)
    arguments = (x, gate_up, down, index.to(DEVICE), weight)
    assert torch.equal(compiled(*arguments), ours.expert_mlp(*arguments))
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("expert_mlp" in name for name in called) == 1 and len(graphs) == 1


def test_a_checkpointed_layer_recomputes_the_same_gradients():
    tensors, index = case(37, 3, 2)

    def checkpointed(*arguments: Any) -> Tensor:
        return torch.utils.checkpoint.checkpoint(ours.expert_mlp, *arguments, use_reentrant=False)

    got, truth = (run(op, leaves(tensors, torch.float32), index) for op in (checkpointed, ours.expert_mlp))
    assert all(torch.equal(a, b) for a, b in zip(got, truth, strict=True))


def test_what_the_kernels_cannot_take_is_refused_in_one_line():
    (x, gate_up, down, weight), index = case(3, 3, 2)
    with pytest.raises(BlockdiffError, match=r"'relu'.*gelu_tanh, silu, swiglu_oai"):
        ours.expert_mlp(x, gate_up, down, index, weight, "relu")
    with pytest.raises(BlockdiffError, match="bfloat16, float32"):
        ours.expert_mlp(x.bfloat16(), gate_up, down, index, weight)
    with pytest.raises(BlockdiffError, match=r'float64.*kernels="torch"'):
        ours.expert_mlp(x.double(), gate_up.double(), down.double(), index, weight)


# -- on a GPU, in the model's dtype --------------------------------------------------------------------------------


def half(tensors: list[Tensor]) -> list[Tensor]:
    """x and the experts rounded to bf16 (routing weights stay): all sides read the same numbers."""
    return [*(t.bfloat16().float() for t in tensors[:3]), tensors[3]]


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["gelu_tanh", "silu", "swiglu_oai"])
@pytest.mark.parametrize("N,E,k,choice", [(63, 8, 2, "padding"), (700, 8, 2, "random"), (2500, 8, 4, "some empty")])
def test_bf16_is_about_as_close_to_fp64_as_torch_in_bf16(N, E, k, choice, activation):
    """Both round x W, the activation and each expert's output once; ours sums in fp32, so 1.25 is for luck alone."""
    tensors, index = case(N, E, k, 704, 176, choice)
    tensors = half(tensors)

    def of(op: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        *wide, weight = leaves(tensors, dtype, "cuda")
        weight = weight if dtype == torch.float64 else weight.detach().float().requires_grad_()
        return run(op, [*wide, weight], index, activation)

    truth = of(reference.expert_mlp, torch.float64)
    mine, torchs = of(ours.expert_mlp, torch.bfloat16), of(in_torch.expert_mlp, torch.bfloat16)
    for x, y, exact in zip(mine, torchs, truth, strict=True):
        assert x.isfinite().all() and relative_error(x, exact) <= 1.25 * relative_error(y, exact) + 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("N", [300, 2500])
def test_fp32_on_the_gpu_is_fp32(N):
    compare(*case(N, 8, 2, 96, 64, "padding"))


@pytest.mark.gpu
@pytest.mark.parametrize("op", [ours.expert_mlp, in_torch.expert_mlp])
def test_neither_direction_waits_for_the_gpu(op):
    tensors, index = case(300, 8, 2, 96, 64, "padding")
    (x, gate_up, down, weight), index = leaves(half(tensors), torch.bfloat16, "cuda"), index.cuda()
    grad = torch.ones_like(x)
    op(x, gate_up, down, index, weight).backward(grad)  # kernels are loaded once, which waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(x, gate_up, down, index, weight).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_graph_replays_with_other_tokens_and_another_routing():
    tensors, index = case(300, 8, 2, 96, 64)
    x, gate_up, down, weight = leaves(tensors, torch.float32, "cuda", (False,) * 4)
    index = index.cuda()
    ours.expert_mlp(x, gate_up, down, index, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours.expert_mlp(x, gate_up, down, index, weight)
    for choice in ("padding", "one", "none"):
        (other, _, _, _), other_index = case(300, 8, 2, 96, 64, choice)
        x.copy_(other)
        index.copy_(other_index)
        graph.replay()
        assert torch.equal(out, ours.expert_mlp(x, gate_up, down, index, weight))


@pytest.mark.gpu
def test_the_same_inputs_give_the_same_bits_on_the_gpu():
    tensors, index = case(2500, 8, 4, 704, 176)
    first, second = (run(ours.expert_mlp, leaves(tensors, torch.bfloat16, "cuda"), index) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
