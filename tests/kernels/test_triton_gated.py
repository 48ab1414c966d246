"""gated in Triton against torch in fp64: outputs and gradients, of halves of one product too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockdiff.errors import BlockdiffError
from blockdiff.kernels import IN_TORCH
from blockdiff.kernels.gated import triton as ours
from tests.support.closeness import relative_error

pytestmark = pytest.mark.quick
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def halves(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gate and up in one tensor, with numbers where every activation bends."""
    drawn = torch.randn(*shape[:-1], 2 * shape[-1], generator=torch.Generator().manual_seed(sum(shape)))
    return (4 * drawn).to(DEVICE, dtype).requires_grad_()


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu", "swiglu_oai"])
@pytest.mark.parametrize("shape", [(2, 5, 24), (1, 300), (33, 257), (0, 8)])
def test_outputs_and_gradients_match_fp64(activation, shape):
    found = []
    for function, dtype in ((ours.gated, torch.float32), (IN_TORCH.gated, torch.float64)):
        both = halves(*shape).detach().to(dtype).requires_grad_()
        out = function(*both.chunk(2, -1), activation)
        (out * torch.linspace(-1, 2, out.numel(), dtype=dtype, device=DEVICE).view_as(out)).sum().backward()
        found.append((out.double(), both.grad.double()))
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(*found, strict=True) if a.numel())


def test_torch_sees_a_sound_op():
    gate, up = (each.detach().requires_grad_() for each in halves(3, 20).chunk(2, -1))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.blockdiff.gated, (gate, up, "gelu_tanh"), test_utils=checks)


def test_other_dtypes_are_refused():
    with pytest.raises(BlockdiffError, match="float64"):
        ours.gated(*halves(2, 8, dtype=torch.float64).chunk(2, -1))
