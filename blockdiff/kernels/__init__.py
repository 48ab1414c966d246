"""Kernels: a folder per op or group of ops, and `Kernels`, the set of ops that a model computes with.

`ops.py` has the table of ops, `op.py` the class of one op. In a folder, `torch.py` defines what its ops compute;
`triton.py` (with `kernels.py`) and `c.py` (with C files) compute the same.
"""

from blockdiff.kernels.ops import IN_C, IN_TORCH, Kernels, resolve

__all__ = ["IN_C", "IN_TORCH", "Kernels", "resolve"]
