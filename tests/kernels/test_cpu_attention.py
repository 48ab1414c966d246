"""Attention by the C functions: outputs and gradients against the reference in fp64, over any spans and in a sweep."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from blockdiff.kernels import IN_C, IN_TORCH, c_library
from blockdiff.kernels.launch import Unserved
from blockdiff.kernels.span_attention import c as in_c
from blockdiff.spans import Spans, Sweep, denoise_spans, encode_spans
from tests.oracles import span_attention as reference
from tests.support.closeness import relative_error

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(c_library.library() is None, reason="there is no C compiler here"),
]
FP32 = 3e-6
TOKENS = (1, 9), (17, 40), (130, 110)  # queries, and prefix tokens
HEADS = (2, 1), (2, 2), (1, 5), (1, 50), (20, 1)  # key heads, and queries for each


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


def leaves(B: int, T: int, P: int, K: int, group: int, d: int) -> list[Tensor]:
    shapes = [(B, T, K * group, d), *[(B, P, K, d)] * 2, *[(B, T, K, d)] * 2]
    return [drawn(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]


def truth_of(inputs: list[Tensor], spans: Spans, direction: Tensor) -> tuple[Tensor, list[Tensor]]:
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out, _ = reference.span_attention(wide[0], *wide[1:], spans, 0.4)
    out.backward(direction.double())
    return out, [x.grad for x in wide if x.grad is not None]


def compare(inputs: list[Tensor], spans: Spans) -> None:
    assert in_c._takes(*inputs)
    direction = drawn(*inputs[0].shape, seed=9)
    truth, truth_grads = truth_of(inputs, spans, direction)
    out = IN_C.span_attention(*inputs, spans, 0.4)
    out.backward(direction)
    assert relative_error(out, truth) < FP32
    for x, grad in zip(inputs, truth_grads, strict=True):
        assert not x.numel() or relative_error(x.grad, grad, floor=1.0) < FP32  # of queries that see one key it is 0
    with torch.no_grad():
        assert torch.equal(IN_C.span_attention(*inputs, spans, 0.4), out)


def any_spans(B: int, T: int, P: int) -> Spans:
    g = torch.Generator().manual_seed(T)
    sides = [torch.randint(0, size + 1, (B, T, 2), generator=g).sort(-1)[0] for size in (P, T)]
    bounds = torch.cat(sides, -1)
    bounds[torch.rand(B, T, generator=g) < 0.2] = 0
    return Spans(bounds.to(torch.int32))


@pytest.mark.parametrize(
    ("d", "T", "P", "K", "group"),
    [
        *((d, *tokens, *heads) for d in (16, 112) for tokens in TOKENS for heads in HEADS),
        *((d, 17, 40, 2, 2) for d in (32, 48, 64)),
    ],
)
def test_outputs_and_gradients_are_those_of_the_reference_over_any_spans(T, P, K, group, d):
    compare(leaves(2, T, P, K, group, d), any_spans(2, T, P))


@pytest.mark.parametrize("d", [16, 112, 256])
@pytest.mark.parametrize(("T", "group"), [(1, 1), (2, 1), (1, 3), (2, 4), (7, 1)])
def test_few_queries_over_a_prefix_with_room_behind_it_are_exact(T, group, d):
    B, K, P = 3, 2, 501
    q, k, v = drawn(B, T, K * group, d), drawn(B, T, K, d, seed=1), drawn(B, T, K, d, seed=2)
    room = [drawn(B, K, P + T, d, seed=n) for n in (3, 4)]
    bounds = torch.tensor([0, P, 0, 1], dtype=torch.int32).repeat(B, T, 1)
    bounds[1, :, 1], bounds[2, :, :2] = 3, 0  # the other rows see three tokens of the prefix, and none
    bounds[..., 3] += torch.arange(T, dtype=torch.int32)
    for x in room:
        x[1, :, 3:] = x[2] = torch.nan
    prefix = [x[:, :, :P].transpose(1, 2) for x in room]
    out = IN_C.span_attention(q, *prefix, k, v, Spans(bounds), 0.4)
    inputs = [x.double() for x in (q, *(x.nan_to_num() for x in prefix), k, v)]
    truth, _ = reference.span_attention(*inputs, Spans(bounds), 0.4)
    assert relative_error(out, truth) < FP32 / 2


@pytest.mark.parametrize("window", [None, 1, 30])
def test_documents_of_a_pack_and_a_window_behind_a_prefix(window):
    doc_start = torch.tensor([0] * 37 + [37] * 60 + [97] * 3 + [-1] * 9).expand(3, -1)
    compare(leaves(3, 109, 0, 1, 2, 32), encode_spans(doc_start, window))
    past = torch.tensor([70, 3, 0])
    compare(leaves(3, 41, 70, 2, 2, 32), encode_spans(torch.zeros(3, 41, dtype=torch.int64), window, past))


def test_a_query_that_sees_one_key_has_no_gradient_to_the_bit():
    inputs = leaves(2, 40, 0, 2, 2, 64)
    spans = encode_spans(torch.zeros(2, 40, dtype=torch.int64), window=1)
    IN_C.span_attention(*inputs, spans, 0.4).backward(drawn(*inputs[0].shape, seed=9))
    assert not inputs[0].grad.any() and not inputs[3].grad.any() and inputs[4].grad.any()


def test_inputs_may_lie_in_memory_as_they_like():
    inputs, spans = leaves(2, 30, 50, 2, 2, 16), any_spans(2, 30, 50)
    q, *kv = (x.detach() for x in inputs)
    strided = [
        q.transpose(1, 2).contiguous().transpose(1, 2),
        *torch.cat(kv[:2], -1).chunk(2, -1),
        kv[2].transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([kv[3], kv[3]], -1)[..., 0],
    ]
    assert not any(x.is_contiguous() for x in strided)
    for x in strided:
        x.requires_grad_()
    direction, grads = drawn(*q.shape, seed=9), []
    for each in (inputs, strided):
        out = IN_C.span_attention(*each, spans, 0.4)
        grads.append((out, *torch.autograd.grad(out, each, direction)))
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


def test_where_every_query_sees_every_key_no_bounds_are_read():
    inputs = leaves(2, 33, 50, 1, 3, 16)
    bounds = torch.tensor([0, 50, 0, 33], dtype=torch.int32).expand(2, 33, 4)
    out = IN_C.span_attention(*inputs, Spans(torch.zeros_like(bounds), sees_all=True), 0.4)
    assert torch.equal(out, IN_C.span_attention(*inputs, Spans(bounds), 0.4))


def packed_sweep() -> tuple[Sweep, int]:
    """Two rows of two documents, canvases of nine tokens behind them; the second row lacks its last canvas."""
    doc_start = torch.tensor([[0] * 30 + [30] * 41, [0] * 12 + [12] * 50 + [-1] * 9])
    start, doc = torch.tensor([[11, 24, 60], [5, 40, 0]]), torch.tensor([[0, 0, 30], [0, 12, 0]])
    length = torch.tensor([[9, 6, 9], [7, 9, 0]])
    return Sweep(encode_spans(doc_start), denoise_spans(start, doc, length, 9), columns=60), 71 + 27


@pytest.mark.parametrize("stop_gradient", [False, True])
def test_a_sweep_in_one_call_is_that_of_two(stop_gradient):
    sweep, T = packed_sweep()
    sweep = replace(sweep, stop_gradient=stop_gradient)
    q, _, _, k, v = leaves(2, T, 0, 2, 2, 32)
    direction = drawn(*q.shape, seed=9)
    (wide_q, wide_k, wide_v), S = (x.detach().double().requires_grad_() for x in (q, k, v)), sweep.clean_tokens
    prefix = [(x.detach() if stop_gradient else x)[:, : sweep.columns] for x in (wide_k, wide_v)]
    nothing = [x[:, :0] for x in prefix]
    parts = [
        reference.span_attention(wide_q[:, part], *before, wide_k[:, part], wide_v[:, part], spans, 0.4)[0]
        for part, before, spans in (
            (slice(S), nothing, sweep.clean),
            (slice(S, None), prefix, sweep.noisy),
        )
    ]
    truth = torch.cat(parts, 1)
    truth.backward(direction.double())
    out = IN_C.span_attention(q, None, None, k, v, sweep, 0.4)
    assert out is not None and relative_error(out, truth) < FP32
    out.backward(direction)
    for x, wide in ((q, wide_q), (k, wide_k), (v, wide_v)):
        assert relative_error(x.grad, wide.grad) < FP32


@pytest.mark.parametrize("K", [1, 9])
def test_the_number_of_threads_changes_no_bit(K):
    """Also where the queries of a head are divided, whose gradients are added up at the end."""
    sweep, T = packed_sweep()
    inputs = leaves(2, T, 0, K, 2, 16)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            q, k, v = (x.detach().requires_grad_() for x in (inputs[0], *inputs[3:]))
            out = in_c.span_attention(q, None, None, k, v, sweep, 0.4)
            assert out is not None
            found.append((out, *torch.autograd.grad(out, (q, k, v), inputs[0].detach())))
    finally:
        torch.set_num_threads(threads)
    for others in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], others, strict=True))


def test_keys_that_no_query_sees_may_hold_nan_and_get_no_gradient():
    spans = Spans(torch.tensor([[[2, 9, 1, 4]] * 3 + [[20, 30, 4, 5]] * 5]).int())
    inputs = leaves(1, 8, 40, 1, 2, 32)
    out = IN_C.span_attention(*inputs, spans, 0.4)
    grads = torch.autograd.grad(out.sum(), inputs)
    is_seen = torch.zeros(40, dtype=torch.bool), torch.zeros(8, dtype=torch.bool)
    is_seen[0][2:9] = is_seen[0][20:30] = is_seen[1][1:5] = True
    spoilt = [inputs[0].detach().clone().requires_grad_()]
    for n, x in enumerate(inputs[1:]):
        spoilt.append(x.detach().masked_fill(~is_seen[n // 2][:, None, None], float("nan")).requires_grad_())
    again = IN_C.span_attention(*spoilt, spans, 0.4)
    assert torch.equal(out, again)
    for n, (x, y) in enumerate(zip(grads, torch.autograd.grad(again.sum(), spoilt), strict=True)):
        assert torch.equal(x, y)
        assert n == 0 or not y[:, ~is_seen[(n - 1) // 2]].any()


def test_a_prefix_without_gradient_leaves_the_others_as_they_are():
    inputs, spans = leaves(2, 30, 50, 2, 2, 16), any_spans(2, 30, 50)
    whole = torch.autograd.grad(IN_C.span_attention(*inputs, spans, 0.4).sum(), inputs)
    held = [inputs[0], *(x.detach() for x in inputs[1:3]), *inputs[3:]]
    some = torch.autograd.grad(IN_C.span_attention(*held, spans, 0.4).sum(), [held[0], *held[3:]])
    assert all(torch.equal(x, y) for x, y in zip((whole[0], *whole[3:]), some, strict=True))


@pytest.mark.parametrize("d", [24, 528])
def test_heads_that_the_functions_do_not_take_are_computed_in_torch(d):
    inputs, spans = leaves(1, 5, 3, 1, 1, d), any_spans(1, 5, 3)
    out = IN_C.span_attention(*inputs, spans, 0.4)
    assert torch.equal(out, IN_TORCH.span_attention(*inputs, spans, 0.4))
    with pytest.raises(Unserved):
        in_c.span_attention(inputs[0], None, None, *inputs[3:], packed_sweep()[0], 0.4)
