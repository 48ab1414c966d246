"""The ops of attention over spans."""

from blockdiff.kernels.op import Composition, Op
from blockdiff.kernels.span_attention import attend as composed
from blockdiff.kernels.span_attention import native

span_attention = Op(native.span_attention, "c", "triton")
sweep_attention = Composition(composed.sweep_attention, "c")
attend = Composition(composed.attend)
