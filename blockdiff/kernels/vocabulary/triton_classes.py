"""Statistics of classes of tokens in Triton: the registered op and the public function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.launch import empty, launch, registered
from blockdiff.kernels.tiles import Tile
from blockdiff.kernels.vocabulary import kernels
from blockdiff.kernels.vocabulary.classes import Classes, ClassStats, Penalty
from blockdiff.kernels.vocabulary.triton_launch import (
    LogitTransform,
    RowStats,
    chunks_of,
    soft_rows,
    sweep,
    temperatures,
    to_probabilities,
)

TILE = Tile(2, 512, warps=4)  # rows, and tokens of a class, that a program reads at a time


class Columns(NamedTuple):
    """The columns of `ClassStats` that the kernel writes, [n, C] for n rows."""

    log_sum: Tensor
    maximum: Tensor
    argmax: Tensor
    sample: Tensor
    entropy: Tensor
    log_probability: Tensor


class PenaltyRows(NamedTuple):
    """A `Penalty` as the kernel reads it, for some of the positions."""

    seen: Tensor
    factor: Tensor
    row: Tensor


@registered("class_stats")
def _class_stats(
    hidden: Tensor, table: Tensor, softcap: float | None, temperature: Tensor, uniform: Tensor, token: Tensor,
    end: Tensor, seen: Tensor | None, factor: Tensor | None, row: Tensor | None, excluded: int | None,
    embedding: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Return the columns of `ClassStats`."""
    N, C = len(hidden), len(end)
    dtypes = torch.float64, torch.float64, torch.int64, torch.int64, torch.float64, torch.float64
    out, soft = Columns(*(empty(hidden, N, C, dtype=dtype) for dtype in dtypes)), soft_rows(hidden, embedding)
    yield *out, soft
    transform, chunks = LogitTransform(softcap, temperature), chunks_of(hidden, table)
    if excluded is not None:
        transform = transform._replace(allowed=_all_but(excluded, table).expand(N, -1))
    for rows in chunks.of_rows(hidden):
        row_transform, merged = (
            transform.of(rows),
            RowStats(*hidden.new_empty(2, len(hidden[rows]), dtype=torch.float32)),
        )
        x = sweep(hidden[rows], table, row_transform, chunks, merged)
        penalty = None
        if seen is not None and factor is not None and row is not None:
            penalty = PenaltyRows(seen, factor, row[rows])
        columns = Columns(*(column[rows] for column in out))
        arguments = x, row_transform, penalty, token, end, uniform[rows], columns, *x.shape, C
        launch(kernels.vocabulary_classes, (TILE.grid(len(x))[0], C), *arguments, **TILE.options)
        if soft.shape[1]:
            to_probabilities(x, row_transform, merged, chunks.tile)
            torch.mm(x, table if embedding is None else embedding, out=soft[rows])


def _all_but(token: int, table: Tensor) -> Tensor:
    """Return the packed mask (`pack_allowed`) of one row that allows all tokens except one."""
    words = torch.full((-(-len(table) // 32),), -1, dtype=torch.int32, device=table.device)
    bits = ~(1 << token % 32)
    words[token // 32].fill_(bits if token % 32 < 31 else 2**31 - 1)
    return words


def class_stats(
    hidden_ND: Tensor,
    table_VD: Tensor,
    softcap: float | None,
    temperature_N: Tensor | float,
    uniform_N: Tensor,
    classes: Classes,
    penalty: Penalty | None = None,
    excluded: int | None = None,
    embedding_VD: Tensor | None = None,
) -> ClassStats:
    """Return the columns of `ClassStats` for every position and class of tokens; arguments as in torch.py.

    With logarithms in fp32; samples are equal unless rounding moves a step of the CDF past them.
    """
    hidden, table = (t.detach() for t in in_autocast(hidden_ND, table_VD))
    embedding = None if embedding_VD is None else embedding_VD.detach().to(table.dtype)
    token, end = classes.token_M.contiguous(), classes.end_C.contiguous()
    seen = factor = row = None
    if penalty is not None:
        seen, factor, row = (t.contiguous() for t in (penalty.seen_RV, penalty.factor_R.float(), penalty.row_N))
    numbers = temperatures(temperature_N, hidden), uniform_N.float().contiguous()
    stats = ClassStats(
        *_class_stats(hidden, table, softcap, *numbers, token, end, seen, factor, row, excluded, embedding)
    )
    return stats._replace(soft_embedding=stats.soft_embedding.to(table_VD.dtype))
