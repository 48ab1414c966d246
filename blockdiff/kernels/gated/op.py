"""The ops of the gated activation."""

from blockdiff.kernels.gated import native
from blockdiff.kernels.op import Composition, Op

gated = Op(native.gated, "c")
gated_linear = Composition(native.gated_linear, "triton")
