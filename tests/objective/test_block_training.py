"""Training with a prefix of blocks: canvases where blocks begin, packed and alone, in one sweep and in passes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from blockdiff.canvas import cut, joined
from blockdiff.canvas_inputs import corrupt_canvases
from blockdiff.data.canvas_choice import AllCanvases
from blockdiff.data.chat import truncated
from blockdiff.data.collate import Collator
from blockdiff.data.example import Example
from blockdiff.data.statistics import Statistics
from blockdiff.diffusion.corruption import MaskCorruption
from blockdiff.diffusion.schedule import Linear, StratifiedTime
from blockdiff.objective import Objective
from tests.objective.test_one_sweep import assert_same, found
from tests.support.families import small_model

pytestmark = pytest.mark.quick

L, V, EOS, MASK, SEED = 4, 96, 2, 95, 5
COLLATE = Collator(L, 0, EOS, 3, StratifiedTime(), AllCanvases(), scores_ar=False, aligned=True)


def example(sample: int, length: int, *responses: tuple[int, int]) -> Example:
    tokens = torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(sample)).tolist()
    return Example(sample, tokens, list(responses))


# Responses from every place of a block, one of them in the first block, and two turns whose canvases are one block.
EXAMPLES = [
    example(0, 9, (1, 9)),
    example(1, 14, (6, 14)),
    example(2, 15, (7, 15)),
    example(3, 21, (4, 13), (14, 21)),
    example(4, 16, (8, 16)),
    example(5, 3, (1, 3)),  # nothing is before its canvas
]


@pytest.fixture(scope="module")
def model():
    return small_model("qwen3 sliding, blocks")


def rows():
    return COLLATE.rows(EXAMPLES, epoch=0, step=1, slots=range(len(EXAMPLES)), total_slots=len(EXAMPLES))


def test_canvases_begin_where_blocks_do_and_the_prompts_tail_is_pinned():
    first, second, _, turns, _, short = rows()
    assert [(canvas.start, [*canvas.pinned]) for canvas in first.canvases] == [(0, [0]), (4, []), (8, [])]
    assert [(canvas.start, [*canvas.pinned]) for canvas in second.canvases] == [(4, [0, 1]), (8, []), (12, [])]
    assert [(canvas.start, len(canvas.pinned)) for canvas in turns.canvases][3:] == [(12, 2), (16, 0), (20, 0)]
    assert second.canvases[0].tokens == EXAMPLES[1].tokens[4:8]
    assert turns.canvases[2].tokens == [EXAMPLES[3].tokens[12], EOS, EOS, EOS]
    lengths = len(first.tokens), len(second.tokens), len(short.tokens)
    assert lengths == (8, 12, 0), "columns that no canvas sees"


def test_each_canvas_is_denoised_over_the_whole_blocks_before_it(model):
    objective = Objective(model, Linear(), MaskCorruption(MASK), SEED)
    batch = COLLATE.lay_out([joined(rows()[:3]), joined(rows()[3:])])
    noisy, is_corrupted = corrupt_canvases(batch, Linear(), MaskCorruption(MASK), SEED, V)
    losses = objective.evaluate(batch).loss_BCL
    flat = [(example, canvas) for row, example in zip(rows(), EXAMPLES, strict=True) for canvas in row.canvases]
    places = [(b, c) for b, c in product(*map(range, batch.length_BC.shape)) if batch.length_BC[b, c]]
    assert len(flat) == len(places) == 18 and not (is_corrupted & batch.is_pinned_BCL).any()
    for (b, c), (its, canvas) in zip(places, flat, strict=True):
        prefix = model.encode(torch.tensor([its.tokens[: canvas.start]], dtype=torch.int64))
        logits = model.unembed(model.denoise(noisy.canvas_BCL[b, c][None], prefix))[0]
        expected = torch.nn.functional.cross_entropy(logits, batch.canvas_BCL[b, c], reduction="none")
        expected[[*canvas.pinned]] = 0
        assert torch.allclose(losses[b, c].double(), expected.double(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("packs", [False, True])
def test_losses_and_gradients_are_those_of_rows_apart_in_one_sweep_and_in_passes(model, packs):
    made = [joined(rows()[:3]), joined(rows()[3:])] if packs else rows()
    options = dict(positions="corrupted")
    apart = Objective(model, Linear(), MaskCorruption(MASK), SEED, **options)
    alone = [found(apart, COLLATE.lay_out([row])) for row in rows()]
    sums = [sum(each) for each in zip(*(losses for losses, _ in alone), strict=True)]
    gradients = {name: sum(of[name] for _, of in alone if name in of) for name in alone[-1][1]}
    for sweep in (False, True):
        objective = Objective(model, Linear(), MaskCorruption(MASK), SEED, sweep=sweep, **options)
        assert_same(found(objective, COLLATE.lay_out(made)), (sums, gradients), 1e-6)


def test_a_cut_and_the_counts_follow_the_blocks():
    tokens = [*range(30)]
    assert truncated(tokens, [(5, 30)], 18, L, aligned=True) == (tokens[:16], [(5, 16)])
    assert truncated(tokens, [(5, 30)], 7, L, aligned=True) is None
    statistics = Statistics(L, aligned=True)
    for each in EXAMPLES:
        statistics.count_example(each.tokens, each.responses, cut_tokens=0)
    made = COLLATE.lay_out(rows())
    assert statistics.scored_tokens == int(made.is_scored_BCL.sum())
    assert statistics.canvases == int((made.length_BC > 0).sum())
    assert (statistics + statistics).canvases == 2 * statistics.canvases
    by_example = replace(COLLATE, normalisation="example")
    batch = by_example(EXAMPLES, epoch=0, step=1, slots=range(6), total_slots=6)
    assert batch.canvas_count() == pytest.approx(6)
    assert cut((5, 9), L, aligned=True) == [(4, 8), (8, 9)]
