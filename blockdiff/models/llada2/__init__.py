"""LLaDA2.x: a block-diffusion mixture of experts with a block-causal prefix."""

from blockdiff.models.llada2.family import LLaDA2Family
from blockdiff.models.llada2.model import Layer, LLaDA2

FAMILIES = (LLaDA2Family,)

__all__ = ["FAMILIES", "LLaDA2", "LLaDA2Family", "Layer"]
