"""The ops that choose experts."""

from blockdiff.kernels.op import Composition, Op
from blockdiff.kernels.routing import native

route = Op(native.route, "c")
routed_tokens = Composition(native.routed_tokens, "triton")
