"""Spans as drawn matrices: what a query sees of clean rows, prefixes and canvases."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdiff.spans import block_runs, denoise_spans, encode_spans

pytestmark = pytest.mark.quick


def matrix(drawing: str) -> Tensor:
    """One row per query; `x` sees, `.` does not, `|` divides prefix from own keys."""
    rows = ["".join(line.split()).replace("|", "") for line in drawing.strip().splitlines()]
    return torch.tensor([[c == "x" for c in row] for row in rows])


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


def test_blocks_count_from_each_documents_start_and_end_with_it():
    doc_start = torch.tensor([[0, 0, 0, 0, 0, 5, 5, 5, 5, -1]])
    drawing = matrix("""
        xxx.......
        xxx.......
        xxx.......
        xxxxx.....
        xxxxx.....
        .....xxx..
        .....xxx..
        .....xxx..
        .....xxxx.
        ..........
    """)
    spans = encode_spans(doc_start, run_BT2=block_runs(doc_start, 3))
    assert torch.equal(spans.dense(0, 10)[0], drawing)
    past, rest = torch.tensor([3]), torch.tensor([[0, 0, -1]])
    assert torch.equal(
        encode_spans(rest, window=2, past_B=past, run_BT2=block_runs(rest, 3, past)).dense(3, 3)[0],
        matrix("""
            ..x|xx.
            ...|xx.
            ...|...
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
    g = torch.Generator().manual_seed(seed)

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
