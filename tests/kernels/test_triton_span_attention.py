"""span_attention in Triton against the dense reference in fp64, in the interpreter or on the GPU there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from blockdiff.errors import BlockdiffError
from blockdiff.kernels.span_attention import kernels_backward
from blockdiff.kernels.span_attention.triton import span_attention, splits_of, tiles_for, with_lse
from blockdiff.kernels.tiles import Tile
from blockdiff.spans import Spans, denoise_spans, encode_spans
from tests.oracles import span_attention as reference
from tests.oracles.visited_tiles import visited
from tests.support.closeness import relative_error

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative. Three tf32 products keep 22 bits of each factor, four times the rounding of fp32; the interpreter has fp32.
FP32 = 3e-6 if DEVICE == "cpu" else 1.2e-5


def inputs(spans: Spans, prefix: int, own: int, h: int = 2, K: int = 1, d: int = 16) -> list[Tensor]:
    """q, prefix k and v, own k and v on the CPU, fp32; scores are about as large as normed heads make them."""
    g = torch.Generator().manual_seed(0)
    B, T = spans.bounds_BT4.shape[:2]
    shapes = [(B, T, h, d), *[(B, prefix, K, d)] * 2, *[(B, own, K, d)] * 2]
    q, *keys = (torch.randn(*shape, generator=g) for shape in shapes)
    return [q * 2 / d**0.5, *keys]


def on(tensors: list[Tensor], dtype: torch.dtype, device: str = DEVICE) -> list[Tensor]:
    return [x.detach().to(device, dtype).requires_grad_() for x in tensors]


def splitting(splits: int) -> Callable[..., Any]:
    """The op with its keys in so many parts."""

    def op(*arguments: Any) -> Any:
        *tensors, spans, scale = arguments
        return torch.ops.blockdiff.span_attention(*tensors, spans.bounds_BT4, scale, splits)

    return op


def in_torch(
    q_BThd: Tensor, prefix_k: Tensor, prefix_v: Tensor, own_k: Tensor, own_v: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp composed of torch's operations: products in the dtype of the inputs, sums in fp32."""
    k, v = torch.cat([prefix_k, own_k], 1), torch.cat([prefix_v, own_v], 1)
    is_seen, (B, T, h, d) = spans.dense(prefix_k.shape[1], own_k.shape[1]), q_BThd.shape
    scores = torch.einsum("btkgd,bskd->btkgs", q_BThd.view(B, T, k.shape[2], -1, d), k).float() * scale
    scores = scores.masked_fill(~is_seen[:, :, None, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=-1e30)[..., None]).exp()
    out = torch.einsum("btkgs,bskd->btkgd", weights.to(v.dtype), v)
    return out.reshape(B, T, h, d), lse.view(B, T, h)


def outputs_and_gradients(op: Callable[..., Any], tensors: list[Tensor], spans: Spans, scale: float) -> list[Tensor]:
    """Output, log-sum-exp, and the five gradients of an arbitrary function of both."""
    out, lse = op(*tensors, spans, scale)
    is_finite = lse.isfinite()
    ((out.double().sin() * 3).sum() + lse[is_finite].double().cos().sum()).backward()
    return [out, lse.where(is_finite, 0), *(x.grad for x in tensors)]


def moved(spans: Spans) -> Spans:
    return Spans(spans.bounds_BT4.to(DEVICE))


def compare(spans: Spans, tensors: list[Tensor], op: Callable[..., Any] = with_lse, scale: float = 0.9) -> None:
    """Outputs, log-sum-exp and every gradient; rows that see nothing are exactly zero."""
    got = outputs_and_gradients(op, on(tensors, torch.float32), moved(spans), scale)
    truth = outputs_and_gradients(reference.span_attention, on(tensors, torch.float64, "cpu"), spans, scale)
    for x, y in zip(got, truth, strict=True):
        assert x.isfinite().all() and relative_error(x, y) < FP32
    sees_nothing_BT = ~spans.dense(tensors[1].shape[1], tensors[3].shape[1]).any(-1)
    assert not got[0].cpu()[sees_nothing_BT].any() and not got[2].cpu()[sees_nothing_BT].any()


# -- geometries ----------------------------------------------------------------------------------------------------


def documents(T: int, *starts: int, padding: int = 0) -> Tensor:
    """One row: the column at which every token's document starts, -1 for the last `padding` tokens."""
    row = torch.zeros(T, dtype=torch.int64)
    for start in starts:
        row[start:] = start
    row[T - padding :] = -1
    return row


def packed(T: int) -> Tensor:
    """Three documents in one row; a shorter row with padding; a row of padding only."""
    return torch.stack([documents(T, T // 3, T // 2), documents(T, T // 4, padding=T // 4), documents(T, padding=T)])


def canvases(window: int | None, L: int = 13) -> tuple[Spans, int, int]:
    """Rows of packed documents with canvases sorted by (document, start), one of them absent or partly filled."""
    doc_start_BC = torch.tensor([[0, 0, 30, 30, 90], [0, 40, 40, 70, 0]])
    start_BC = torch.tensor([[9, 25, 33, 80, 90], [40, 41, 60, 99, 0]])
    length_BC = torch.tensor([[L, L, L, 4, L], [L, 1, L, L, 0]])
    return denoise_spans(start_BC, doc_start_BC, length_BC, L, window), 100, 5 * L


def arbitrary(T: int, prefix: int, own: int) -> Spans:
    """Any spans, empty ones and ones beyond the keys among them, in no order."""
    g = torch.Generator().manual_seed(T)
    lo = torch.stack([torch.randint(-3, n + 3, (2, T), generator=g) for n in (prefix, own)], -1)
    hi = lo + torch.randint(-2, max(prefix, own) // 2 + 2, (2, T, 2), generator=g)
    return Spans(torch.stack([lo, hi], -1).flatten(-2).to(torch.int32))


@pytest.mark.parametrize(("T", "window"), [(1, None), (63, 7), (65, None), (100, 7), (257, None)])
def test_causal_rows_of_packed_documents(T, window):
    spans = encode_spans(packed(T)[:2] if T == 257 else packed(T), window)
    compare(spans, inputs(spans, 0, T))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("T,past", [(1, 65), (33, 100)])
def test_a_later_chunk_sees_what_was_cached_before_it(T, past, window):
    spans = encode_spans(torch.zeros(3, T, dtype=torch.int64), window, torch.tensor([past, past // 2, 0]))
    compare(spans, inputs(spans, past, T))


@pytest.mark.quick
@pytest.mark.parametrize("window", [None, 8])
def test_many_canvases_over_packed_documents(window):
    spans, prefix, own = canvases(window)
    compare(spans, inputs(spans, prefix, own))


@pytest.mark.parametrize("T,prefix,own", [(1, 1, 1), (65, 63, 100), (40, 0, 63), (40, 65, 0), (3, 0, 0)])
def test_arbitrary_spans_over_arbitrary_keys(T, prefix, own):
    spans = arbitrary(T, prefix, own)
    compare(spans, inputs(spans, prefix, own))


@pytest.mark.parametrize("missing", ["first", "last"])
def test_a_tile_of_which_one_query_lacks_one_key_is_not_seen_by_all(missing):
    tensors = inputs(Spans(torch.zeros(1, 2, 4)), 256, 1)
    columns = tiles_for(tensors[0]).forward.columns
    all_but_one = [1, columns] if missing == "first" else [0, columns - 1]
    compare(Spans(torch.tensor([[[*all_but_one, 0, 1], [0, columns, 0, 1]]], dtype=torch.int32)), tensors)


def test_rows_that_see_nothing_are_zero_even_when_all_of_them_do():
    spans = Spans(torch.zeros(2, 7, 4, dtype=torch.int32))
    compare(spans, inputs(spans, 5, 9))


def test_no_queries_and_no_rows():
    for B, T in ((2, 0), (0, 3)):
        spans = Spans(torch.zeros(B, T, 4, dtype=torch.int32, device=DEVICE))
        tensors = on(inputs(spans, 5, 9), torch.float32)
        out = span_attention(*tensors, spans, 1.0)
        assert isinstance(out, Tensor) and out.shape == (B, T, 2, 16)
        out.sum().backward()
        assert all(not x.grad.any() for x in tensors)


def test_a_missing_prefix_is_an_empty_one():
    spans = moved(encode_spans(packed(20)))
    q, _, _, k, v = on(inputs(spans, 0, 20), torch.float32)
    without, empty = ((None, None), (k[:, :0], v[:, :0]))
    assert torch.equal(*(span_attention(q, *prefix, k, v, spans, 1.0) for prefix in (without, empty)))


# -- heads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("h,K", [(1, 1), (4, 2), (8, 1)])
def test_queries_share_key_heads(h, K):
    spans = arbitrary(37, 20, 33)
    compare(spans, inputs(spans, 20, 33, h, K))


@pytest.mark.parametrize("d", [64, 512, 24])
def test_every_head_size(d):
    spans = arbitrary(9, 20, 17)
    compare(spans, inputs(spans, 20, 17, 4, 2, d))


def test_views_and_gradients_of_any_layout():
    spans = arbitrary(21, 20, 17)
    tensors = inputs(spans, 30, 17, 4, 2)
    tensors[1:3] = [x[:, 5:25] for x in tensors[1:3]]  # columns of a buffer with room to grow
    truth = outputs_and_gradients(reference.span_attention, on(tensors, torch.float64, "cpu"), spans, 1.0)
    leaves = on(tensors, torch.float32)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves[:3]]
    views += [torch.stack([x, x], -1)[..., 0] for x in leaves[3:]]
    assert not any(x.is_contiguous() for x in views)
    out, lse = with_lse(*views, moved(spans), 1.0)
    is_finite = lse.isfinite()
    ((out.transpose(1, 2).double().sin() * 3).sum() + lse[is_finite].double().cos().sum()).backward()
    for x, y in zip([out, lse.where(is_finite, 0), *(x.grad for x in leaves)], truth, strict=True):
        assert relative_error(x, y) < FP32


# -- splits and merges ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [3, 9])
def test_keys_in_several_parts_give_the_same(splits):
    """Nine are more than there are key tiles: the last parts are empty."""
    spans = arbitrary(37, 100, 40)
    compare(spans, inputs(spans, 100, 40), splitting(splits))


def test_few_programs_are_split_until_they_fill_the_device():
    assert splits_of(programs=200, key_tiles=1000, multiprocessors=132) == 1
    assert splits_of(programs=64, key_tiles=1000, multiprocessors=132) == 2
    assert splits_of(programs=44, key_tiles=1000, multiprocessors=132) == 3
    assert splits_of(programs=1, key_tiles=1000, multiprocessors=132) == 32
    assert splits_of(programs=1, key_tiles=9, multiprocessors=132) == 1
    # one canvas of the released model over a full window: 4 row tiles of 8 heads, 16 + 4 key tiles
    assert splits_of(programs=32, key_tiles=20, multiprocessors=132) == 4


def test_halves_of_the_keys_merge_by_their_log_sum_exp_in_both_directions():
    """As block-sparse families do: each half's output is weighted with exp(its lse - the lse of the whole)."""
    spans = arbitrary(23, 20, 33)
    whole = on(inputs(spans, 20, 33), torch.float32)
    halves = on(inputs(spans, 20, 33), torch.float32)
    bounds = spans.bounds_BT4.to(DEVICE)
    only_prefix, only_own = (bounds * torch.tensor(keep, device=DEVICE) for keep in ([1, 1, 0, 0], [0, 0, 1, 1]))

    def merged(*arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, _, scale = arguments
        parts = [with_lse(*tensors, Spans(part.int()), scale) for part in (only_prefix, only_own)]
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        shares = [torch.where(lse.isfinite(), (part_lse - lse).exp(), 0) for _, part_lse in parts]
        return sum(out * share[..., None] for (out, _), share in zip(parts, shares, strict=True)), lse  # type: ignore[return-value]

    # gradients through logaddexp of two -inf are not numbers: those rows are left out of the function
    is_seen = spans.dense(20, 33).any(-1).to(DEVICE)
    assert is_seen.any() and not is_seen.all()
    for tensors, op in ((whole, with_lse), (halves, merged)):
        out, lse = op(*tensors, moved(spans), 0.9)
        (out[is_seen].sin().sum() + lse[is_seen].cos().sum()).backward()
    for x, y in zip(halves, whole, strict=True):
        assert relative_error(x.grad.nan_to_num(), y.grad) < 1e-5


# -- what is loaded ------------------------------------------------------------------------------------------------


def test_keys_outside_every_hull_are_never_loaded():
    """They hold NaN here: a product with 0 would show."""
    spans = encode_spans(torch.tensor([[70] * 20]), 8, torch.tensor([90]))  # sees prefix columns 83 .. 89
    q, *keys = inputs(spans, 200, 20)
    for x in keys[:2]:
        x[:, :83], x[:, 90:] = float("nan"), float("nan")
    got = outputs_and_gradients(with_lse, on([q, *keys], torch.float32), moved(spans), 1.0)
    clean = outputs_and_gradients(with_lse, on([q, *(x.nan_to_num() for x in keys)], torch.float32), moved(spans), 1.0)
    for x, y in zip(got, clean, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("window", [None, 8])
def test_the_forward_visits_what_the_oracle_says(window):
    """Keys that it gives as not visited may be NaN: nothing changes; every key that a query sees is visited."""
    spans, prefix, own = canvases(window)
    tensors = [x[:1] for x in inputs(spans, prefix, own)]
    first = Spans(spans.bounds_BT4[:1])
    tile = tiles_for(tensors[0]).forward
    is_visited = visited(first, prefix, own, tile.rows // 2, tile.columns)
    assert (is_visited | ~first.dense(prefix, own)).all()
    clean = with_lse(*on(tensors, torch.float32), moved(first), 1.0)[0]
    for rows in (slice(0, tile.rows // 2), slice(tile.rows // 2, own)):  # one tile of queries, then the others
        if window is None:
            assert is_visited[0, rows].any(0).sum() < prefix + own
        poisoned = [x.clone() for x in tensors]
        never = ~is_visited[0, rows].any(0)
        for x, keys in zip(poisoned[1:], (never[:prefix], never[:prefix], never[prefix:], never[prefix:]), strict=True):
            x[:, keys] = float("nan")
        out = with_lse(*on(poisoned, torch.float32), moved(first), 1.0)[0]
        assert torch.equal(out[:, rows], clean[:, rows])


def seeing(spans: Spans, first: int, keys: int, N: int) -> Tensor:
    tiles = triton.cdiv(keys, N)
    bounds = spans.bounds_BT4.contiguous().to(DEVICE)
    interval = torch.full((bounds.shape[0], tiles, 4), -7, dtype=torch.int32, device=DEVICE)
    kernel = kernels_backward.span_attention_backward_intervals
    kernel[tiles, bounds.shape[0]](bounds, first, interval, bounds.shape[1], keys, tiles, COLUMNS=N)
    return interval.cpu()


@pytest.mark.parametrize("window", [None, 8])
def test_the_queries_that_see_a_key_are_neighbours(window):
    """Causal rows and sorted canvases: between the first and the last query that sees a key, all of its document do."""
    denoised, prefix, _ = canvases(window)
    encoded = encode_spans(packed(40), window)
    for spans, first, keys in ((denoised, 0, prefix), (encoded, 2, 40)):
        is_seen_BTS = spans.dense(keys if first == 0 else 0, 0 if first == 0 else keys)
        interval_BS2 = seeing(spans, first, keys, 1)[..., :2]
        for b, row in enumerate(interval_BS2):
            for s, (begin, end) in enumerate(row.tolist()):
                queries = is_seen_BTS[b, :, s].nonzero().flatten()
                assert (begin, end) == ((int(queries[0]), int(queries[-1]) + 1) if len(queries) else (0, 0))
        between_B1S = (interval_BS2[..., 1] - interval_BS2[..., 0]).sum()
        valid_BT = is_seen_BTS.any(-1)
        holes = sum(  # queries inside an interval that see nothing at all (padding) are no loss of order
            int((~valid_BT[b, begin:end]).sum()) for b, row in enumerate(interval_BS2) for begin, end in row.tolist()
        )
        assert between_B1S == is_seen_BTS.sum() + holes


@pytest.mark.parametrize("order", ["causal", "shuffled"])
def test_queries_that_need_no_mask_are_those_that_see_a_whole_tile_if_they_are_neighbours(order):
    spans = encode_spans(packed(40), 24)
    if order == "shuffled":
        spans = Spans(spans.bounds_BT4[:, torch.randperm(40, generator=torch.Generator().manual_seed(1))])
    sees_all_BTN = spans.dense(0, 40).unflatten(-1, (10, 4)).all(-1)
    intervals = seeing(spans, 2, 40, 4)
    found = []
    for b, tile in itertools.product(range(len(sees_all_BTN)), range(10)):
        queries = sees_all_BTN[b, :, tile].nonzero().flatten().tolist()
        are_neighbours = queries == list(range(queries[0], queries[-1] + 1)) if queries else False
        begin, end = intervals[b, tile, 2:].tolist()
        assert list(range(begin, end)) == (queries if are_neighbours else [])
        found.append(end > begin)
    assert order == "shuffled" or any(found)


def test_queries_in_any_order_have_the_same_gradients():
    """The intervals are then hulls with strangers in them, which are masked."""
    spans, prefix, own = canvases(8)
    q, *keys = inputs(spans, prefix, own)
    order = torch.randperm(own, generator=torch.Generator().manual_seed(1))
    shuffled = Spans(spans.bounds_BT4[:, order])
    compare(shuffled, [q[:, order], *keys])


def test_more_queries_than_one_scan_looks_at(monkeypatch):
    T = 1100
    if DEVICE == "cpu":  # the interpreter reads the constant at each launch; a compiled kernel keeps its own
        T = 65
        monkeypatch.setattr(kernels_backward, "SCAN", triton.language.constexpr(16))
    assert kernels_backward.SCAN.value < T
    spans = encode_spans(packed(T), 9)
    compare(spans, inputs(spans, 0, T))


# -- dtypes, errors ------------------------------------------------------------------------------------------------


def test_under_autocast_everything_is_cast_to_one_dtype():
    spans = moved(arbitrary(7, 5, 9))
    tensors = on(inputs(spans, 5, 9), torch.float32)
    mixed = [x if i in (0, 1, 3) else x.detach().bfloat16() for i, x in enumerate(tensors)]
    with torch.autocast(DEVICE, torch.bfloat16):
        out = span_attention(*mixed, spans, 1.0)
    assert isinstance(out, Tensor) and out.dtype == torch.bfloat16


def test_what_the_kernels_cannot_take_is_refused_in_words():
    spans = moved(arbitrary(3, 4, 5))
    with pytest.raises(BlockdiffError, match=r"float32, bfloat16 or float16.*float64"):
        span_attention(*on(inputs(spans, 4, 5), torch.float64), spans, 1.0)
    with pytest.raises(BlockdiffError, match=r"512.*520"):
        span_attention(*on(inputs(spans, 4, 5, d=520), torch.float32), spans, 1.0)
    q, *keys = on(inputs(spans, 4, 5), torch.float32)
    with pytest.raises(BlockdiffError, match="bfloat16, float32"):
        span_attention(q.bfloat16(), *keys, spans, 1.0)


def test_the_same_inputs_give_the_same_bits():
    spans = arbitrary(33, 20, 33)
    tensors = inputs(spans, 20, 33)
    first, second = (
        outputs_and_gradients(splitting(3), on(tensors, torch.float32), moved(spans), 1.0) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_that_are_not_asked_for_are_not_made():
    spans = moved(arbitrary(9, 20, 17))
    tensors = [x.to(DEVICE) for x in inputs(spans, 20, 17)]
    truth = outputs_and_gradients(with_lse, on(tensors, torch.float32), spans, 1.0)[2:]
    for wanted in ({0}, {2}, {3}, {1, 4}):
        chosen = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(tensors)]
        out, lse = with_lse(*chosen, spans, 1.0)
        ((out.double().sin() * 3).sum() + lse[lse.isfinite()].double().cos().sum()).backward()
        for i, x in enumerate(chosen):
            assert (x.grad is None) == (i not in wanted)
            assert x.grad is None or torch.equal(x.grad, truth[i])


# -- as torch sees it ----------------------------------------------------------------------------------------------


def test_torch_sees_one_sound_op():
    spans = moved(arbitrary(9, 20, 17))
    tensors = on(inputs(spans, 20, 17), torch.float32)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    arguments = (*tensors, spans.bounds_BT4, 1.0, 0)
    torch.library.opcheck(torch.ops.blockdiff.span_attention, arguments, test_utils=checks)

    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    attend = torch.compile(lambda *x: span_attention(*x, spans, 1.0), backend=backend, fullgraph=True)
    assert torch.equal(attend(*tensors), span_attention(*tensors, spans, 1.0))
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("span_attention" in name for name in called) == 1 and len(graphs) == 1


def test_a_checkpointed_layer_recomputes_the_same_gradients():
    spans = arbitrary(9, 20, 17)

    def checkpointed(*arguments: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(with_lse, *arguments, use_reentrant=False)

    got, truth = (
        outputs_and_gradients(op, on(inputs(spans, 20, 17), torch.float32), moved(spans), 1.0)
        for op in (checkpointed, with_lse)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, truth, strict=True))


def test_tiles_of_few_rows_are_small():
    forward = Tile(128, 64, warps=8, stages=2)
    assert forward.fitted(rows=8) == Tile(16, 64, warps=8, stages=2)
    assert forward.fitted(rows=33).rows == 64
    assert forward.fitted(rows=10_000) == forward


# -- on a GPU, in the model's dtype --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("h,K,d", [(16, 8, 256), (16, 2, 512), (8, 2, 128), (4, 4, 64)])
@pytest.mark.parametrize("geometry", ["causal", "window", "canvases", "split"])
def test_bf16_is_about_as_close_to_fp64_as_torch_in_bf16(geometry, h, K, d):
    """Twice torch's own error is allowed: the order of sums differs, the roundings of p and ds are the same kind."""
    spans, prefix, own = canvases(None, 64)
    if geometry in ("causal", "window"):
        spans, prefix, own = encode_spans(packed(600), None if geometry == "causal" else 100), 0, 600
    op = splitting(3) if geometry == "split" else with_lse
    tensors = [x.bfloat16() for x in inputs(spans, prefix, own, h, K, d)]
    on_gpu = moved(spans)
    got = outputs_and_gradients(op, on(tensors, torch.bfloat16), on_gpu, 1.0)
    torchs = outputs_and_gradients(in_torch, on(tensors, torch.bfloat16), on_gpu, 1.0)
    truth = outputs_and_gradients(reference.span_attention, on(tensors, torch.float64), on_gpu, 1.0)
    for x, y, exact in zip(got, torchs, truth, strict=True):
        assert x.isfinite().all() and relative_error(x, exact) <= 2 * relative_error(y, exact) + 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("d", [16, 32, 64, 128, 256, 512])
def test_fp32_on_the_gpu_is_fp32(d):
    spans, prefix, own = canvases(8)
    compare(spans, inputs(spans, prefix, own, 4, 2, d))
