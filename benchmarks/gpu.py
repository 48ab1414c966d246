"""The program of `make gpu`: the tests that need a GPU and then the benchmarks, each in a process of its own.

An error on the device (an address that is not there, say) ends a CUDA process for good, so a file of tests or a suite
takes none of the others with it. A file that fails is run once more with every launch made by Triton itself
(BLOCKDIFF_RELAUNCH=0), which says whose fault it is. Nothing is installed or loaded from a network. Words that are not
listed below go to `python -m benchmarks`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import quick

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
SUITES = ("attention", "vocabulary", "experts", "denoise", "training")  # kernels come first
NEEDED = ("torch", "triton", "transformers", "safetensors", "tokenizers", "numpy", "pytest")
PASSED, DONE, NOTHING = "passed", "done", "nothing to compare with here"
PEERS = {
    "peft": "LoRA steps are compared with PEFT",
    "liger_kernel": "losses are compared with Liger",
    "cut_cross_entropy": "losses are compared with cut-cross-entropy",
    "flash_attn_interface": "attention is compared with FlashAttention-3",
    "deep_gemm": "experts are compared with DeepGEMM",
}
# Run in a separate process, since a process that has looked at a GPU keeps some of its memory.
LOOK = """
import json, torch
is_there = torch.cuda.is_available()
of_gpu = (torch.cuda.get_device_name(), *torch.cuda.get_device_capability()) if is_there else None
print(json.dumps((torch.__version__, torch.version.cuda, of_gpu)))
"""


def looked_at() -> tuple[str, list[str]]:
    """Return the name of the GPU, and in words what this machine lacks to run anything here."""
    found = [f"the Python package {name}" for name in NEEDED if importlib.util.find_spec(name) is None]
    compilers = [os.environ.get("CC"), "gcc", "clang", "cc"]
    if not any(name and shutil.which(name) for name in compilers):
        found.append("a C compiler, with which Triton makes what launches its kernels (CC names one)")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        found.append(f"Python's headers for that compiler ({header}; Debian: python3-dev)")
    if importlib.util.find_spec("torch") is None:
        return "", found
    looked = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True)
    if looked.returncode:
        said = (looked.stderr.strip() or f"it ended with code {looked.returncode}").splitlines()[-1]
        return "", [*found, f"a torch that works: {said}"]
    version, cuda, of_gpu = json.loads(looked.stdout.splitlines()[-1])
    if of_gpu is None:
        return "", [*found, f"a GPU that torch finds (torch {version}, CUDA {cuda})"]
    gpu, major, minor = of_gpu
    if major < 8:
        found.append(f"a GPU of compute capability 8.0 or newer, {gpu} has {major}.{minor}")
    return gpu, found


def test_files() -> dict[Path, str]:
    """Return the files with tests for a GPU, those of kernels first, each with a marker to select.

    "gpu" selects the marked tests; "" runs the whole file, which chooses its DEVICE.
    """
    found = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text("utf-8")
        if re.search(r"^DEVICE = |^from .* import .*\bDEVICE\b", text, re.MULTILINE):
            found[path] = ""
        elif "mark.gpu" in text:
            found[path] = "gpu"
    return dict(sorted(found.items(), key=lambda pair: (pair[0].parent.name != "kernels", pair[0])))


def process(words: Sequence[str], limit: float, environment: Mapping[str, str] | None = None) -> str:
    """Run `python` with these words; return "" if it succeeds, else the reason. Its output is printed as it comes."""
    begin = time.monotonic()
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **(environment or {})}
    try:
        code = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        return f"was ended after {limit:.0f} s"
    took = f"after {time.monotonic() - begin:.0f} s"
    return "" if code == 0 else f"ended with code {code} {took}" if code > 0 else f"was ended by signal {-code} {took}"


def run_tests(files: Mapping[Path, str], limit: float) -> dict[str, str]:
    """Run the selected tests of each file; return for each file "passed" or the failure in words."""
    found = {}
    for path, mark in files.items():
        name = str(path.relative_to(ROOT))
        words = ["-m", "pytest", "-q", "-m", mark, "-p", "no:cacheprovider", name]
        print(f"\n== {name}", flush=True)
        wrong = process(words, limit)
        if wrong and os.environ.get("BLOCKDIFF_RELAUNCH") != "0":
            print(f"\n== {name}, once more with every launch made by Triton", flush=True)
            again = process(words, limit, {"BLOCKDIFF_RELAUNCH": "0"})
            wrong += "; with BLOCKDIFF_RELAUNCH=0 it " + (again or "passes")
        found[name] = wrong or PASSED
        print(f"{name}: {found[name]}", flush=True)
    return found


def run_suites(suites: Sequence[str], words: Sequence[str], output: Path, limit: float) -> dict[str, str]:
    """Run suites; return how each ended. After each, `output` has the lines so far, as JSON and as a table."""
    from benchmarks import machine  # this needs torch; its absence is reported earlier
    from benchmarks.result import Result, table

    found, lines = {}, []
    for suite in suites:
        print(f"\n== benchmarks: {suite}", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            part = Path(directory) / "part.json"
            wrong = process(["-m", "benchmarks", "--only", suite, *words, "--output", str(part)], limit)
            written = json.loads(part.read_text(encoding="utf-8")) if part.is_file() else None
        if written is not None:
            lines += written["results"]
            heading = machine.heading(written["machine"], written["repeats"])
            report = f"{heading}\n\n{table([Result.of_record(line) for line in lines])}\n"
            machine.write(output, written | {"results": lines}, report)
        found[suite] = wrong or (DONE if written is not None else NOTHING)
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Run tests and suites; return 0 if all tests pass and all lines agree."""
    words = sys.argv[1:] if words is None else words
    if "--quick" in words:
        return quick.main([word for word in words if word != "--quick"])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    only = f"a suite (may be repeated; {', '.join(SUITES)}); default: all"
    parser.add_argument("--only", action="append", choices=SUITES, metavar="NAME", help=only)
    quickly = "nine minutes: the released shapes with random weights; `--quick --help` lists its options"
    parser.add_argument("--quick", action="store_true", help=quickly)
    parser.add_argument("--no-tests", action="store_true", help="the benchmarks alone")
    parser.add_argument("--no-benchmarks", action="store_true", help="the tests alone")
    parser.add_argument("--checkpoint", help="a released model that is to be checked, too (`benchmarks.released`)")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for a file of tests or a suite (1800)")
    parser.add_argument("--output", type=Path, help="FILE.json; default: results/DEVICE-DATE.json")
    options, others = parser.parse_known_args(words)
    gpu, lacks = looked_at()
    if lacks:
        print("\n".join(f"make gpu needs {each}" for each in lacks), file=sys.stderr)
        print(f"looked for by {sys.executable}; `make gpu PYTHON=...` takes another Python", file=sys.stderr)
        return 2
    from benchmarks.machine import slug_of

    for package, what in PEERS.items():
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed: {what} where it is", file=sys.stderr)
    name = "-".join([slug_of(gpu), datetime.date.today().isoformat(), *(options.only or ())])
    output = (options.output or RESULTS / f"{name}.json").resolve()
    found = {} if options.no_tests else run_tests(test_files(), options.limit)
    if options.checkpoint:
        print(f"\n== {options.checkpoint}", flush=True)
        found[options.checkpoint] = process(["-m", "benchmarks.released", options.checkpoint], options.limit) or DONE
    if not options.no_benchmarks:
        found |= run_suites(options.only or SUITES, others, output, options.limit)
    print()
    if not options.no_benchmarks and output.is_file():
        print(output.with_suffix(".md").read_text(encoding="utf-8"))
        print(f"written: {output} and {output.with_suffix('.md').name}\n")
    print("\n".join(f"{name}: {what}" for name, what in found.items()))
    return 0 if all(what in (PASSED, DONE, NOTHING) for what in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
