"""The norms and norm_rope in Triton against their references in fp64, in the interpreter or on the GPU there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blockdiff.kernels.norm_rope import torch as in_torch
from blockdiff.kernels.norm_rope import triton as ours
from blockdiff.kernels.tiles import Tile
from blockdiff.layers.rope import angles, default_frequencies, proportional_frequencies
from tests.oracles import norm_rope as reference
from tests.support.closeness import relative_error

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

EPS = 1e-6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = 3e-6  # relative; a norm's gradient cancels a little
LAYOUTS = ("plain", "transposed", "sliced")


def draw(*shape: int, seed: int, layout: str = "plain") -> Tensor:
    """fp32 numbers: dense, dense in another order of the axes, or every second row of a tensor."""
    g = torch.Generator().manual_seed(seed)
    if layout == "transposed":
        return torch.randn(shape[1], shape[0], *shape[2:], generator=g).transpose(0, 1)
    if layout == "sliced":
        return torch.randn(*shape[:-2], shape[-2] * 2, shape[-1], generator=g)[..., ::2, :]
    return torch.randn(*shape, generator=g)


def weight(d: int, seed: int) -> Tensor:
    return torch.rand(d, generator=torch.Generator().manual_seed(seed)) + 0.5


def leaves(tensors: list[Tensor | None], dtype: torch.dtype, device: str = DEVICE) -> list[Tensor | None]:
    """The same values elsewhere, as leaves of the same layout."""
    return [None if t is None else t.detach().to(device, dtype).requires_grad_() for t in tensors]


def outputs_and_gradients(op: Any, tensors: list[Tensor | None]) -> list[Tensor]:
    """The outputs of the op, and the gradients of all its tensors for an arbitrary function of the outputs."""
    outs = op(*tensors)
    outs = list(outs) if isinstance(outs, tuple | list) else [outs]
    sum(((i + 1) * out.double().sin()).sum() for i, out in enumerate(outs)).backward()
    return [*outs, *(t.grad for t in tensors if t is not None)]


def compare(op: Any, truth: Any, tensors: list[Tensor | None], tolerance: float = FP32) -> None:
    got = outputs_and_gradients(op, leaves(tensors, torch.float32))
    expected = outputs_and_gradients(truth, leaves(tensors, torch.float64, "cpu"))
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == torch.float32 and relative_error(x, y) < tolerance


# -- against the references --------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["w", "0", "w0", "0ww", "ww0"])
@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 5, 24), (2, 63, 100), (5, 257, 16), (1, 2, 2816)])
def test_rms_norms_match_the_reference(shape, weights):
    x = draw(*shape, seed=0)
    ws = [weight(shape[-1], i + 1) if kind == "w" else None for i, kind in enumerate(weights)]
    compare(
        lambda x, *ws: ours.rms_norms(x, ws, EPS),
        lambda x, *ws: [reference.rms_norm(x, w, EPS) for w in ws],
        [x, *ws],
    )


@pytest.mark.parametrize("scalar", ["none", "one for all", "one per token", "one per row of a batch"])
@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 65, 24), (2, 63, 100), (1, 2, 2816)])
def test_add_rms_norm_matches_the_reference(shape, scalar):
    sizes = {"one for all": (1,), "one per token": (*shape[:2], 1), "one per row of a batch": (shape[0], 1, 1)}
    factor = draw(*sizes[scalar], seed=3) if scalar in sizes else None
    compare(
        lambda x, y, w: ours.add_rms_norm(x, y, w, EPS, None if factor is None else factor.to(DEVICE)),
        lambda x, y, w: (x + reference.rms_norm(y, w, EPS)) * (1.0 if factor is None else factor.double()),
        [draw(*shape, seed=0), draw(*shape, seed=1), weight(shape[-1], 2)],
    )


@pytest.mark.quick
@pytest.mark.parametrize("T,h,d", [(1, 1, 2), (7, 3, 16), (17, 2, 30), (65, 1, 256), (3, 4, 512)])
def test_norm_rope_turns_pairs_of_halves(T, h, d):
    positions = torch.randint(0, 5000, (2, T), generator=torch.Generator().manual_seed(2))
    frequencies = proportional_frequencies(d, 1e6, 0.25) if d == 512 else default_frequencies(d, 1e4)
    cos, sin = (x.to(DEVICE) for x in angles(positions, frequencies, torch.float32))
    angle = (positions[..., None].float() * frequencies).double()  # angles are fp32 by definition
    compare(
        lambda x, w: ours.norm_rope(x, w, cos, sin, EPS),
        lambda x, w: reference.norm_rope(x, w, angle, EPS),
        [draw(2, T, h, d, seed=0), weight(d, 1)],
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_taken_in_both_directions(layout):
    x, y = draw(3, 5, 4, 24, seed=0, layout=layout), draw(3, 5, 4, 24, seed=1, layout=layout)
    assert x.is_contiguous() == (layout == "plain")
    cos, sin = (c.to(DEVICE) for c in angles(torch.arange(5).expand(3, 5), default_frequencies(24, 1e4), torch.float32))

    def through(norms: Any, add: Any, rope: Any) -> Any:
        def op(x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
            first, second = norms(x, (w, None), EPS)
            total = add(first, y, w, EPS)
            turned = rope(second, w, cos.to(x), sin.to(x), EPS)
            return [total.transpose(0, 1), turned.transpose(1, 2)]  # their gradients arrive in that layout

        return op

    got = outputs_and_gradients(
        through(ours.rms_norms, ours.add_rms_norm, ours.norm_rope), leaves([x, y, weight(24, 2)], torch.float32)
    )
    truth = outputs_and_gradients(
        through(in_torch.rms_norms, in_torch.add_rms_norm, in_torch.norm_rope),
        leaves([x, y, weight(24, 2)], torch.float32, "cpu"),
    )
    for a, b in zip(got, truth, strict=True):
        assert relative_error(a, b) < FP32


def test_a_gradient_that_is_not_asked_for_is_not_made():
    x, w = draw(4, 8, seed=0).to(DEVICE), weight(8, 1).to(DEVICE).requires_grad_()
    (out,) = ours.rms_norms(x, (w,), EPS)
    out.sum().backward()
    assert x.grad is None and w.grad is not None
    with torch.no_grad():
        assert not ours.rms_norms(x, (w,), EPS)[0].requires_grad


def test_frozen_weights_get_no_gradient_and_inputs_the_same_to_the_bit(monkeypatch):
    partial, made = ours._partial, []
    monkeypatch.setattr(ours, "_partial", lambda *sizes: made.append(sizes) or partial(*sizes))
    found = {}
    for trains in (True, False):
        x, y = (draw(2, 5, 3, 24, seed=n).to(DEVICE).requires_grad_() for n in (0, 1))
        w, v = (weight(24, n).to(DEVICE).requires_grad_(trains) for n in (2, 3))
        cos, sin = (draw(2, 5, 24, seed=n).to(DEVICE) for n in (3, 4))
        outs = [
            *ours.rms_norms(x, (w, None, v), EPS),
            ours.add_rms_norm(x, y, w, EPS),
            ours.norm_rope(y, v, cos, sin, EPS),
        ]
        sum(((n + 1) * out.sin()).sum() for n, out in enumerate(outs)).backward()
        assert (w.grad is not None) == (v.grad is not None) == trains
        found[trains] = x.grad, y.grad
    assert len(made) == 4  # two weights of rms_norms, and one of each other op, where they train
    assert all(torch.equal(a, b) for a, b in zip(found[True], found[False], strict=True))


def test_a_norm_whose_output_is_not_used_gets_a_zero_gradient():
    x, a, b = (t.to(DEVICE).requires_grad_() for t in (draw(4, 8, seed=0), weight(8, 1), weight(8, 2)))
    ours.rms_norms(x, (a, b), EPS)[0].sum().backward()
    truth = x.detach().cpu().double().requires_grad_()
    reference.rms_norm(truth, a.detach().cpu().double(), EPS).sum().backward()
    assert relative_error(x.grad, truth.grad) < 1e-5
    assert b.grad is None or not b.grad.any()


def test_norms_of_zeros_are_zero_with_finite_gradients():
    x, w = torch.zeros(2, 3, 1, 8, device=DEVICE).requires_grad_(), torch.ones(8, device=DEVICE).requires_grad_()
    cos = torch.ones(2, 3, 8, device=DEVICE)
    outs = [*ours.rms_norms(x, (w, None), EPS), ours.add_rms_norm(x, x, w, EPS), ours.norm_rope(x, w, cos, cos, EPS)]
    sum(o.sum() for o in outs).backward()
    assert all((o == 0).all() for o in outs)
    assert x.grad.isfinite().all() and w.grad.isfinite().all()


def test_no_rows_at_all_give_empty_outputs_and_zero_weight_gradients():
    x, w = torch.zeros(2, 0, 3, 8, device=DEVICE).requires_grad_(), torch.ones(8, device=DEVICE).requires_grad_()
    cos = torch.ones(2, 0, 8, device=DEVICE)
    outs = [*ours.rms_norms(x, (w, None), EPS), ours.add_rms_norm(x, x, w, EPS), ours.norm_rope(x, w, cos, cos, EPS)]
    sum(o.sum() for o in outs).backward()
    assert all(o.shape == x.shape for o in outs) and not w.grad.any()


def test_more_rows_than_a_backward_has_programs(monkeypatch):
    monkeypatch.setattr(ours, "PROGRAMS", 3)
    monkeypatch.setattr(ours, "elementwise", lambda columns: Tile(2, columns))
    scalar = torch.tensor([0.7], device=DEVICE)
    compare(
        lambda x, y, w: [*ours.rms_norms(x, (w, None), EPS), ours.add_rms_norm(x, y, w, EPS, scalar)],
        lambda x, y, w: [
            reference.rms_norm(x, w, EPS), reference.rms_norm(x, None, EPS),
            (x + reference.rms_norm(y, w, EPS)) * 0.7,
        ],
        [draw(41, 16, seed=0), draw(41, 16, seed=1), weight(16, 2)],
    )  # fmt: skip


@pytest.mark.parametrize("x_dtype,y_dtype", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_mixed_dtypes_give_what_torch_promotes_them_to(x_dtype, y_dtype):
    """Under autocast the residual is fp32 beside a branch in bf16, and fp32 cos and sin meet a bf16 projection."""
    x, y = draw(3, 5, 2, 24, seed=0).to(DEVICE, x_dtype), draw(3, 5, 2, 24, seed=1).to(DEVICE, y_dtype)
    w = weight(24, 2).to(DEVICE)
    cos, sin = (torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in (3, 4))
    for mine, torchs in [
        (ours.add_rms_norm(x, y, w, EPS), in_torch.add_rms_norm(x, y, w, EPS)),
        (ours.norm_rope(y, w, cos, sin, EPS), in_torch.norm_rope(y, w, cos, sin, EPS)),
        (ours.rms_norms(y, (w,), EPS)[0], in_torch.rms_norms(y, (w,), EPS)[0]),
    ]:
        assert mine.dtype == torchs.dtype and relative_error(mine, torchs) < 0.01
    x.requires_grad_(), y.requires_grad_()
    ours.add_rms_norm(x, y, w, EPS).float().sum().backward()
    assert x.grad.dtype == x_dtype and y.grad.dtype == y_dtype


def test_the_same_inputs_give_the_same_bits():
    def run() -> list[Tensor]:
        x, w = draw(3, 40, 4, 24, seed=0).to(DEVICE).requires_grad_(), weight(24, 1).to(DEVICE).requires_grad_()
        return outputs_and_gradients(lambda x, w: ours.rms_norms(x, (w, None), EPS), [x, w])

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


# -- as torch sees them ------------------------------------------------------------------------------------------


def test_torch_sees_sound_ops():
    x, y, w = (t.to(DEVICE).requires_grad_() for t in (draw(3, 5, 8, seed=0), draw(3, 5, 8, seed=1), weight(8, 2)))
    cos = draw(3, 5, 8, seed=3).to(DEVICE)
    scalar = torch.tensor([0.7], device=DEVICE)
    ops = torch.ops.blockdiff
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(ops.rms_norms, (x, w, None, w.detach(), 3, EPS), test_utils=checks)
    torch.library.opcheck(ops.add_rms_norm, (x, y, w, scalar, EPS), test_utils=checks)
    torch.library.opcheck(ops.norm_rope, (x.detach()[:, :, None].requires_grad_(), w, cos, cos, EPS), test_utils=checks)


def test_a_checkpointed_layer_recomputes_the_same_gradients():
    def layer(x: Tensor, w: Tensor) -> Tensor:
        first, second = ours.rms_norms(x, (w, None), EPS)
        return ours.add_rms_norm(first, second * 2, w, EPS)

    def checkpointed(x: Tensor, w: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(layer, x, w, use_reentrant=False)

    tensors = [draw(3, 5, 24, seed=0), weight(24, 1)]
    got, truth = (outputs_and_gradients(f, leaves(tensors, torch.float32)) for f in (checkpointed, layer))
    assert all(torch.equal(a, b) for a, b in zip(got, truth, strict=True))


# -- on a GPU, in the model's dtype --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 300, 16, 256), (2, 300, 16, 512), (2, 300, 1, 2816)])
def test_bf16_is_at_least_as_close_to_fp64_as_torch_in_bf16(shape):
    """Errors are of the rounding of inputs and outputs: both paths read the same bf16 numbers."""
    positions = torch.arange(shape[1]).expand(shape[:2])
    frequencies = default_frequencies(shape[-1], 1e4)
    x, y, w = (t.bfloat16() for t in (draw(*shape, seed=0), draw(*shape, seed=1), weight(shape[-1], 2)))
    cos, sin = angles(positions, frequencies, torch.bfloat16)

    def all_of(kernels: Any, dtype: torch.dtype) -> list[Tensor]:
        c, s = cos.cuda().to(dtype), sin.cuda().to(dtype)

        def op(x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
            norms = kernels.rms_norms(x, (w, None), EPS)
            return [*norms, kernels.add_rms_norm(x, y, w, EPS), kernels.norm_rope(x, w, c, s, EPS)]

        return outputs_and_gradients(op, leaves([x, y, w], dtype, "cuda"))

    truth = all_of(in_torch, torch.float32)  # its own error is 1e-4 of what bf16 rounds away
    for mine, torchs, exact in zip(all_of(ours, torch.bfloat16), all_of(in_torch, torch.bfloat16), truth, strict=True):
        assert mine.isfinite().all() and mine.dtype == torch.bfloat16
        assert relative_error(mine, exact) <= 1.1 * relative_error(torchs, exact)
