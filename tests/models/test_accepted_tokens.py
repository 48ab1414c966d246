"""Tokens that are written and not accepted leave no trace when they are dropped, and nobody shares them before."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import pytest
import torch

from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.models.page_rows import PagedRow
from blockdiff.models.pages import Pages
from tests.support.oracle import oracle, ours
from tests.support.paged import close, opened, tokens

pytestmark = pytest.mark.quick

L = 16


@pytest.fixture(scope="module")
def model() -> DiffusionGemma:
    """fp64, three sliding layers and a full one."""
    return ours(oracle())


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def state_of(pages: Pages, row: PagedRow) -> object:
    """The content of pools and of a row, without the stamps."""
    pools = {
        name: (sorted(pool.references), sorted(pool.free), list(pool.cached), sorted(pool.links), pool.in_use)
        for name, pool in pages.pools.items()
    }
    held = (row.length, row.accepted, row.tables, row.first, [id(link) for link in row.links], row.tail)
    return copy.deepcopy((pools, held, len(pages._links), pages.free_tokens()))


@pytest.mark.parametrize("length", [40, 43])
def test_dropped_tokens_leave_pools_and_the_window_as_they_were(model, length):
    pages, canvas = Pages(model, 8, capacity=400), tokens(1, L)
    (row,) = opened(pages, [tokens(length)])
    pages.encode([row], tokens(1, 60, seed=1), [60])  # takes the pages that will be free afterwards
    pages.truncate(row, length)
    before, truth = state_of(pages, row), pages.denoise([row], canvas)
    for count in (1, 5, 60):  # the window leaves all pages of before
        pages.encode([row], tokens(1, count, seed=count), [count])
        assert row.length == length + count and row.accepted == length
        pages.check()
        close(
            pages.denoise([row], canvas),
            model.denoise(canvas, model.encode(torch.cat([tokens(length), tokens(1, count, seed=count)[0]])[None])),
        )
        pages.truncate(row, length)
        pages.check()
        assert state_of(pages, row) == before
        assert torch.equal(pages.denoise([row], canvas), truth)


def test_nobody_shares_tokens_before_they_are_accepted(model):
    pages, prompt = Pages(model, 8), tokens(40)
    row = pages.open()
    pages.encode([row], prompt[None], [40])
    assert pages.reuse(pages.open(), prompt.tolist()) == 0 and row.first["sliding"] == 0
    pages.truncate(row, 20)
    pages.accept(row)
    assert pages.reuse(other := pages.open(), prompt.tolist()) == 16 == other.accepted
    assert row.first["sliding"] == pages.pools["sliding"].first_kept(20) // 8
    pages.encode([row], tokens(1, 12, seed=1), [12])
    pages.accept(row)
    pages.check()
    changed = torch.cat([prompt[:20], tokens(1, 12, seed=1)[0]])
    third = pages.open()
    assert pages.reuse(third, changed.tolist()) == 32
    close(pages.denoise([third], tokens(1, L)), model.denoise(tokens(1, L), model.encode(changed[None])))


def test_random_guesses_that_are_accepted_in_part_give_the_rows_of_who_never_guessed(model):
    draw, pages = random.Random(3), Pages(model, 4, capacity=400)
    rows = opened(pages, [tokens(n, seed=n) for n in (9, 30)])
    texts = [tokens(n, seed=n).tolist() for n in (9, 30)]
    for step in range(30):
        guesses = tokens(2, 12, seed=100 + step)
        counts = [draw.randint(1, 12) for _ in rows]
        pages.encode(rows, guesses, counts)
        for row, text, guess, count in zip(rows, texts, guesses.tolist(), counts, strict=True):
            taken = draw.randint(0, count)
            pages.truncate(row, len(text) + taken)
            pages.accept(row)
            text += guess[:taken]
        pages.check()
        if step % 5 == 4:
            hidden = pages.denoise(rows, tokens(2, L, seed=step))
            for n, text in enumerate(texts):
                truth = model.denoise(tokens(2, L, seed=step)[n : n + 1], model.encode(torch.tensor([text])))
                close(hidden[n : n + 1], truth)
