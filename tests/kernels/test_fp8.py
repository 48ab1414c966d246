"""fp8 weights: the numbers of codes, and rounding to them."""

from __future__ import annotations

import pytest
import torch

from blockdiff.kernels.fp8 import Fp8
from tests.oracles import fp8 as reference
from tests.support.closeness import relative_error

pytestmark = pytest.mark.quick


def in_fp8(*shape: int, seed: int = 0) -> Fp8:
    return Fp8.nearest(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_code_is_decoded_to_the_number_it_stands_for(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    truth = torch.tensor([reference.value(code) for code in range(256)], dtype=torch.float64)
    made = Fp8(codes[:, None], torch.ones(256, 1)).decoded(dtype)[:, 0].double()
    assert torch.equal(made.isnan(), truth.isnan()) and truth.isnan().sum() == 2
    assert torch.equal(made.nan_to_num(), truth.nan_to_num())


def test_a_code_is_the_nearest_one_to_its_number():
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(40, 70, generator=g) * torch.logspace(-6, 6, 40)[:, None]
    made = Fp8.nearest(weight)
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
    made = Fp8.nearest(weight).decoded(torch.float32)
    assert torch.equal(made[0], weight[0]) and relative_error(made[3], weight[3]) < 2**-4
    assert not Fp8.nearest(weight).scale[1:3].isfinite().any()
    assert not (made[1:3] @ torch.ones(2)).isfinite().any()


def test_what_is_quantised_once_is_the_same_when_it_is_quantised_again():
    made = in_fp8(5, 33, 20)
    again = Fp8.nearest(made.decoded(torch.float64))
    assert torch.equal(made.codes, again.codes) and torch.equal(made.scale, again.scale)
