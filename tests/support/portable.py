"""`make portable`: the tests marked `portable` under other kinds of arithmetic than the machine's own.

These tests train and assert an outcome, or compare roundings, so they could hold on one processor and not on another.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import torch

from blockdiff.kernels import resolve

KINDS = {
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",  # without effect on an AMD processor, where MKL uses AVX2 anyway
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "BLOCKDIFF_C_ARCH": "x86-64-v3",
    },
    "DEFAULT": {"ATEN_CPU_CAPABILITY": "default", "BLOCKDIFF_C_ARCH": "none"},
}
PYTEST = ("-m", "pytest", "-q", "-m", "portable", "-n", "logical", "--maxprocesses", "4", "--dist", "loadfile")


def exists(kind: str) -> bool:
    """True if torch has this kind here; AVX2 is a part of AVX512."""
    return kind == "DEFAULT" or torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def fingerprint() -> str:
    """A hash of products, sums and norms that kinds of arithmetic round differently, with torch's name for the kind."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(257, 257, generator=generator) for _ in range(2))
    [normed] = resolve("auto").rms_norms(x, (None,), 1e-6)
    results = [x @ y, x.softmax(-1), x.sum(-1), normed, (x.bfloat16() @ y.bfloat16()).float()]
    bits = hashlib.sha256(b"".join(each.contiguous().numpy().tobytes() for each in results))
    return f"{torch.backends.cpu.get_cpu_capability()} {bits.hexdigest()[:12]}"


def main(more: list[str]) -> int:
    """Run the tests under each kind, with `more` arguments of pytest; the exit status is 1 if any fail."""
    status, own = 0, fingerprint()
    print(f"portable  the machine's own arithmetic is {own}", flush=True)
    for kind, variables in KINDS.items():
        if not exists(kind):
            print(f"portable  {kind}: torch has no such arithmetic here; left out", flush=True)
            continue
        environment = os.environ | variables
        words = [sys.executable, "-c", "from tests.support.portable import fingerprint; print(fingerprint())"]
        found = subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout.strip()
        same = ", the machine's own" if found == own else ""
        print(f"portable  {kind}: {found}{same} ({' '.join(map('='.join, variables.items()))})", flush=True)
        status |= subprocess.run([sys.executable, *PYTEST, *more], env=environment).returncode != 0
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
