"""The memory of devices, and the check that a model fits before it is read."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from blockdiff.errors import BlockdiffError


def available_bytes(device: Any) -> int | None:
    """The bytes that this process can still allocate on a device; None if that is unknown.

    On a CUDA device, garbage and torch's cache are freed first.
    """
    import torch

    torch_device = torch.device(device)
    if torch_device.type == "cuda":
        gc.collect()
        with torch.cuda.device(torch_device):
            torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(torch_device)[0])
    return _host_bytes(Path("/")) if torch_device.type == "cpu" else None


def total_bytes(device: Any) -> int | None:
    """The total bytes of a device; of the host at most the limit of this process's control groups."""
    import torch

    torch_device = torch.device(device)
    if torch_device.type == "cuda":
        return int(torch.cuda.mem_get_info(torch_device)[1])
    return _host_bytes(Path("/"), is_whole=True) if torch_device.type == "cpu" else None


_MOST: dict[Any, int] = {}  # the peak of each device before `peak_of` reset torch's count


def most_allocated(device: Any) -> int:
    """The peak of the bytes of this process's tensors on a CUDA device."""
    import torch

    torch_device = torch.device(device)
    return max(_MOST.get(torch_device, 0), torch.cuda.max_memory_allocated(torch_device))


def peak_of(work: Callable[[], object], device: Any) -> int:
    """Return the bytes that torch reserves on a CUDA device during a call, beyond those reserved before.

    They are more than the tensors' bytes, because memory is reserved in blocks. torch's peak counters are reset.
    """
    import torch

    torch_device = torch.device(device)
    torch.cuda.synchronize(torch_device)
    with torch.cuda.device(torch_device):
        torch.cuda.empty_cache()
    _MOST[torch_device], before = most_allocated(torch_device), torch.cuda.memory_reserved(torch_device)
    torch.cuda.reset_peak_memory_stats(torch_device)
    work()
    torch.cuda.synchronize(torch_device)
    return torch.cuda.max_memory_reserved(torch_device) - before


def require(needs: Mapping[str, int], device: Any, smaller: Mapping[str, int] | None = None) -> None:
    """Raise BlockdiffError if a device cannot hold `needs`; warn if it cannot while others use its memory.

    needs: bytes by their name (weights, gradients, ...). smaller: the bytes in all with other settings, by the setting
    in the user's words; the error names the ones that fit.
    """
    total, available, needed = total_bytes(device), available_bytes(device), sum(needs.values())
    parts = ", ".join(f"{name} {size(count)}" for name, count in needs.items())
    if total is not None and needed > total:
        fitting = [f"{choice} ({size(count)})" for choice, count in (smaller or {}).items() if count <= total]
        larger = "take a machine with more memory" if str(device).startswith("cpu") else "take a GPU with more memory"
        remedy = f"what would fit: {', '.join(fitting)}" if fitting else f"{larger}, or a smaller model"
        raise BlockdiffError(f"{device}: needs {size(needed)} ({parts}), it has {size(total)}; {remedy}")
    if available is not None and needed > available:
        has = "" if total is None else f" of its {size(total)}"
        warnings.warn(
            f"{device}: needs {size(needed)} ({parts}), {size(available)}{has} are free now; end other programs, or "
            "it may be stopped when memory runs out",
            stacklevel=2,
        )


def of_training(numbers: int, trained: int) -> dict[str, int]:
    """Return the bytes of training `trained` of `numbers` weights in fp32 with AdamW, without activations, by use."""
    return {"weights": 4 * numbers, "gradients": 4 * trained, "optimiser": 8 * trained}


def size(count: float) -> str:
    """Format bytes as `1.5 GiB`, or as `2.0 MiB` below one GiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _host_bytes(root: Path, is_whole: bool = False) -> int | None:
    """Return the bytes that are available on the host, limited by the control groups of this process.

    is_whole: the bytes of the host in all, limited likewise. Returns None if neither is known.
    """
    word = "MemTotal:" if is_whole else "MemAvailable:"
    lines = [line.split() for line in _text(root / "proc/meminfo").splitlines()]
    limits = [int(words[1]) * 1024 for words in lines if words[:1] == [word]]
    group = next((line[3:] for line in _text(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), "/")
    for path in (PurePosixPath(group), *PurePosixPath(group).parents):
        limits += _left_in_group(root / "sys/fs/cgroup" / path.relative_to("/"), is_whole)
    return min(limits, default=None)


def _left_in_group(group: Path, is_whole: bool) -> list[int]:
    """Return [limit of a control group (version 2) minus its use], or [] without a limit.

    Inactive file pages count as free. is_whole: return the limit itself.
    """
    most, held = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
    if not most.isdecimal() or not held.isdecimal():
        return []
    if is_whole:
        return [int(most)]
    statistics = dict(line.split() for line in _text(group / "memory.stat").splitlines())
    return [max(0, int(most) - int(held) + int(statistics.get("inactive_file", 0)))]


def _text(file: Path) -> str:
    """The content of a small file; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
