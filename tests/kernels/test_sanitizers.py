"""The C functions read and write only what is theirs, and do nothing that C leaves undefined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("sanitized.py")


def runtime(name: str) -> str:
    """The path of a library of the compiler; only the name where it has none."""
    words = [*(os.environ.get("CC") or "cc").split(), f"-print-file-name={name}"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def run(root: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """The program with the C functions of a source tree."""
    preload = " ".join(runtime(name) for name in ("libasan.so", "libstdc++.so"))
    own = {
        "BLOCKDIFF_CACHE": str(cache),
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "2",
    }
    words = [sys.executable, "-W", "error:torch runs", str(PROGRAM)]
    return subprocess.run(words, env=os.environ | own, capture_output=True, text=True, timeout=600)


def test_address_and_undefined_behaviour_sanitizers_find_nothing(tmp_path):
    if not Path(runtime("libasan.so")).is_absolute():
        pytest.skip("this compiler has no AddressSanitizer")
    done = run(Path(__file__).parents[2], tmp_path)
    assert done.returncode == 0 and "all functions called" in done.stdout, done.stderr[-4000:]
