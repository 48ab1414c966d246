"""The work of an optimiser step, by arithmetic over the weights, and how long a GPU takes for it at least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from blockdiff.canvas import Batch
from blockdiff.layers.experts import Experts
from blockdiff.models.family import family_of
from blockdiff.training.recipe import Recipe


@dataclass(frozen=True)
class Rates:
    """Rates of a device. flops: operations of products per second; memory: bytes per second that it reads and
    writes; network: bytes per second that it receives from the others."""

    flops: float = 400e12
    memory: float = 3e12
    network: float = 100e9


@dataclass(frozen=True)
class Work:
    """Counts of a step. flops: operations of matrix products; moved: bytes of weights, and of what products read and
    write; exchanged: bytes that a rank receives from others."""

    flops: float
    moved: float
    exchanged: float

    def seconds(self, rates: Rates) -> float:
        """At least how long a step takes, if what is exchanged is exchanged meanwhile."""
        return max(self.flops / rates.flops, self.moved / rates.memory, self.exchanged / rates.network)


def of_step(objective: Any, recipe: Recipe, batch: Batch, rows: int, ranks: int) -> Work:
    """The work of one of `ranks` processes, each with so many rows like those of the batch in a step.

    Every token passes through all matrices of a layer but the experts that are not chosen, once in each forward; a
    backward takes twice as many operations where weights train, and as many where they do not. Attention sees the spans
    of the batch.
    """
    (B, S), canvases, model = batch.tokens_BS.shape, batch.canvas_BCL[0].numel(), objective.model
    times, trained = rows / B, [x for x in objective.parameters() if x.requires_grad]
    matrices = [(name, x) for name, x in [*model.named_parameters(), *model.named_buffers()] if x.dim() > 1]
    outline = family_of(model.config).outline(model.config)
    share = {id(x): outline.experts_per_token / outline.experts for x in _of_experts(model)} if outline.experts else {}
    in_layers = [x for name, x in matrices if name.startswith("layers.")]
    # tokens that pass through the layers without gradients and with them, in a row
    first, second = (0, S) if not model.denoises else (canvases + S * recipe.sweeps, S + canvases)
    again = 1 + recipe.train.activation_checkpointing
    passes = B * (first + second * again), B * second  # of forwards, of backwards
    flops = moved = 0.0
    for x in in_layers:
        per_token = 2 * x.numel() * share.get(id(x), 1.0)
        flops += per_token * (passes[0] + (1 + x.requires_grad) * passes[1])
        numbers = sum(x.shape[-2:]) * share.get(id(x), 1.0) * (x.shape[0] if x.dim() == 3 else 1)
        moved += x.itemsize * (numbers * (passes[0] + 2 * passes[1]) + x.numel() * (3 + again + x.requires_grad))
    table = model.vocabulary.table
    scored, signals = int(batch.is_scored_BCL.sum() + batch.is_ar_scored_BS.sum()), int(batch.coin_BC.sum())
    of_signals = signals * batch.canvas_BCL.shape[-1] * (2 + 2 * table.requires_grad)
    flops += 2 * table.numel() * (scored * (2 + table.requires_grad) + of_signals)
    flops += (4 * (1 + again) + 10) * B * _pairs(model, batch)
    sent = (ranks - 1) / ranks
    exchanged = 2 * sent * sum(x.numel() * 4 for x in trained)
    if recipe.parallel.shard == "full":
        calls = 3 if recipe.sweeps else 5
        weights = sum(x.nbytes for x in objective.parameters())
        exchanged = times * sent * (calls * weights + sum(4 * x.numel() for x in trained))
    splits, hidden = recipe.parallel.experts * recipe.parallel.tensor, model.vocabulary.table.shape[1]
    if splits > 1:
        travels = 2 * len(model.layers) * hidden * table.itemsize * (splits - 1) / splits
        exchanged += times * travels * (passes[0] + passes[1])
    return Work(times * flops, times * moved, exchanged)


def _pairs(model: Any, batch: Batch) -> float:
    """Pairs of a query and a key in a row, times heads and their numbers, over all layers."""
    C, L = batch.canvas_BCL.shape[1:]
    places = batch.start_BC[:1], batch.doc_start_BC[:1], batch.length_BC[:1], L
    seen = {}
    for name, kind in model.kinds.items():
        spans = [kind.encode_spans(batch.doc_start_BS[:1]), *([kind.denoise_spans(*places)] if C else [])]
        bounds = [each.bounds_BT4 for each in spans]
        seen[name] = sum(int((b[..., 1::2] - b[..., 0::2]).clamp(min=0).sum()) for b in bounds)
    widths = [layer.attention.q_proj.out_features for layer in model.layers]
    return float(sum(seen[kind] * width for kind, width in zip(model.layer_kinds, widths, strict=True)))


def _of_experts(model: nn.Module) -> list[Any]:
    modules = [module for module in model.modules() if isinstance(module, Experts)]
    return [x for module in modules for x in (*module.parameters(), *module.buffers())]
