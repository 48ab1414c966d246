"""Checkpoints in Hub layout that tests change and compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion

from blockdiff.checkpoint.files import WEIGHTS

PROJECTION = "model.decoder.layers.0.self_attn.q_proj.weight"


def edit(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def drop(name: str) -> Callable[[Path], None]:
    return lambda d: edit(d, lambda tensors: tensors.pop(name))


def in_transformers(directory: Path) -> DiffusionGemmaForBlockDiffusion:
    """transformers' model from `directory`, which must hold every key and no other."""
    model, report = DiffusionGemmaForBlockDiffusion.from_pretrained(directory, output_loading_info=True)
    assert not any(report.values()), report
    return model


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name
