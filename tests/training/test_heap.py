"""The heap of a training on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

# What the system says of the area that holds a block which came from the heap after it was asked for large pages.
PROGRAM = """
import ctypes
from pathlib import Path
from blockdiff.training.heap import keep_in_large_pages

print(keep_in_large_pages())
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
block, flags, is_here = libc.malloc(4 * 2**20) + 2**21, "", False
for line in Path("/proc/self/smaps").read_text().splitlines():
    if line.startswith("VmFlags:"):
        flags = line if is_here else flags
    elif "-" in line.split()[0]:
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        is_here = start <= block < end
print("hg" in flags.split())
"""


def test_what_is_allocated_later_stands_in_an_area_of_large_pages_or_the_answer_is_no():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    has_large_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    assert run.stdout.split() == ["True", "True"] if has_large_pages else run.stdout.startswith("False"), run.stderr
