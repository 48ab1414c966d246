"""The memory of a training on a CPU: kept from one step to the next, and in large pages."""

from __future__ import annotations

import ctypes
import mmap

BLOCK = 24 * 2**20  # bytes: what glibc still takes from the heap
BLOCKS = 20  # with 480 MiB of addresses; memory is only what is written
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # what glibc's mallopt calls them
KEPT = 2**30  # bytes that may lie free at the heap's end before the system gets them back
LARGEST = 2**25  # bytes of a tensor that comes from the heap, at most: glibc allows no more


def keep_in_large_pages() -> bool:
    """Let the C library keep freed memory, and the system back the heap by large pages; whether that could be asked.

    A step goes through all its tensors and every one is larger than the processor's caches, so finding pages costs it
    some 4 % where they are small; a run that begins with `GLIBC_TUNABLES=glibc.malloc.hugetlb=1` has the same. Nothing
    is asked of other C libraries than glibc, or of systems without MADV_HUGEPAGE. No number changes.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    libc = ctypes.CDLL(None)
    if advice is None or not hasattr(libc, "mallopt") or not hasattr(libc, "gnu_get_libc_version"):
        return False
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if not (libc.mallopt(MMAP_THRESHOLD, LARGEST) and libc.mallopt(TRIM_THRESHOLD, KEPT)):
        return False
    blocks = [block for _ in range(BLOCKS) if (block := libc.malloc(BLOCK))]
    page = mmap.PAGESIZE
    is_advised = bool(blocks)
    for block in blocks:
        start = -(-block // page) * page
        is_advised &= libc.madvise(start, (block + BLOCK) // page * page - start, advice) == 0
    for block in blocks:
        libc.free(block)
    return is_advised
