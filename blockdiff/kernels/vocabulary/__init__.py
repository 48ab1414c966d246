"""The vocabulary ops: everything over [tokens, V], computed from hidden states and the table in chunks of logits."""

from blockdiff.kernels.vocabulary.classes import Classes, ClassStats, Penalty
from blockdiff.kernels.vocabulary.shaping import Shaping
from blockdiff.kernels.vocabulary.torch import Stats, pack_allowed

__all__ = ["ClassStats", "Classes", "Penalty", "Shaping", "Stats", "pack_allowed"]
