"""The library of C functions for ops on a CPU: compiled once on each machine, cached, and called with bare pointers.

On a CPU a small model's step mostly walks over tensors, in torch once for each operator. The C functions fuse these
walks, and attention reads only the keys that queries see. The library is optional: if it cannot be built or loaded, one
warning names the reason and the ops run in torch.
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
# Optimise for this machine, without flags that change how NaN and infinity behave.
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
TRIED = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ())  # in this order, until one compiles
CACHE = "BLOCKDIFF_CACHE"  # environment variable: the directory of caches that outlive a process
ARCH = "BLOCKDIFF_C_ARCH"  # environment variable: a value for -march in place of TRIED; "none" disables the library
BLOCKS = 16  # partial sums of the gradient of a weight, as in loops.h
LONGEST = 300  # seconds after which a compilation is given up

# The argument types of every C function: p is a tensor or None (NULL), n an int64, f a float32. Spaces only group.
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
    """The C functions cannot be built or loaded; the message is the reason."""


def serves(*tensors: Tensor | None) -> bool:
    """Whether the C functions can compute on these: plain fp32 tensors on a CPU (None is allowed), not compiling."""
    for x in tensors:
        if x is not None and not (type(x) in _PLAIN and x.dtype is torch.float32 and x.is_cpu):
            return False
    return not torch.compiler.is_compiling() and library() is not None


def serves_products(*tensors: Tensor | None) -> bool:
    """Whether the C functions can compute an op that contains matrix products on these tensors.

    Under autocast they cannot: torch would round the products, the C functions would not.
    """
    return not torch.is_autocast_enabled("cpu") and serves(*tensors)


def call(name: str, *arguments: Tensor | int | float | None) -> None:
    """Call the C function `name` with the arguments listed in `SIGNATURES`; tensors are passed as addresses.

    The caller must pass tensors of the layout and size that the function expects. C functions allocate nothing: their
    working memory is among the arguments. If an argument is a fake tensor, nothing is called.
    """
    if FakeTensor in map(type, arguments):
        return
    function, signature = _functions()[name]
    typed: Any = zip(signature, arguments, strict=True)
    function(*[x if x is None or c != "p" else x.data_ptr() for c, x in typed])


@functools.cache
def _functions() -> dict[str, tuple[Any, str]]:
    """Map the name of each C function to the function and its argument types, one letter each."""
    loaded = library()
    assert loaded is not None, "`serves` says whether there is a library"
    return {name: (getattr(loaded, name), signature.replace(" ", "")) for name, signature in SIGNATURES.items()}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, from the cache or compiled. None if `ARCH` is "none" or, after a warning, on failure."""
    if os.environ.get(ARCH) == "none":
        return None
    try:
        return find_library()
    except NoLibrary as obstacle:
        warnings.warn(f"torch runs in place of the C functions for a CPU: {obstacle}", stacklevel=2)
        return None


def find_library() -> ctypes.CDLL:
    """Load the library from the cache or compile it; raise NoLibrary if neither works."""
    try:
        words = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError as error:
        raise NoLibrary(f"the environment variable CC cannot be read ({error})") from None
    if os.name != "posix" or shutil.which(words[0]) is None:
        raise NoLibrary(f"there is no C compiler {words[0]!r} (the environment variable CC names another)")
    obstacle, directory, arch = "", cache_directory(), os.environ.get(ARCH)
    for extra in ((f"-march={arch}",),) if arch else TRIED:
        command = [*words, *FLAGS, *extra]
        cached = None if directory is None else directory / f"kernels-{_key(command)}.so"
        if cached is not None and _is_ours(cached):
            with suppress(NoLibrary):  # a file that does not load is compiled again
                return _load(cached)
        try:
            return _build(command, cached)
        except NoLibrary as reason:
            obstacle = str(reason)
    raise NoLibrary(f"{ARCH}={arch}: {obstacle} (x86-64-v3 or the like, or none)" if arch else obstacle)


def sources() -> list[Path]:
    """List the C files of all ops."""
    return sorted(HERE.glob("*/*.c"))


def _build(command: list[str], cached: Path | None) -> ctypes.CDLL:
    """Compile and load the library; move the file to `cached`, or delete it after loading if that is None."""
    parent = None if cached is None else cached.parent
    try:
        with tempfile.TemporaryDirectory(prefix="blockdiff-", dir=parent) as directory:
            compiled = Path(directory) / "kernels.so"
            words = [*command, f"-I{HERE}", *map(str, sources()), "-o", str(compiled), "-lm"]
            subprocess.run(words, check=True, capture_output=True, timeout=LONGEST, stdin=subprocess.DEVNULL)
            compiled.chmod(0o700)
            loaded = _load(compiled)
            if cached is not None:
                compiled.replace(cached)
            return loaded
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        status = f"status {error.returncode}"
        reason = next((line for line in lines if "error" in line), next(iter(lines), status))
        raise NoLibrary(f"{command[0]} failed: {reason}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoLibrary(f"{command[0]} failed: {error}") from None


def _load(path: Path) -> ctypes.CDLL:
    """Load a library and declare its functions; raise NoLibrary if it does not load or lacks a function."""
    try:
        loaded = ctypes.CDLL(str(path))
        for name, signature in SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = None, [_TYPES[c] for c in signature.replace(" ", "")]
    except (OSError, AttributeError) as error:
        raise NoLibrary(f"the library does not load: {error}") from None
    return loaded


def cache_directory() -> Path | None:
    """Return the directory of the compiled library: `CACHE`, else `blockdiff` in the user's cache directory.

    None, after a warning, if neither can be used.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "blockdiff")
    override = os.environ.get(CACHE)
    for directory in (Path(override), default) if override else (default,):
        if not (obstacle := _obstacle(directory)):
            return directory.expanduser()
    reason = f"{directory}: {obstacle}; {CACHE} sets another directory"
    warnings.warn(f"the C functions are compiled anew for this process: {reason}", stacklevel=2)
    return None


def _obstacle(directory: Path) -> str:
    """Return why a directory cannot hold the library, or "" if it can. A missing directory is created."""
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
    return "" if os.access(directory, os.W_OK) else "it is not writable"


def _is_ours(path: Path) -> bool:
    """Whether a path is an existing file or directory (no link) that belongs to the user and only they may write."""
    try:
        status = path.lstat()
    except OSError:
        return False
    is_real = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_real and status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _key(command: list[str]) -> str:
    """Hash the compile command, the C sources and the machine's traits, so that a change of any builds anew."""
    text = b"".join(path.read_bytes() for path in [*sorted(HERE.rglob("*.h")), *sources()])
    return hashlib.sha256("\0".join([*command, _machine()]).encode() + text).hexdigest()[:24]


def _machine() -> str:
    """Describe the processor. Different machines may share a home directory, and so a cache."""
    facts = [platform.system(), platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return " ".join(facts)
    return " ".join([*facts, *next(([line] for line in lines if line.startswith(("flags", "Features"))), [])])
