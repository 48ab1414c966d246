"""The device that work runs on: a requested one, or the best available."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdiff.errors import CheckpointError

if TYPE_CHECKING:
    import torch

GPUS = Path("/proc/driver/nvidia/gpus")  # one entry for each GPU that NVIDIA's driver has found


def resolve_device(device: Any) -> torch.device:
    """Return the device of a name or of "auto". Raises CheckpointError if it is not there.

    "auto" is CUDA's current device, or else the CPU, with a warning if the machine has a GPU nevertheless.
    """
    import torch

    if str(device) == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if gpus := _gpus():
            there = f"this machine has {gpus} GPU{'s' * (gpus > 1)}"
            warnings.warn(f"{there}, but the CPU is used: {_why_not_cuda()}", stacklevel=2)
        return torch.device("cpu")
    try:
        torch_device = torch.device(device)
    except RuntimeError:
        raise CheckpointError(f"device {str(device)!r} is not known; use auto, cpu or cuda") from None
    if torch_device.type == "cuda" and not torch.cuda.is_available():
        raise CheckpointError(f"device {str(device)!r} is not available: {_why_not_cuda()}")
    return torch_device


def _gpus() -> int:
    """The number of GPUs of the machine, whether or not this process may use them."""
    return len(list(GPUS.iterdir())) if GPUS.is_dir() else 0


def _why_not_cuda() -> str:
    """Explain in one line why torch has no CUDA device in this process."""
    import torch

    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA; install one that is built with it"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU; unset it"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # its first line explains the problem of driver or runtime
        return f"torch finds no CUDA device: {str(error).strip().partition(chr(10))[0]}"
    return "torch finds no CUDA device"
