"""The ops that touch [tokens, V]."""

from blockdiff.kernels.op import Op
from blockdiff.kernels.vocabulary import native

logits = Op(native.logits)
linear_cross_entropy = Op(native.linear_cross_entropy, "c", "triton")
soft_embedding = Op(native.soft_embedding, "c", "triton")
token_stats = Op(native.token_stats, "c", "triton")
token_scores = Op(native.token_scores, "triton")
log_sums = Op(native.log_sums, "triton")
class_stats = Op(native.class_stats, "triton")
