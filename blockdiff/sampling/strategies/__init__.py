"""The strategies there are, and the three rules that most of them are made of."""

from blockdiff.sampling.strategies.composed import Composed, released

__all__ = ["Composed", "released"]
