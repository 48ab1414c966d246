"""Kernels of the released model, compiled into Triton's cache by several processes before a GPU needs them.

Each process makes the calls of `benchmarks.compilations` on torch's meta device, so that Triton tells launches apart as
it will on the GPU, and compiles those kernels that no other process has taken. A GPU is not touched.
`python -m benchmarks.quick_compile DIRECTORY ARCHITECTURE MULTIPROCESSORS` is one of them; DIRECTORY is empty before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.quick import ROOT

MOST = 14  # processes


class Pool:
    """Processes that compile kernels; they start with this object."""

    def __init__(self, architecture: int, multiprocessors: int, count: int | None = None, preset: str | None = None):
        self.directory = tempfile.TemporaryDirectory()
        words = ["-m", "benchmarks.quick_compile", self.directory.name, str(architecture), str(multiprocessors)]
        words += [] if preset is None else ["--preset", preset]
        environment = os.environ | dict(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        environment.pop("TRITON_INTERPRET", None)
        self.begin, count = time.monotonic(), count or max(1, min(MOST, (os.cpu_count() or 1) - 2))
        how: dict[str, Any] = dict(cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        self.processes = [subprocess.Popen([sys.executable, *words], **how) for _ in range(count)]

    def wait(self, seconds: float) -> dict[str, Any]:
        """Wait for all processes, and kill those still running after `seconds`.

        Returns how many kernels were compiled, and the failures in words (`short`).
        """
        end, late = time.monotonic() + seconds, 0
        found, failed = 0, list[str]()
        for process in self.processes:
            try:
                said, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
                line = json.loads(said.splitlines()[-1])
                found, failed = found + line["compiled"], failed + line["failed"]
            except subprocess.TimeoutExpired:
                late += 1
                process.kill()
                process.wait()
            except (IndexError, ValueError):
                failed.append(f"a process ended with code {process.returncode}")
        self.directory.cleanup()
        line = dict(processes=len(self.processes), compiled=found, ended_late=late)
        line |= dict(after_seconds=round(time.monotonic() - self.begin, 1))
        return line | dict(short="; ".join(sorted(set(failed)))[:500])


def sharing(directory: Path, found: list[str], failed: list[str]) -> Callable[..., Any]:
    """Return a replacement for `JITFunction._do_compile` that compiles only kernels no other process has taken.

    directory: has an empty file for each kernel taken. Names of compiled kernels are added to `found`, failures in
    words to `failed`.
    """
    from triton.runtime.jit import JITFunction

    compile_kernel = JITFunction._do_compile

    def compile_or_leave(kernel: Any, key: str, *rest: Any) -> Any:
        name = hashlib.sha256(f"{kernel.__module__}.{kernel.__name__} {key}".encode()).hexdigest()
        try:
            os.close(os.open(directory / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return None
        try:
            compiled = compile_kernel(kernel, key, *rest)
            found.append(kernel.__name__)
            return compiled
        except Exception as error:
            traceback.print_exc()
            failed.append(
                f"{kernel.__name__}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
            )
            return SimpleNamespace()

    return compile_or_leave


def main() -> None:
    """Compile kernels and print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quick_compile", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("architecture", type=int)
    parser.add_argument("multiprocessors", type=int)
    parser.add_argument("--preset", help="of which canvases are made (the released model, quantised and drafted, too)")
    options = parser.parse_args()
    from benchmarks import compilations as walks
    from blockdiff.models.stored import quantised_layers, store

    found, failed = list[str](), list[str]()
    preset = [] if options.preset is None else [options.preset]
    forms = (None, "fp8", "nvfp4") if options.preset is None else (None,)
    with walks.compilations(options.architecture, options.multiprocessors, sharing(options.directory, found, failed)):
        for form in forms:
            model = walks.released_model(*preset)
            store(model, quantised_layers(model, form))
            model = model.to("meta")
            walks.walk(model, walks.pages_of(model))
        if options.preset is None:
            drafted = walks.drafted_model()
            walks.walk_drafted(drafted, walks.pages_of(drafted))
    print(json.dumps(dict(compiled=len(found), failed=failed)), flush=True)


if __name__ == "__main__":
    main()
