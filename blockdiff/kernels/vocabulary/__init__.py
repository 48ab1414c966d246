"""The vocabulary ops: everything that touches [tokens, V], computed in chunks from hidden states and the table."""

from blockdiff.kernels.vocabulary.classes import Classes, ClassStats, Penalty
from blockdiff.kernels.vocabulary.native import Stats, pack_allowed
from blockdiff.kernels.vocabulary.race import race
from blockdiff.kernels.vocabulary.shaping import Shaping

__all__ = ["ClassStats", "Classes", "Penalty", "Shaping", "Stats", "pack_allowed", "race"]
