"""The strategies there are, and the three rules that most of them are made of."""

from blockdiff.sampling.strategies.composed import Ancestral, Composed, released
from blockdiff.sampling.strategies.named import NAMES, adjusted, as_strategy, parse_strategy, strategies_table
from blockdiff.sampling.strategies.next_token import NextToken, Speculative, Verified, next_token_head
from blockdiff.sampling.strategies.rules import (
    AllKept,
    Confident,
    ConstantTemperature,
    CosineTemperature,
    EntropyBound,
    LinearTemperature,
    Never,
    Quota,
    StableAndConfident,
    Sticky,
)

__all__ = [
    "NAMES",
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
    "Speculative",
    "StableAndConfident",
    "Sticky",
    "Verified",
    "adjusted",
    "as_strategy",
    "next_token_head",
    "parse_strategy",
    "released",
    "strategies_table",
]
