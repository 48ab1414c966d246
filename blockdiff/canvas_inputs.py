"""The inputs of the denoise pass: the noise, spans and positions of a batch's canvases."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from blockdiff.canvas import CANVAS_FIELDS, Batch
from blockdiff.diffusion.corruption import Corruption
from blockdiff.diffusion.schedule import Schedule
from blockdiff.errors import RecipeError
from blockdiff.models.layer_kind import LayerKind
from blockdiff.spans import Spans


def with_canvases(batch: Batch) -> Batch:
    """Return the batch; if it has no canvases, add an absent one to each row, so that every parameter is used."""
    if batch.start_BC.numel():
        return batch
    empty = {name: getattr(batch, name) for name in CANVAS_FIELDS}
    host = None if batch.host is None else with_canvases(batch.host)
    return replace(batch, **{name: x.new_zeros(x.shape[0], 1, *x.shape[2:]) for name, x in empty.items()}, host=host)


def corrupt_canvases(
    batch: Batch, schedule: Schedule, corruption: Corruption, seed: int, vocab_size: int
) -> tuple[Batch, Tensor]:
    """Corrupt the canvases of a batch, except their pinned tokens.

    Returns the batch with noisy canvases, and which positions are corrupted [B, C, L]. Raises RecipeError if a
    corruption from Python returns other shapes or dtypes, or tokens outside the vocabulary.
    """
    # copies, for parts from Python may write into their arguments
    alpha_BC = schedule.alpha(batch.t_BC.clone())
    output = corruption.corrupt(batch.canvas_BCL.clone(), alpha_BC, batch.address_BC3.clone(), seed)
    noisy_BCL, is_corrupted_BCL = _checked(output, batch.canvas_BCL, corruption, vocab_size)
    noisy_BCL = batch.canvas_BCL.where(batch.is_pinned_BCL, noisy_BCL)
    return replace(batch, canvas_BCL=noisy_BCL), is_corrupted_BCL & ~batch.is_pinned_BCL


def _checked(
    output: tuple[Tensor, Tensor], canvas_BCL: Tensor, corruption: Corruption, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Return a corruption's output. Raises RecipeError if its form is wrong.

    Only on a CPU are the tokens compared with the vocabulary: elsewhere the host would wait for the device.
    """
    expected = [(canvas_BCL.shape, canvas_BCL.dtype), (canvas_BCL.shape, torch.bool)]
    if (
        not isinstance(output, tuple)
        or [(getattr(x, "shape", ()), getattr(x, "dtype", None)) for x in output] != expected
    ):
        parts = output if isinstance(output, tuple) else (output,)
        forms = " and ".join(f"{x.dtype} {[*x.shape]}" if isinstance(x, Tensor) else type(x).__name__ for x in parts)
        shape = [*canvas_BCL.shape]
        raise RecipeError(
            f"objective.corruption: {type(corruption).__name__}.corrupt() returned {forms}; it should return noisy "
            f"tokens torch.int64 {shape} and marks torch.bool {shape}"
        )
    if canvas_BCL.is_cpu and canvas_BCL.numel():
        extremes = [int(token) for token in output[0].aminmax()]
        if outside := [token for token in extremes if not 0 <= token < vocab_size]:
            raise RecipeError(
                f"objective.corruption: {type(corruption).__name__}.corrupt() returned token {outside[0]}; it should "
                f"return tokens of the model's vocabulary, 0 to {vocab_size - 1}"
            )
    return output


def canvas_spans(kind: LayerKind, batch: Batch) -> Spans:
    """The spans of the canvases' tokens in layers of one kind."""
    return kind.denoise_spans(batch.start_BC, batch.doc_start_BC, batch.length_BC, batch.canvas_BCL.shape[-1])


def canvas_positions(batch: Batch) -> Tensor:
    """The positions [B, C * L] of the canvases' tokens in their documents."""
    return ((batch.start_BC - batch.doc_start_BC)[..., None] + canvas_offsets(batch)).flatten(1)


def canvas_offsets(batch: Batch) -> Tensor:
    """The offsets [L] of a canvas's tokens from its start."""
    return torch.arange(batch.canvas_BCL.shape[-1], device=batch.start_BC.device)
