"""Whether the fp32 products of cpu_products.c are faster than a call of torch's for each of many small ones."""

from __future__ import annotations

import functools

import torch

from blockdiff.kernels.c_library import call


@functools.cache
def are_fast() -> bool:
    """Whether the library was compiled for fused products of long vectors, and with threads."""
    answer = torch.zeros(1, dtype=torch.int64)
    call("products_are_fast", answer)
    return bool(answer)
