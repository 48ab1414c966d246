"""The memory that a device has left, and the one line that says, before anything is read, what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from blockdiff.errors import BlockdiffError


def available_bytes(device: Any) -> int | None:
    """Bytes that this process can still allocate on a device of torch, or by its name; None where that is not known."""
    import torch

    place = torch.device(device)
    if place.type == "cuda":
        free, _ = torch.cuda.mem_get_info(place)
        return free + torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
    return _host_bytes(Path("/")) if place.type == "cpu" else None


def require(needs: Mapping[str, int], device: Any, smaller: Mapping[str, int] | None = None) -> None:
    """Refuse what does not fit on a device.

    needs: bytes by what they hold (weights, gradients, ...); smaller: all that would be needed instead, by what the
    user would have to say. Raises BlockdiffError, naming those of `smaller` that fit.
    """
    available, asked = available_bytes(device), sum(needs.values())
    if available is None or asked <= available:
        return
    parts = ", ".join(f"{name} {size(count)}" for name, count in needs.items())
    fitting = [f"{choice} ({size(count)})" for choice, count in (smaller or {}).items() if count <= available]
    remedy = f"what would fit: {', '.join(fitting)}" if fitting else "use a device with more memory"
    raise BlockdiffError(f"{device}: needs {size(asked)} ({parts}), {size(available)} are there; {remedy}")


def of_training(numbers: int, trained: int) -> dict[str, int]:
    """Bytes of training `trained` of `numbers` weights in fp32 with AdamW, without activations, by what they hold."""
    return {"weights": 4 * numbers, "gradients": 4 * trained, "optimiser": 8 * trained}


def size(count: float) -> str:
    """Bytes in words: `1.5 GiB`, or `2.0 MiB` where it is less than one."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _host_bytes(root: Path) -> int | None:
    """The bytes that the kernel says are available, and no more than the control groups of this process leave."""
    lines = [line.split() for line in _text(root / "proc/meminfo").splitlines()]
    limits = [int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"]
    group = next((line[3:] for line in _text(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), "/")
    for path in (PurePosixPath(group), *PurePosixPath(group).parents):
        limits += _left_in_group(root / "sys/fs/cgroup" / path.relative_to("/"))
    return min(limits, default=None)


def _left_in_group(group: Path) -> list[int]:
    """The limit of a control group (version 2) less what it holds, without file pages that can be dropped; or none."""
    most, held = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
    if not most.isdecimal() or not held.isdecimal():
        return []
    statistics = dict(line.split() for line in _text(group / "memory.stat").splitlines())
    return [max(0, int(most) - int(held) + int(statistics.get("inactive_file", 0)))]


def _text(file: Path) -> str:
    """The content of a small file, empty where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
