"""The machine of a result: hardware, versions, commit."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

import blockdiff

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "transformers", "safetensors", "tokenizers")


def describe(device: torch.device) -> dict[str, Any]:
    """Return hardware, versions and commit as JSON values; `dirty`: tracked files differ from the commit."""
    versions = {"python": platform.python_version(), "blockdiff": blockdiff.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    record: dict[str, Any] = {
        "device": name(device),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "versions": versions,
        "commit": _git("rev-parse", "HEAD"),
        "dirty": _is_dirty(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        record |= {
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return record


def name(device: torch.device) -> str:
    """Return the device in words: the GPU's name, or the processor's with its cores."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()


def heading(record: dict[str, Any], repeats: int) -> str:
    """Return the first line of a table: the machine, and the number of repeats."""
    return f"{place(record)}; medians (quartiles) of {repeats} repeats in turns"


def place(record: dict[str, Any]) -> str:
    """Return the hardware, versions and commit of a record in words."""
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    commit = f"{str(record['commit'])[:12]}{' + changes' if record['dirty'] else ''}"
    return f"{record['device']}, {record['cores']} cores, {record['threads']} threads; {versions}; commit {commit}"


def write(output: Path, figures: Any, text: str) -> None:
    """Write figures to FILE.json, and the table that shows them to FILE.md."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    output.with_suffix(".md").write_text(text, encoding="utf-8")


def slug(device: torch.device) -> str:
    """Return the device's name as part of a file name."""
    return slug_of(name(device))


def slug_of(device_name: str) -> str:
    """Return a device's name, as `name` gives it, as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower().replace("(r)", "").replace("(tm)", "")).strip("-")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def _git(*words: str) -> str | None:
    try:
        run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None  # a copy without its history
    return run.stdout.strip()


def _is_dirty() -> bool | None:
    status = _git("status", "--porcelain", "--untracked-files=no")
    return None if status is None else bool(status)
