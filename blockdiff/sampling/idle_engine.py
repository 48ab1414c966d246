"""The engine of a sampler between two calls, and the rule that decides whether the next call can have it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from blockdiff.models.pages import Pages
from blockdiff.sampling.engine import Engine

if TYPE_CHECKING:
    from blockdiff.models.family import BlockDiffusionModel
    from blockdiff.sampling.settings import SamplingSettings


@dataclass(frozen=True)
class Purpose:
    """The state of a sampler and of a call that decide whether an engine made for one call can serve another."""

    settings: SamplingSettings
    graphs: bool | None
    is_cast: bool
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class IdleEngine:
    """An engine between two calls, and the tokens that its pages were asked for."""

    engine: Engine
    tokens: int
    purpose: Purpose

    @classmethod
    def made(
        cls, model: BlockDiffusionModel, pages: Pages | None, rows: int, tokens: int, purpose: Purpose
    ) -> IdleEngine:
        """A new engine for calls of so many rows and tokens; without `pages` it gets its own."""
        if pages is None:
            pages = Pages(model)
            pages = pages if tokens > pages.free_tokens() else Pages(model, capacity=tokens)
        engine = Engine(
            model,
            settings=purpose.settings,
            max_rows=rows,
            max_waiting=sys.maxsize,
            graphs=purpose.graphs,
            pages=pages,
        )
        return cls(engine, tokens, purpose)

    def serves(self, rows: int, tokens: int, pages: Pages | None) -> bool:
        """True where a call of so many rows and tokens, and in these pages if any, can have the engine."""
        is_large = self.engine.most_rows >= rows and self.tokens >= tokens
        return is_large and pages in (None, self.engine.pages)
