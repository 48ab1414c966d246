"""Compositions in one launch, without gradient, against the ops they are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from blockdiff.kernels import IN_TORCH, Kernels, launch, resolve
from blockdiff.kernels.expert_mlp import Slots
from blockdiff.kernels.heads import HeadNorms
from blockdiff.kernels.launch import Unserved
from blockdiff.kernels.routing import triton as routing
from blockdiff.kernels.span_attention.paged import BlockTable, PagedTensor
from blockdiff.layers.norm import CastRMSNorm, RMSNorm, ZeroCentredRMSNorm
from blockdiff.layers.rope import angles, default_frequencies

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS, FP32 = 1e-6, 1e-5  # relative


@pytest.fixture(scope="module")
def in_triton() -> Kernels:
    return resolve("triton")


@pytest.fixture(autouse=True)
def _no_gradient() -> Iterator[None]:
    with torch.no_grad():
        yield


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_close(got: Any, truth: Any) -> None:
    for a, b in zip(got, truth, strict=True):
        assert a.shape == b.shape
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert error < FP32, float(error)


class OwnNorm(RMSNorm):
    """A norm of which the kernel knows nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def norms_of(norm: type[RMSNorm] | None, d: int, kernels: Kernels, norms_values: bool = False) -> HeadNorms:
    """Norms of queries and of keys with weights that count."""
    if norm is None:
        return HeadNorms(d, None, None, norms_values, EPS)
    made = norm(d, EPS, kernels), norm(d, EPS, kernels)
    for n, each in enumerate(made):
        each.weight = torch.nn.Parameter(draw(d, seed=5 + n))
    return HeadNorms(d, *made, norms_values, EPS)


def drawn_heads(h: int, K: int, d: int, layout: str = "own", r: int = 0) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Queries, keys and values of 2 rows of 5 tokens; and RoPE of their first r numbers (0: all)."""
    B, T = 2, 5
    if layout == "sliced":
        parts = draw(B, T, (h + 2 * K) * d).split([h * d, K * d, K * d], -1)
        q, k, v = (x.view(B, T, -1, d) for x in parts)
    else:
        q, k, v = (draw(B, T, heads, d, seed=n) for n, heads in enumerate((h, K, K)))
        v = k if layout == "shared" else v
    cos, sin = angles(torch.arange(T).expand(B, T) + 3, default_frequencies(r or d, 1e4), torch.float32)
    return [q, k, v], (cos.to(DEVICE), sin.to(DEVICE))


@pytest.mark.parametrize(("h", "K", "d"), [(4, 2, 16), (3, 1, 6), (8, 2, 32)])
@pytest.mark.parametrize("layout", ["own", "sliced", "shared"])
def test_heads_are_normed_and_turned_in_one(in_triton, h, K, d, layout):
    """Also as slices of one product, and where values are the raw keys."""
    tensors, rope = drawn_heads(h, K, d, layout)
    got, truth = (
        kernels.attention_heads(*tensors, norms_of(RMSNorm, d, kernels, True), rope)
        for kernels in (in_triton, IN_TORCH)
    )
    assert_close(got, truth)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched, in their order."""
    names: list[str] = []
    start = launch.Launch.__call__

    def noted(self: Any, *arguments: Any) -> None:
        names.append(self.kernel.__name__)
        start(self, *arguments)

    monkeypatch.setattr(launch.Launch, "__call__", noted)
    return names


@pytest.mark.parametrize("norm", [None, CastRMSNorm, ZeroCentredRMSNorm, OwnNorm])
@pytest.mark.parametrize(("d", "r"), [(16, 16), (16, 8), (24, 6)])
@pytest.mark.parametrize("has_values", [True, False])
def test_heads_of_every_family_are_one_launch(in_triton, norm, d, r, has_values, launched):
    """Norms in all forms or none, part of a head turned, values as they are or none; but not a norm of one's own."""
    (q, k, v), rope = drawn_heads(4, 2, d, r=r)
    found = []
    for kernels in (in_triton, IN_TORCH):
        out = kernels.attention_heads(q, k, v if has_values else None, norms_of(norm, d, kernels), rope)
        assert (out[2] is None) is not has_values
        found.append([x for x in out if x is not None])
    assert_close(*found)
    assert (launched == ["attention_heads"]) is (norm is not OwnNorm) and "attention_heads" not in launched[1:]


def paged(pool: Tensor, pages: list[int], page_tokens: int) -> PagedTensor:
    """A prefix of two rows in pages of a pool, all of them full."""
    table = torch.tensor([pages, pages[::-1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.full((2,), len(pages) * page_tokens, dtype=torch.int32, device=DEVICE)
    return PagedTensor(pool, BlockTable(table, lengths, page_tokens))


@pytest.mark.parametrize("norm", [ZeroCentredRMSNorm, OwnNorm])
@pytest.mark.parametrize("layout", ["own", "shared", "no values"])
@pytest.mark.parametrize(("h", "K", "d", "r"), [(4, 2, 16, 16), (3, 1, 6, 6), (4, 2, 16, 8)])
def test_heads_are_written_into_their_pages_and_nowhere_else(in_triton, h, K, d, r, layout, norm):
    """As norm, RoPE and a copy to the tokens' places; tokens of padding share one place, which nobody reads."""
    B, P, (tensors, rope) = 2, 4, drawn_heads(h, K, d, layout, r)
    tensors = [*tensors[:2], None] if layout == "no values" else tensors
    places = torch.tensor([22, 23, 24, 25, 26, 9, 8, 10, 4, 4], device=DEVICE)  # 4: a page that padding spills to
    table = torch.zeros(B, 1, dtype=torch.int32, device=DEVICE)
    pages, count = BlockTable(table, table[:, 0], P, places), 1 if tensors[2] is None else 2
    pools = tuple(PagedTensor(torch.full((7, P, K, d), torch.nan, device=DEVICE), pages) for _ in range(count))
    norms_values = norm is ZeroCentredRMSNorm
    q, k, v = tensors
    out, *own = in_triton.attention_heads(q, k, v, norms_of(norm, d, in_triton, norms_values), rope, pools)
    truth, *whole = IN_TORCH.attention_heads(q, k, v, norms_of(norm, d, IN_TORCH, norms_values), rope)
    assert_close([out], [truth])
    rest = [n for n in range(7 * P) if n not in places.tolist()]
    for nothing, pool, all_of in zip(own, pools, whole, strict=False):
        assert nothing.shape == (B, 0, K, d)
        held = pool.pool_NPKd.flatten(0, 1)
        assert_close([held[places[places != 4]]], [all_of.flatten(0, 1)[places != 4]])
        assert held[rest].isnan().all()


def test_torch_knows_which_pages_are_written_to():
    (B, T, d), places = (1, 3, 16), torch.tensor([5, 6, 4])
    inputs = [draw(B, T, 2, d, seed=n) for n in range(3)], draw(d), draw(d), torch.zeros(2, B, T, d, device=DEVICE)
    pages = torch.zeros(2, 2, 4, 2, d, device=DEVICE)
    arguments = *inputs[0], *inputs[1:3], *inputs[3], EPS, "direct", True, *pages, places.to(DEVICE)
    op, checks = torch.ops.blockdiff.attention_heads_into, ("test_schema", "test_faketensor")
    torch.library.opcheck(op, arguments, test_utils=checks)
    written = [a.name for a in op.default._schema.arguments if a.alias_info is not None]
    assert written == ["k_pages", "v_pages"]


@pytest.mark.parametrize("D", [16, 44])
def test_a_residual_and_its_norms_are_one_op(in_triton, D):
    x, y, weight, w0, w1 = draw(2, 7, D), draw(2, 7, D, seed=1), *(draw(D, seed=n) for n in (2, 3, 4))
    for weights in ((w0,), (w0, w1, None)):
        assert_close(*(kernels.residual_norms(x, y, weight, weights, EPS) for kernels in (in_triton, IN_TORCH)))


@pytest.mark.parametrize("D", [16, 44])
@pytest.mark.parametrize("scalar", [None, 1, 7])
def test_the_end_of_a_layer_is_one_op(in_triton, D, scalar):
    x, dense, weights = draw(1, 7, D), draw(1, 7, D, seed=1), tuple(draw(D, seed=n) for n in (2, 3, 4))
    scalars = None if scalar is None else draw(*((1,) if scalar == 1 else (1, 7, 1)), seed=9)
    routed = draw(7, D, seed=5)
    slots = Slots(routed.unsqueeze(1), None, 0)
    truth = IN_TORCH.layer_end(x, dense, slots, weights, EPS, scalars)
    assert_close([in_triton.layer_end(x, dense, slots, weights, EPS, scalars)], [truth])
    values, index = draw(7, 3, D, seed=6), torch.arange(21, device=DEVICE).view(7, 3) % 5
    values[index == 4] = torch.nan  # slots of no expert may hold anything
    summed = Slots(values.nan_to_num(0.0).sum(1, keepdim=True), None, 0)
    truth = IN_TORCH.layer_end(x, dense, summed, weights, EPS, scalars)
    assert_close([in_triton.layer_end(x, dense, Slots(values, index, 4), weights, EPS, scalars)], [truth])


@pytest.mark.parametrize(("N", "E", "k", "D"), [(5, 8, 2, 16), (19, 6, 3, 200), (33, 16, 8, 136)])
def test_tokens_are_routed_in_one(in_triton, N, E, k, D):
    x, scale, weight, expert_scale = draw(N, D), draw(D, seed=1), draw(E, D, seed=2), draw(E, seed=3).abs() + 0.5
    (index, of_expert), (truth, of_truth) = (
        kernels.routed_tokens(x, scale, D**-0.5, weight, expert_scale, k) for kernels in (in_triton, IN_TORCH)
    )
    assert torch.equal(index, truth) and index.dtype == torch.int64
    assert_close([of_expert], [of_truth])


@torch.enable_grad()
@pytest.mark.parametrize(("N", "E", "k", "D"), [(5, 8, 2, 16), (19, 6, 3, 200), (33, 16, 8, 136)])
def test_routed_tokens_have_the_gradient_of_single_operations_and_a_router_that_trains_is_left_to_these(N, E, k, D):
    router = draw(D, seed=1), draw(E, D, seed=2), draw(E, seed=3)
    router[2][0] = 0.0
    served = Kernels("triton", routed_tokens=routing.routed_tokens)  # strictly
    found = []
    for kernels in (served, IN_TORCH):
        x = draw(N, D).requires_grad_()
        _, of_expert = kernels.routed_tokens(x, router[0], D**-0.5, *router[1:], k)
        (of_expert * draw(N, k, seed=5)).sum().backward()
        found.append(x.grad)
    assert_close([found[0]], [found[1]])
    router[1].requires_grad_()
    with pytest.raises(Unserved, match="tokens alone"):
        routing.routed_tokens(x, router[0], D**-0.5, *router[1:], k)


def test_a_launch_that_is_too_large_leaves_the_call_to_the_single_ops_with_one_warning(monkeypatch):
    """Compositions too, which are silent about all else."""

    class TooLargeKernel:
        __name__ = "router_scores"

        def __getitem__(self, grid: Any) -> Any:
            def refuse(*arguments: Any, **constants: Any) -> None:
                raise OutOfResources(274_432, 232_448, "shared memory")

            return refuse

    monkeypatch.setattr(routing.kernels, "router_scores", TooLargeKernel())
    launch.forget_sizes()
    inputs = draw(5, 16), draw(16), 0.25, draw(6, 16, seed=1), torch.ones(6, device=DEVICE), 2
    sets = resolve("triton"), Kernels("shapes")
    with pytest.warns(UserWarning, match="router_scores needs 274,432 of shared memory, and.* 232,448$") as said:
        outs = [kernels.routed_tokens(*inputs) for kernels in sets for _ in range(3)]
    launch.forget_sizes()
    assert len(said) == 2  # of each set of ops
    assert all(torch.equal(index, IN_TORCH.routed_tokens(*inputs)[0]) for index, _ in outs)


def test_equal_scores_choose_every_expert_once_and_not_finite_ones_an_expert_that_is_there(in_triton):
    x = torch.zeros(3, 16, device=DEVICE)
    x[2] = torch.nan
    index, weight = in_triton.routed_tokens(x, draw(16), 0.25, draw(6, 16), torch.ones(6, device=DEVICE), 4)
    assert index[:2].tolist() == [[0, 1, 2, 3]] * 2 and (index < 6).all() and (index >= 0).all()
    assert torch.equal(weight[:2], torch.full((2, 4), 0.25, device=DEVICE))


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu", "swiglu_oai"])
@pytest.mark.parametrize(("N", "D", "F"), [(5, 16, 12), (70, 48, 80), (17, 20, 65)])
def test_a_gated_product_is_one_op(in_triton, activation, N, D, F):
    x, gate, up = draw(1, N, D), draw(F, D, seed=1), draw(F, D, seed=2)
    assert_close(*([kernels.gated_linear(x, gate, up, activation)] for kernels in (in_triton, IN_TORCH)))


@pytest.mark.parametrize("few", [True, False])
def test_slots_are_sorted_the_same_in_one_launch_and_in_two(in_triton, few, monkeypatch):
    from blockdiff.kernels.expert_mlp import triton as experts

    monkeypatch.setattr(experts, "FEW_SLOTS", 8192 if few else 0)
    N, E, k, D, F = 50, 7, 3, 16, 12
    index = torch.rand(N, E + 1, generator=torch.Generator().manual_seed(1)).topk(k).indices.to(DEVICE)  # E: none
    tensors = draw(N, D), draw(E, 2 * F, D, seed=1), draw(E, D, F, seed=2), index, draw(N, k, seed=3)
    assert_close([in_triton.expert_mlp(*tensors)], [IN_TORCH.expert_mlp(*tensors)])
    slots = in_triton.expert_slots(*tensors)
    values = slots.values_NkD.masked_fill((index == E)[..., None], 0.0)
    assert_close([values.sum(1)], [IN_TORCH.expert_mlp(*tensors)])


def test_single_ops_run_where_a_gradient_is_needed(in_triton, monkeypatch):
    monkeypatch.setattr(launch, "launch", None)
    x, weight = draw(2, 3, 16), draw(16).requires_grad_()
    with torch.enable_grad():
        out, *_ = in_triton.residual_norms(x, x, weight, (weight,), EPS)
        out.sum().backward()
    assert weight.grad is not None
