"""Cutting responses into canvases, and `Batch`, which lays clean rows and their canvases out as tensors.

The clean row holds the conversation as it is; a canvas carries its own tokens, end-of-sequence fill included,
so the fill never enters a row. Noise lives in `diffusion`, reading and choosing in `data`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from blockdiff.images import PlacedImage, RowImages


def cut(response: tuple[int, int], canvas_length: int, aligned: bool = False) -> list[tuple[int, int]]:
    """Cut a response at columns [start, end) into canvases of `canvas_length` columns.

    Returns the (start, end) columns of each; only the last one can be shorter (the fill makes up the rest). aligned:
    whether canvases begin at multiples of their length; then the first one may have columns before the response.
    """
    start, end = response
    first = start // canvas_length * canvas_length if aligned and start < end else start
    return [(column, min(column + canvas_length, end)) for column in range(first, end, canvas_length)]


def fill(tokens: Sequence[int], canvas_length: int, fill_id: int) -> list[int]:
    """The clean tokens of a canvas, filled up to `canvas_length` with a token, mostly the end-of-sequence one."""
    return [*tokens, *[fill_id] * (canvas_length - len(tokens))]


def narrow_length(tokens: int, most: int) -> int:
    """Return the length of the narrowest canvas for `tokens` tokens: a multiple of 16, or `most` if that is less."""
    return min(most, -(-tokens // 16) * 16)


@dataclass(frozen=True)
class Canvas:
    """One canvas before it becomes a column of tensors.

    `tokens` has the canvas length; the first `length` of them (default: all) are valid and scored. `content` of these
    are the response's own (default: all valid ones), the others its fill. The tokens at the places `pinned`, from 0,
    are given: the model sees them as they are, and they are neither corrupted nor scored.
    `start` and `doc_start` are columns of the row; `address` is (epoch, sample id, index within the sample);
    `weight` is what each scored position counts for.
    """

    tokens: Sequence[int]
    start: int
    doc_start: int = 0
    length: int | None = None
    t: float = 0.0
    coin: bool = False
    address: tuple[int, int, int] = (0, 0, 0)
    weight: float = 1.0
    content: int | None = None
    pinned: Collection[int] = ()


@dataclass(frozen=True)
class CleanRow:
    """One row of a batch: clean tokens, the columns where its documents start, and the canvases to run.

    `ar_weights` says for each column what the pair of its token and the next counts for, 0 = not scored (None: every
    pair within a document counts 1). `sample_id` is the first document's. `images` stand where `tokens` has their
    placeholders, in order.
    """

    tokens: Sequence[int]
    canvases: Sequence[Canvas]
    sample_id: int = 0
    doc_starts: Sequence[int] = (0,)
    ar_weights: Sequence[float] | None = None
    images: Sequence[PlacedImage] = ()


PADDING_ROW = CleanRow((), (), sample_id=-1, doc_starts=())  # a rank without examples takes part with a row of padding


def joined(rows: Sequence[CleanRow]) -> CleanRow:
    """Rows packed into one: their documents side by side, each with its own canvases and weights."""
    tokens: list[int] = []
    doc_starts: list[int] = []
    canvases: list[Canvas] = []
    weights: list[float] = []
    images: list[PlacedImage] = []
    for row in rows:
        first = len(tokens)
        tokens += row.tokens
        doc_starts += [first + start for start in row.doc_starts]
        canvases += [replace(c, start=first + c.start, doc_start=first + c.doc_start) for c in row.canvases]
        weights += [1.0] * len(row.tokens) if row.ar_weights is None else row.ar_weights
        images += [replace(placed, column=first + placed.column) for placed in row.images]
    is_plain = all(row.ar_weights is None for row in rows)
    return CleanRow(tokens, canvases, rows[0].sample_id, doc_starts, None if is_plain else weights, images)


@dataclass(frozen=True)
class Visited:
    """States of a batch's canvases as a sampler's steps saw them, with their self-conditioning signals."""

    tokens_BCL: Tensor
    signal_BCLD: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Visited:
        """The same with each of its tensors changed, to lie elsewhere, say."""
        return Visited(change(self.tokens_BCL), change(self.signal_BCLD))


@dataclass(frozen=True)
class Batch:
    """Clean rows and the canvases that are run against them.

    B rows, S clean columns, C canvases per row (sorted by document, then start), L canvas length.
    Padding columns have `doc_start_BS` -1, position 0 and the pad token; absent canvases have `length_BC` 0. Of a
    canvas's valid tokens the first `content_BC` are the response's own; what follows them is fill. Tokens that are
    pinned are seen without noise and are not scored.
    `weight_BC` and `ar_weight_BS` say what each scored position of a canvas and each scored pair counts for: 1 where
    the loss is a mean over tokens, 1 / (scored positions of the example) where it is a mean over examples. `images` are
    those of the clean rows (None: there is none). `visited` stands in place of noise (None: there is noise).
    `host` is the batch on the CPU that this one was copied from (None: it lies there itself).
    """

    tokens_BS: Tensor
    positions_BS: Tensor
    doc_start_BS: Tensor
    is_ar_scored_BS: Tensor
    ar_weight_BS: Tensor
    sample_id_B: Tensor
    canvas_BCL: Tensor
    start_BC: Tensor
    doc_start_BC: Tensor
    length_BC: Tensor
    content_BC: Tensor
    is_pinned_BCL: Tensor
    is_scored_BCL: Tensor
    t_BC: Tensor
    coin_BC: Tensor
    address_BC3: Tensor
    weight_BC: Tensor
    images: RowImages | None = None
    visited: Visited | None = None
    host: Batch | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The batch with each of its tensors changed, to lie elsewhere, say."""
        there: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "host"}
        for name, x in there.items():
            if x is not None:
                there[name] = change(x) if isinstance(x, Tensor) else x.map(change)
        return replace(self, **there)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same batch on another device, which still has the one on the CPU that it was copied from."""
        there = self.map(lambda x: x.to(device, non_blocking=non_blocking))
        is_copied = self.tokens_BS.is_cpu and not there.tokens_BS.is_cpu
        return replace(there, host=self) if is_copied else there

    def in_pinned_memory(self) -> Self:
        """The batch with its tensors, those of images too, in pinned memory."""
        return self.map(Tensor.pin_memory)

    @property
    def on_host(self) -> Batch:
        """The batch where the host reads it without waiting: the one on the CPU that this was copied from, or itself.

        Its canvases have the same places, and their own tokens where these have noise.
        """
        return self if self.host is None else self.host

    @property
    def is_fill_BCL(self) -> Tensor:
        """True behind the response's own tokens in its last canvas; also where a canvas is absent."""
        return torch.arange(self.canvas_BCL.shape[-1], device=self.content_BC.device) >= self.content_BC[..., None]

    def canvas_count(self, is_counted_BCL: Tensor | None = None) -> float:
        """The divisor of the canvas loss: the weights of the scored canvas positions, added up.

        is_counted_BCL: counts these positions alone (None: all that are scored).
        """
        is_counted_BCL = self.is_scored_BCL if is_counted_BCL is None else self.is_scored_BCL & is_counted_BCL
        return float((is_counted_BCL.sum(-1) * self.weight_BC.double()).sum())

    def ar_count(self) -> float:
        """The divisor of the AR loss: the weights of the scored next-token pairs, added up."""
        return float(self.ar_weight_BS[self.is_ar_scored_BS].double().sum())

    def answer_count(self) -> float:
        """The divisor of the policy loss: the answers of rollouts, of which ordinary batches have none."""
        return 0.0

    def select(self, is_kept_BC: Tensor) -> tuple[Batch, Tensor]:
        """The batch with only the canvases that are marked, on the device of `on_host`, in their order.

        C shrinks to the largest number kept in a row and rows left without a canvas are dropped.
        Returns the batch and the indices [rows kept] of its rows in this one; S stays as it is. Visited states are left
        out.
        """
        is_kept_BC = is_kept_BC & (self.on_host.length_BC > 0)
        host = None if self.host is None else self.host.select(is_kept_BC)[0]
        counts_B = is_kept_BC.sum(1)
        rows = counts_B.nonzero()[:, 0]
        is_kept_BC = is_kept_BC[rows]
        width = int(counts_B.max()) if len(rows) else 0
        order_BC = (~is_kept_BC).long().argsort(dim=1, stable=True)[:, :width]
        is_present_BC = is_kept_BC.gather(1, order_BC)
        rows, order_BC, is_present_BC = (sent(x, self.tokens_BS.device) for x in (rows, order_BC, is_present_BC))
        row_B1 = torch.arange(len(rows), device=rows.device)[:, None]

        def pick(values: Tensor) -> Tensor:
            picked = values[rows][row_B1, order_BC]
            return picked * is_present_BC.view(*is_present_BC.shape, *[1] * (picked.dim() - 2)).to(picked.dtype)

        canvases = {name: pick(getattr(self, name)) for name in CANVAS_FIELDS}
        others = (*CANVAS_FIELDS, "images", "visited", "host")
        of_rows = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in others}
        images = None if self.images is None else self.images.select(rows)
        kept = {name: x[rows] for name, x in of_rows.items()} | canvases
        return replace(self, **kept, images=images, visited=None, host=host), rows


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, to which the CPU sends its own without waiting for the device."""
    return x.pin_memory().to(device, non_blocking=True) if x.is_cpu and device.type == "cuda" else x.to(device)


CANVAS_FIELDS = (
    "canvas_BCL",
    "start_BC",
    "doc_start_BC",
    "length_BC",
    "content_BC",
    "is_pinned_BCL",
    "is_scored_BCL",
    "t_BC",
    "coin_BC",
    "address_BC3",
    "weight_BC",
)


def lay_out(rows: Sequence[CleanRow], canvas_length: int, pad_id: int) -> Batch:
    """Right-pad rows and their canvases into a `Batch` on the CPU; positions restart with every document."""
    width = max((max(1, len(row.tokens)) for row in rows), default=0)
    most = max((len(row.canvases) for row in rows), default=0)
    absent = Canvas([0] * canvas_length, start=0, length=0)
    # One tensor per field from nested lists: a tensor per row or canvas would cost more than the draws.
    tokens, doc_starts = [], []
    canvases: list[list[Canvas]] = []
    for row in rows:
        padding = width - len(row.tokens)
        tokens.append([*row.tokens, *[pad_id] * padding])
        edges = [*row.doc_starts, len(row.tokens)]
        doc_starts.append([a for a, b in pairwise(edges) for _ in range(a, b)] + [-1] * padding)
        of_row = sorted(row.canvases, key=lambda canvas: (canvas.doc_start, canvas.start))
        canvases.append([*of_row, *[absent] * (most - len(of_row))])

    def collect(field: Callable[[Canvas], object], *shape: int) -> Tensor:
        values = [[field(canvas) for canvas in of_row] for of_row in canvases]
        return torch.tensor(values, dtype=torch.int64).reshape(len(rows), most, *shape)

    doc_start_BS = torch.tensor(doc_starts, dtype=torch.int64).reshape(len(rows), width)
    length_BC = collect(lambda canvas: canvas_length if canvas.length is None else canvas.length)
    content_BC = collect(lambda canvas: canvas_length if canvas.content is None else canvas.content)
    t = [[canvas.t for canvas in of_row] for of_row in canvases]
    weight = [[canvas.weight for canvas in of_row] for of_row in canvases]
    pinned = [
        (row, number, place)
        for row, of_row in enumerate(canvases)
        for number, canvas in enumerate(of_row)
        for place in canvas.pinned
    ]
    is_pinned_BCL = torch.zeros(len(rows), most, canvas_length, dtype=torch.bool)
    is_pinned_BCL[torch.tensor(pinned, dtype=torch.int64).reshape(-1, 3).unbind(1)] = True
    is_valid_BS = doc_start_BS >= 0
    is_ar_scored_BS = torch.zeros_like(is_valid_BS)
    is_ar_scored_BS[:, :-1] = is_valid_BS[:, :-1] & (doc_start_BS[:, :-1] == doc_start_BS[:, 1:])
    ar_weight_BS = torch.ones(is_valid_BS.shape)
    for b, row in enumerate(rows):
        if row.ar_weights is not None:
            ar_weight_BS[b, : len(row.tokens)] = torch.tensor(row.ar_weights, dtype=torch.float32)
    return Batch(
        tokens_BS=torch.tensor(tokens, dtype=torch.int64).reshape(len(rows), width),
        positions_BS=torch.where(is_valid_BS, torch.arange(width) - doc_start_BS, 0),
        doc_start_BS=doc_start_BS,
        is_ar_scored_BS=is_ar_scored_BS & (ar_weight_BS > 0),
        ar_weight_BS=ar_weight_BS,
        sample_id_B=torch.tensor([row.sample_id for row in rows], dtype=torch.int64),
        canvas_BCL=collect(lambda canvas: list(canvas.tokens), canvas_length),
        start_BC=collect(lambda canvas: canvas.start),
        doc_start_BC=collect(lambda canvas: canvas.doc_start),
        length_BC=length_BC,
        content_BC=content_BC.minimum(length_BC),
        is_pinned_BCL=is_pinned_BCL,
        is_scored_BCL=(torch.arange(canvas_length) < length_BC[..., None]) & ~is_pinned_BCL,
        t_BC=torch.tensor(t, dtype=torch.float32).reshape(len(rows), most),
        coin_BC=collect(lambda canvas: canvas.coin).bool(),
        address_BC3=collect(lambda canvas: canvas.address, 3),
        weight_BC=torch.tensor(weight, dtype=torch.float32).reshape(len(rows), most),
        images=RowImages.of([row.images for row in rows], width),
    )
