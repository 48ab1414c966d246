"""Images in the objective: both orders of passes, packed rows, features made once, and nothing of them kept."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import blockdiff
from blockdiff.canvas import Batch, Canvas, CleanRow, joined, lay_out
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.images import ImageInput, PlacedImage
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.objective import Objective
from tests.support.closeness import relative_error
from tests.support.oracle import our_config
from tests.support.pictures import gemma_config, minimax_config, picture

pytestmark = pytest.mark.quick
L = 6


@pytest.fixture(scope="module", params=["diffusion_gemma", "minimax_m3"])
def model(request: pytest.FixtureRequest) -> BlockDiffusionModel:
    config = gemma_config(random.Random(3), use_bidirectional_attention="vision")
    if request.param == "minimax_m3":
        config = minimax_config(random.Random(3))
        config = our_config(config).with_canvases(L)
    return blockdiff.with_image_side(blockdiff.init(config, seed=1, dtype="float64", device="cpu", kernels="torch"))


def rows(model: BlockDiffusionModel) -> list[CleanRow]:
    """Two turns with a picture each, a row of text, and a picture after the last canvas; a picture comes twice."""
    draw = random.Random(7)
    one, other = (picture(model.config, draw) for _ in range(2))
    placeholder = model.config.image_tokens()[1]

    def row(*parts: int | ImageInput, canvases: tuple[int, ...], sample: int) -> CleanRow:
        tokens, images, own = [], list[PlacedImage](), list[Canvas]()
        for n, part in enumerate(parts):
            if isinstance(part, ImageInput):
                images.append(PlacedImage(part, len(tokens)))
                tokens += [placeholder] * part.tokens
                continue
            if n in canvases:
                address, clean = (0, sample, len(own)), [draw.randrange(3, 90) for _ in range(L)]
                own.append(Canvas(clean, len(tokens), t=0.6, coin=len(own) == 0, address=address))
            tokens += [draw.randrange(3, 90) for _ in range(part)]
        weights = [float(token != placeholder) for token in [*tokens[1:], 0]]  # no placeholder is predicted
        return CleanRow(tokens, own, sample, ar_weights=weights, images=images)

    return [
        row(2, one, 3, L, 2, other, 1, 4, canvases=(3, 7), sample=0),
        row(9, 3, canvases=(1,), sample=1),
        row(1, 4, 2, other, one, canvases=(1,), sample=2),
    ]


def found(model: BlockDiffusionModel, batches: list[Batch], **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    objective = Objective(model, Linear(), UniformCorruption(96), 5, **options)
    objective.zero_grad(set_to_none=True)
    losses = [objective(batch) for batch in batches]
    total = sum((each["canvas"] + 0.7 * each["ar"] for each in losses), torch.zeros((), dtype=torch.float64))
    total.backward()
    return total.detach(), {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}


def test_both_orders_of_passes_and_packed_rows_give_the_same_losses_and_gradients(model):
    clean = rows(model)
    model.image_side.requires_grad_(True)
    truth, gradients = found(model, [lay_out([row], L, 0) for row in clean])
    assert any(name.startswith("model.image_side.") for name in gradients)
    together = [lay_out(clean, L, 0)], [lay_out([joined(clean)], L, 0)]
    for batches in together:
        for sweep in (False, True):
            total, others = found(model, batches, sweep=sweep)
            assert relative_error(total, truth) < 1e-6 and others.keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert relative_error(others[name], gradient) < 1e-6, name


def test_features_are_made_in_one_call_and_not_at_all_for_rows_of_text(model, monkeypatch):
    calls = list[int]()
    features = type(model.image_side).features
    monkeypatch.setattr(type(model.image_side), "features", lambda side, x: calls.append(len(x)) or features(side, x))
    model.image_side.requires_grad_(False)
    for sweep in (False, True):
        _, gradients = found(model, [lay_out(rows(model), L, 0)], sweep=sweep)
        assert not any(name.startswith("model.image_side.") for name in gradients)
    assert calls == [2, 2]  # different pictures: one stands in the batch twice
    found(model, [lay_out(rows(model)[1:2], L, 0)])
    Objective(model, Linear(), UniformCorruption(96)).evaluate(lay_out(rows(model), L, 0))
    assert calls == [2, 2, 2]


def test_nothing_of_the_image_side_but_its_result_is_kept_for_the_backward(model):
    model.image_side.requires_grad_(True)
    kept = list[int]()
    inputs = [picture(model.config, random.Random(1), 4)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        features = model.image_features(inputs)
    assert features.requires_grad and not kept
    model.image_side.requires_grad_(False)
    assert not model.image_features(inputs).requires_grad  # frozen: without a graph
