"""Rows in pages, for the tests of pages: prompts that are encoded alone, and tokens that are drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdiff.models.page_rows import PagedRow
from blockdiff.models.pages import Pages
from tests.support.closeness import require_close


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 380, shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, truth: Tensor, tolerance: float = 1e-10) -> None:
    require_close(found, truth, tolerance)


def opened(pages: Pages, prompts: Sequence[Tensor], chunk: int = 1000) -> list[PagedRow]:
    """Rows with these prompts, each encoded alone in chunks that begin at multiples of `chunk`."""
    rows = [pages.open() for _ in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        for part in prompt[row.length :].split(chunk):
            pages.encode([row], part[None], [len(part)])
            pages.accept(row)
    return rows
