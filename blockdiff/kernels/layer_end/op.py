"""The op of a layer's end."""

from blockdiff.kernels.layer_end import native
from blockdiff.kernels.op import Composition

layer_end = Composition(native.layer_end, "triton")
