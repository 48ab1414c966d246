"""Figures of the quick run in one process: `python -m benchmarks.quick_figures PART...`, called by `benchmarks.quick`.

Each figure is a line of JSON on stdout; before it a line says that it begins. One that fails says how, and the next one
is made; if the GPU is lost, this process ends and the caller starts another one with `--done`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.quick import LOST, PARTS, RELEASED, TESTS

SPLITS = {"FSDP2": "parallel.shard=full", "experts": "parallel.experts=2", "tensor": "parallel.tensor=2"}


class Figures:
    """Makes figures one after another, except those in `done` ("part: figure").

    `kept` has objects that several parts share: models, and the rates of the device.
    """

    def __init__(self, device: torch.device, preset: str, prompt: int, rows: int, done: Sequence[str] = ()):
        self.device, self.preset, self.prompt, self.rows, self.done = device, preset, prompt, rows, done
        self.is_cuda = device.type == "cuda"
        self.part = ""
        self.kept: dict[str, Any] = {}

    def make(self, name: str, measure: Callable[[], dict[str, Any] | None], limit: float | None = None) -> None:
        """Make and print a figure of the present part; an exception becomes its `short`.

        limit: seconds after which the caller ends this process.
        """
        if f"{self.part}: {name}" in self.done:
            return
        say(dict(begins=f"{self.part}: {name}", limit=limit))
        begin, line = time.monotonic(), dict[str, Any]()
        try:
            line = measure() or {}
        except Exception as error:
            line = self._failure(error)
        self.wait_or_end(dict(part=self.part, figure=name, seconds=round(time.monotonic() - begin, 2)) | line)

    def wait_or_end(self, line: dict[str, Any]) -> None:
        """Wait for the device and print a line; end this process if the GPU is lost."""
        try:
            self.wait()
        except Exception as error:
            traceback.print_exc()
            line |= dict(short=line.get("short") or f"the GPU is lost: {first_line(error)}")
            say(line)
            os._exit(LOST)
        say(line)

    def run(self, part: str, work: Callable[[Figures], None]) -> None:
        """Make the figures of a part; an exception between figures ends the part."""
        self.part = part
        if part in self.done:
            return
        say(dict(begins=part))
        try:
            work(self)
        except Exception as error:
            self.wait_or_end(dict(part=part, figure="start") | self._failure(error))

    def _failure(self, error: Exception) -> dict[str, Any]:
        traceback.print_exc()
        traceback.clear_frames(error.__traceback__)  # which hold tensors
        return dict(short=f"{type(error).__name__}: {first_line(error)}")

    def wait(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def free(self, *names: str) -> None:
        """Drop the kept objects of these names, and release their memory."""
        for name in names:
            self.kept.pop(name, None)
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0][:300]


def say(line: dict[str, Any]) -> None:
    """Print a line of JSON."""
    print(json.dumps(line), flush=True)


def nccl(figures: Figures) -> None:
    """Train a tiny model in two processes, for each way to split it."""
    if not figures.is_cuda or torch.cuda.device_count() < 2:
        return say(dict(part="nccl", figure="start", found="needs two GPUs"))
    from tests.support.tiny_run import make_inputs  # imports the requirements of `blockdiff train`

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        make_inputs(folder)
        for name, setting in SPLITS.items():
            figures.make(name, lambda name=name, setting=setting: _trained(folder, name, setting))  # type: ignore[misc]
    return None


def _trained(folder: Path, name: str, setting: str) -> dict[str, Any]:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "blockdiff", "train"]
    words += [str(folder / "recipe.yaml"), "--output", str(folder / name), "--set", setting]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "error" in line.lower()] or ["it ended without a word"]
    return dict(short=said[0] if done.returncode else "")


def main(words: Sequence[str] | None = None) -> int:
    """Make figures and print lines of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quick_figures", description=__doc__)
    parser.add_argument("parts", nargs="+", choices=[part for part in PARTS if part != TESTS])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", default=RELEASED)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--layers", type=int, help="of the model that is updated (all of them)")
    parser.add_argument("--done", type=Path, help="a JSON list of the figures that are there")
    options = parser.parse_args(words)
    done = json.loads(options.done.read_text(encoding="utf-8")) if options.done else []
    figures = Figures(torch.device(options.device), options.preset, options.prompt, options.rows, done)

    if figures.is_cuda and not torch.cuda.is_available():
        found = f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU"
        for part in options.parts:
            say(dict(part=part, figure="start", short=found))
        return 0

    from benchmarks import quick_policy, quick_sampling, quick_start

    parts: dict[str, Callable[[Figures], None]] = {
        "start": quick_start.start,
        "sampling": quick_sampling.sampling,
        "graphs": quick_sampling.graphs,
        "updates": lambda figures: quick_policy.updates(figures, options.layers),
        "fp8": lambda figures: quick_sampling.quantised(figures, "fp8"),
        "nvfp4": lambda figures: quick_sampling.quantised(figures, "nvfp4"),
        "drafted": quick_sampling.drafted,
        "nccl": nccl,
    }
    for part in options.parts:
        figures.run(part, parts[part])
    return 0


if __name__ == "__main__":
    sys.exit(main())
