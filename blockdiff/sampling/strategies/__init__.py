"""The strategies, by which canvases are denoised or next tokens are drawn."""

from blockdiff.sampling.strategies.acceptance import Confident, EntropyBound, Quota, Sequential
from blockdiff.sampling.strategies.denoising import Ancestral, Composed, JointThreshold, released
from blockdiff.sampling.strategies.named import NAMES, adjusted, as_strategy, parse_strategy, strategies_table
from blockdiff.sampling.strategies.next_token import NextToken, Speculative, Verified, next_token_head

__all__ = [
    "NAMES",
    "Ancestral",
    "Composed",
    "Confident",
    "EntropyBound",
    "JointThreshold",
    "NextToken",
    "Quota",
    "Sequential",
    "Speculative",
    "Verified",
    "adjusted",
    "as_strategy",
    "next_token_head",
    "parse_strategy",
    "released",
    "strategies_table",
]
