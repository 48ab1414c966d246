"""The paged prefix against `Prefix`: the same hidden states however rows come, grow and leave."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from blockdiff.kernels.span_attention.paged import BlockTable
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.models.page_rows import PagedRow
from blockdiff.models.pages import Pages
from blockdiff.spans import canvas_spans, denoise_spans
from tests.support.oracle import oracle, ours
from tests.support.paged import close, opened, tokens

pytestmark = pytest.mark.quick

L, D = 16, 64


@pytest.fixture(scope="module")
def model() -> DiffusionGemma:
    """fp64, three sliding layers and a full one, which has wider heads and no v_proj."""
    return ours(oracle())


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def signal(rows: int, length: int = L) -> Tensor:
    return torch.randn(rows, length, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


# -- as Prefix -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_tokens", [1, 5, 16, 128])
@pytest.mark.parametrize("lengths", [(40, 1, 17, 9), (20, 20, 20, 20)])
def test_rows_of_any_lengths_are_encoded_and_denoised_as_with_a_prefix(model, page_tokens, lengths):
    """A prompt in two calls, then three canvases, each denoised twice and committed."""
    pages = Pages(model, page_tokens)
    rows = [pages.open() for _ in lengths]
    given = None if len(set(lengths)) == 1 else torch.tensor(lengths)
    prompt = tokens(4, max(lengths))
    hidden, prefix = pages.encode(rows, prompt, lengths), model.encode(prompt, given)
    for row, length in enumerate(lengths):
        close(hidden[row, :length], prefix.hidden[row, :length])
    more = [3, 0, 21, 1]
    part = tokens(4, 21, seed=1)
    hidden, prefix = pages.encode(rows, part, more), model.encode(part, torch.tensor(more), prefix)
    for row, length in enumerate(more):
        close(hidden[row, :length], prefix.hidden[row, :length]) if length else None
    for number in range(3):
        canvas = tokens(4, L, seed=10 + number)
        for soft in (None, signal(4)):
            close(pages.denoise(rows, canvas, soft), model.denoise(canvas, prefix, soft))
        close(pages.encode(rows, canvas, [L] * 4), (prefix := model.encode(canvas, prefix=prefix)).hidden)
        assert [row.length for row in rows] == prefix.lengths_B.tolist()
        pages.check()


def test_fp32_is_as_close_as_fp32_can_be():
    model = ours(oracle(dtype=torch.float32))
    pages, lengths, canvas = Pages(model, 8), (40, 3, 17), tokens(3, L, seed=1)
    rows = [pages.open() for _ in lengths]
    pages.encode(rows, tokens(3, 40), lengths)
    close(pages.denoise(rows, canvas), model.denoise(canvas, model.encode(tokens(3, 40), torch.tensor(lengths))), 1e-6)


def test_a_row_without_tokens_is_denoised_alone_and_beside_others(model):
    pages, canvas = Pages(model, 8), tokens(2, L, seed=1)
    empty, other = pages.open(), pages.open()
    nothing = {name: denoise_spans(*[torch.zeros(1, 1).long()] * 2, torch.tensor([[L]]), L) for name in model.kinds}
    truth, _ = model(canvas[:1], torch.arange(L)[None], nothing, None, True)
    close(pages.denoise([empty], canvas[:1]), truth)
    pages.encode([other], tokens(1, 20), [20])
    close(
        pages.denoise([other, empty], canvas.flip(0)),
        torch.cat([model.denoise(canvas[1:], model.encode(tokens(1, 20))), truth]),
    )


@pytest.mark.parametrize("page_tokens", [4, 128])
def test_rows_that_come_grow_and_leave_in_any_order_change_nothing_for_the_others(model, page_tokens):
    """Every denoise of a random set of rows in a random order against each row alone."""
    draw, pages = random.Random(0), Pages(model, page_tokens)
    texts: dict[PagedRow, Tensor] = {}
    for step in range(20):
        for row in [row for row in texts if draw.random() < 0.2]:
            pages.release(row)
            del texts[row]
        while len(texts) < 5 and draw.random() < 0.8:
            prompt = tokens(draw.randint(1, 50), seed=draw.randrange(1000))
            texts[opened(pages, [prompt])[0]] = prompt
        if not texts:
            continue
        grown = [row for row in texts if draw.random() < 0.3]
        if grown:
            parts = tokens(len(grown), L, seed=step)
            pages.encode(grown, parts, [L] * len(grown))
            texts |= {row: torch.cat([texts[row], part]) for row, part in zip(grown, parts, strict=True)}
        rows = draw.sample(list(texts), draw.randint(1, len(texts)))
        canvas = tokens(len(rows), L, seed=100 + step)
        hidden = pages.denoise(rows, canvas, signal(len(rows)))
        for n, row in enumerate(rows):
            alone = model.denoise(canvas[n : n + 1], model.encode(texts[row][None]), signal(len(rows))[n : n + 1])
            close(hidden[n : n + 1], alone)
        pages.check()
    for row in texts:
        pages.release(row)
    pages.check()
    assert not any(pages.statistics.pages.values())


def test_a_row_may_come_twice(model):
    pages, canvas = Pages(model, 8), tokens(5, L)
    rows = opened(pages, [tokens(20), tokens(9, seed=1), tokens(13, seed=2)])
    pages.denoise(rows, canvas[:3])
    for places in ([0, 1, 0, 2, 0], [2, 2, 1], [1, 0, 0]):
        some = canvas[: len(places)]
        hidden = pages.denoise([rows[n] for n in places], some)
        for n, place in enumerate(places):
            close(hidden[n : n + 1], pages.denoise([rows[place]], some[n : n + 1]))


def test_a_set_in_any_order_and_parts_of_it_are_denoised_as_each_row_alone(model):
    pages = Pages(model, 8)
    rows, canvas = opened(pages, [tokens(n, seed=n) for n in (20, 31, 9)]), tokens(3, L)
    steps = pages.step_buffers(4, L)
    truth = [pages.denoise([row], canvas[n : n + 1]) for n, row in enumerate(rows)]
    for order in ((0, 1, 2), (2, 0, 1)):
        for part in (order, order[:2]):
            steps.load([rows[n] for n in part])
            close(steps.denoise(canvas[list(part)]), torch.cat([truth[n] for n in part]))


def test_only_what_has_changed_is_copied_for_attention_in_torch(model, monkeypatch):
    """A row that commits a canvas costs its new tokens, and one that leaves the row that takes its place."""
    pages, found = Pages(model, 8), set[tuple[int, int, int]]()
    slots_of, window = BlockTable.slots_of, model.kinds["sliding"].window

    def noted(table: BlockTable, row_N: Tensor, column_N: Tensor) -> Tensor:
        for row in set(row_N.tolist()):
            if columns := [column for column in column_N[row_N == row].tolist() if column < table.lengths[row]]:
                assert columns == list(range(columns[0], columns[-1] + 1))
                found.add((row, columns[0], columns[-1] + 1))
        return slots_of(table, row_N, column_N)

    monkeypatch.setattr(BlockTable, "slots_of", noted)
    first, second, third = opened(pages, [tokens(n, seed=n) for n in (40, 48, 32)])
    steps = pages.step_buffers(3, L)

    def copied(rows: list[PagedRow]) -> set[tuple[int, int, int]]:
        """Place, begin and end of what is copied of full layers when these rows are denoised."""
        found.clear()
        steps.load(rows)
        hidden = steps.denoise(tokens(len(rows), L))
        copies = [each for each in found if each[2] == rows[each[0]].length and each[2] - each[1] >= window]
        found.clear()
        assert torch.equal(steps.denoise(tokens(len(rows), L)), hidden) and not found
        for n, row in enumerate(rows):
            close(hidden[n : n + 1], pages.denoise([row], tokens(len(rows), L)[n : n + 1]))
        return set(copies)

    assert copied([first, second, third]) == {(0, 0, 40), (1, 0, 48), (2, 0, 32)}
    pages.encode([third], tokens(1, 16), [16])
    assert copied([first, second, third]) == {(2, 32, 48)}
    assert copied([third, second]) == {(0, 0, 48)}


def test_a_row_with_broken_numbers_leaves_nothing_behind(model):
    """Its pages and its place are taken over by rows that must not notice."""
    pages, canvas = Pages(model, 64), tokens(2, L, seed=1)
    bad, good = opened(pages, [tokens(40, seed=1), tokens(10)])
    for pool in pages.pools.values():
        for x in pool.tensors:
            for page in bad.tables[pool.kind.name]:
                x[:, page] = float("nan")
    hidden = pages.denoise(
        [bad, good], canvas, signal(2).masked_fill(torch.tensor([True, False])[:, None, None], float("nan"))
    )
    assert hidden[0].isnan().any()
    close(hidden[1:], model.denoise(canvas[1:], model.encode(tokens(1, 10)), signal(2)[1:]))
    pages.release(bad)
    (new,) = opened(pages, [tokens(7, seed=2)])
    pages.encode([good], tokens(1, 60, seed=3), [60])
    truth = model.denoise(canvas[:1], model.encode(tokens(1, 7, seed=2)))
    close(pages.denoise([new, good], canvas)[:1], truth)
    pages.encode([new, good], tokens(2, 1, seed=4), [1, 1])
    close(
        pages.denoise([new], canvas[:1]),
        model.denoise(canvas[:1], model.encode(torch.cat([tokens(1, 7, seed=2), tokens(2, 1, seed=4)[:1]], 1))),
    )


# -- the canvas of a row ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 4, 8, 16])
def test_a_canvas_sees_the_last_columns_of_its_row_and_itself(window):
    starts = torch.tensor([0, 3, 9])
    mask = canvas_spans(starts, 5, window).dense(9, 5)
    zeros = torch.zeros(3, 1, dtype=torch.int64)
    assert torch.equal(denoise_spans(starts[:, None], zeros, zeros + 5, 5, window).dense(9, 5), mask)
    for start, is_seen in zip(starts.tolist(), mask, strict=True):
        oldest = 0 if window is None else start - window + 1
        column = torch.arange(9)
        of_row = (column >= oldest) & (column < start)
        assert torch.equal(is_seen[:, :9], of_row.expand(5, 9)) and is_seen[:, 9:].all()
