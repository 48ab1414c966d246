"""The whole line on Triton: one training step and one denoise beside torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockdiff.canvas import Batch, Canvas, CleanRow, lay_out
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.objective import Objective
from tests.support.oracle import oracle, ours, tiny_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
L, V = 8, 384


@pytest.fixture(scope="module")
def models() -> tuple[DiffusionGemma, DiffusionGemma, DiffusionGemma]:
    """The same weights of one sliding and one full layer: torch in fp64, torch in fp32, on Triton in fp32."""
    kinds = dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], num_experts=4)
    truth = ours(oracle(tiny_config(canvas_length=L, **kinds))).to(DEVICE)
    in_torch, on_triton = (DiffusionGemma(truth.config, kernels=kind).to(DEVICE) for kind in ("torch", "triton"))
    for model in (in_torch, on_triton):
        model.load_state_dict(truth.state_dict())
    return truth, in_torch.eval(), on_triton.eval()


def close(values: list[Tensor]) -> bool:
    """(fp64, fp32, Triton): Triton is about as far from fp64 as torch's fp32 is; single sums may be luckier."""
    truth, in_torch, on_triton = (x.detach().double() for x in values)
    return bool((on_triton - truth).norm() <= 4 * (in_torch - truth).norm() + 1e-6 * truth.norm())


def tokens(n: int, seed: int) -> list[int]:
    return torch.randint(3, 380, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def batch() -> Batch:
    """Unequal rows longer and shorter than the window (16), two documents in one of them, coins and none."""

    def canvas(sample: int, row: list[int], start: int, doc: int = 0, coin: bool = False) -> Canvas:
        filled = [*row[start : start + L], *[1] * L][:L]
        return Canvas(filled, start, doc, None, 0.3 + 0.1 * sample, coin, address=(0, sample, start))

    a, b = tokens(40, 1), tokens(27, 2)
    return lay_out(
        [
            CleanRow(a, [canvas(0, a, 9), canvas(0, a, 28, 18, coin=True)], 0, doc_starts=(0, 18)),
            CleanRow(b, [canvas(1, b, 19, coin=True)], 1),
        ],
        L,
        pad_id=0,
    ).to(DEVICE)


def test_one_training_step_is_the_same_on_triton(models):
    """Both losses and every gradient, the routers' too."""
    losses, gradients = [], []
    for model in models:
        objective = Objective(model, Linear(), UniformCorruption(V), seed=5)
        sums = objective(batch())
        (sums["canvas"] / 16 + sums["ar"] / 60).backward()
        losses.append((sums["canvas"], sums["ar"]))
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    assert all(close(list(values)) for values in zip(*losses, strict=True))
    assert gradients[0].keys() == gradients[1].keys() == gradients[2].keys() >= {"vocabulary.table"}
    for name, truth in gradients[0].items():
        assert truth.any() and close([of_model[name] for of_model in gradients]), name


@torch.no_grad()
def test_a_denoise_after_a_chunked_encode_is_the_same_on_triton(models):
    """A denoise as sampling runs it: unequal rows, a second chunk, a canvas with a signal."""
    first, second, canvas = (
        torch.tensor([tokens(n, seed), tokens(n, seed + 1)], device=DEVICE) for n, seed in ((21, 3), (7, 5), (L, 7))
    )
    logits = []
    for model in models:
        prefix = model.encode(first, torch.tensor([21, 3], device=DEVICE))
        prefix = model.encode(second, torch.tensor([5, 7], device=DEVICE), prefix)
        soft = model.soft_embedding(model.unembed(model.denoise(canvas, prefix)))
        logits.append(model.unembed(model.denoise(canvas, prefix, soft)))
    assert close(logits)
