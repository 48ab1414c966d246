"""fp8 weights in Triton against the reference in fp64, in the interpreter or on the GPU there is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.fp8 import triton as ours
from blockdiff.kernels.gated.triton import gated_linear
from tests.oracles import expert_mlp as expert_reference
from tests.oracles import fp8 as reference
from tests.support.closeness import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = 3e-6  # relative


def in_fp8(*shape: int, seed: int = 0) -> Fp8:
    weight = Fp8.nearest(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    return Fp8(*(part.to(DEVICE) for part in weight))


def dense(weight: Fp8) -> Tensor:
    return reference.decoded(weight, torch.float64).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_finite_code_is_decoded_exactly(dtype):
    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 1)
    codes[:, [127, 255]] = 0  # a channel with a NaN has a scale that is NaN
    scale = torch.tensor([[1.0], [0.5], [2.0**-7]])
    like = torch.empty(0, dtype=dtype, device=DEVICE)
    made = ours._decoded(codes.view(torch.int8).to(DEVICE), scale.to(DEVICE), like)
    assert torch.equal(made.cpu().double(), reference.decoded(Fp8(codes, scale), torch.float64).to(dtype).double())


def test_the_gated_half_of_an_mlp():
    gate, up = in_fp8(37, 44, seed=1), in_fp8(37, 44, seed=2)
    x = torch.randn(21, 44, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        out = gated_linear(x.to(DEVICE), gate, up, "gelu_tanh")
    truth = expert_reference.gated(x.double() @ dense(gate).T, x.double() @ dense(up).T, "gelu_tanh")
    assert relative_error(out, truth) < FP32
