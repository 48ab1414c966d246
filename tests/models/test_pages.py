"""The paged prefix against `Prefix`: the same hidden states however rows come, grow, share and leave."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from blockdiff.errors import BlockdiffError
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.models.page_pool import Link
from blockdiff.models.page_rows import PagedRow
from blockdiff.models.pages import Pages
from blockdiff.models.prefix import Prefix
from blockdiff.spans import Spans, denoise_spans, running_spans
from tests.closeness import require_close
from tests.oracle import oracle, ours

pytestmark = pytest.mark.quick

L, D, WINDOW = 16, 64, 16
EXACT = 1e-10


@pytest.fixture(scope="module")
def model() -> DiffusionGemma:
    """fp64, three sliding layers and a full one, which has wider heads and no v_proj."""
    return ours(oracle())


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 380, shape, generator=torch.Generator().manual_seed(seed))


def signal(rows: int, length: int = L) -> Tensor:
    return torch.randn(rows, length, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def close(found: Tensor, truth: Tensor, tolerance: float = EXACT) -> None:
    require_close(found, truth, tolerance)


def opened(pages: Pages, prompts: Sequence[Tensor], chunk: int = 1000) -> list[PagedRow]:
    """Rows with these prompts, each encoded alone in chunks that begin at multiples of `chunk`."""
    rows = [pages.open() for _ in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        for part in prompt[row.length :].split(chunk):
            pages.encode([row], part[None], [len(part)])
    return rows


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


def test_sets_of_rows_that_take_turns_are_gathered_once(model, monkeypatch):
    pages = Pages(model, 8)
    rows = opened(pages, [tokens(20, seed=n) for n in range(6)])
    sets = rows[:2], rows[2:4], rows[4:]
    truth = [pages.denoise(some, tokens(2, L)) for some in sets]
    for steps in pages._steps:
        monkeypatch.setattr(steps, "_make", None)
    assert all(torch.equal(pages.denoise(some, tokens(2, L)), one) for some, one in zip(sets, truth, strict=True))


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


# -- several canvases of a row ---------------------------------------------------------------------------------


def brute_force(start: int, canvases: int, length: int, window: int | None) -> Tensor:
    """Which columns of the row, prefix and canvases, each token of the canvases sees: [C L, start + C L]."""
    columns = torch.arange(start + canvases * length)
    lines = []
    for canvas in range(canvases):
        begin = start + canvas * length
        oldest = 0 if window is None else begin - window + 1
        lines += [(columns >= oldest) & (columns < begin + length)] * length
    return torch.stack(lines)


@pytest.mark.parametrize("window", [None, 4, 8, 16])
@pytest.mark.parametrize("canvases", [1, 3])
def test_a_canvas_of_a_running_set_sees_the_earlier_ones_as_if_they_were_clean(window, canvases):
    starts = torch.tensor([0, 3, 9])
    mask = running_spans(starts, canvases, 5, window).dense(9, canvases * 5)
    for start, is_seen in zip(starts.tolist(), mask, strict=True):
        assert torch.equal(torch.cat([is_seen[:, :start], is_seen[:, 9:]], 1), brute_force(start, canvases, 5, window))
        assert not is_seen[:, start:9].any()
    if canvases == 1:
        zeros = torch.zeros(3, 1, dtype=torch.int64)
        alone = denoise_spans(starts[:, None], zeros, zeros + 5, 5, window)
        assert torch.equal(alone.dense(9, 5), mask)


def over_prefix(model: DiffusionGemma, canvas: Tensor, prefix: Prefix, canvases: int) -> Tensor:
    """A running set of one row by the model's own call, with the mask of `brute_force` as bounds."""
    (start,) = prefix.lengths_B.tolist()
    spans = {}
    for name, kind in model.kinds.items():
        mask = brute_force(start, canvases, L, kind.window)
        lo, hi = mask.int().argmax(1), mask.shape[1] - mask.flip(1).int().argmax(1)
        bounds = torch.stack([lo.clamp(max=start), hi.clamp(max=start), (lo - start).clamp(min=0), hi - start], -1)
        spans[name] = prefix.held(kind, Spans(bounds[None].int()))
    positions = start + torch.arange(canvases * L)[None]
    return model(canvas, positions, spans, prefix.layers(), True)[0]


def test_several_canvases_of_a_row_are_denoised_together(model):
    pages = Pages(model, 8)
    prompts = [tokens(33), tokens(4, seed=1), tokens(20, seed=2)]
    rows, canvas = opened(pages, prompts), tokens(3, 3 * L, seed=3)
    hidden = pages.denoise(rows, canvas, canvases=3)
    for n, prompt in enumerate(prompts):
        prefix = model.encode(prompt[None])
        close(hidden[n : n + 1], over_prefix(model, canvas[n : n + 1], prefix, 3))
        close(hidden[n : n + 1, :L], model.denoise(canvas[n : n + 1, :L], prefix))
    close(pages.denoise(rows, canvas[:, : 2 * L], canvases=2), hidden[:, : 2 * L])
    pages.encode(rows, canvas[:, :L], [L] * 3)
    assert not torch.allclose(pages.denoise(rows, canvas[:, L:], canvases=2), hidden[:, L:])


# -- sharing ---------------------------------------------------------------------------------------------------


def test_a_shared_prefix_changes_no_bit(model):
    """Chunks of 8 tokens, so that what is encoded after the shared pages is encoded as it would be without them."""
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
    opened(pages, [prompt])
    assert pages.reserve(row, 16) and pages.reuse(row, prompt.tolist()) == 40
    pages.check()
    close(pages.denoise([row], tokens(1, L)), model.denoise(tokens(1, L), model.encode(prompt[None])))


def test_a_released_prefix_is_found_again_and_a_length_can_be_asked_to_be_a_multiple(model):
    pages, prompt = Pages(model, 8), tokens(60)
    pages.release(opened(pages, [prompt])[0])
    assert not any(pages.statistics.pages.values())
    for multiple, length in ((1, 56), (16, 48), (32, 32), (64, 0)):
        row = pages.open()
        assert pages.reuse(row, prompt.tolist(), multiple) == length
        pages.check()
    assert pages.reuse(pages.open(), [5, *prompt.tolist()]) == 0


def test_tokens_are_compared_and_not_only_their_hashes(model, monkeypatch):
    """Every key has the same hash here, and other tokens are still others."""

    class Same(bytes):
        def __hash__(self) -> int:
            return 1

    monkeypatch.setattr(Link, "__hash__", lambda link: 0)
    monkeypatch.setattr("blockdiff.models.page_rows.key_of", lambda values: Same(array("q", values).tobytes()))
    pages = Pages(model, 4)
    opened(pages, [tokens(8)])
    assert pages.reuse(pages.open(), tokens(8).tolist()) == 8
    assert pages.reuse(pages.open(), [*tokens(8)[:7].tolist(), 1]) == 4
    assert pages.reuse(pages.open(), [1, *tokens(8)[1:].tolist()]) == 0


def test_another_identity_shares_nothing(model):
    pages = Pages(model, 8, identity="base")
    opened(pages, [tokens(20)])
    assert pages.reuse(pages.open(), tokens(20).tolist()) == 16
    pages.identity = "base, adapter a"
    assert pages.reuse(pages.open(), tokens(20).tolist()) == 0


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
    with pytest.raises(BlockdiffError, match="no room for 29 more tokens: 24 of the pages' tokens are free; release"):
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
    with pytest.raises(BlockdiffError, match="44 tokens cannot be cut to 20: its sliding layers have given back"):
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
