"""The C functions of the ops: compiled once on each machine, kept in the user's cache, and called with bare pointers.

A small model's step on a CPU is mostly walks over tensors that torch makes one operator at a time; the `cpu.c` of an op
makes them in one, and attention touches only what queries see. Nothing here is needed: without a C compiler the native
ops run.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
# Vector code of this machine, and nothing that changes what NaN and infinity do.
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
TRIED = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-march=native", "-fopenmp-simd"),
    ("-fopenmp-simd",),
)
BLOCKS = 16  # partial sums of the gradient of a weight, as in cpu.h
LONGEST = 300  # seconds that a compiler may take
_PLAIN = (Tensor, torch.nn.Parameter)


def serves(*tensors: Tensor | None) -> bool:
    """Whether the C functions take these: plain fp32 tensors in the memory of a CPU, outside of torch.compile."""
    for x in tensors:
        if x is not None and not (type(x) in _PLAIN and x.dtype is torch.float32 and x.is_cpu):
            return False
    return not torch.compiler.is_compiling() and library() is not None


def call(name: str, *arguments: Tensor | int | float | None) -> None:
    """Call a C function: tensors give their address, None is no memory, integers are int64 and floats fp32.

    What lies where is the caller's business, and it has to keep the tensors until the call returns.
    """
    function = _functions.get(name) or _declared(name, arguments)
    function(*[x if x is None or type(x) in (int, float) else x.data_ptr() for x in arguments])  # type: ignore[union-attr]


_functions: dict[str, Any] = {}


def _declared(name: str, arguments: tuple[Tensor | int | float | None, ...]) -> Any:
    """A function of the library that knows the types of its arguments, which are those of its first call."""
    types = {int: ctypes.c_int64, float: ctypes.c_float}
    function = _functions[name] = getattr(library(), name)
    function.restype, function.argtypes = None, [types.get(type(x), ctypes.c_void_p) for x in arguments]
    return function


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library, built where it is not in the cache; None where it cannot be built."""
    words = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(words[0]) is None:
        return None
    sources = sorted(HERE.glob("*/cpu*.c"))
    text = b"".join(path.read_bytes() for path in [*sorted(HERE.rglob("*.h")), *sources])
    for extra in TRIED:
        command = [*words, *FLAGS, *extra, f"-I{HERE}"]
        key = hashlib.sha256("\0".join([*words, *FLAGS, *extra, _machine()]).encode() + text).hexdigest()[:24]
        for directory in _directories():
            try:
                return _built(command, sources, directory / f"kernels-{key}.so")
            except (OSError, subprocess.SubprocessError):
                continue
    return None


def _built(command: list[str], sources: list[Path], target: Path) -> ctypes.CDLL:
    """The library at `target`, which is compiled there first if it is missing; processes do not disturb each other."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as beside:
            fresh = Path(beside) / target.name
            words = [*command, *map(str, sources), "-o", str(fresh), "-lm"]
            subprocess.run(words, check=True, capture_output=True, timeout=LONGEST, stdin=subprocess.DEVNULL)
            ctypes.CDLL(str(fresh))  # a library that does not load is never kept
            fresh.replace(target)
    return ctypes.CDLL(str(target))


def _directories() -> Iterator[Path]:
    """Where the library may lie: in the user's cache, else in a directory that is removed once it is loaded."""
    users = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    yield Path(users).expanduser() / "blockdiff"
    with tempfile.TemporaryDirectory(prefix="blockdiff-") as own:
        yield Path(own)


def _machine() -> str:
    """What the vector code depends on: a home directory can be shared by machines of several kinds."""
    facts = [platform.system(), platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return " ".join(facts)
    return " ".join([*facts, *next(([line] for line in lines if line.startswith(("flags", "Features"))), [])])
