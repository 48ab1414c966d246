"""Compiled kernels: one that does not compile is said, and the others are looked at all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.runtime.jit import JITFunction

from benchmarks.compiled import _row, fits, launches_compile


def right(x, D: tl.constexpr):
    """A kernel that every Triton compiles."""
    tl.store(x + tl.arange(0, D), 1.0)


def wrong(x, D: tl.constexpr):
    """A kernel that none compiles: an arange must be as long as a power of two."""
    tl.store(x + tl.arange(0, D + 1), 1.0)


@pytest.mark.quick
def test_a_kernel_that_does_not_compile_has_a_line_and_fits_nowhere(tmp_path):
    found: list[dict[str, Any]] = []
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        with launches_compile(90, found):
            for kernel in (wrong, wrong, right):
                JITFunction(kernel)[(1,)](torch.zeros(32), D=16)
    failed, made = found
    assert failed["kernel"] == "wrong" and not fits(failed) and "CompilationError" in _row("an op", failed)
    assert made["kernel"] == "right" and fits(made) and made["registers"] > 0
