"""How much memory a device has left, and saying in one line, before anything is read, what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockdiff.errors import BlockdiffError


def available_bytes(device: Any) -> int | None:
    """Bytes that this process can still allocate on a device of torch, or by its name; None where nothing tells."""
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
    there, asked = available_bytes(device), sum(needs.values())
    if there is None or asked <= there:
        return
    parts = ", ".join(f"{name} {size(count)}" for name, count in needs.items())
    fitting = [f"{choice} ({size(count)})" for choice, count in (smaller or {}).items() if count <= there]
    remedy = f"what would fit: {', '.join(fitting)}" if fitting else "use a device with more memory"
    raise BlockdiffError(f"{device}: needs {size(asked)} ({parts}), {size(there)} are there; {remedy}")


def of_training(
    numbers: int, trained: int, dtype: str = "float32", optimiser: str = "adamw", is_averaged: bool = False
) -> dict[str, int]:
    """Bytes of training by what they hold, without activations: of `numbers` weights `trained` ones train."""
    width = 4 if dtype == "float32" else 2
    moments = 2 * (1 if optimiser == "adamw_8bit" else width)
    needs = {"weights": numbers * width, "gradients": trained * width, "optimiser": trained * moments}
    return needs | {"average": 4 * trained} if is_averaged else needs


def size(count: float) -> str:
    """Bytes in words: `1.5 GiB`, or `2.0 MiB` where it is less than one."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _host_bytes(root: Path) -> int | None:
    """What the kernel says is available, and no more than the control groups of this process leave."""
    limits = [_meminfo(root / "proc/meminfo"), *map(_left_in_group, _groups(root))]
    return min((limit for limit in limits if limit is not None), default=None)


def _meminfo(file: Path) -> int | None:
    lines = [line.split() for line in _text(file).splitlines()]
    return next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), None)


def _groups(root: Path) -> list[Path]:
    """The directories of the process's memory control group and of those around it, of both versions."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = root / "sys/fs/cgroup" / controllers
            own = top / path.lstrip("/")
            found += [top, own, *(parent for parent in own.parents if top in parent.parents)]
    return found


def _left_in_group(group: Path) -> int | None:
    """The limit of a group less what its processes hold; file pages that can be dropped do not count as held."""
    for limit, usage, droppable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, held = _text(group / limit).strip(), _text(group / usage).strip()
        if most.isdecimal() and held.isdecimal():
            statistics = dict(line.split() for line in _text(group / "memory.stat").splitlines())
            return max(0, int(most) - int(held) + int(statistics.get(droppable, 0)))
    return None


def _text(file: Path) -> str:
    """The content of a small file, empty where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
