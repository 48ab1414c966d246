"""What one needs to quote a run: a record for report.json, and the same in one line."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from blockdiff import __version__
from blockdiff.metrics import Record, of_kind

PACKAGES = ("torch", "transformers", "accelerate")


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
    """A run in JSON values, from its metrics records and what they do not say.

    run: its name; examples: of the training data, None where they are streamed; best: the metric that chose the
    exported weights; wall_seconds: of this process from start to end, beside `seconds` of training over all resumes.
    Training losses are of the last logged step; held-out and sampled figures both the last and, as `best_...` with
    its step, the best.
    """
    trained = of_kind(records, "train")
    last = trained[-1] if trained else {}
    steps = max((record["step"] for record in records), default=0)
    report: dict[str, Any] = {
        "run": run,
        "steps": steps,
        "examples_seen": steps * batch_size,
        "epochs": round(steps * batch_size / examples, 3) if examples else None,
        "skipped": max((record.get("skipped", 0) for record in records), default=0),
        **{key: last.get(key) for key in ("loss", "canvas_loss", "ar_loss")},
    }
    report |= _of(records, "heldout_canvas_loss", min) | _of(records, "heldout_ar_loss", min)
    report |= _of(records, "heldout_canvas_accuracy", max) | _of(records, "sample_accuracy", max)
    for record in records:  # the last one stays
        report |= {
            key: record[key] for key in ("sample_steps_per_canvas", "sample_tokens_per_forward") if key in record
        }
    return report | {
        "best_metric": best,
        "tokens_per_second": _mean_speed(trained, "tokens_per_second"),
        "scored_tokens_per_second": _mean_speed(trained, "scored_tokens_per_second"),
        "memory_gib": max((record["memory_gib"] for record in trained if "memory_gib" in record), default=None),
        "seconds": last.get("seconds"),
        "wall_seconds": None if wall_seconds is None else round(wall_seconds, 1),
        "device": _device(device),
        "world": world,
        "versions": _versions(),
        "commit": _commit(),
    }


def report_line(report: Mapping[str, Any]) -> str:
    """A report as one line; what was not measured is left out."""
    told: list[str] = [report["run"]]

    def tell(text: str, *keys: str) -> None:
        if all(report.get(key) is not None for key in keys):
            told.append(text.format(**report))

    tell("{steps:,} optimiser steps")
    tell("{examples_seen:,} examples", "examples_seen")
    tell("{epochs:.1f} epochs", "epochs")
    if report.get("skipped"):
        tell("{skipped} optimiser steps skipped")
    tell("canvas loss {canvas_loss:.4f}", "canvas_loss")
    if report.get("ar_loss"):
        tell("AR loss {ar_loss:.4f}")
    held = "held-out canvas loss {heldout_canvas_loss:.4f}"
    tell(held + _unless_last(report, "heldout_canvas_loss", ".4f"), "heldout_canvas_loss")
    if report.get("heldout_ar_loss"):
        tell("held-out AR loss {heldout_ar_loss:.4f}" + _unless_last(report, "heldout_ar_loss", ".4f"))
    tell("{sample_accuracy:.1%} of samples right" + _unless_last(report, "sample_accuracy", ".1%"), "sample_accuracy")
    tell("{sample_steps_per_canvas:.1f} steps per canvas", "sample_steps_per_canvas")
    tell("{tokens_per_second:,.0f} tokens/s", "tokens_per_second")
    tell("{memory_gib:.1f} GiB", "memory_gib")
    tell(f"{_duration(report.get('seconds') or 0)} of training", "seconds")
    told.append(f"{report['world']} x {report['device']}")
    told.append(" ".join(f"{name} {version}" for name, version in report["versions"].items()))
    tell("commit {commit}", "commit")
    return ", ".join(told)


def _of(records: Sequence[Mapping[str, Any]], key: str, choose: Any) -> dict[str, Any]:
    """The last value of a figure, and the best one with the first step that had it."""
    found = [(record[key], record["step"]) for record in records if record.get(key) is not None]
    if not found:
        return {}
    best = choose(value for value, _ in found)
    step = next(step for value, step in found if value == best)
    return {key: found[-1][0], f"best_{key}": best, f"best_{key}_step": step}


def _unless_last(report: Mapping[str, Any], key: str, form: str) -> str:
    if report.get(key) is None or report[key] == report[f"best_{key}"]:
        return ""
    return f" (best {{best_{key}:{form}}} at step {{best_{key}_step}})"


def _mean_speed(trained: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Over the run: each record's speed counts for the seconds since the record before it."""
    tokens = seconds = before = 0.0
    for record in trained:
        if key in record:
            tokens += record[key] * (record["seconds"] - before)
            seconds += record["seconds"] - before
        before = record["seconds"]
    return round(tokens / seconds, 1) if seconds > 0 else None


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{seconds:.0f} s"
    return f"{whole // 3600} h {whole // 60 % 60:02d} min" if whole >= 3600 else f"{whole // 60} min {whole % 60:02d} s"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8"), re.M) if info.is_file() else None
    processor = found[1].strip() if found else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{processor} ({threads} thread{'s' * (threads != 1)})"


def _versions() -> dict[str, str]:
    return {"blockdiff": __version__} | {package: importlib.metadata.version(package) for package in PACKAGES}


def _commit() -> str | None:
    """The commit of the checkout this code runs from, marked when files differ from it; None for an installed copy."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # not somebody else's repository around site-packages
        return git("rev-parse", "--short=10", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
