"""Products with weights in fewer bits in Triton against the reference in fp64, in the interpreter or on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blockdiff.kernels import Kernels
from blockdiff.kernels.expert_mlp import triton as experts
from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.fp8 import triton as fp8_kernels
from blockdiff.kernels.nvfp4 import Nvfp4
from tests.oracles import expert_mlp as expert_reference
from tests.oracles import fp8, nvfp4
from tests.support.closeness import relative_error
from tests.support.expert_choices import chosen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = 3e-6  # relative
FORMS = {"fp8": (Fp8, fp8), "nvfp4": (Nvfp4, nvfp4)}


def stored(form: str, *shape: int, seed: int = 0) -> tuple[Any, Tensor]:
    """A matrix whose channels have scales of their own, which are no powers of two, and its numbers in fp64."""
    kept_in, reference = FORMS[form]
    matrix: Any = kept_in.nearest(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    matrix = matrix._replace(scale=matrix.scale * torch.linspace(0.7, 1.3, shape[-2])[:, None])
    return type(matrix)(*(part.to(DEVICE) for part in matrix)), reference.decoded(matrix, torch.float64)


# few: the rows up to which the kernel of fp8 serves; beyond them the weight is decoded, and torch's product follows
@pytest.mark.parametrize("form,few", [("fp8", 512), ("fp8", 0), ("nvfp4", 512)])
@pytest.mark.parametrize("rows,D,F", [((1, 1), 150, 70), ((3, 17), 50, 19), ((0,), 50, 19)])
def test_a_product_with_its_gradient(rows, D, F, form, few, monkeypatch):
    monkeypatch.setattr(fp8_kernels, "FEW_ROWS", few)
    D -= D % FORMS[form][0].BLOCK
    weight, dense = stored(form, F, D)
    x = torch.randn(*rows, D, generator=torch.Generator().manual_seed(1))
    mine, true = x.clone().to(DEVICE).requires_grad_(), x.double().requires_grad_()
    direction = torch.randn(*rows, F, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    out, truth = weight.product(Kernels("triton"), mine), true @ dense.T
    (out.double() * direction.to(DEVICE)).sum().backward()
    (truth * direction).sum().backward()
    assert relative_error(out, truth) < FP32 and relative_error(mine.grad, true.grad) < FP32


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("N,E,k,choice", [(63, 3, 2, "padding"), (1, 1, 1, "random"), (130, 8, 2, "some empty")])
@pytest.mark.parametrize("form", FORMS)
def test_experts_with_all_gradients_that_there_are(form, N, E, k, choice, rank):
    D, F = (size - size % FORMS[form][0].BLOCK for size in (50, 85))
    g = torch.Generator().manual_seed(N)
    x, weight, index = torch.randn(N, D, generator=g), torch.rand(N, k, generator=g), chosen(N, E, k, choice, g)
    (gate_up, dense_gate_up), (down, dense_down) = stored(form, E, 2 * F, D, seed=1), stored(form, E, D, F, seed=2)
    shapes = ((E, rank, D), (E, 2 * F, rank), (E, rank, F), (E, D, rank)) if rank else ()
    low_rank = [torch.randn(shape, generator=g) / 4 for shape in shapes]
    direction = torch.randn(N, D, generator=g, dtype=torch.float64)

    def run(op: Any, device: str, dtype: torch.dtype, *matrices: Any) -> list[Tensor | None]:
        leaves = [t.detach().to(device, dtype).requires_grad_() for t in (x, weight, *low_rank)]
        out = op(leaves[0], *matrices, index.to(device), leaves[1], "gelu_tanh", leaves[2:])
        (out.double() * direction.to(device)).sum().backward()
        return [out, *(t.grad for t in leaves)]

    got = run(experts.expert_mlp, DEVICE, torch.float32, gate_up, down)
    truth = run(expert_reference.expert_mlp, "cpu", torch.float64, dense_gate_up, dense_down)
    for mine, true in zip(got, truth, strict=True):
        assert mine is not None and true is not None and relative_error(mine, true) < FP32
    with torch.no_grad():
        of_tokens = index.to(DEVICE), weight.to(DEVICE), "gelu_tanh", [m.to(DEVICE) for m in low_rank]
        slots = experts.expert_slots(x.to(DEVICE), gate_up, down, *of_tokens)
    counts = (slots.index_Nk < E)[..., None]
    assert relative_error(torch.where(counts, slots.values_NkD, 0.0).sum(1), truth[0]) < FP32
