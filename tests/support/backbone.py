"""DiffusionGemma beside transformers: what their tests run and how they compare."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion

from blockdiff.canvas import Batch, Canvas, CleanRow, lay_out
from blockdiff.models.diffusion_gemma import DiffusionGemma
from tests.support.closeness import relative_error, require_close

L = 16  # canvas length; the window is 16 as well
PAD = 0
EXACT = 1e-12  # what two orders of the same fp64 sums may differ by
PARITY = 1e-8


class Truth(NamedTuple):
    """The numbers of transformers: encoder [B, S, D], hidden [B, L, D], logits [B, L, V]."""

    encoder: Tensor
    hidden: Tensor
    logits: Tensor


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 380, shape, generator=torch.Generator().manual_seed(seed))


def transformers_run(model: DiffusionGemmaForBlockDiffusion, prompt: Tensor, canvas: Tensor, **signal: Any) -> Truth:
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        out = model(input_ids=prompt, decoder_input_ids=canvas, **signal)
    finally:
        hook.remove()
    return Truth(out.encoder_last_hidden_state, seen[0], out.logits)


def close(found: Tensor, truth: Tensor, tolerance: float = PARITY) -> None:
    require_close(found, truth, tolerance)


def differs(a: Tensor, b: Tensor) -> None:
    assert relative_error(a, b) > 1e-4


def packed_batch() -> Batch:
    """Three rows: three canvases of one document, two packed documents, one canvas near the start."""
    document = tokens(20 + 3 * L, seed=1).tolist()
    first = [Canvas(tokens(L, seed=30 + n).tolist(), start, 0) for n, start in enumerate((5, 5 + L, 5 + 3 * L))]
    packed = tokens(30 + 45, seed=2).tolist()
    second = [
        Canvas(tokens(L, seed=40).tolist(), 3, 0),
        Canvas(tokens(L, seed=41).tolist(), 19, 0),
        Canvas(tokens(L, seed=42).tolist(), 31, 30),
        Canvas(tokens(L, seed=43).tolist(), 58, 30),
    ]
    third = [Canvas(tokens(L, seed=50).tolist(), 1, 0)]
    rows = [
        CleanRow(document, first),
        CleanRow(packed, second, doc_starts=(0, 30)),
        CleanRow(tokens(18, seed=3).tolist(), third),
    ]
    return lay_out(rows, L, PAD)


def run_packed(model: DiffusionGemma, batch: Batch, soft_BTD: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encoder hidden [B, S, D] and canvas hidden [B, C, L, D] of a batch, each in one call."""
    kinds = model.kinds.values()
    encoder, kv = model(
        batch.tokens_BS, batch.positions_BS, {kind.name: kind.encode_spans(batch.doc_start_BS) for kind in kinds}
    )
    canvases = batch.start_BC, batch.doc_start_BC, batch.length_BC, L
    spans = {kind.name: kind.denoise_spans(*canvases) for kind in kinds}
    positions = (batch.start_BC - batch.doc_start_BC)[..., None] + torch.arange(L)
    hidden, _ = model(batch.canvas_BCL.flatten(1), positions.flatten(1), spans, kv, True, soft_BTD)
    return encoder, hidden.unflatten(1, (*batch.start_BC.shape[1:], L))
