"""The memory of a training step grows with the tokens of a row and not with their square."""

from __future__ import annotations

import pytest
import torch

from blockdiff.canvas import Canvas, CleanRow, lay_out
from blockdiff.checkpoint import init
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.kernels.span_attention import pieces
from blockdiff.kernels.span_attention import torch as in_torch
from blockdiff.objective import Objective
from blockdiff.training.recomputation import checkpoint_activations
from tests.support.oracle import TWO_LAYERS, tiny_config
from tests.support.peaks import peak_memory

CONFIG = tiny_config(**TWO_LAYERS)


def peak(tokens: int, one_sweep: bool) -> int:
    """Bytes that a step with recomputation allocates for one row whose canvases are all scored."""
    model = init(CONFIG, seed=0, device="cpu", kernels="torch")
    L, V = model.canvas_length, model.vocab_size
    drawn = torch.randint(3, V, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    starts = range(L, tokens - L + 1, L)
    canvases = [Canvas(drawn[s : s + L], s, t=0.5, coin=True, address=(0, 0, s // L)) for s in starts]
    batch = lay_out([CleanRow(drawn, canvases)], L, pad_id=0)
    checkpoint_activations(model)
    objective = Objective(model.train(), Linear(), UniformCorruption(V), sweep=one_sweep)

    def step() -> None:
        losses = objective(batch)
        (losses["canvas"] / batch.canvas_count() + losses["ar"] / batch.ar_count()).backward()

    return peak_memory(step, torch.device("cpu"), release=lambda: model.zero_grad(set_to_none=True))


@pytest.mark.parametrize("one_sweep", [False, True])
def test_a_row_four_times_as_long_takes_four_times_the_memory(one_sweep, monkeypatch):
    """With limits scaled down to rows that a test can run: masks would take more and more."""
    for module, name, value in (
        (in_torch, "LONG_KEYS", 64),
        (in_torch, "LONG_MASK", 1 << 12),
        (pieces, "MASK", 1 << 14),
    ):
        monkeypatch.setattr(module, name, value)
    short, long = (peak(tokens, one_sweep) for tokens in (240, 960))
    assert long <= 4.2 * short
    monkeypatch.setattr(in_torch, "LONG_KEYS", 1 << 20)
    assert peak(960, one_sweep) > 1.8 * long
