"""The products of experts in C: exact at every edge, and the same bits whatever the threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockdiff.kernels.c_library import library
from blockdiff.kernels.expert_mlp import c as in_c

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(library() is None, reason="there is no C compiler here"),
]
BOUND = 6e-7  # relative error in the 2-norm

# tokens, slots of each, experts, depth, width: one of everything; few rows; experts without tokens; several panels of
# depth and of width with odd ends; sides that are left to torch
CASES = [(1, 1, 1, 16, 16), (37, 3, 5, 32, 48), (9, 2, 12, 80, 64), (700, 2, 2, 304, 112), (530, 1, 1, 528, 16)]
CASES += [(37, 3, 5, 13, 16), (37, 3, 5, 16, 13)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def grouped(tokens: int, k: int, experts: int) -> in_c._Groups:
    """Slots spread over the experts; every seventh goes to none."""
    index = torch.randint(0, experts, (tokens, k), generator=torch.Generator().manual_seed(tokens))
    index.view(-1)[3::7] = experts
    return in_c._Groups(index, experts)


def results(tokens: int, k: int, experts: int, depth: int, width: int) -> list[Tensor]:
    """Rows times the matrices and times these transposed, and the gradients of both."""
    groups, weights = grouped(tokens, k, experts), drawn(experts, width, depth)
    x, y = drawn(groups.rows, depth), drawn(groups.rows, width)
    forward, back = groups.product(x, weights.transpose(1, 2)), groups.product(y, weights)
    return [forward, back, groups.outer(y, x, weights), groups.outer(x, y, weights.transpose(1, 2))]


@pytest.mark.parametrize("case", CASES)
def test_products_of_every_expert_are_those_of_its_own_rows(case, unwritten_memory_is_nan):
    tokens, k, experts, depth, width = case
    groups, weights = grouped(tokens, k, experts), drawn(experts, width, depth).double()
    x, y = drawn(groups.rows, depth).double(), drawn(groups.rows, width).double()
    wanted = [torch.zeros(groups.rows, width), torch.zeros(groups.rows, depth)]
    wanted += [torch.zeros(experts, width, depth), torch.zeros(experts, depth, width)]
    wanted = [each.double() for each in wanted]
    for e, lo, hi in groups.bounds():
        wanted[0][lo:hi], wanted[1][lo:hi] = x[lo:hi] @ weights[e].t(), y[lo:hi] @ weights[e]
        wanted[2][e], wanted[3][e] = y[lo:hi].t() @ x[lo:hi], x[lo:hi].t() @ y[lo:hi]
    for found, true in zip(results(*case), wanted, strict=True):
        assert float((found - true).norm()) <= BOUND * float(true.norm())


def test_products_have_the_same_bits_whatever_the_threads():
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(results(700, 2, 2, 304, 112))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(found[0], others, strict=True))
