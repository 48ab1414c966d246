"""Products with weights in fewer bits, in torch and in C, against products with decoded weights in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.nvfp4 import Nvfp4
from tests.oracles import expert_mlp as experts
from tests.oracles import fp8, nvfp4
from tests.support.closeness import relative_error

pytestmark = pytest.mark.quick
FORMS = {"fp8": (Fp8, fp8), "nvfp4": (Nvfp4, nvfp4)}


@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("rows,D,outputs", [((1, 1), 16, 19), ((3, 17), 53, 64), ((2, 3), 535, 16), ((0, 4), 53, 16)])
@pytest.mark.parametrize("form", FORMS)
def test_a_product_with_its_gradient(kernels, form, rows, D, outputs, dtype, bound):
    stored, reference = FORMS[form]
    D -= D % stored.BLOCK
    g = torch.Generator().manual_seed(0)
    weight, x = stored.nearest(torch.randn(outputs, D, generator=g)), torch.randn(*rows, D, generator=g).to(dtype)
    mine, true = x.clone().requires_grad_(), x.double().requires_grad_()
    out, truth = weight.product(kernels, mine), F.linear(true, reference.decoded(weight, torch.float64))
    for each in (out, truth):
        (each * torch.linspace(-1, 1, each.numel()).view(each.shape).to(each.dtype)).sum().backward()
    assert out.dtype == mine.grad.dtype == dtype
    assert relative_error(out, truth) < bound and relative_error(mine.grad, true.grad) < bound


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("N,E,k,empty", [(1, 3, 2, False), (37, 5, 2, True), (0, 3, 1, False), (9, 4, 2, False)])
@pytest.mark.parametrize("form", FORMS)
def test_experts_with_all_gradients_that_there_are(kernels, form, N, E, k, empty, rank):
    stored, reference = FORMS[form]
    D, inner = (size - size % stored.BLOCK for size in (53, 26))
    g = torch.Generator().manual_seed(N + E)
    x, weight = torch.randn(N, D, generator=g), torch.rand(N, k, generator=g)
    gate_up, down = (stored.nearest(torch.randn(E, *shape, generator=g)) for shape in ((2 * inner, D), (D, inner)))
    index = torch.rand(N, E, generator=g).argsort(-1)[:, :k]
    index = torch.where(index == 1, E, index) if empty else index  # expert 1 gets no token, and some have no expert
    shapes = ((E, rank, D), (E, 2 * inner, rank), (E, rank, inner), (E, D, rank)) if rank else ()
    low_rank = [torch.randn(shape, generator=g) / 4 for shape in shapes]
    dense = [reference.decoded(matrix, torch.float64) for matrix in (gate_up, down)]
    results = []
    for op, dtype, matrices in (
        (kernels.expert_mlp, torch.float32, (gate_up, down)),
        (experts.expert_mlp, torch.float64, dense),
    ):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weight, *low_rank)]
        out = op(leaves[0], *matrices, index, leaves[1], "silu", leaves[2:])
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype)).sum().backward()
        results.append([out, *(t.grad for t in leaves)])
    for ours, true in zip(*results, strict=True):
        assert relative_error(ours, true) < 1e-5
