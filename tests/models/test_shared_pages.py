"""Rows share pages, and give them back: the same hidden states in little memory, and no page is lost."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import pytest
import torch

from blockdiff.errors import BlockdiffError
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.models.page_pool import Link
from blockdiff.models.page_rows import PagedRow
from blockdiff.models.pages import Pages
from tests.support.oracle import oracle, ours
from tests.support.paged import close, opened, tokens

pytestmark = pytest.mark.quick

L = 16


@pytest.fixture(scope="module")
def model() -> DiffusionGemma:
    """fp64, three sliding layers and a full one, which has wider heads and no v_proj."""
    return ours(oracle())


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


# -- sharing ---------------------------------------------------------------------------------------------------


def test_a_shared_prefix_changes_no_bit():
    """Chunks of 8 tokens, so that what is encoded after the shared pages is encoded as it would be without them."""
    model = ours(oracle(dtype=torch.float32))
    prompts = [tokens(61), torch.cat([tokens(40), tokens(13, seed=1)])]
    alone, together = Pages(model, 8), Pages(model, 8)
    for pages in (alone, together):
        first = opened(pages, prompts[:1], 8)[0]
        second = pages.open()
        reused = pages.reuse(second, prompts[1].tolist()) if pages is together else 0
        assert reused == (40 if pages is together else 0) == second.length
        hidden = [pages.encode([second], part[None], [len(part)]) for part in prompts[1][reused:].split(8)]
        found = [hidden[-1], pages.denoise([first, second], tokens(2, L)), pages.denoise([second], tokens(1, L))]
        truth = found if pages is alone else truth  # noqa: F821
        assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
    tables = [row.tables["full"] for row in (first, second)]
    assert tables[0][:5] == tables[1][:5] and not set(tables[0][5:]) & set(tables[1][5:])
    together.check()
    statistics = together.statistics
    assert (statistics.reused_tokens, statistics.asked_tokens) == (40, 53)


def test_a_row_can_find_more_pages_between_its_chunks(model):
    pages, prompt = Pages(model, 8), tokens(40)
    row = pages.open()
    pages.encode([row], prompt[None, :8], [8])
    pages.accept(row)
    opened(pages, [prompt])
    assert pages.reserve(row, 16) and pages.reuse(row, prompt.tolist()) == 40
    pages.check()
    close(pages.denoise([row], tokens(1, L)), model.denoise(tokens(1, L), model.encode(prompt[None])))


def test_a_released_prefix_is_found_again_in_whole_pages_from_its_first_token_on(model):
    pages, prompt = Pages(model, 8), tokens(60)
    pages.release(opened(pages, [prompt])[0])
    assert not any(pages.statistics.pages.values())
    assert pages.reuse(pages.open(), prompt.tolist()) == 56
    pages.check()
    assert pages.reuse(pages.open(), [5, *prompt.tolist()]) == 0


def test_tokens_are_compared_and_not_only_their_hashes(model, monkeypatch):
    """Every key has the same hash here, and other tokens are still others."""

    class Same(bytes):
        def __hash__(self) -> int:
            return 1

    monkeypatch.setattr(Link, "__hash__", lambda link: 0)
    monkeypatch.setattr(
        "blockdiff.models.page_rows.packed_identities", lambda values: Same(array("q", values).tobytes())
    )
    pages = Pages(model, 4)
    opened(pages, [tokens(8)])
    assert pages.reuse(pages.open(), tokens(8).tolist()) == 8
    assert pages.reuse(pages.open(), [*tokens(8)[:7].tolist(), 1]) == 4
    assert pages.reuse(pages.open(), [1, *tokens(8)[1:].tolist()]) == 0


def test_a_hit_needs_the_sliding_pages_before_it_and_not_those_before_the_window(model):
    """Capacity for 12 pages of each kind: the second row's pages push out the first's sliding ones."""
    pages, prompt = Pages(model, 8, capacity=8 * 12), tokens(64)
    (row,) = opened(pages, [prompt], 8)
    assert len(row.tables["full"]) == 8 and len(row.tables["sliding"]) == 2 and row.first["sliding"] == 6
    other, chain = pages.open(), list(row.links)
    assert pages.reuse(other, prompt.tolist()) == 64 and other.tables["sliding"] == row.tables["sliding"]
    for each in (row, other):
        pages.release(each)
    pool = pages.pools["sliding"]
    gone = chain[5].pages["sliding"]  # columns 40 to 47, which a hit at 48 or at 56 needs
    pool.cached.move_to_end(gone, last=False)
    while gone in pool.links:
        pool.take()
    again = pages.open()
    assert pages.reuse(again, prompt.tolist()) == 64
    shorter = pages.open()
    assert pages.reuse(shorter, prompt[:63].tolist()) == 40 and len(shorter.tables["sliding"]) == 2


# -- memory ----------------------------------------------------------------------------------------------------


def test_room_is_refused_without_changing_anything_and_the_oldest_unused_pages_are_given_up(model):
    pages = Pages(model, 8, capacity=80)
    assert pages.free_tokens() == 80
    first, second = opened(pages, [tokens(30), tokens(20, seed=1)])
    assert pages.free_tokens() == 80 - 32 - 24
    before = pages.statistics
    assert not pages.reserve(second, 29) and pages.statistics == before and pages.free_tokens() == 24
    with pytest.raises(BlockdiffError, match=r"29 .*24 "):
        pages.encode([second], tokens(1, 29), [29])
    assert pages.reserve(second, 28) and pages.free_tokens() == 0
    pages.check()
    chain = list(first.links)
    pages.release(first)
    assert pages.free_tokens() == 32 and pages.statistics.cached["full"] == 3
    (third,) = opened(pages, [tokens(15, seed=2)])  # of each kind one page was free, and one is given up
    assert pages.statistics.evictions == 2
    assert ["full" in link.pages for link in chain] == [True, True, False]  # without the last, the others still serve
    assert ["sliding" in link.pages for link in chain] == [False, True, True]  # the window had left the first
    pages.check()
    for each in (second, third):
        pages.release(each)
    pages.check()
    assert pages.free_tokens() == 80


def test_a_row_that_goes_on_in_a_shared_page_writes_to_a_copy(model):
    pages, prompt = Pages(model, 8), tokens(30)
    row, other = pages.open(), pages.open()
    pages.encode([row], prompt[None], [30])
    assert pages.reuse(pages.open(), prompt.tolist()) == 0
    pages.accept(row)
    assert pages.reuse(other, prompt.tolist()) == 24
    pages.truncate(other, 23)
    assert pages.reuse(other, prompt.tolist()) == 23
    changed = torch.cat([prompt[:23], tokens(6, seed=1)])
    pages.encode([other], changed[None, 23:], [6])
    pages.check()
    canvas = tokens(2, L)
    truth = [model.denoise(canvas[n : n + 1], model.encode(text[None])) for n, text in enumerate((prompt, changed))]
    close(pages.denoise([row, other], canvas), torch.cat(truth))
    third = pages.open()
    assert pages.reuse(third, prompt.tolist()) == 24
    close(pages.denoise([third], canvas[:1]), model.denoise(canvas[:1], model.encode(prompt[None, :24])))


def test_a_truncated_row_goes_on_where_its_sliding_layers_still_can(model):
    pages, prompt, canvas = Pages(model, 8), tokens(40), tokens(1, L)
    (row,) = opened(pages, [prompt], 8)
    pages.denoise([row], canvas)
    pages.truncate(row, 39)
    pages.check()
    close(pages.denoise([row], canvas), model.denoise(canvas, model.encode(prompt[None, :39])))
    pages.encode([row], tokens(1, 5, seed=1), [5])
    close(
        pages.denoise([row], canvas),
        model.denoise(canvas, model.encode(torch.cat([prompt[:39], tokens(5, seed=1)])[None])),
    )
    with pytest.raises(BlockdiffError, match=r"44 .* 20"):
        pages.truncate(row, 20)


def test_memory_grows_with_the_rows_and_cached_pages_do_not_pile_up(model, monkeypatch):
    pages = Pages(model, 8)
    monkeypatch.setattr("blockdiff.models.page_pool.CACHED_BYTES", 0)
    for n in range(30):
        pages.release(opened(pages, [tokens(32, seed=n)])[0])
    held = {name: pool.tensors[0].shape[1] for name, pool in pages.pools.items()}
    assert max(held.values()) <= 2 + 3 * 4 and pages.statistics.evictions
    pages.check()


def test_a_lost_page_is_noticed(model):
    pages = Pages(model, 8)
    (row,) = opened(pages, [tokens(20)])
    row.tables["full"].pop()
    with pytest.raises(AssertionError):
        pages.check()


# -- everything at once ----------------------------------------------------------------------------------------


def test_random_rows_with_common_beginnings_in_little_memory_stay_right_and_lose_no_page(model):
    """Rows of two different tokens, so that much is shared; encoded in chunks of 4, cut, denoised, released."""
    draw, pages = random.Random(1), Pages(model, 4, capacity=120)
    texts: dict[PagedRow, list[int]] = {}
    refused = compared = 0

    def extend(row: PagedRow, text: list[int]) -> bool:
        """Encode what a row has not got of its text; False, and the row is gone, where memory runs out."""
        while row.length < len(text):
            pages.reuse(row, text)
            part = text[row.length : row.length + 4 - row.length % 4]
            if part and not pages.reserve(row, len(part)):
                pages.release(row)
                return False
            if part:
                pages.encode([row], torch.tensor([part]), [len(part)])
                pages.accept(row)
        texts[row] = text
        return True

    for _ in range(200):
        action = draw.random()
        row = draw.choice(list(texts)) if texts else None
        if row is None or action < 0.35:
            refused += not extend(pages.open(), [draw.choice((3, 3, 3, 4)) for _ in range(draw.randint(1, 30))])
        elif action < 0.5:
            refused += not extend(row, texts.pop(row) + [draw.choice((3, 4)) for _ in range(draw.randint(1, 9))])
        elif action < 0.6 and row.length > 2:
            pages.truncate(row, row.length - 1)
            texts[row] = texts[row][:-1]
        elif action < 0.85:
            pages.release(row)
            del texts[row]
        else:
            rows = draw.sample(list(texts), draw.randint(1, len(texts)))
            canvas = tokens(len(rows), L, seed=compared)
            hidden = pages.denoise(rows, canvas)
            for n, each in enumerate(rows):
                truth = model.denoise(canvas[n : n + 1], model.encode(torch.tensor([texts[each]])))
                close(hidden[n : n + 1], truth)
                compared += 1
        pages.check()
    statistics = pages.statistics
    assert refused and compared > 40 and statistics.evictions > 20 and statistics.reused_tokens > 100
    for row in texts:
        pages.release(row)
    pages.check()
    assert pages.free_tokens() == 120
