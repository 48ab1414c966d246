"""The settings of a run of the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Settings:
    """repeats: of every timing; kernels: ours; compiled_peer: also try the `generate` that transformers compiles."""

    device: torch.device
    repeats: int = 9
    kernels: str = "auto"
    compiled_peer: bool = False
