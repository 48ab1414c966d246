"""span_attention in torch against its reference: outputs and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blockdiff.kernels import IN_TORCH
from blockdiff.kernels.span_attention import pieces as attention_pieces
from blockdiff.kernels.span_attention import torch as attention_in_torch
from blockdiff.spans import Spans, encode_spans
from tests.oracles import span_attention as attention_reference
from tests.support.closeness import relative_error

pytestmark = pytest.mark.quick


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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


PATHS = ["materialised", "sdpa", "pieces"]


def attend(path: str, monkeypatch: Any, inputs: list[Tensor | None], spans: Spans, scale: float) -> Any:
    """In torch; the C functions have a file of their own."""
    monkeypatch.setattr(attention_in_torch, "SMALL_SCORES", 1 << 40 if path == "materialised" else -1)
    for name in ("LONG_KEYS", "LONG_MASK"):
        monkeypatch.setattr(attention_in_torch, name, -1 if path == "pieces" else 1 << 40)
    for name, small in (("MASK", 100), ("LEAST_QUERIES", 3), ("PROBED_QUERIES", 2)):
        monkeypatch.setattr(attention_pieces, name, small)
    return IN_TORCH.span_attention(*inputs, spans, scale)


def compare_attention(
    path: str, monkeypatch: Any, inputs: list[Tensor], spans: Spans, scale: float, tolerance: float
) -> None:
    """Outputs and gradients in the inputs' dtype against the reference in fp64; empty rows exactly 0."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    truth, _ = attention_reference.span_attention(*wide, spans, scale)
    given: list[Tensor | None] = list(inputs)
    if inputs[1].shape[1] == 0:
        given[1] = given[2] = None  # no prefix may be given as None or as no keys
    with torch.no_grad():
        quick = attend(path, monkeypatch, given, spans, scale)
    out = attend(path, monkeypatch, given, spans, scale)
    is_empty = ~spans.dense(inputs[1].shape[1], inputs[3].shape[1]).any(-1)
    assert out.dtype == inputs[0].dtype and relative_error(out, truth) < tolerance
    assert relative_error(quick, truth) < tolerance
    assert (out[is_empty] == 0).all()
    g = generator(0)
    direction = torch.randn(truth.shape, generator=g, dtype=torch.float64)
    (out * direction).sum().backward()
    (truth * direction).sum().backward()
    for x, y in zip(inputs, wide, strict=True):
        if x.numel():
            assert relative_error(x.grad, y.grad, floor=3.0) < tolerance  # of a single key seen it is 0
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
    assert relative_error(out, truth) < 1e-12


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
        assert relative_error(attend(path, monkeypatch, list(strided), spans, 1.0), truth) < 1e-12


@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0), (0, 0)])
def test_span_attention_of_no_rows_or_no_queries_is_empty_and_has_gradients(kernels, B, T):
    for d, P in ((8, 3), (16, 3)):  # in torch and by the C functions
        shapes = [(B, T, 4, d), *[(B, P, 2, d)] * 2, *[(B, T, 2, d)] * 2]
        inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
        spans = Spans(torch.tensor([0, P, 0, T], dtype=torch.int32).repeat(B, T, 1))
        out = kernels.span_attention(*inputs, spans, 1.0)
        assert out.shape == shapes[0]
        out.sum().backward()
        assert all(x.grad.shape == x.shape and not x.grad.any() for x in inputs)


def test_bounds_may_come_as_other_integers(kernels):
    inputs, spans = attention_case(17, 9, 2, torch.float32, d=16), random_spans(2, 17, 9, seed=3)
    outs = [kernels.span_attention(*inputs, each, 1.0) for each in (spans, Spans(spans.bounds_BT4.long()))]
    assert torch.equal(*outs)


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
    assert relative_error(out, truth) < 0.02
    assert all(x.grad.isfinite().all() and x.grad.dtype == x.dtype for x in mixed)
