"""The ops of norms and RoPE."""

from blockdiff.kernels.norm_rope import native
from blockdiff.kernels.op import Composition, Op

rms_norms = Op(native.rms_norms, "c", "triton")
add_rms_norm = Op(native.add_rms_norm, "c", "triton")
norm_rope = Op(native.norm_rope, "c", "triton")
residual_norms = Composition(native.residual_norms, "triton")
