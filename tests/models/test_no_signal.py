"""Denoisers that read nothing of their last prediction: no pass and no product makes a signal for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockdiff.canvas import Canvas, CleanRow, lay_out
from blockdiff.diffusion.corruption import MaskCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.kernels import resolve
from blockdiff.objective import Objective
from blockdiff.sampling import Generation, Request, Sampler
from tests.support.families import small_model

pytestmark = pytest.mark.quick


def test_training_and_evaluation_make_one_pass_over_canvases_whatever_the_coin():
    model, tokens = small_model("llada2"), [*range(3, 43)]
    L = model.canvas_length
    canvases = [Canvas(tokens[s : s + L], s, t=0.6, coin=s > L, address=(0, 0, s)) for s in (L, 2 * L)]
    batch = lay_out([CleanRow(tokens, canvases)], L, pad_id=0)
    without = replace(batch, coin_BC=torch.zeros_like(batch.coin_BC))
    objective = Objective(model, Linear(), MaskCorruption(1), seed=3)
    passes: list[int] = []
    hook = model.layers[0].register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].shape[1]))
    assert torch.equal(objective(batch)["canvas"], objective(without)["canvas"])
    assert passes == [40, 2 * L] * 2
    measured = objective.evaluate(batch)
    hook.remove()
    assert passes[4:] == [40, 2 * L]
    assert torch.equal(measured.loss_BCL, measured.signal_loss_BCL) and measured.loss_BCL.any()
    assert torch.equal(measured.is_correct_BCL, measured.signal_is_correct_BCL)


def test_a_denoising_step_makes_no_soft_embedding(monkeypatch):
    model, widths = small_model("llada2"), []
    sampler = Sampler(model, generation=Generation(max_new_tokens=2 * model.canvas_length, eos_ids=(95,)))
    request = Request("a", tokens=[3, 4, 5], seed=1)
    [alone] = sampler.generate([request])
    stats = model.vocabulary.stats

    def watched(*given, **named):
        found = stats(*given, **named)
        widths.append(found.soft_embedding.shape[-1])
        return found

    monkeypatch.setattr(model.vocabulary, "stats", watched)
    sampler.generate([request])
    assert widths and set(widths) == {0}
    model.vocabulary.makes_signal = True  # which changes no token
    assert Sampler(model, generation=sampler.generation).generate([request])[0].tokens == alone.tokens
    assert widths[-1] == model.config.hidden_size


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_statistics_without_a_signal_are_those_with_one(kernels: str):
    vocabulary = small_model("llada2", dtype=torch.float32).vocabulary
    vocabulary.kernels = resolve(kernels)
    hidden_BLD, uniform_BL = torch.randn(2, 5, vocabulary.table.shape[1]), torch.rand(2, 5)
    without = vocabulary.stats(hidden_BLD, 0.8, uniform_BL)
    vocabulary.makes_signal = True
    whole = vocabulary.stats(hidden_BLD, 0.8, uniform_BL)
    for name, column in without._asdict().items():
        if name != "soft_embedding":
            assert torch.equal(column, getattr(whole, name)), name
    assert without.soft_embedding.shape == (2, 5, 0) and whole.soft_embedding.any()
