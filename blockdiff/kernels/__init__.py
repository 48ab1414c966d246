"""Kernels: a folder per op, and the set of ops that a model computes with.

`op.py` of a folder has its ops, `native.py` says what they compute, `triton.py` and `cpu.py` compute the same in Triton
and in C. `op.py` here says what an op is, and `choice.py` which form of each runs.
"""

from blockdiff.kernels.choice import CPU, NATIVE, Kernels, resolve

__all__ = ["CPU", "NATIVE", "Kernels", "resolve"]
