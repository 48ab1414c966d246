"""The ops of routed experts."""

from blockdiff.kernels.expert_mlp import native
from blockdiff.kernels.op import Composition, Op

expert_mlp = Op(native.expert_mlp, "c", "triton")
expert_slots = Composition(native.expert_slots, "triton")
