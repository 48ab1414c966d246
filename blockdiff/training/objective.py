"""The objective: encode once, denoise without and with the self-conditioning signal, and both losses.

This is what is wrapped (DDP, FSDP2) and trained. Drawing t and coins is the batch's business, dividing the
loop's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed
from torch import Tensor, nn

from blockdiff.canvas import CANVAS_FIELDS, Batch
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Schedule
from blockdiff.layers.attention import KV
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.spans import Spans, denoise_spans, encode_spans
from blockdiff.training.losses import Losses, ar_loss, canvas_loss


class Objective(nn.Module):
    """Google's DiffusionGemma recipe on a batch: `objective(batch) -> Losses` (formulas: docs/objective.md).

    seed: of the corruption draws, which are addressed by the batch's `address_BC3`; train_router: whether the
    routers' parameters train (fine-tuning freezes them).
    """

    def __init__(
        self,
        model: DiffusionGemma,
        schedule: Schedule,
        corruption: UniformCorruption,
        seed: int = 0,
        train_router: bool = False,
    ):
        super().__init__()
        self.model, self.schedule, self.corruption, self.seed = model, schedule, corruption, seed
        for p in model.router_parameters():
            p.requires_grad_(train_router)

    def forward(self, batch: Batch) -> Losses:
        if not batch.start_BC.numel():
            batch = _with_absent_canvas(batch)
        model = self.model
        spans = {w: encode_spans(batch.doc_start_BS, w) for w in set(model.windows)}
        hidden_BSD, kv = model.run_encode(batch.tokens_BS, batch.positions_BS, spans)
        ar_sum = ar_loss(model.vocabulary, hidden_BSD, batch)

        noisy_BCL, _ = self.corruption.corrupt(
            batch.canvas_BCL, self.schedule.alpha(batch.t_BC), batch.address_BC3, self.seed
        )
        columns = int(batch.start_BC.max())  # no canvas sees a clean token at or after its start
        past = [tuple(x[:, :columns] for x in layer) for layer in kv]
        noisy = replace(batch, canvas_BCL=noisy_BCL)
        soft_BTD = self._signal(noisy, past)
        return Losses(canvas_loss(model.vocabulary, self._denoise(noisy, past, soft_BTD), batch), ar_sum)

    def _denoise(self, noisy: Batch, past: list[KV], soft_BTD: Tensor | None) -> Tensor:
        L = noisy.canvas_BCL.shape[-1]
        spans: dict[int | None, Spans] = {
            w: denoise_spans(noisy.start_BC, noisy.doc_start_BC, noisy.length_BC, L, w)
            for w in set(self.model.windows)
        }
        positions_BCL = (noisy.start_BC - noisy.doc_start_BC)[..., None] + torch.arange(
            L, device=noisy.start_BC.device
        )
        canvas_BT = noisy.canvas_BCL.flatten(1)
        return self.model.run_denoise(canvas_BT, positions_BCL.flatten(1), spans, past, soft_BTD)

    def _signal(self, noisy: Batch, past: list[KV]) -> Tensor:
        """Pass one, for coin canvases only: their soft embeddings [B, T, D], zero everywhere else.

        With several processes a rank without coins runs one canvas and discards it: the ranks of a sharded
        model must gather its layers equally often.
        """
        has_signal_BC = noisy.coin_BC & (noisy.length_BC > 0)
        D = self.model.vocabulary.table.shape[1]
        shape = (*noisy.canvas_BCL.shape, D)
        soft_BCLD = torch.zeros(shape, dtype=self.model.dtype, device=noisy.canvas_BCL.device)
        if bool(has_signal_BC.any()):
            kept, rows = noisy.keep(has_signal_BC)
            soft_BCLD[has_signal_BC] = self._pass_one(kept, [tuple(x[rows] for x in layer) for layer in past])
        elif torch.distributed.is_initialized():
            first = replace(noisy, **{name: getattr(noisy, name)[:1, :1] for name in CANVAS_FIELDS})
            self._pass_one(first, [tuple(x[:1] for x in layer) for layer in past])
        return soft_BCLD.flatten(1, 2)

    def _pass_one(self, noisy: Batch, past: list[KV]) -> Tensor:
        """Soft embeddings [canvases, L, D] of the canvases present, in row-major order.

        The logits carry no gradient; the table that embeds them does.
        """
        with torch.no_grad():
            hidden_BTD = self._denoise(noisy, past, None)
        soft_BTD = self.model.vocabulary.soft_embedding(hidden_BTD)
        return soft_BTD.view(*noisy.canvas_BCL.shape, -1)[noisy.length_BC > 0]


def _with_absent_canvas(batch: Batch) -> Batch:
    """A batch without canvases gets an absent one per row: every parameter is used, with a zero gradient."""
    empty = {name: getattr(batch, name) for name in CANVAS_FIELDS}
    return replace(batch, **{name: x.new_zeros(x.shape[0], 1, *x.shape[2:]) for name, x in empty.items()})
