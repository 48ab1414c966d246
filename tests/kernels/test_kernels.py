"""Spans as drawn matrices, and the native kernels against their references: outputs and every gradient."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels import CPU, NATIVE, Kernels, c_library
from blockdiff.kernels.c_library import serves
from blockdiff.kernels.expert_mlp import cpu as expert_cpu
from blockdiff.kernels.expert_mlp import native as expert_native
from blockdiff.kernels.expert_mlp import reference as expert_reference
from blockdiff.kernels.norm_rope import reference as norm_reference
from blockdiff.kernels.span_attention import native as attention_native
from blockdiff.kernels.span_attention import pieces as attention_pieces
from blockdiff.kernels.span_attention import reference as attention_reference
from blockdiff.layers.experts import Router
from blockdiff.layers.rope import angles, default_frequencies, proportional_frequencies
from blockdiff.spans import Spans, denoise_spans, encode_spans

pytestmark = pytest.mark.quick

EPS = 1e-6


@pytest.fixture(params=["native", "cpu"])
def kernels(request):
    """Every op runs natively and, where it has one, by its C function."""
    return NATIVE if request.param == "native" else CPU


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def relative(a: Tensor, b: Tensor, floor: float = 1e-12) -> float:
    assert a.shape == b.shape
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=floor))


def matrix(drawing: str) -> Tensor:
    """One row per query; `x` sees, `.` does not, `|` divides prefix from own keys."""
    rows = ["".join(line.split()).replace("|", "") for line in drawing.strip().splitlines()]
    return torch.tensor([[c == "x" for c in row] for row in rows])


# -- spans: the drawn matrices -------------------------------------------------------------------------------


def test_encode_is_causal_within_a_document():
    doc_start = torch.tensor([[0, 0, 0, 3, 3, -1]])
    assert torch.equal(
        encode_spans(doc_start).dense(0, 6)[0],
        matrix("""
            x.....
            xx....
            xxx...
            ...x..
            ...xx.
            ......
        """),
    )


def test_encode_sees_a_window_that_counts_the_query():
    assert torch.equal(
        encode_spans(torch.zeros(1, 5, dtype=torch.int64), window=3).dense(0, 5)[0],
        matrix("""
            x....
            xx...
            xxx..
            .xxx.
            ..xxx
        """),
    )


def test_encode_after_a_prefix_continues_its_window_at_each_rows_own_length():
    past = torch.tensor([4, 1])
    doc_start = torch.tensor([[0, 0, 0], [0, 0, -1]])
    dense = encode_spans(doc_start, window=3, past_B=past).dense(4, 3)
    assert torch.equal(
        dense[0],
        matrix("""
            ..xx|x..
            ...x|xx.
            ....|xxx
        """),
    )
    assert torch.equal(
        dense[1],
        matrix("""
            x...|x..
            x...|xx.
            ....|...
        """),
    )
    assert torch.equal(
        encode_spans(doc_start, past_B=past).dense(4, 3)[0],
        matrix("""
            xxxx|x..
            xxxx|xx.
            xxxx|xxx
        """),
    )


def test_a_canvas_sees_the_prefix_before_it_and_itself():
    start, doc_start = torch.tensor([[2, 4]]), torch.zeros(1, 2, dtype=torch.int64)
    dense = denoise_spans(start, doc_start, torch.tensor([[2, 2]]), canvas_length=2).dense(6, 4)[0]
    assert torch.equal(
        dense,
        matrix("""
            xx....|xx..
            xx....|xx..
            xxxx..|..xx
            xxxx..|..xx
        """),
    )


def test_a_canvas_sees_the_same_last_window_minus_one_prefix_keys_with_every_query():
    start, doc_start = torch.tensor([[2, 5]]), torch.tensor([[0, 4]])
    dense = denoise_spans(start, doc_start, torch.tensor([[3, 3]]), canvas_length=3, window=2).dense(6, 6)[0]
    assert torch.equal(
        dense,
        matrix("""
            .x....|xxx...
            .x....|xxx...
            .x....|xxx...
            ....x.|...xxx
            ....x.|...xxx
            ....x.|...xxx
        """),
    )


def test_a_short_canvas_ends_early_and_an_absent_one_sees_nothing():
    start, doc_start = torch.tensor([[1, 3, 0]]), torch.tensor([[0, 2, 0]])
    dense = denoise_spans(start, doc_start, torch.tensor([[3, 2, 0]]), canvas_length=3).dense(4, 9)[0]
    assert torch.equal(
        dense,
        matrix("""
            x...|xxx......
            x...|xxx......
            x...|xxx......
            ..x.|...xx....
            ..x.|...xx....
            ....|.........
            ....|.........
            ....|.........
            ....|.........
        """),
    )


def random_rows(seed: int) -> dict[str, Any]:
    """Packed rows with padding and canvases, drawn at random."""
    g = generator(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    B, S, C, L = draw(1, 3), draw(1, 14), draw(1, 3), draw(1, 4)
    doc_start = torch.full((B, S), -1)
    start, doc, length = (torch.zeros(B, C, dtype=torch.int64) for _ in range(3))
    for b in range(B):
        column = 0
        while column < S and (column == 0 or draw(0, 3)):
            end = min(S, column + draw(1, 6))
            doc_start[b, column:end] = column
            column = end
        places = sorted(draw(0, column) for _ in range(C))
        for c, place in enumerate(places):
            before = doc_start[b, max(place - 1, 0)]  # a canvas right after a document belongs to it
            start[b, c], doc[b, c], length[b, c] = place, min(int(before), place), draw(0, L)
    window = draw(1, 6) if draw(0, 1) else None
    return dict(doc_start=doc_start, start=start, doc=doc, length=length, L=L, window=window)


@pytest.mark.parametrize("seed", range(25))
def test_spans_equal_the_mask_rule_key_by_key(seed):
    rows = random_rows(seed)
    doc_start, window = rows["doc_start"], rows["window"] or 10**9
    B, S = doc_start.shape
    C, L = rows["start"].shape[1], rows["L"]
    for past in range(S):  # columns before `past` are cached, the others are this call's
        spans = encode_spans(doc_start[:, past:], rows["window"], torch.full((B,), past))
        truth = torch.zeros(B, S - past, S, dtype=torch.bool)
        for b, q, k in itertools.product(range(B), range(past, S), range(S)):
            same = doc_start[b, q] >= 0 and doc_start[b, q] == doc_start[b, k]
            truth[b, q - past, k] = bool(same) and k <= q and q - k < window
        assert torch.equal(spans.dense(past, S - past), truth)
    spans = denoise_spans(rows["start"], rows["doc"], rows["length"], L, rows["window"])
    truth = torch.zeros(B, C * L, S + C * L, dtype=torch.bool)
    for b, c, j in itertools.product(range(B), range(C), range(L)):
        start, doc, length = (int(rows[name][b, c]) for name in ("start", "doc", "length"))
        if j < length:
            for k in range(S):
                truth[b, c * L + j, k] = doc <= k < start and start - k < window
            truth[b, c * L + j, S + c * L : S + c * L + length] = True
    assert torch.equal(spans.dense(S, C * L), truth)
    picked = torch.tensor([B - 1, 0])
    assert torch.equal(spans.select(picked).dense(S, C * L), truth[picked])


# -- span_attention ------------------------------------------------------------------------------------------


def random_spans(B: int, T: int, P: int, seed: int) -> Spans:
    """Any bounds at all; about a fifth of the queries see nothing, some only one side."""
    g = generator(seed)

    def sides(size: int) -> Tensor:
        return torch.randint(0, size + 1, (B, T, 2), generator=g).sort(-1)[0]

    bounds = torch.cat([sides(P), sides(T)], -1)
    bounds[torch.rand(B, T, generator=g) < 0.2] = 0
    return Spans(bounds.to(torch.int32))


def packed(B: int, T: int, window: int | None) -> Spans:
    """Two documents and some padding in every row, encoded without a prefix."""
    column = torch.arange(T)
    doc_start = torch.where(column < T // 3, 0, T // 3)
    doc_start = torch.where(column < T - T // 5, doc_start, -1)
    return encode_spans(doc_start.expand(B, T), window)


def attention_case(T: int, P: int, group: int, dtype: torch.dtype, d: int = 8) -> list[Tensor]:
    g = generator(T + P + group)
    B, K = 2, 2
    shapes = [(B, T, K * group, d), *[(B, P, K, d)] * 2, *[(B, T, K, d)] * 2]
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


PATHS = ["materialised", "sdpa", "pieces", "lse"]


def attend(path: str, monkeypatch: Any, inputs: list[Tensor | None], spans: Spans, scale: float) -> Any:
    """By the native op; the C functions have a file of their own."""
    monkeypatch.setattr(attention_native, "SMALL_SCORES", 1 << 40 if path == "materialised" else -1)
    for name in ("LONG_KEYS", "LONG_MASK"):
        monkeypatch.setattr(attention_native, name, -1 if path == "pieces" else 1 << 40)
    for name, small in (("MASK", 100), ("LEAST_QUERIES", 3), ("PROBED_QUERIES", 2)):
        monkeypatch.setattr(attention_pieces, name, small)
    return NATIVE.span_attention(*inputs, spans, scale, return_lse=path == "lse")


def compare_attention(
    path: str, monkeypatch: Any, inputs: list[Tensor], spans: Spans, scale: float, tolerance: float
) -> None:
    """Outputs and gradients in the inputs' dtype against the reference in fp64; empty rows exactly 0."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    truth, truth_lse = attention_reference.span_attention(*wide, spans, scale)
    given: list[Tensor | None] = list(inputs)
    if inputs[1].shape[1] == 0 and path != "lse":
        given[1] = given[2] = None  # no prefix may be given as None or as no keys
    with torch.no_grad():
        quick = attend(path, monkeypatch, given, spans, scale)
    result = attend(path, monkeypatch, given, spans, scale)
    out, lse = result if path == "lse" else (result, None)
    is_empty = ~spans.dense(inputs[1].shape[1], inputs[3].shape[1]).any(-1)
    assert out.dtype == inputs[0].dtype and relative(out, truth) < tolerance
    assert relative(quick[0] if path == "lse" else quick, truth) < tolerance
    assert (out[is_empty] == 0).all()
    g = generator(0)
    direction = torch.randn(truth.shape, generator=g, dtype=torch.float64)
    loss, truth_loss = (out * direction).sum(), (truth * direction).sum()
    if lse is not None:
        assert torch.equal(lse == float("-inf"), is_empty[..., None].expand_as(lse))
        weight = torch.randn(truth_lse.shape, generator=g, dtype=torch.float64)
        seen = ~is_empty
        assert relative(lse[seen], truth_lse[seen]) < tolerance
        loss, truth_loss = loss + (lse * weight)[seen].sum(), truth_loss + (truth_lse * weight)[seen].sum()
    loss.backward()
    truth_loss.backward()
    for x, y in zip(inputs, wide, strict=True):
        if x.numel():
            assert relative(x.grad, y.grad, floor=3.0) < tolerance  # of a single key seen it is 0
    assert (inputs[0].grad[is_empty] == 0).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("T,P", [(1, 0), (1, 9), (7, 0), (7, 5), (17, 40), (63, 31)])
def test_span_attention_matches_its_reference_on_any_spans(T, P, group, path, monkeypatch):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
        spans = random_spans(2, T, P, seed=T + P)
        inputs = attention_case(T, P, group, dtype)
        compare_attention(path, monkeypatch, inputs, spans, 0.7, tolerance)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("T", [7, 63])
def test_span_attention_of_packed_documents_in_windows(T, window, path, monkeypatch):
    inputs = attention_case(T, 0, 2, torch.float32)
    compare_attention(path, monkeypatch, inputs, packed(2, T, window), 1.0, 5e-6)


@pytest.mark.parametrize("path", PATHS)
def test_span_attention_without_a_mask_equals_seeing_everything(path, monkeypatch):
    inputs = attention_case(7, 5, 2, torch.float64)
    bounds = torch.tensor([0, 5, 0, 7], dtype=torch.int32).expand(2, 7, 4)
    whole = Spans(bounds, sees_all=True)
    truth, _ = attention_reference.span_attention(*inputs, Spans(bounds), 1.0)
    out = attend(path, monkeypatch, list(inputs), whole, 1.0)
    assert relative(out[0] if path == "lse" else out, truth) < 1e-12


@pytest.mark.parametrize("path", PATHS)
def test_rows_that_see_nothing_are_zero_even_when_all_of_them_do(path, monkeypatch):
    inputs = attention_case(7, 5, 2, torch.float32)
    compare_attention(path, monkeypatch, inputs, Spans(torch.zeros(2, 7, 4, dtype=torch.int32)), 1.0, 1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_unseen_keys_may_hold_anything_finite(path, monkeypatch):
    q, *kv = (x.detach() for x in attention_case(7, 5, 2, torch.float32))
    spans = Spans(torch.tensor([1, 3, 2, 6], dtype=torch.int32).expand(2, 7, 4))
    before = attend(path, monkeypatch, [q, *kv], spans, 1.0)
    for prefix, own in (kv[0:3:2], kv[1:4:2]):
        prefix[:, [0, 3, 4]], own[:, [0, 1, 6]] = 1e4, 1e4
    after = attend(path, monkeypatch, [q, *kv], spans, 1.0)
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x, y)


def test_span_attention_takes_strided_inputs(monkeypatch):
    inputs = attention_case(17, 9, 2, torch.float64)
    spans = random_spans(2, 17, 9, seed=3)
    truth = attend("materialised", monkeypatch, list(inputs), spans, 1.0)
    strided = [torch.stack([x, x], -1)[..., 0] for x in inputs]
    strided[0] = inputs[0].transpose(1, 2).contiguous().transpose(1, 2)
    assert not any(x.is_contiguous() for x in strided)
    for path in ("materialised", "sdpa", "pieces"):
        assert relative(attend(path, monkeypatch, list(strided), spans, 1.0), truth) < 1e-12


def test_span_attention_under_autocast_computes_in_one_dtype(monkeypatch):
    """There cos and sin leave q and k in fp32, while v comes from a projection in bf16."""
    inputs = attention_case(7, 5, 2, torch.float32)
    spans = random_spans(2, 7, 5, seed=1)
    truth = attend("materialised", monkeypatch, list(inputs), spans, 1.0)
    dtypes = [torch.float32, *[torch.float32, torch.bfloat16] * 2]
    mixed = [x.detach().to(dtype).requires_grad_() for x, dtype in zip(inputs, dtypes, strict=True)]
    with torch.autocast("cpu", torch.bfloat16):
        out = attend("materialised", monkeypatch, list(mixed), spans, 1.0)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert relative(out, truth) < 0.02
    assert all(x.grad.isfinite().all() and x.grad.dtype == x.dtype for x in mixed)


# -- norms and rope ------------------------------------------------------------------------------------------

DTYPES = [(torch.float64, 3e-7), (torch.float32, 3e-6)]  # norms compute in fp32 whatever the dtype


def copies(tensors: list[Tensor | None], dtype: torch.dtype, needs: list[bool]) -> list[Tensor | None]:
    """The same values in another dtype, as leaves; a dense layout is kept."""
    return [
        None if x is None else x.detach().to(dtype).requires_grad_(need) for x, need in zip(tensors, needs, strict=True)
    ]


def compare_gradients(got: list[Tensor | None], truth: list[Tensor | None], tolerance: float) -> None:
    for x, y in zip(got, truth, strict=True):
        if x is not None and y is not None and x.requires_grad:
            assert relative(x.grad, y.grad) < tolerance
        else:
            assert x is None or x.grad is None


def transposed(*shape: int, seed: int) -> Tensor:
    """A transposed tensor: dense, but in another order than its axes."""
    b, t, d = shape
    return torch.randn(t, b, d, generator=generator(seed), dtype=torch.float64).transpose(0, 1)


def sliced(*shape: int, seed: int) -> Tensor:
    """Every second row of a tensor."""
    x = torch.randn(*shape[:-2], shape[-2] * 2, shape[-1], generator=generator(seed), dtype=torch.float64)
    return x[..., ::2, :]


@pytest.mark.parametrize("dtype,tolerance", DTYPES)
@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize("weights", ["w", "0", "ww", "w0", "0w", "ww0", "00"])
def test_rms_norms_match_the_reference(kernels, weights, needs, dtype, tolerance):
    x = transposed(3, 5, 24, seed=0)
    assert not x.is_contiguous() and x.to(dtype).stride() == x.stride()
    w: list[Tensor | None] = [
        None if kind == "0" else torch.rand(24, generator=generator(i), dtype=torch.float64) + 0.5
        for i, kind in enumerate(weights)
    ]
    flags = [needs[0], *[needs[1 + i % 2] for i in range(len(w))]]
    mine, truth = copies([x, *w], dtype, flags), copies([x, *w], torch.float64, flags)
    outs = kernels.rms_norms(mine[0], mine[1:], EPS)
    expected = [norm_reference.rms_norm(truth[0], weight, EPS) for weight in truth[1:]]
    for out, y in zip(outs, expected, strict=True):
        assert out.dtype == dtype and relative(out, y) < tolerance
    with torch.no_grad():
        for out, y in zip(kernels.rms_norms(mine[0], mine[1:], EPS), expected, strict=True):
            assert relative(out, y) < tolerance
    if not any(o.requires_grad for o in expected):
        assert not any(o.requires_grad for o in outs)
        return
    loss = sum((o * (i + 1)).pow(3).sum() for i, o in enumerate(outs))
    loss.backward()
    sum((o * (i + 1)).pow(3).sum() for i, o in enumerate(expected)).backward()
    compare_gradients(mine, truth, 10 * tolerance)


@pytest.mark.parametrize("layout", [transposed, sliced])
def test_norms_take_any_layout_in_both_directions(kernels, layout):
    """Inputs that are views, and gradients of the same layout as the outputs."""
    x, y = layout(3, 5, 24, seed=0).float(), layout(3, 5, 24, seed=1).float()
    base = torch.stack([x, y]).requires_grad_()
    wide = base.detach().double().requires_grad_()
    w = torch.rand(24, generator=generator(2)) + 0.5

    def loss(base: Tensor, norms: Any) -> Tensor:
        a, b = base[0].transpose(0, 1), base[1].transpose(0, 1)
        first, second = norms(a, (w.to(base.dtype), None))
        return (first * b + second.sin()).transpose(0, 1).pow(2).sum()

    loss(base, lambda x, ws: kernels.rms_norms(x, ws, EPS)).backward()
    loss(wide, lambda x, ws: [norm_reference.rms_norm(x, weight, EPS) for weight in ws]).backward()
    assert relative(base.grad, wide.grad) < 3e-6


def test_a_norm_whose_output_is_not_used_gets_a_zero_gradient(kernels):
    x = torch.randn(4, 8, generator=generator(0), requires_grad=True)
    a, b = (torch.rand(8, generator=generator(i)).requires_grad_() for i in (1, 2))
    kernels.rms_norms(x, (a, b), EPS)[0].sum().backward()
    truth = x.detach().double().requires_grad_()
    norm_reference.rms_norm(truth, a.detach().double(), EPS).sum().backward()
    assert relative(x.grad, truth.grad) < 1e-5
    assert b.grad is None or not b.grad.any()


def test_norms_of_zeros_are_zero_with_finite_gradients(kernels):
    x = torch.zeros(2, 8, requires_grad=True)
    w = torch.ones(8, requires_grad=True)
    out = kernels.rms_norms(x, (w, None), EPS)
    sum(o.sum() for o in out).backward()
    assert all((o == 0).all() for o in out)
    assert x.grad.isfinite().all() and w.grad.isfinite().all()


@pytest.mark.parametrize("dtype,tolerance", DTYPES)
@pytest.mark.parametrize("scalar_shape", [None, (1,), (3, 5, 1)])
@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=3) if any(n)])
def test_add_rms_norm_matches_the_reference(kernels, needs, scalar_shape, dtype, tolerance):
    x, y = transposed(3, 5, 24, seed=0), transposed(3, 5, 24, seed=1)
    w = torch.rand(24, generator=generator(2), dtype=torch.float64) + 0.5
    mine, truth = copies([x, y, w], dtype, list(needs)), copies([x, y, w], torch.float64, list(needs))
    scalar = None if scalar_shape is None else torch.rand(scalar_shape, generator=generator(3)).to(dtype) + 0.5
    out = kernels.add_rms_norm(*mine, EPS, scalar)
    expected = truth[0] + norm_reference.rms_norm(truth[1], truth[2], EPS)
    expected = expected * scalar.double() if scalar is not None else expected
    assert out.dtype == dtype and relative(out, expected) < tolerance
    with torch.no_grad():
        assert relative(kernels.add_rms_norm(*mine, EPS, scalar), expected) < tolerance
    out.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    compare_gradients(mine, truth, 10 * tolerance)
    assert torch.equal(mine[0].detach(), x.to(dtype)) and torch.equal(mine[1].detach(), y.to(dtype))


@pytest.mark.parametrize("dtype,tolerance", DTYPES)
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("T,h,d", [(1, 1, 2), (7, 3, 16), (17, 2, 30)])
def test_norm_rope_turns_pairs_of_halves(kernels, T, h, d, needs, dtype, tolerance):
    x = torch.randn(2, h, T, d, generator=generator(0), dtype=torch.float64).transpose(1, 2)
    w = torch.rand(d, generator=generator(1), dtype=torch.float64) + 0.5
    positions = torch.randint(0, 5000, (2, T), generator=generator(2))
    frequencies = default_frequencies(d, 1e4)
    cos, sin = angles(positions, frequencies, dtype)
    mine, truth = copies([x, w], dtype, list(needs)), copies([x, w], torch.float64, list(needs))
    out = kernels.norm_rope(*mine, cos, sin, EPS)
    angle = (positions[..., None].float() * frequencies).double()  # angles are fp32 by definition
    expected = norm_reference.norm_rope(*truth, angle, EPS)
    assert out.dtype == dtype and relative(out, expected) < tolerance
    with torch.no_grad():
        assert relative(kernels.norm_rope(*mine, cos, sin, EPS), expected) < tolerance
    out.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    compare_gradients(mine, truth, 10 * tolerance)


def test_the_frequencies_of_both_layer_kinds():
    sliding = default_frequencies(256, 1e4)
    assert sliding.shape == (128,)
    assert torch.allclose(sliding.double(), 1e4 ** (-2 * torch.arange(128, dtype=torch.float64) / 256))
    full = proportional_frequencies(512, 1e6, 0.25)
    assert full.shape == (256,)
    assert torch.allclose(full[:64].double(), 1e6 ** (-2 * torch.arange(64, dtype=torch.float64) / 512))
    assert (full[64:] == 0).all()


# -- experts -------------------------------------------------------------------------------------------------


def expert_case(N: int, E: int, k: int, choice: str = "random") -> tuple[list[Tensor], Tensor]:
    """x, gate_up, down and routing weights in fp64, and which experts; E among them means no expert."""
    D, F_ = 12, 5
    g = generator(N + 10 * E + k)
    x = torch.randn(N, D, generator=g, dtype=torch.float64)
    gate_up = torch.randn(E, 2 * F_, D, generator=g, dtype=torch.float64)
    down = torch.randn(E, D, F_, generator=g, dtype=torch.float64)
    weight = torch.rand(N, k, generator=g, dtype=torch.float64)
    order = torch.rand(N, max(E, k), generator=g).argsort(-1)[:, :k]
    index = {
        "random": order,
        "one": torch.full_like(order, E // 2) + torch.arange(k) * E,  # the others of a token: no expert
        "some empty": torch.rand(N, max(E // 2, k), generator=g).argsort(-1)[:, :k] * 2,  # only even ones
        "none": torch.full_like(order, E),
        "padding": torch.where(torch.rand(N, 1, generator=g) < 0.4, E, order),
    }[choice].clamp(max=E)
    return [x, gate_up, down, weight], index


def compare_experts(
    kernels: Kernels, tensors: list[Tensor], index: Tensor, needs: list[bool], dtype: torch.dtype, tolerance: float
) -> None:
    mine, truth = copies(list(tensors), dtype, needs), copies(list(tensors), torch.float64, needs)
    out = kernels.expert_mlp(mine[0], mine[1], mine[2], index, mine[3])
    expected = expert_reference.expert_mlp(truth[0], truth[1], truth[2], index, truth[3])
    assert out.dtype == dtype and relative(out, expected) < tolerance
    direction = torch.randn(out.shape, generator=generator(9), dtype=torch.float64)
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    compare_gradients(mine, truth, tolerance)


EXPERT_DTYPES = [(torch.float64, 1e-12), (torch.float32, 3e-5)]  # a single sum may cancel
ALL = [True] * 4


@pytest.mark.parametrize("dtype,tolerance", EXPERT_DTYPES)
@pytest.mark.parametrize("E,k", [(1, 1), (3, 1), (3, 2), (8, 2)])
@pytest.mark.parametrize("N", [0, 1, 63, 257])
def test_expert_mlp_matches_its_reference(kernels, N, E, k, dtype, tolerance):
    tensors, index = expert_case(N, E, k)
    compare_experts(kernels, tensors, index, ALL, dtype, tolerance)


@pytest.mark.parametrize("dtype,tolerance", EXPERT_DTYPES)
@pytest.mark.parametrize("choice", ["one", "some empty", "none", "padding"])
@pytest.mark.parametrize("E,k", [(1, 1), (3, 1), (8, 2)])
def test_expert_mlp_with_empty_experts_and_tokens_without_one(kernels, E, k, choice, dtype, tolerance):
    tensors, index = expert_case(37, E, k, choice)
    if choice in ("none", "padding"):
        assert (index == E).all(-1).any()
    compare_experts(kernels, tensors, index, ALL, dtype, tolerance)
    out = kernels.expert_mlp(*(t.to(dtype) for t in tensors[:3]), index, tensors[3].to(dtype))
    assert (out[(index == E).all(-1)] == 0).all()


@pytest.mark.parametrize("dtype,tolerance", EXPERT_DTYPES)
@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=4) if any(n)])
def test_expert_mlp_trains_whatever_is_not_frozen(kernels, needs, dtype, tolerance):
    tensors, index = expert_case(37, 3, 2, "padding")
    compare_experts(kernels, tensors, index, list(needs), dtype, tolerance)


@pytest.mark.parametrize("dtype,tolerance", EXPERT_DTYPES)
@pytest.mark.parametrize("choice", ["random", "one", "some empty", "none", "padding"])
def test_the_dense_path_equals_the_grouped_one(kernels, choice, dtype, tolerance, monkeypatch):
    tensors, index = expert_case(63, 8, 2, choice)
    x, gate_up, down, weight = (t.to(dtype) for t in tensors)
    calls = []
    module = expert_cpu if kernels is CPU and serves(x) else expert_native
    dense = module._dense
    monkeypatch.setattr(module, "_dense", lambda *a: calls.append(1) or dense(*a))
    with torch.no_grad():
        quick = kernels.expert_mlp(x, gate_up, down, index, weight)
        monkeypatch.setattr(expert_native, "DENSE_FLOPS", -1)
        grouped = kernels.expert_mlp(x, gate_up, down, index, weight)
    assert len(calls) == 1
    assert relative(quick, grouped) < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_the_router_follows_its_formula(kernels, top_k, dtype):
    D, E, N = 24, 5, 63
    g = generator(top_k)
    router = Router(D, E, top_k, kernels).to(dtype)
    with torch.no_grad():
        router.proj.weight.copy_(torch.randn(E, D, generator=g) * 3)
        router.scale.copy_(torch.rand(D, generator=g) + 0.5)
        router.per_expert_scale.copy_(torch.rand(E, generator=g) + 0.5)
    x = torch.randn(N, D, generator=g).to(dtype)
    index, weight = router(x)
    if dtype == torch.bfloat16:  # rounded after each factor
        scores = F.linear(x * router.scale * D**-0.5, router.proj.weight)
    else:
        scores = (x * router.scale * D**-0.5) @ router.proj.weight.T
    probability = torch.exp(scores.detach().float() - scores.detach().float().logsumexp(-1, keepdim=True))
    for n in range(N):
        chosen = probability[n, index[n]]
        assert len(set(index[n].tolist())) == top_k
        assert torch.allclose(chosen, probability[n].sort(descending=True)[0][:top_k], rtol=1e-5)
        truth = chosen / chosen.sum() * router.per_expert_scale[index[n]].float()
        assert torch.allclose(weight[n].float(), truth, rtol=1e-5)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-6), (torch.float32, 3e-6)])
@pytest.mark.parametrize("N,E,k", [(1, 1, 1), (63, 5, 2), (257, 40, 8)])
def test_the_gradients_of_routing_match_its_formula(kernels, N, E, k, dtype, tolerance):
    g = generator(N)
    scores, scale = torch.randn(N, E, generator=g) * 3, torch.rand(E, generator=g) + 0.5
    mine, truth = copies([scores, scale], dtype, [True] * 2), copies([scores, scale], torch.float64, [True] * 2)
    index, weight = kernels.route(*mine, k)
    best, order = truth[0].topk(k, -1)
    assert torch.equal(index, order)
    expected = best.softmax(-1) * truth[1][order]
    assert relative(weight, expected) < tolerance
    direction = torch.randn(weight.shape, generator=generator(9), dtype=torch.float64)
    (weight * direction).sum().backward()
    (expected * direction).sum().backward()
    assert relative(mine[0].grad, truth[0].grad, floor=1e-3) < 10 * tolerance
    assert relative(mine[1].grad, truth[1].grad) < tolerance


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu", "swiglu_oai"])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_gated_activations_match_their_formula_from_tiny_to_huge_gates(kernels, dtype, tolerance, activation):
    g = generator(0)
    gate = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-80.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 80.0])])
    mine, truth = (copies([gate, torch.randn(4008, generator=g)], d, [True] * 2) for d in (dtype, torch.float64))
    truth[1].data.copy_(mine[1].data)
    out, expected = kernels.gated(*mine, activation), expert_reference.gated(*truth, activation)
    direction = torch.randn(out.shape, generator=generator(9), dtype=torch.float64)
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    ends = slice(0, 4001)  # the huge ones would hide the others in a norm
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(mine, truth, strict=True))]
    for x, y in pairs:
        assert relative(x[ends], y[ends]) < tolerance
        assert torch.allclose(x[4001:].double(), y[4001:], rtol=1e-5, atol=1e-6)


def test_the_c_functions_are_built_where_there_is_a_compiler_and_left_out_where_there_is_none(monkeypatch, tmp_path):
    has_compiler = shutil.which((os.environ.get("CC") or "cc").split()[0]) is not None
    assert (c_library.library() is not None) == has_compiler
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    monkeypatch.setattr(c_library, "library", functools.cache(c_library.library.__wrapped__))
    x = torch.randn(7, 24)
    assert c_library.library() is None and not serves(x)
    assert torch.equal(CPU.rms_norms(x, (None,), EPS)[0], NATIVE.rms_norms(x, (None,), EPS)[0])


@pytest.fixture
def quick_builds(monkeypatch):
    """The library without optimisation, for tests that build it and do not call it."""
    flags = [flag for flag in c_library.FLAGS if flag != "-O3"]
    monkeypatch.setattr(c_library, "FLAGS", (*flags, "-O0"))


def test_the_library_is_built_again_for_other_sources_and_kept_for_the_same(monkeypatch, tmp_path, quick_builds):
    if c_library.library() is None:
        return
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(c_library, "_machine", lambda: "another machine")
    build = c_library.library.__wrapped__
    assert build() is not None
    (built,) = (tmp_path / "blockdiff").iterdir()
    made = built.stat().st_mtime_ns
    assert build() is not None and built.stat().st_mtime_ns == made
    monkeypatch.setattr(c_library, "_machine", lambda: "a third one")
    assert build() is not None and len(list((tmp_path / "blockdiff").iterdir())) == 2


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_process_leaves_no_directory_of_its_own_behind(has_cache, tmp_path, monkeypatch, quick_builds):
    if c_library.library() is None:
        return
    own = tmp_path / "own"
    own.mkdir()
    (tmp_path / "file").write_text("no directory can be made in here")
    monkeypatch.setattr(c_library.tempfile, "tempdir", str(own))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("cache" if has_cache else "file")))
    assert c_library.library.__wrapped__() is not None
    assert not list(own.iterdir()) and (tmp_path / "cache").exists() == has_cache
