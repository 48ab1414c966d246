"""The quick run of `make gpu QUICK=1`: what one GPU does with the released model's shapes, in minutes.

This process imports no torch: it starts the others, ends those that hang, and writes each figure as it comes to the
screen and to three files of one directory: lines.jsonl (one JSON object a figure; a later run adds to it), table.md
(all of them, written anew after every line) and log.txt (what the processes say, with tracebacks).

One process (`benchmarks.quick_figures`) makes all figures of a stage with one model. A figure whose process dies, hangs
or loses its GPU is said, and another process goes on with the next one. "short" says in words what falls short.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RELEASED = "diffusiongemma-26b-a4b"
LIMIT = 120.0  # seconds of a figure without a limit of its own
SHARE_OF_TESTS = 0.2  # of the seconds; the parts before leave it to the tests
LOST = 17  # the exit code of a process that has printed a figure and lost its GPU
MOST_STARTS = 10  # of processes of a stage
TESTS = "tests"
# Stages: one process each, which makes the figures of its parts in this order.
STAGES: tuple[tuple[str, ...], ...] = (
    ("start", "sampling", "graphs", "updates", "fp8", "nvfp4"),
    (TESTS,),
    ("drafted",),
    ("nccl",),
)
PARTS = tuple(part for stage in STAGES for part in stage)
NEEDS = {
    "triton": ((), "kernels are compiled by it"),
    "pytest": ((TESTS,), "tests of kernels at released shapes run"),
    "pydantic": (("nccl",), "two GPUs train"),
    "datasets": (("nccl",), "two GPUs train"),
}
Line = dict[str, Any]


class Report:
    """Writes the figures of a run to the screen and to files in a directory."""

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        self.lines, self.table, self.log = (directory / name for name in ("lines.jsonl", "table.md", "log.txt"))
        self.begin, self.run = time.monotonic(), datetime.datetime.now().isoformat(timespec="seconds")
        self.fallen = 0

    def add(self, line: Line) -> None:
        """Write a figure to all outputs, with its time in seconds since the run began."""
        line = dict(run=self.run, at=round(time.monotonic() - self.begin, 1)) | line
        self.fallen += bool(line.get("short"))
        print(json.dumps(line), flush=True)
        with self.lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        written = [json.loads(each) for each in self.lines.read_text(encoding="utf-8").splitlines()]
        self.table.write_text(table(written), encoding="utf-8")


def table(lines: Sequence[Line]) -> str:
    """Return a Markdown table of figures, with a heading for each run."""
    text, run = "", None
    for line in lines:
        if line["run"] != run:
            run = line["run"]
            text += f"\n## {run}\n\n| s | part | figure | found | falls short |\n|---|---|---|---|---|\n"
        found = {key: each for key, each in line.items() if key not in ("run", "at", "part", "figure", "short")}
        cells = [str(line["at"]), line["part"], line["figure"], _words(found), str(line.get("short", ""))]
        text += f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"
    return text.lstrip()


def _words(found: Any) -> str:
    if isinstance(found, dict):
        return ", ".join(f"{key} {_words(each)}" for key, each in found.items() if each is not None)
    return f"{found:.4g}" if isinstance(found, float) else str(found)


class Stage:
    """Makes figures with one process after another, until all are made, time is over, or none makes progress."""

    def __init__(self, parts: Sequence[str], report: Report, end: float):
        self.parts, self.report, self.end = parts, report, end
        self.done: list[str] = []  # "part: figure"; "part" if no more of its figures can be made
        self.current = ""  # the figure that is being made, or the part before and between its figures
        self.limit = 0.0  # the moment at which the figure has taken too long

    def run(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """Run `python command --done ...` until it succeeds, or dies without having begun anything new."""
        for _ in range(MOST_STARTS):
            known, self.current = len(self.done), ""
            self.limit = time.monotonic() + LIMIT
            with tempfile.TemporaryDirectory() as directory:
                done = Path(directory) / "done.json"
                done.write_text(json.dumps(self.done), encoding="utf-8")
                how = self._run([sys.executable, *command, "--done", str(done)], environment)
            if not how:
                return
            if self.current or len(self.done) == known:
                part, _, figure = (self.current or self.parts[0]).partition(": ")
                self.report.add(dict(part=part, figure=figure or "start", short=f"{how}; see {self.report.log.name}"))
            if self.current:
                self.done.append(self.current)
            if time.monotonic() >= self.end or len(self.done) == known:
                break
        begun = {each.partition(": ")[0] for each in self.done}
        for part in self.parts:
            if part not in begun:
                self.report.add(dict(part=part, figure="start", short="not begun"))

    def _run(self, command: Sequence[str], environment: dict[str, str]) -> str:
        """Run a process; return "" if it succeeds, else how it ended."""
        with self.report.log.open("a", encoding="utf-8") as log:
            log.write(f"\n== {' '.join(command)}\n")
            log.flush()
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, env=environment, start_new_session=True
            )
            try:
                for said in self._said(process):
                    self._take(said, log)
                code = process.wait(10)
            except (TimeoutError, subprocess.TimeoutExpired):
                is_over = time.monotonic() >= self.end
                return "the time of the run was over" if is_over else "it took too long and was ended"
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code == LOST:
            self.current = ""
        return "" if code == 0 else f"its process ended with code {code}" if code > 0 else f"it died of signal {-code}"

    def _said(self, process: subprocess.Popen[bytes]) -> Iterator[str]:
        """Yield the lines that a process prints; TimeoutError if it takes too long."""
        assert process.stdout is not None
        rest, file = b"", process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(file, selectors.EVENT_READ)
            while True:
                left = min(self.end, self.limit) - time.monotonic()
                if left <= 0 or not selector.select(left):
                    if time.monotonic() >= min(self.end, self.limit):
                        raise TimeoutError
                    continue
                read = os.read(file.fileno(), 1 << 16)
                if not read:
                    return
                *whole, rest = (rest + read).split(b"\n")
                yield from (each.decode("utf-8", "replace") for each in whole)

    def _take(self, said: str, log: Any) -> None:
        """Process a printed line: report a figure, remember one that begins, and log any other words."""
        line = None
        if said.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                line = json.loads(said)
        if line is None:
            log.write(said + "\n")
            log.flush()
        elif "begins" in line:
            self.current = line["begins"]
            self.limit = time.monotonic() + (line.get("limit") or LIMIT)
        else:
            self.done.append(f"{line['part']}: {line['figure']}")
            self.current = line["part"]
            self.limit = time.monotonic() + LIMIT
            self.report.add(line)


def missing() -> dict[str, str]:
    """Return the missing packages, each with the parts that are left out without it."""
    absent = {}
    for name, (_, what) in NEEDS.items():
        try:
            is_there = importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):  # the package is hidden
            is_there = False
        if not is_there:
            absent[name] = what
    return absent


def main(words: Sequence[str] | None = None) -> int:
    """Run all stages; return 0 if no figure falls short."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quick", description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=PARTS, help="a part (may be repeated); default: all but nccl"
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu (cuda)")
    parser.add_argument("--preset", default=RELEASED, help=f"in recipes/presets ({RELEASED})")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt (1024)")
    parser.add_argument("--rows", type=int, default=32, help="rows at most (32)")
    parser.add_argument("--seconds", type=float, default=540, help="after which the run ends by itself (540)")
    default = Path(__file__).parent / "results" / "quick"
    parser.add_argument("--output", type=Path, default=default, help=f"a directory ({default.relative_to(ROOT)})")
    options = parser.parse_args(words)
    report, chosen, absent = (
        Report(options.output),
        options.only or [part for part in PARTS if part != "nccl"],
        missing(),
    )
    end = report.begin + options.seconds
    sizes = ["--device", options.device, "--preset", options.preset]
    sizes += ["--prompt", str(options.prompt), "--rows", str(options.rows)]
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    if not os.access(Path.home(), os.W_OK):
        environment.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "triton"))
    left_out = {part for name in absent for part in NEEDS[name][0]}
    has_tests = TESTS in chosen and TESTS not in left_out
    try:
        for stage in STAGES:
            parts = [part for part in stage if part in chosen and part not in left_out]
            if not parts:
                continue
            if parts == [TESTS]:
                has_tests, command = False, ["-m", "benchmarks.quick_tests", options.device]
            else:
                command = ["-m", "benchmarks.quick_figures", *parts, *sizes]
            Stage(parts, report, end - has_tests * SHARE_OF_TESTS * options.seconds).run(command, environment)
    except KeyboardInterrupt:
        report.add(dict(part="run", figure="", short="interrupted"))
    for name, what in absent.items():
        report.add(dict(part="left out", figure=name, found=f"not installed; {what} where it is"))
    print(
        f"\n{report.table.read_text(encoding='utf-8')}\nwritten: {report.lines}, {report.table.name}, {report.log.name}"
    )
    return int(report.fallen > 0)


if __name__ == "__main__":
    sys.exit(main())
