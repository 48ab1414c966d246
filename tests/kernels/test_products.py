"""The fp32 products of many small matrices in C: exact at every edge, and the same bits whatever the threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockdiff.kernels.c_library import call, library
from blockdiff.kernels.expert_mlp import cpu
from blockdiff.kernels.linear import cpu as tiles
from blockdiff.kernels.linear import products

pytestmark = pytest.mark.quick
HAS_C = library() is not None
BOUND = 5e-7  # relative error in the 2-norm

# tokens, slots of each, experts, depth, width: one of everything; odd edges; experts without tokens; several panels
# of depth and columns, and chunks of rows
CASES = [(1, 1, 1, 1, 1), (37, 3, 5, 13, 7), (9, 2, 12, 50, 66), (700, 2, 2, 203, 300), (530, 1, 1, 401, 49)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def has(pieces: int) -> bool:
    """Whether this machine makes products of so many pieces; without a compiler it makes none."""
    return HAS_C and (pieces == 0 or tiles.has_tiles())


def grouped(tokens: int, k: int, experts: int) -> cpu._Groups:
    """Slots spread over the experts; every seventh goes to none."""
    index = torch.randint(0, experts, (tokens, k), generator=torch.Generator().manual_seed(tokens))
    index.view(-1)[3::7] = experts
    return cpu._Groups(index, experts)


def results(tokens: int, k: int, experts: int, depth: int, width: int, pieces: int) -> list[Tensor]:
    """What the C functions make of gathered rows and of rows that stand in order, in all four kinds of use."""
    groups, x, of_rows = grouped(tokens, k, experts), drawn(tokens, depth), drawn(tokens * k, width)[: tokens * k]
    rows, weights, ends = groups.rows, drawn(experts, width, depth), groups.ends_E
    forward, added = torch.full((rows, width), torch.nan), torch.ones(rows, depth)
    outer, turned = torch.full((experts, width, depth), torch.nan), torch.full((experts, depth, width), torch.nan)
    sizes = (ends, experts, depth, weights, width * depth, 1, depth, width, 0)
    call("product_grouped", x, groups.token, *sizes, forward, pieces)
    back = (ends, experts, width, weights, width * depth, depth, 1, depth, 1)
    call("product_grouped", of_rows, None, *back, added, pieces)
    call("product_grouped_outer", of_rows, None, x, groups.token, ends, experts, width, depth, outer, pieces)
    call("product_grouped_outer", x, groups.token, of_rows, None, ends, experts, depth, width, turned, pieces)
    return [forward, added, outer, turned]


@pytest.mark.parametrize("pieces", [0, tiles.EXACT])
@pytest.mark.parametrize("case", CASES)
def test_products_of_every_expert_are_those_of_its_own_rows(case, pieces):
    if not has(pieces):
        return  # nothing of this is called
    tokens, k, experts, depth, width = case
    groups, x = grouped(tokens, k, experts), drawn(tokens, depth).double()
    of_rows, weights = drawn(tokens * k, width).double(), drawn(experts, width, depth).double()
    wanted = [torch.zeros(groups.rows, width), torch.zeros(groups.rows, depth)]
    wanted += [torch.zeros(experts, width, depth), torch.zeros(experts, depth, width)]
    wanted = [each.double() for each in wanted]
    for e, lo, hi in groups.bounds():
        mine = x[groups.slot[lo:hi] // k]
        wanted[0][lo:hi], wanted[1][lo:hi] = mine @ weights[e].t(), 1 + of_rows[lo:hi] @ weights[e]
        wanted[2][e], wanted[3][e] = of_rows[lo:hi].t() @ mine, mine.t() @ of_rows[lo:hi]
    for found, true in zip(results(*case, pieces), wanted, strict=True):
        assert float((found - true).norm()) <= BOUND * float(true.norm())


@pytest.mark.parametrize("pieces", [0, tiles.EXACT])
def test_products_have_the_same_bits_whatever_the_threads(pieces):
    if not has(pieces):
        return
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(results(700, 2, 2, 203, 300, pieces))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(found[0], others, strict=True))


@pytest.mark.parametrize("are_fast", [True, False])
def test_experts_are_as_exact_with_the_products_of_torch(are_fast, monkeypatch):
    """A library without long vectors leaves the products to torch; both ways give one result and its gradients."""
    if not HAS_C:
        return
    x, weight = drawn(60, 24), drawn(60, 2).softmax(-1)
    gate_up, down = drawn(4, 32, 24) / 5, drawn(4, 24, 16) / 4
    index = torch.randint(0, 5, (60, 2), generator=torch.Generator().manual_seed(1))
    found = []
    for dtype in (torch.float32, torch.float64):
        monkeypatch.setattr(products, "are_fast", lambda: are_fast)
        inputs = [each.to(dtype).requires_grad_() for each in (x, gate_up, down, weight)]
        out = cpu.expert_mlp(*inputs[:3], index, inputs[3])
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for mine, true in zip(*found, strict=True):
        assert float((mine - true).detach().norm()) < 4 * BOUND * float(true.detach().norm())
