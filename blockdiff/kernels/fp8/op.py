"""The op of products with weights in fp8."""

from blockdiff.kernels.fp8 import native
from blockdiff.kernels.op import Op

fp8_linears = Op(native.fp8_linears, "triton")
