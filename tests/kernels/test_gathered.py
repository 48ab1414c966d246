"""The dense copies that attention in torch keeps of pages: whatever rows become, the same as reading the pages."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from blockdiff.kernels.span_attention import c as in_c
from blockdiff.kernels.span_attention import torch as in_torch
from blockdiff.kernels.span_attention.paged import BlockTable, Gathered, GatheredPool, PagedTensor
from blockdiff.spans import canvas_spans
from tests.oracles import span_attention as reference
from tests.support.closeness import relative_error

pytestmark = pytest.mark.quick

P, PAGES, K, d = 4, 60, 2, 16


@pytest.mark.parametrize(("L", "window"), [(6, None), (6, 9), (18, 5)])
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_rows_that_grow_leave_and_are_cut_are_read_as_from_their_pages(L, window, limit, monkeypatch):
    """By SDPA, by a product of all scores and in C; own keys of some calls and tokens of dropped rows are NaN."""
    monkeypatch.setattr(in_torch, "SMALL_GATHERED", limit)
    draw, generator = random.Random(1), torch.Generator().manual_seed(2)
    pools = [torch.full((PAGES, P, K, d), torch.nan) for _ in range(2)]
    for pool in pools:
        pool[0] = 0
    copies, of_c = (GatheredPool([pool[None] for pool in pools]) for _ in range(2))
    free, versions = list(range(1, PAGES)), [0] * PAGES
    rows: list[tuple[list[int], int]] = []  # pages and length

    def grown(table: list[int], length: int, count: int) -> tuple[list[int], int]:
        for column in range(length, length + count):
            if column // P == len(table):
                table = [*table, free.pop(draw.randrange(len(free)))]
            page = table[column // P]
            versions[page] += 1
            for pool in pools:
                pool[page, column % P] = torch.randn(K, d, generator=generator)
        return table, length + count

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    for step in range(25):
        action = draw.random()
        if rows and action < 0.25:
            table, _ = rows.pop(draw.randrange(len(rows)))
            free += table
            for pool in pools:
                pool[table] = torch.nan
        elif rows and action < 0.5:
            n = draw.randrange(len(rows))
            rows[n] = grown(*rows[n], draw.randint(1, 7))
        elif rows and action < 0.6:
            n = draw.randrange(len(rows))
            table, length = rows[n]
            length = draw.randint(0, length)
            free += table[-(-length // P) :]
            rows[n] = table[: -(-length // P)], length
        elif len(rows) < 3:
            rows.insert(draw.randint(0, len(rows)), grown([], 0, draw.randint(0, 15)))
        if not rows:
            continue
        lengths = [length for _, length in rows]
        table = torch.tensor([pages + [0] * (16 - len(pages)) for pages, _ in rows], dtype=torch.int32)
        contents = [[(page, versions[page]) for page in pages] for pages, _ in rows]
        pages = BlockTable(table, torch.tensor(lengths).int(), P, lengths=lengths, contents=contents)
        spans = canvas_spans(torch.tensor(lengths), L, window)
        B, T = len(rows), L
        plain = [PagedTensor(pool, pages) for pool in pools]
        for turn in range(2):
            q, own_k, own_v = drawn(B, T, 2 * K, d), drawn(B, T, K, d), drawn(B, T, K, d)
            dense = [x.dense().double() for x in plain]
            truth, _ = reference.span_attention(q.double(), *dense, own_k.double(), own_v.double(), spans, 0.9)
            for attend, kept in ((in_torch.span_attention, copies), (in_c.span_attention, of_c)):
                prefix = [PagedTensor(pool, pages, Gathered(kept, n, 0)) for n, pool in enumerate(pools)]
                assert relative_error(attend(q, *prefix, own_k, own_v, spans, 0.9), truth) < 2e-6
                if step % 7 == 6 and turn:
                    attend(q, *prefix, own_k * torch.nan, own_v * torch.nan, spans, 0.9)
