"""The rows of the benchmark of a pass: what is drawn, and that packed and padded batches hold the same tokens."""

from __future__ import annotations

import math
import statistics

import pytest

from benchmarks.epoch import PROMPT, RESPONSE, examples_of, with_coins_of_rows
from blockdiff.data.collate import AllCanvases, Collator, micro_batches
from blockdiff.data.order import Order
from blockdiff.diffusion.schedule import StratifiedTime

pytestmark = pytest.mark.quick


def test_lengths_are_spread_as_said_and_the_same_for_a_seed():
    examples = examples_of(400, 50, seed=3)
    assert [e.tokens for e in examples] == [e.tokens for e in examples_of(400, 50, seed=3)]
    assert all(3 <= token < 50 for example in examples for token in example.tokens)
    for part, (mean, deviation, longest) in enumerate((PROMPT, RESPONSE)):
        sizes = [span[0] if part == 0 else span[1] - span[0] for e in examples for span in e.responses]
        assert 8 <= min(sizes) and max(sizes) <= longest
        assert abs(statistics.mean(map(math.log, sizes)) - mean) < 4 * deviation / 20


def test_packed_and_padded_batches_hold_the_same_tokens_canvases_and_coins():
    examples = examples_of(6, 50)
    order, collator = Order(6, 6, seed=0), Collator(64, 0, 1, 0, StratifiedTime(), canvases=AllCanvases())
    sides = []
    for pack in (None, 1024):
        batches = [with_coins_of_rows(b) for b in micro_batches(examples, order, collator, 1, pack=pack)]
        there = [batch.length_BC > 0 for batch in batches]
        canvases = sorted(
            (*address, length, coin)
            for b, t in zip(batches, there, strict=True)
            for address, length, coin in zip(
                b.address_BC3[t].tolist(), b.length_BC[t].tolist(), b.coin_BC[t].tolist(), strict=True
            )
        )
        sides.append((sum(int((b.doc_start_BS >= 0).sum()) for b in batches), canvases))
    assert sides[0] == sides[1]
    assert all(coin == (sample % 2 == 0) for _, sample, _, _, coin in sides[0][1])
