"""fp8 weights: what codes stand for, the way there, and products in torch against the reference with gradients."""

from __future__ import annotations

import pytest
import torch

from blockdiff.kernels import IN_C
from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.fp8 import torch as in_torch
from tests.closeness import relative_error
from tests.oracles import expert_mlp as experts
from tests.oracles import fp8 as reference

pytestmark = pytest.mark.quick


def in_fp8(*shape: int, seed: int = 0) -> Fp8:
    return in_torch.quantised(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_code_is_decoded_to_the_number_it_stands_for(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    truth = torch.tensor([reference.value(code) for code in range(256)], dtype=torch.float64)
    made = in_torch.decoded(Fp8(codes[:, None], torch.ones(256, 1)), dtype)[:, 0].double()
    assert torch.equal(made.isnan(), truth.isnan()) and truth.isnan().sum() == 2
    assert torch.equal(made.nan_to_num(), truth.nan_to_num())


def test_a_code_is_the_nearest_one_to_its_number():
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(40, 70, generator=g) * torch.logspace(-6, 6, 40)[:, None]
    made = in_torch.quantised(weight)
    finite = torch.tensor(sorted(v for v in map(reference.value, range(256)) if v == v), dtype=torch.float64)
    wanted = (weight.double() / made.scale.double())[..., None]
    nearest = (wanted - finite).abs().amin(-1)
    off = (reference.decoded(made, torch.float64) / made.scale.double() - wanted[..., 0]).abs()
    assert float((off - nearest).abs().max()) < 1e-4  # the quotient is rounded to fp32 first
    # half a step of three bits of mantissa, and half of the least number of all
    bound = weight.double().abs() * 2.0**-4 + made.scale.double() * 2.0**-10
    assert bool(((reference.decoded(made, torch.float64) - weight.double()).abs() <= bound * (1 + 1e-6)).all())


def test_channels_without_finite_numbers_and_of_zeros():
    weight = torch.tensor([[0.0, 0.0], [1.0, float("nan")], [float("inf"), 1.0], [3.0, -1.0]])
    made = in_torch.decoded(in_torch.quantised(weight), torch.float32)
    assert torch.equal(made[0], weight[0]) and relative_error(made[3], weight[3]) < 2**-4
    assert not in_torch.quantised(weight).scale[1:3].isfinite().any()
    assert not (made[1:3] @ torch.ones(2)).isfinite().any()


def test_what_is_quantised_once_is_the_same_when_it_is_quantised_again():
    made = in_fp8(5, 33, 20)
    again = in_torch.quantised(in_torch.decoded(made, torch.float64))
    assert torch.equal(made.codes, again.codes) and torch.equal(made.scale, again.scale)


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("shape", [(1, 1, 7), (3, 17, 33), (0, 4, 33)])
def test_a_product_with_its_gradient(shape, dtype, bound):
    weight = in_fp8(19, shape[-1])
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    outs = []
    for op, own in ((IN_C.fp8_linears, x), (reference.fp8_linears, x.double())):
        own = own.detach().requires_grad_()
        (out,) = op(own, (weight,))
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)).sum().backward()
        outs.append((out, own.grad))
    (out, grad), (true_out, true_grad) = outs
    assert out.dtype == grad.dtype == dtype
    assert relative_error(out, true_out) < bound and relative_error(grad, true_grad) < bound


def test_every_row_is_rounded_to_the_nearest_codes_of_a_scale_of_its_own():
    x = torch.randn(40, 33, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 40)[:, None]
    x[3], x[4, :5] = 0.0, torch.tensor([448.0, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10])  # between two codes
    made = in_torch.rounded(x)
    assert torch.equal(made, reference.rounded(x)) and torch.equal(made[3], x[3])
    assert made[4, 1:5].tolist() == [1.0, 1.25, 0.0, 2.0**-8]
    assert torch.equal(made[5:9], in_torch.rounded(x[5:9]))  # whatever stands beside a row
    assert torch.equal(in_torch.rounded(x.view(2, 20, 33)).view(40, 33), made)
    assert 0.01 < relative_error(made, x) < 2**-4
    bad = in_torch.rounded(torch.tensor([[1.0, float("nan")], [float("inf"), 1.0], [3.0, -1.0]]))
    assert not bad[:2].isfinite().any() and relative_error(bad[2], torch.tensor([3.0, -1.0])) < 2**-4


def test_a_product_that_rounds_its_inputs_has_the_gradient_of_one_that_does_not():
    weights = [in_fp8(19, 33)._replace(rounds_inputs=True), in_fp8(7, 33, seed=1)]
    x = torch.randn(4, 5, 33, generator=torch.Generator().manual_seed(1))
    grads, outs = [], []
    for op, chosen in ((IN_C.fp8_linears, weights), (IN_C.fp8_linears, [Fp8(*w[:2]) for w in weights])):
        own = x.clone().requires_grad_()
        outs.append(op(own, chosen))
        sum(out.sum() for out in outs[-1]).backward()
        grads.append(own.grad)
    assert torch.equal(*grads)
    for out, true in zip(outs[0], reference.fp8_linears(x.double(), weights), strict=True):
        assert relative_error(out, true) < 1e-6
    assert relative_error(outs[0][0], outs[1][0]) > 0.01 and torch.equal(outs[0][1], outs[1][1])


@pytest.mark.parametrize("rank", [0, 3])
def test_experts_round_their_tokens_and_what_is_activated(rank):
    N, E, k, D, F = 37, 5, 2, 21, 10
    g = torch.Generator().manual_seed(N)
    x, weight = torch.randn(N, D, generator=g), torch.rand(N, k, generator=g)
    gate_up, down = (in_fp8(*shape)._replace(rounds_inputs=True) for shape in ((E, 2 * F, D), (E, D, F)))
    index = torch.rand(N, E, generator=g).argsort(-1)[:, :k]
    shapes = ((E, rank, D), (E, 2 * F, rank), (E, rank, F), (E, D, rank)) if rank else ()
    low_rank = [torch.randn(shape, generator=g) / 4 for shape in shapes]
    out = IN_C.expert_mlp(x, gate_up, down, index, weight, "silu", low_rank)
    dense = (reference.decoded(w, torch.float64) for w in (gate_up, down))
    of_tokens = index, weight.double(), "silu", [matrix.double() for matrix in low_rank]
    truth = experts.expert_mlp(x.double(), *dense, *of_tokens, taken=reference.rounded)
    plain = IN_C.expert_mlp(x, Fp8(*gate_up[:2]), Fp8(*down[:2]), index, weight, "silu", low_rank)
    assert relative_error(out, truth) < 1e-5 and relative_error(plain, truth) > 0.01


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("N,E,k,empty", [(1, 3, 2, False), (37, 5, 2, True), (0, 3, 1, False), (9, 4, 2, False)])
def test_experts_with_all_gradients_that_there_are(N, E, k, empty, rank):
    D, F = 21, 10
    g = torch.Generator().manual_seed(N + E)
    x, weight = torch.randn(N, D, generator=g), torch.rand(N, k, generator=g)
    gate_up, down = in_fp8(E, 2 * F, D, seed=1), in_fp8(E, D, F, seed=2)
    index = torch.rand(N, E, generator=g).argsort(-1)[:, :k]
    index = torch.where(index == 1, E, index) if empty else index  # expert 1 gets no token, and some have no expert
    shapes = ((E, rank, D), (E, 2 * F, rank), (E, rank, F), (E, D, rank)) if rank else ()
    low_rank = [torch.randn(shape, generator=g) / 4 for shape in shapes]
    found = []
    for dtype in (torch.float32, torch.float64):
        own = [t.detach().to(dtype).requires_grad_() for t in (x, weight, *low_rank)]
        matrices = own[2:]
        if dtype == torch.float32:
            out = IN_C.expert_mlp(own[0], gate_up, down, index, own[1], "silu", matrices)
        else:
            dense = (reference.decoded(w, dtype) for w in (gate_up, down))
            out = experts.expert_mlp(own[0], *dense, index, own[1], "silu", matrices)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype)).sum().backward()
        found.append([out, *(t.grad for t in own)])
    for ours, true in zip(*found, strict=True):
        assert relative_error(ours, true) < 1e-5


def test_sums_of_fourteen_bits_cost_little_beside_the_rounding_to_fp8():
    """A model of the sums of fp8 products in tensor cores of sm_90: 32 products and the sum so far are cut off at
    2^-13 of the largest. It is why kernels leave sums there to the end."""
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(16, 2816, generator=g), in_torch.quantised(torch.randn(16, 2816, generator=g))
    a, b = (side.codes.view(in_torch.E4M3).double() for side in (in_torch.quantised(x), weight))
    total = torch.zeros(16, 16, dtype=torch.float64)
    for k in range(0, 2816, 32):
        parts = torch.cat([a[:, None, k : k + 32] * b[None, :, k : k + 32], total[..., None]], -1)
        last = 2.0 ** (parts.abs().amax(-1, keepdim=True).frexp().exponent.double() - 1 - 13)
        total = (torch.trunc(parts / last) * last).sum(-1).float().double()
    truth = x.double() @ reference.decoded(weight, torch.float64).mT
    cut = relative_error(total, a @ b.mT)
    rounding = relative_error(reference.rounded(x).double() @ reference.decoded(weight, torch.float64).mT, truth)
    assert 1e-4 < cut < rounding / 10
