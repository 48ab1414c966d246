"""The memory that sampling with a model needs. Only its config is read; a step runs on shapes without memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from blockdiff import checkpoint
from blockdiff.checkpoint.quantization_config import layers_described
from blockdiff.models.adapters import adapt
from blockdiff.models.family import Family
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import forms_of, quantised_layers, store
from blockdiff.training.plan.live_bytes import LiveBytes
from blockdiff.training.plan.step_bytes import keep_one_of_each
from blockdiff.training.plan.training import kernels_for, spare


@dataclass(frozen=True)
class SamplingPlan:
    """The memory of sampling, in bytes: `weights`, the `cache` of 1,000 tokens of a row, and a denoising `step`.

    images: weights of the image side, which is loaded with the first image. step: of the first row and of each further
    one, after a prefix of 1,000 tokens, rounded up to whole blocks. forms: names of the formats in which linear layers
    and experts are stored.
    """

    weights: int
    images: int
    cache: int
    step: tuple[int, int]
    forms: tuple[str, ...] = ()

    def rows(self, limit: int, tokens: int) -> int:
        """Return how many rows with prefixes of `tokens` tokens fit into `limit` bytes, less the `spare` ones."""
        first, further = self.step
        budget = limit - spare(limit) - self.weights - self.images - first
        each = further + self.cache * tokens // 1000
        return max(0, budget // each + 1 if budget >= self.cache * tokens // 1000 else 0)


def plan_sampling(
    config: Family,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    quantize: str | None = None,
    adapter: Path | None = None,
) -> SamplingPlan:
    """Return the memory of sampling with a model of this config.

    quantize: the form that weights are rounded to; None: the one in the config. adapter: the directory of an adapter
    that the model gets, unmerged.
    """
    model = checkpoint.empty(config, kernels_for(device)).to(dtype).eval()
    store(model, (layers_described(model) if quantize is None else {}) | quantised_layers(model, quantize))
    if adapter is not None:
        content = checkpoint.read_adapter(adapter, model)
        adapt(model, content.modules, content.tokens)
    cached = config.cached_per_token
    with torch.device("meta"):
        side = config.image_side() if model.image_side is None else None
    weights, images = _bytes(model), 0 if side is None else _bytes(side.to(dtype))
    keep_one_of_each(model)
    one, two = (_step(model, rows) for rows in (1, 2))
    return SamplingPlan(weights, images, 1000 * cached * dtype.itemsize, (one, two - one), forms_of(model))


def _bytes(module: nn.Module) -> int:
    return sum(x.nbytes for x in (*module.parameters(), *module.buffers()))


def _step(model: BlockDiffusionModel, rows: int) -> int:
    """Return the peak bytes of one denoising step, with a signal and the statistics of all canvas tokens.

    For a model that does not denoise it is the step that predicts the next token.
    """
    counted = LiveBytes()
    counted.fill(model)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), counted:
        canvas = torch.zeros(rows, model.canvas_length, dtype=torch.int64)
        block = model.config.block or 1
        prefix = model.encode(torch.zeros(rows, -(-1000 // block) * block, dtype=torch.int64))
        counted.start_again()
        if not model.denoises:  # the step that gives the next token
            hidden = model.encode(canvas, prefix=prefix).hidden
            model.vocabulary.stats(hidden, 1.0, torch.zeros(rows, 1))
            return counted.peak
        soft = counted.empty((rows, model.canvas_length, model.vocabulary.signal_width), model.dtype)
        hidden = model.denoise(canvas, prefix, soft)
        model.vocabulary.stats(hidden, 1.0, torch.zeros(rows, model.canvas_length))
    return counted.peak
