"""span_attention over a prefix in pages, in torch and in Triton, against the dense reference in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockdiff.errors import BlockdiffError
from blockdiff.kernels.span_attention import c as in_c
from blockdiff.kernels.span_attention import torch as in_torch
from blockdiff.kernels.span_attention import triton
from blockdiff.kernels.span_attention.paged import BlockTable, PagedTensor
from blockdiff.spans import Spans, canvas_spans, encode_spans
from tests.oracles import span_attention as reference
from tests.support.closeness import relative_error

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = 3e-6  # relative


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def in_pages(dense_BSKd: Tensor, lengths: list[int], page_tokens: int) -> PagedTensor:
    """The same prefix in pages in any order; whatever is no row's token holds NaN, and page 0 zeros."""
    B, S = dense_BSKd.shape[:2]
    width = -(-S // page_tokens)
    pool = torch.full((1 + B * width, page_tokens, *dense_BSKd.shape[2:]), float("nan"))
    pool[0] = 0
    pages = 1 + torch.randperm(B * width, generator=torch.Generator().manual_seed(1)).view(B, width)
    for row, length in enumerate(lengths):
        for column in range(length):
            pool[pages[row, column // page_tokens], column % page_tokens] = dense_BSKd[row, column]
        pages[row, -(-length // page_tokens) :] = 0
    table = pages.int().to(DEVICE)
    lengths_B = torch.tensor(lengths, device=DEVICE).int()
    return PagedTensor(pool.to(DEVICE), BlockTable(table, lengths_B, page_tokens, lengths=lengths))


def spans_of(geometry: str, lengths: list[int], T: int) -> Spans:
    """Causal tokens after a prefix, with and without a window, or a canvas."""
    past = torch.tensor(lengths)
    if geometry == "canvas":
        return canvas_spans(past, T)
    doc_start = torch.zeros(len(lengths), T, dtype=torch.int64)
    doc_start[0, T - 2 :] = -1  # padding
    return encode_spans(doc_start, 6 if geometry == "window" else None, past)


def inputs(lengths: list[int], T: int, h: int, K: int, d: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Queries, prefix keys and values (zeros after each row's length), own keys and values: fp32 on the CPU."""
    B, S = len(lengths), max(lengths)
    prefix = [random(B, S, K, d), random(B, S, K, d + 0) + 1]
    for x in prefix:
        for row, length in enumerate(lengths):
            x[row, length:] = 0
    return random(B, T, h, d) * 2 / d**0.5, prefix, [random(B, T, K, d), random(B, T, K, d) - 1]


@pytest.mark.quick
@pytest.mark.parametrize(  # the kernel's tiles have 32 keys: 32 and 64 are whole tiles
    "page_tokens,geometry", [(7, "window"), (7, "canvas"), (64, "causal")]
)
def test_a_prefix_in_pages_is_read_as_a_dense_one(page_tokens, geometry):
    lengths, T = [70, 0, 33], 10
    q, prefix, own = inputs(lengths, T, 4, 2, 16)
    spans = spans_of(geometry, lengths, T)
    truth, lse = reference.span_attention(*(x.double() for x in (q, *prefix, *own)), spans, 0.9)
    pools = [in_pages(x, lengths, page_tokens) for x in prefix]
    moved, moved_spans = [x.to(DEVICE) for x in (q, *own)], Spans(spans.bounds_BT4.to(DEVICE))
    for dense, pool in zip(prefix, pools, strict=True):
        assert torch.equal(pool.dense().cpu(), dense)
    arguments = moved[0], *pools, *moved[1:], moved_spans, 0.9
    assert relative_error(in_torch.span_attention(*arguments), truth) < FP32
    out, its_lse = triton.with_lse(*arguments)
    assert relative_error(out, truth) < FP32 and relative_error(its_lse.exp(), lse.exp()) < FP32
    for splits in (2, 3):  # the keys in several parts
        tensors = moved[0], *(pool.pool_NPKd for pool in pools), *moved[1:]
        table, columns = pools[0].pages.table_BM, prefix[0].shape[1]
        paged, bounds = torch.ops.blockdiff.span_attention_paged, moved_spans.bounds_BT4
        out = paged(*tensors, bounds, table, columns, 0.9, splits)[0]
        dense = moved[0], *(x.to(DEVICE) for x in prefix), *moved[1:]
        assert relative_error(out, truth) < FP32
        assert torch.equal(out, torch.ops.blockdiff.span_attention(*dense, bounds, 0.9, splits)[0])


@pytest.mark.quick
@pytest.mark.parametrize("geometry", ["causal", "window"])
def test_own_keys_that_stand_in_the_pages_are_read_with_the_prefix(geometry, monkeypatch):
    """As more columns of it: in one run with them, and none of one's own beside it."""
    lengths, T = [30, 0, 9], 10
    q, prefix, own = inputs(lengths, T, 4, 2, 16)
    spans = spans_of(geometry, lengths, T)
    truth, _ = reference.span_attention(*(x.double() for x in (q, *prefix, *own)), spans, 0.9)
    pools = []
    for x, more in zip(prefix, own, strict=True):
        both = torch.cat([x, torch.zeros_like(more)], 1)
        for row, length in enumerate(lengths):
            both[row, length : length + T] = more[row]
        pools.append(in_pages(both, [length + T for length in lengths], 7))
    nothing = [x[:, :0].to(DEVICE) for x in own]
    for limit in (1, 1 << 10):  # in torch in pieces, too
        monkeypatch.setattr(in_torch, "LONG_KEYS", limit)
        monkeypatch.setattr(in_torch, "LONG_MASK", limit)
        in_place = (in_torch.span_attention, triton.span_attention)
        for attend in (*in_place, in_c.span_attention) if DEVICE == "cpu" else in_place:
            one_run = Spans(spans.in_one_run.bounds_BT4.to(DEVICE))
            out = attend(q.to(DEVICE), *pools, *nothing, one_run, 0.9)
            assert isinstance(out, Tensor) and relative_error(out, truth) < FP32


@pytest.mark.parametrize("h,K,d", [(1, 1, 16), (8, 1, 32), (4, 4, 64), (2, 1, 512)])
def test_heads_of_any_number_and_size_are_read_from_pages(h, K, d):
    lengths, T = [40, 9], 5
    q, prefix, own = inputs(lengths, T, h, K, d)
    spans = spans_of("causal", lengths, T)
    truth, _ = reference.span_attention(*(x.double() for x in (q, *prefix, *own)), spans, 1.0)
    tensors = [x.to(DEVICE) for x in (q, *own)]
    pools = [in_pages(x, lengths, 16) for x in prefix]
    out = triton.span_attention(tensors[0], *pools, *tensors[1:], Spans(spans.bounds_BT4.to(DEVICE)), 1.0)
    assert isinstance(out, Tensor) and relative_error(out, truth) < FP32


def test_what_the_kernel_does_not_read_from_pages_is_made_dense_or_refused():
    """Heads that need padding are read from a copy of the prefix."""
    lengths, T = [20, 9], 5
    q, prefix, own = inputs(lengths, T, 2, 1, 24)
    spans = spans_of("causal", lengths, T)
    truth, _ = reference.span_attention(*(x.double() for x in (q, *prefix, *own)), spans, 1.0)
    tensors, moved = [x.to(DEVICE) for x in (q, *own)], Spans(spans.bounds_BT4.to(DEVICE))
    pools = [in_pages(x, lengths, 16) for x in prefix]
    out = triton.span_attention(tensors[0], *pools, *tensors[1:], moved, 1.0)
    assert isinstance(out, Tensor) and relative_error(out, truth) < FP32
    doubles = [PagedTensor(p.pool_NPKd.double(), p.pages) for p in pools]
    with pytest.raises(BlockdiffError, match="float32, float64"):
        triton.span_attention(tensors[0], *doubles, *tensors[1:], moved, 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("page_tokens", [16, 128])
@pytest.mark.parametrize("h,K,d", [(16, 8, 256), (16, 2, 512), (8, 2, 64)])
def test_in_bf16_pages_give_the_bits_of_a_dense_prefix(h, K, d, page_tokens):
    lengths, T = [700, 0, 33], 256
    q, prefix, own = (
        [y.bfloat16() for y in x] if isinstance(x, list) else x.bfloat16() for x in inputs(lengths, T, h, K, d)
    )
    pools = [in_pages(x.float(), lengths, page_tokens).pool_NPKd.bfloat16() for x in prefix]
    pages = in_pages(prefix[0].float(), lengths, page_tokens).pages
    bounds = spans_of("causal", lengths, T).bounds_BT4.to(DEVICE)
    q, *tensors = (x.to(DEVICE) for x in (q, *own, *prefix))
    for splits in (1, 3):
        paged = torch.ops.blockdiff.span_attention_paged(
            q, *pools, *tensors[:2], bounds, pages.table_BM, pages.columns, 1.0, splits
        )[0]
        dense = torch.ops.blockdiff.span_attention(q, *tensors[2:], *tensors[:2], bounds, 1.0, splits)[0]
        assert paged.isfinite().all() and torch.equal(paged, dense)


def test_torch_sees_one_sound_op():
    lengths, T = [20, 9], 5
    q, prefix, own = inputs(lengths, T, 2, 1, 16)
    pools = [in_pages(x, lengths, 16) for x in prefix]
    bounds = spans_of("causal", lengths, T).bounds_BT4.to(DEVICE)
    tensors = [x.to(DEVICE) for x in (q, *own)]
    arguments = tensors[0], *(p.pool_NPKd.nan_to_num() for p in pools), *tensors[1:], bounds, pools[0].pages.table_BM
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.blockdiff.span_attention_paged, (*arguments, 20, 1.0, 0), test_utils=checks)
