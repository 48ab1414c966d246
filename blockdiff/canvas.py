"""Canvases and clean rows, and `Batch`, their tensors.

A clean row is a conversation as it is. A canvas has its own copy of its tokens, with end-of-sequence fill, so the fill
is never in a row. Noise is in `diffusion`; `data` reads rows and chooses canvases.
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

    Returns the (start, end) columns of each canvas. Only the last one can be shorter, which fill makes up for.
    aligned: canvases begin at multiples of their length, so that the first one may begin before the response.
    """
    start, end = response
    first = start // canvas_length * canvas_length if aligned and start < end else start
    return [(column, min(column + canvas_length, end)) for column in range(first, end, canvas_length)]


def fill(tokens: Sequence[int], canvas_length: int, fill_id: int) -> list[int]:
    """Pad the clean tokens of a canvas to `canvas_length` with `fill_id`, usually the end-of-sequence token."""
    return [*tokens, *[fill_id] * (canvas_length - len(tokens))]


def narrow_length(tokens: int, most: int) -> int:
    """Return the length of the narrowest canvas for `tokens` tokens: a multiple of 16, or `most` if that is less."""
    return min(most, -(-tokens // 16) * 16)


@dataclass(frozen=True)
class Canvas:
    """One training canvas, before a `Batch` lays it out.

    tokens: the clean tokens, as many as the canvas length.
    start, doc_start: the columns of the row where the canvas and its document begin.
    length: the number of leading tokens that are valid and scored (None: all).
    t, coin: the noise level, and whether the canvas gets the self-conditioning signal.
    address: (epoch, sample id, index within the sample) of its random draws.
    weight: the weight of each scored position.
    content: the number of leading tokens that belong to the response; the other valid ones are fill (None: no fill).
    pinned: the indices of tokens that the model sees as they are; they are neither corrupted nor scored.
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

    sample_id: the id of the first document.
    ar_weights: for each column the weight of the pair of its token and the next; 0 = not scored (None: 1 for every pair
        within a document).
    images: the images of the placeholders in `tokens`, in order.
    """

    tokens: Sequence[int]
    canvases: Sequence[Canvas]
    sample_id: int = 0
    doc_starts: Sequence[int] = (0,)
    ar_weights: Sequence[float] | None = None
    images: Sequence[PlacedImage] = ()


PADDING_ROW = CleanRow((), (), sample_id=-1, doc_starts=())  # a rank without examples takes part with a row of padding


def joined(rows: Sequence[CleanRow]) -> CleanRow:
    """Pack rows into one row: their documents one after another, with their canvases, weights and images."""
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
    """Canvas states that a sampler's steps visited, with their self-conditioning signals; they replace noise."""

    tokens_BCL: Tensor
    signal_BCLD: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Visited:
        """Apply a function to each tensor, for example to move it to a device."""
        return Visited(change(self.tokens_BCL), change(self.signal_BCLD))


@dataclass(frozen=True)
class Batch:
    """The tensors of clean rows and of the canvases that are denoised against them.

    B rows, S clean columns, C canvases per row (sorted by document, then start), L canvas length.
    Padding columns have `doc_start_BS` -1, position 0 and the pad token. Absent canvases have `length_BC` 0. The first
    `content_BC` valid tokens of a canvas belong to the response, the other valid ones are fill. Pinned tokens are seen
    without noise and not scored. `weight_BC` and `ar_weight_BS` are the weights of each scored position of a canvas and
    of each scored pair: 1 if the loss is a mean over tokens, 1 / (scored positions of the example) if it is a mean over
    examples.

    images: the images of the clean rows (None: no images).
    visited: canvas states that replace noise (None: noise).
    host: the batch on the CPU that this one was copied from (None: this one is on the CPU).
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
        """Apply a function to each tensor, for example to move it to a device. `host` stays as it is."""
        changed: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "host"}
        for name, x in changed.items():
            if x is not None:
                changed[name] = change(x) if isinstance(x, Tensor) else x.map(change)
        return replace(self, **changed)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Copy the batch to a device. A copy off the CPU keeps this one as its `host`."""
        copy = self.map(lambda x: x.to(device, non_blocking=non_blocking))
        is_copied = self.tokens_BS.is_cpu and not copy.tokens_BS.is_cpu
        return replace(copy, host=self) if is_copied else copy

    def in_pinned_memory(self) -> Self:
        """Copy the batch, images included, to pinned memory."""
        return self.map(Tensor.pin_memory)

    @property
    def on_host(self) -> Batch:
        """The batch on the CPU that this one was copied from, or itself: the host reads it without waiting.

        It has the same canvases, but clean tokens if this one's are noisy.
        """
        return self if self.host is None else self.host

    @property
    def is_fill_BCL(self) -> Tensor:
        """Which tokens of a canvas come after the response's last; all tokens of an absent canvas."""
        return torch.arange(self.canvas_BCL.shape[-1], device=self.content_BC.device) >= self.content_BC[..., None]

    def canvas_count(self, is_counted_BCL: Tensor | None = None) -> float:
        """The divisor of the canvas loss: the sum of the weights of the scored canvas positions.

        is_counted_BCL: the positions to count (None: all scored ones).
        """
        is_counted_BCL = self.is_scored_BCL if is_counted_BCL is None else self.is_scored_BCL & is_counted_BCL
        return float((is_counted_BCL.sum(-1) * self.weight_BC.double()).sum())

    def ar_count(self) -> float:
        """The divisor of the AR loss: the sum of the weights of the scored next-token pairs."""
        return float(self.ar_weight_BS[self.is_ar_scored_BS].double().sum())

    def answer_count(self) -> float:
        """The divisor of the policy loss: the number of sampled answers, 0 for batches of training data."""
        return 0.0

    def select(self, is_kept_BC: Tensor) -> tuple[Batch, Tensor]:
        """Keep the canvases marked in is_kept_BC, in their order, and drop rows left without any.

        is_kept_BC: on the CPU if the batch has a `host`, else on its device.
        Returns the smaller batch, whose `visited` is None, and for each of its rows the index of that row in this
        batch. C becomes the largest number of canvases in a row; S stays.
        """
        is_kept_BC = is_kept_BC & (self.on_host.length_BC > 0)
        host = None if self.host is None else self.host.select(is_kept_BC)[0]
        counts_B = is_kept_BC.sum(1)
        rows = counts_B.nonzero()[:, 0]
        is_kept_BC = is_kept_BC[rows]
        width = int(counts_B.max()) if len(rows) else 0
        order_BC = (~is_kept_BC).long().argsort(dim=1, stable=True)[:, :width]
        is_present_BC = is_kept_BC.gather(1, order_BC)
        rows, order_BC, is_present_BC = (to_device(x, self.tokens_BS.device) for x in (rows, order_BC, is_present_BC))
        row_B1 = torch.arange(len(rows), device=rows.device)[:, None]

        def pick(values: Tensor) -> Tensor:
            picked = values[rows][row_B1, order_BC]
            return picked * is_present_BC.view(*is_present_BC.shape, *[1] * (picked.dim() - 2)).to(picked.dtype)

        canvases = {name: pick(getattr(self, name)) for name in CANVAS_FIELDS}
        others = (*CANVAS_FIELDS, "images", "visited", "host")
        row_fields = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in others}
        tensors = {name: x[rows] for name, x in row_fields.items()} | canvases
        images = None if self.images is None else self.images.select(rows)
        return replace(self, **tensors, images=images, visited=None, host=host), rows


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device. The host does not wait for a copy from CPU to GPU."""
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
    """Right-pad rows and their canvases into a `Batch` on the CPU. Positions restart with every document."""
    width = max((max(1, len(row.tokens)) for row in rows), default=0)
    most_canvases = max((len(row.canvases) for row in rows), default=0)
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
        canvases.append([*of_row, *[absent] * (most_canvases - len(of_row))])

    def collect(field: Callable[[Canvas], object], *shape: int) -> Tensor:
        values = [[field(canvas) for canvas in of_row] for of_row in canvases]
        return torch.tensor(values, dtype=torch.int64).reshape(len(rows), most_canvases, *shape)

    doc_start_BS = torch.tensor(doc_starts, dtype=torch.int64).reshape(len(rows), width)
    length_BC = collect(lambda canvas: canvas_length if canvas.length is None else canvas.length)
    content_BC = collect(lambda canvas: canvas_length if canvas.content is None else canvas.content)
    t = [[canvas.t for canvas in of_row] for of_row in canvases]
    weight = [[canvas.weight for canvas in of_row] for of_row in canvases]
    pinned = [
        (row, number, index)
        for row, of_row in enumerate(canvases)
        for number, canvas in enumerate(of_row)
        for index in canvas.pinned
    ]
    is_pinned_BCL = torch.zeros(len(rows), most_canvases, canvas_length, dtype=torch.bool)
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
        t_BC=torch.tensor(t, dtype=torch.float32).reshape(len(rows), most_canvases),
        coin_BC=collect(lambda canvas: canvas.coin).bool(),
        address_BC3=collect(lambda canvas: canvas.address, 3),
        weight_BC=torch.tensor(weight, dtype=torch.float32).reshape(len(rows), most_canvases),
        images=RowImages.of([row.images for row in rows], width),
    )
