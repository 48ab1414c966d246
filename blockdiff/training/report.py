"""The figures of a run: the clock behind its speeds, report.json, and the report in one line."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdiff import __version__, memory
from blockdiff.metrics import METRICS, Record, of_kind, texts, unlisted_keys
from blockdiff.terminal import counted

PACKAGES = ("torch", "transformers", "accelerate")


DIVERGENCE_RECORDS = 5  # records in each of the two mean losses that `diverging` compares
DIVERGENCE_RATIO = 1.5  # the last mean loss of a diverging run, relative to its first


class Clock:
    """Measures the seconds of optimiser steps and the tokens that they processed, without evaluation and saving.

    since_reading: the seconds between the last two readings.
    """

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._since = time.perf_counter()
        self._seconds_at_reading = seconds
        self.since_reading = 0.0
        # It stays on the device, so that counting never waits for the device.
        self._tokens = torch.zeros(2, dtype=torch.float64, device=device)

    def count(self, tokens: Tensor) -> None:
        """Add the tokens of one optimiser step: [processed, scored]."""
        self._tokens += tokens

    def read(self) -> dict[str, float]:
        """Return tokens per second since the last reading, and the `seconds` of the run. Waits for the device."""
        processed, scored = self._tokens.tolist()
        seconds = self._seconds + time.perf_counter() - self._since
        self.since_reading = since = max(seconds - self._seconds_at_reading, 1e-9)
        self._seconds_at_reading = seconds
        self._tokens.zero_()
        return {
            "tokens_per_second": round(processed / since, 1),
            "scored_tokens_per_second": round(scored / since, 1),
            "seconds": round(seconds, 3),
        }

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock around a block."""
        self._seconds += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()


def memory_gib(device: torch.device) -> float:
    """The peak memory so far in GiB: of tensors on a CUDA device, of the whole process on other devices."""
    if device.type == "cuda":
        return round(memory.most_allocated(device) / 2**30, 3)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 3)


def epochs_in_words(epochs: float) -> str:
    """Format a number of passes over the examples, such as "2.5 epochs" or "0.04 epochs"."""
    return f"{epochs:,.1f} epochs" if epochs >= 0.1 else f"{epochs:.1g} epochs"


def diverging(records: Sequence[Record]) -> str | None:
    """Return a line for the user if a training loss is much larger now than at the start of the run, else None.

    It compares means of `DIVERGENCE_RECORDS` records, so that one batch cannot decide.
    """
    trained = of_kind(records, "train")
    for key in ("canvas_loss", "ar_loss"):
        losses = [record[key] for record in trained if record.get(key)]
        count = DIVERGENCE_RECORDS
        if len(losses) < 2 * count:
            continue
        first, last = sum(losses[:count]) / count, sum(losses[-count:]) / count
        if last > DIVERGENCE_RATIO * first:
            return (
                f"{METRICS[key].label} is {last:.3g} over the last {count} records and was {first:.3g} over the first: "
                "the run diverges; lower optim.lr, and resume from an earlier checkpoint"
            )
    return None


def run_report(
    records: Sequence[Record],
    *,
    run: str,
    batch_size: int,
    examples: int | None,
    device: torch.device,
    world: int = 1,
    best: str | None = None,
    wall_seconds: float | None = None,
) -> dict[str, Any]:
    """Return the contents of report.json.

    run: the name of the run.
    examples: the number of training examples; None if they are streamed or are rollouts.
    best: the metric that chose the exported weights.
    wall_seconds: the seconds of this process from start to end; `seconds` is the training time over all resumes.

    Training losses are those of the last logged step. Held-out and sampled figures are the last and, as `best_...` with
    its step, the best.
    """
    trained = of_kind(records, "train")
    last = trained[-1] if trained else {}
    steps = max((record["step"] for record in records), default=0)
    report: dict[str, Any] = {
        "run": run,
        "steps": steps,
        "examples_seen": steps * batch_size,
        "epochs": round(steps * batch_size / examples, 6) if examples else None,
        "skipped": max((record.get("skipped", 0) for record in records), default=0),
        **{key: last.get(key) for key in ("loss", *(key for key in last if key.endswith("_loss")))},
    }
    for key, metric in METRICS.items():
        if metric.in_report.startswith("best"):
            report |= _last_and_best(records, key)
        elif metric.in_report and not key.endswith("_loss") and (values := [r[key] for r in records if key in r]):
            report[key] = values[-1]
    unlisted = {key: value for record in records for key, value in record.items() if key in unlisted_keys([record])}
    return {**unlisted, **report} | {
        "best_metric": best,
        "tokens_per_second": _mean_speed(trained, "tokens_per_second"),
        "scored_tokens_per_second": _mean_speed(trained, "scored_tokens_per_second"),
        "memory_gib": max((record["memory_gib"] for record in trained if "memory_gib" in record), default=None),
        "seconds": last.get("seconds"),
        "wall_seconds": None if wall_seconds is None else round(wall_seconds, 1),
        "device": _device(device),
        "world": world,
        "versions": {"blockdiff": __version__} | {name: importlib.metadata.version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def report_line(report: Mapping[str, Any]) -> str:
    """Format a report as one line, without figures that were not measured."""
    seen = counted(report["examples_seen"], "answer" if "reward" in report else "example")
    words = [report["run"], counted(report["steps"], "optimiser step"), seen]
    if report["epochs"] is not None:
        words.append(epochs_in_words(report["epochs"]))
    shown = [key for key, metric in METRICS.items() if metric.in_report in ("line", "best")]
    keys = ["skipped", *shown, "tokens_per_second", "memory_gib"]
    for key, text in texts(report, keys).items():
        best = report.get(f"best_{key}", report[key])
        if best != report[key]:
            text += f" (best {METRICS[key].number(best)} at step {report[f'best_{key}_step']})"
        words.append(text)
    if report["seconds"] is not None:
        words.append(f"{timedelta(seconds=round(report['seconds']))} of training")
    words.append(f"{report['world']} x {report['device']}")
    words.append(" ".join(f"{name} {version}" for name, version in report["versions"].items()))
    return ", ".join(words + [f"commit {report['commit']}"] * bool(report["commit"]))


def _last_and_best(records: Sequence[Record], key: str) -> dict[str, Any]:
    """Return the last value of a metric, and its best value with the first step that had it."""
    values = [(record[key], record["step"]) for record in records if record.get(key) is not None]
    if not values:
        return {}
    choose = max if METRICS[key].better == "higher" else min
    best, step = choose(values, key=lambda pair: pair[0])
    return {key: values[-1][0], f"best_{key}": best, f"best_{key}_step": step}


def _mean_speed(trained: Sequence[Record], key: str) -> float | None:
    """The mean of a speed over the run, weighted by the seconds between records."""
    ends = [(record["seconds"], record[key]) for record in trained if key in record and "seconds" in record]
    starts = [0.0, *(seconds for seconds, _ in ends)]
    tokens = sum(speed * (end - start) for start, (end, speed) in zip(starts, ends, strict=False))
    return round(tokens / starts[-1], 1) if starts[-1] > 0 else None


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8"), re.M) if info.is_file() else None
    processor = match[1].strip() if match else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{processor} ({threads} thread{'s' * (threads != 1)})"


def _commit() -> str | None:
    """The commit of the checkout that this code runs from, with a mark if files differ; None for an installed copy."""
    folder = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # an installed copy may be inside another repository
        return git("rev-parse", "--short=10", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
