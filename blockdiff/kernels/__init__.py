"""Kernels: a folder per op, and the set of ops that a model computes with.

`ops.py` has the table of ops, `op.py` says what an op is. `torch.py` of a folder says what its ops compute; `triton.py`
(with `kernels.py`) and `c.py` (with C files) compute the same.
"""

from blockdiff.kernels.ops import IN_C, IN_TORCH, Kernels, resolve

__all__ = ["IN_C", "IN_TORCH", "Kernels", "resolve"]
