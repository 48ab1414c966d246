"""The strategies there are, and the three rules that most of them are made of."""

from blockdiff.sampling.strategies.acceptance import Confident, EntropyBound, Quota, Sticky
from blockdiff.sampling.strategies.adjusted import adjusted
from blockdiff.sampling.strategies.ancestral import Ancestral
from blockdiff.sampling.strategies.composed import Composed, captured_shape, is_guided, released
from blockdiff.sampling.strategies.next_token import NextToken
from blockdiff.sampling.strategies.stopping import AllKept, Never, StableAndConfident
from blockdiff.sampling.strategies.temperature import ConstantTemperature, CosineTemperature, LinearTemperature
from blockdiff.sampling.strategies.text import as_strategy, parse_strategy, strategies_table
from blockdiff.sampling.strategies.verified import Verified, head_of

__all__ = [
    "AllKept",
    "Ancestral",
    "Composed",
    "Confident",
    "ConstantTemperature",
    "CosineTemperature",
    "EntropyBound",
    "LinearTemperature",
    "Never",
    "NextToken",
    "Quota",
    "StableAndConfident",
    "Sticky",
    "Verified",
    "adjusted",
    "as_strategy",
    "captured_shape",
    "head_of",
    "is_guided",
    "parse_strategy",
    "released",
    "strategies_table",
]
