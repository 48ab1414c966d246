"""The vocabulary ops: everything that touches [tokens, V], computed in chunks from hidden states and the table."""

from blockdiff.kernels.vocabulary.classes import Classes, ClassStats, Penalty
from blockdiff.kernels.vocabulary.native import Stats, pack_allowed

__all__ = ["ClassStats", "Classes", "Penalty", "Stats", "pack_allowed"]
