"""The ops of the heads of attention."""

from blockdiff.kernels.heads import native
from blockdiff.kernels.op import Composition

attention_heads = Composition(native.attention_heads, "triton")
attention = Composition(native.attention, "triton")
