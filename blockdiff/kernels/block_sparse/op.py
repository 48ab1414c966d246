"""The ops of block-sparse attention."""

from blockdiff.kernels.block_sparse import native
from blockdiff.kernels.op import Op

select_blocks = Op(native.select_blocks, "c", "triton")
block_sparse_attention = Op(native.block_sparse_attention, "c", "triton")
