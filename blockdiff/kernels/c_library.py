"""The C functions of the ops: compiled once on each machine, kept in the user's cache, and called with bare pointers.

A small model's step on a CPU is mostly walks over tensors that torch makes one operator at a time; the C files of an op
make them in one, and attention touches only what queries see. Nothing here is needed: where the functions cannot be
built or loaded, one warning says why, and torch runs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

HERE = Path(__file__).parent
# Vector code of this machine, and nothing that changes what NaN and infinity do.
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
TRIED = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ())
CACHE = "BLOCKDIFF_CACHE"  # the environment variable: the directory for what is kept for other starts
ARCH = "BLOCKDIFF_C_ARCH"  # the environment variable: a value of -march in place of TRIED, or none
BLOCKS = 16  # partial sums of the gradient of a weight, as in loops.h
LONGEST = 300  # seconds that a compiler may take

# The arguments of every C function: p a tensor or None (no memory), n an int64, f a float of 32 bits; spaces group.
SIGNATURES = {
    # span_attention
    "span_attention": "p pppppp f ppp",
    "span_attention_backward": "p pppppp f ppp ppppp pp",
    # expert_mlp
    "gated": "pp nnn p n p",
    "gated_backward": "ppp nnn p n pp n pp",
    "route": "p nnn pppp",
    "route_backward": "p nnn ppp ppp",
    "group_by_expert": "p nnn ppppp",
    "gather_tokens": "pp nn p",
    "combine_slots": "pp nnnn p",
    "grouped_product": "pp nn p nnnn p",
    "grouped_product_nvfp4": "pp nn pppp nn p",
    "grouped_outer_product": "ppp nnn p",
    # norm_rope
    "norms": "p nn f p pp pp pp",
    "norms_backward": "p nn p ppp ppp ppp pp",
    "add_norm": "pp nn f pp n pp",
    "add_norm_backward": "pp nn ppp n pppp",
    "norm_rope": "p nnn nnnn f pppp p nnn",
    "norm_rope_backward": "p nnn p nnn nnnn pppp ppp",
    # vocabulary
    "cross_entropy": "p nn p f pp n pp",
    "capped_softmax": "p nn ff",
    "token_stats": "p nn f p n pp n ppppp",
}
_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_float}
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


class NoLibrary(Exception):
    """The reason why the C functions cannot be built or loaded, in words."""


def serves(*tensors: Tensor | None) -> bool:
    """True where the C functions take these: plain fp32 tensors in the memory of a CPU, outside of torch.compile."""
    for x in tensors:
        if x is not None and not (type(x) in _PLAIN and x.dtype is torch.float32 and x.is_cpu):
            return False
    return not torch.compiler.is_compiling() and library() is not None


def serves_products(*tensors: Tensor | None) -> bool:
    """The same of an op with products of its own, which autocast would round: these run in torch under autocast."""
    return not torch.is_autocast_enabled("cpu") and serves(*tensors)


def call(name: str, *arguments: Tensor | int | float | None) -> None:
    """Call a C function with arguments as `SIGNATURES` has them; a tensor gives its address.

    What lies where is the caller's business. No function allocates: memory to work in is among the arguments. Where one
    is a fake tensor of torch, which has no memory, nothing is called.
    """
    if FakeTensor in map(type, arguments):
        return
    function, signature = _functions()[name]
    given: Any = zip(signature, arguments, strict=True)
    function(*[x if x is None or c != "p" else x.data_ptr() for c, x in given])


@functools.cache
def _functions() -> dict[str, tuple[Any, str]]:
    """Every function of the library and its arguments, by name."""
    found = library()
    assert found is not None, "`serves` says whether there is a library"
    return {name: (getattr(found, name), signature.replace(" ", "")) for name, signature in SIGNATURES.items()}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library, from the cache or built; None if `ARCH` is none or, with a warning, if it cannot be had."""
    if os.environ.get(ARCH) == "none":
        return None
    try:
        return find_library()
    except NoLibrary as obstacle:
        warnings.warn(f"torch runs in place of the C functions for a CPU: {obstacle}", stacklevel=2)
        return None


def find_library() -> ctypes.CDLL:
    """The library of the user's cache, else one that is built; NoLibrary where neither can be had."""
    try:
        words = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError as error:
        raise NoLibrary(f"the environment variable CC cannot be read ({error})") from None
    if os.name != "posix" or shutil.which(words[0]) is None:
        raise NoLibrary(f"there is no C compiler {words[0]!r} (the environment variable CC names another)")
    obstacle, directory, arch = "", kept_in(), os.environ.get(ARCH)
    for extra in ((f"-march={arch}",),) if arch else TRIED:
        command = [*words, *FLAGS, *extra]
        kept = None if directory is None else directory / f"kernels-{_key(command)}.so"
        if kept is not None and _is_ours(kept):
            with suppress(NoLibrary):  # one that does not load is built anew
                return _loaded(kept)
        try:
            return _built(command, kept)
        except NoLibrary as reason:
            obstacle = str(reason)
    raise NoLibrary(f"{ARCH}={arch}: {obstacle} (x86-64-v3 or the like, or none)" if arch else obstacle)


def sources() -> list[Path]:
    """The C files of all ops."""
    return sorted(HERE.glob("*/*.c"))


def _built(command: list[str], kept: Path | None) -> ctypes.CDLL:
    """The library, compiled by a command and moved to `kept`; without that it lies in a directory that is removed."""
    try:
        with tempfile.TemporaryDirectory(prefix="blockdiff-", dir=None if kept is None else kept.parent) as directory:
            fresh = Path(directory) / "kernels.so"
            words = [*command, f"-I{HERE}", *map(str, sources()), "-o", str(fresh), "-lm"]
            subprocess.run(words, check=True, capture_output=True, timeout=LONGEST, stdin=subprocess.DEVNULL)
            fresh.chmod(0o700)
            found = _loaded(fresh)
            if kept is not None:
                fresh.replace(kept)
            return found
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        status = f"status {error.returncode}"
        reason = next((line for line in said if "error" in line), next(iter(said), status))
        raise NoLibrary(f"{command[0]} failed: {reason}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoLibrary(f"{command[0]} failed: {error}") from None


def _loaded(path: Path) -> ctypes.CDLL:
    """The library of a file with every function declared; NoLibrary where it does not load or lacks one."""
    try:
        found = ctypes.CDLL(str(path))
        for name, signature in SIGNATURES.items():
            function = getattr(found, name)
            function.restype, function.argtypes = None, [_TYPES[c] for c in signature.replace(" ", "")]
    except (OSError, AttributeError) as error:
        raise NoLibrary(f"the library does not load: {error}") from None
    return found


def kept_in() -> Path | None:
    """The directory that keeps the library: `CACHE` or else of the user's cache; None, after a warning, without one."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "blockdiff")
    asked = os.environ.get(CACHE)
    for directory in (Path(asked), users) if asked else (users,):
        if not (obstacle := _obstacle(directory)):
            return directory.expanduser()
    where = f"{directory}: {obstacle}; {CACHE} names another place"
    warnings.warn(f"the C functions are compiled anew for this process: {where}", stacklevel=2)
    return None


def _obstacle(directory: Path) -> str:
    """The reason why a directory cannot keep the library, in words; it is made if it is not there."""
    try:
        directory = directory.expanduser()
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    except RuntimeError as error:  # there is no home directory
        return str(error)
    if not _is_ours(directory):
        return "it belongs to another user, or others may write in it"
    return "" if os.access(directory, os.W_OK) else "it cannot be written"


def _is_ours(path: Path) -> bool:
    """True where a file or directory is there, no link, the user's own, and writable by nobody else."""
    try:
        found = path.lstat()
    except OSError:
        return False
    is_real = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    return is_real and found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _key(command: list[str]) -> str:
    """A hash of the command, the sources and the machine."""
    text = b"".join(path.read_bytes() for path in [*sorted(HERE.rglob("*.h")), *sources()])
    return hashlib.sha256("\0".join([*command, _machine()]).encode() + text).hexdigest()[:24]


def _machine() -> str:
    """The machine's traits that vector code depends on: machines of several kinds can share a home directory."""
    facts = [platform.system(), platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return " ".join(facts)
    return " ".join([*facts, *next(([line] for line in lines if line.startswith(("flags", "Features"))), [])])
