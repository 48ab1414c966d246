"""Calls of outlines-core, each in a process of its own with limits on its time and memory.

An expression of thirty characters can need a billion states, and a thread that compiles one can be neither stopped nor
bounded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from blockdiff.errors import RequestError
from blockdiff.sampling.constraints import compile_child
from blockdiff.sampling.constraints.compile_limit import ADVICE, seconds_left, too_slow

COMPILE_BYTES = 1 << 29  # of memory, for one call of outlines-core


def call_outlines(**request: Any) -> tuple[dict[str, Any], bytes]:
    """Send a request to `compile_child`; return its answer and the bytes after it.

    Raises RequestError if outlines-core is not installed, or if compilation exceeds its limits.
    """
    line = json.dumps(request | {"bytes": COMPILE_BYTES}).encode() + b"\n"
    command = [sys.executable, "-P", compile_child.__file__]
    try:
        done = subprocess.run(command, input=line, capture_output=True, timeout=seconds_left())
    except subprocess.TimeoutExpired:
        raise too_slow() from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        if done.returncode > 0 and "MemoryError" not in last:
            raise RequestError(f"the constraint cannot be compiled: outlines-core ended with {last:.160}")
        raise RequestError(f"the constraint takes more than {COMPILE_BYTES >> 20} MiB to compile; {ADVICE}")
    head, _, body = done.stdout.partition(b"\n")
    answer = json.loads(head)
    if "missing" in answer:
        raise RequestError("a constraint needs the package outlines-core; pip install outlines-core")
    return answer, body
