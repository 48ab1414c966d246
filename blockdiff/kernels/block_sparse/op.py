"""The ops of block-sparse attention."""

from blockdiff.kernels.block_sparse import attend, native
from blockdiff.kernels.op import Composition, Op

select_blocks = Op(native.select_blocks, "c", "triton")
block_sparse_attention = Op(native.block_sparse_attention, "c", "triton")
sparse_attention = Composition(attend.sparse_attention)
