"""MiniMax M3: a causal mixture of experts with block-sparse attention."""

from blockdiff.models.minimax_m3.family import MiniMaxM3Family, MiniMaxM3TextFamily
from blockdiff.models.minimax_m3.model import (
    Block,
    MiniMaxM3,
    MiniMaxM3Attention,
    MiniMaxM3Indexer,
    MiniMaxM3MLP,
    MiniMaxM3RMSNorm,
)

FAMILIES = (MiniMaxM3Family, MiniMaxM3TextFamily)

__all__ = [
    "FAMILIES",
    "Block",
    "MiniMaxM3",
    "MiniMaxM3Attention",
    "MiniMaxM3Family",
    "MiniMaxM3Indexer",
    "MiniMaxM3MLP",
    "MiniMaxM3RMSNorm",
    "MiniMaxM3TextFamily",
]
