"""The ops of products with weights."""

from blockdiff.kernels.linear import native
from blockdiff.kernels.op import Composition

linear = Composition(native.linear)
linears = Composition(native.linears)
