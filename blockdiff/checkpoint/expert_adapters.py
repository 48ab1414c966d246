"""Adapters of experts whose matrices are modules of their own in the class that loads the files (`experts_apart`).

PEFT then has an adapter for each matrix of each expert, and none for stacked parameters. Our adapter of an expert's
gate and up has one A, and B has rows for both, so both are written with the same A. If PEFT trained an A for each, the
two adapters become one of twice the rank: the As are stacked, the Bs are on a block diagonal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from blockdiff.errors import CheckpointError
from blockdiff.models.names import Names

LEAVES = {"gate_up_lora_A": "gate_up_proj", "gate_up_lora_B": "gate_up_proj"}
LEAVES |= {"down_lora_A": "down_proj", "down_lora_B": "down_proj"}


def expert_modules(weight: str, names: Names) -> list[str]:
    """Return the names, in the class that loads the files, of the modules of our expert weight `weight`.

    `[]` in a name stands for the number of the expert. Empty if the experts are not modules of their own.
    """
    pieces = names.pieces_of(str(names.to_hub(weight))) if names.experts_apart else []
    return [names.to_module(piece.removesuffix(".weight")) for piece in pieces]


def expert_tensors(ours: str, tensor: Tensor, names: Names) -> dict[str, Tensor]:
    """Split our adapter parameter `ours` of all experts into tensors of single modules, by their names."""
    owner, _, leaf = ours.rpartition(".")
    modules = expert_modules(f"{owner}.{LEAVES[leaf]}", names)
    which = "lora_A" if leaf.endswith("A") else "lora_B"
    tensors: dict[str, Tensor] = {}
    for expert, of_expert in enumerate(tensor):
        parts = of_expert.chunk(len(modules)) if which == "lora_B" else [of_expert] * len(modules)
        for module, part in zip(modules, parts, strict=True):
            tensors[f"{module.replace('[]', str(expert))}.{which}.weight"] = part.contiguous()
    return tensors


def stacked_experts(tensors: Mapping[str, Tensor], names: Names, file: Path) -> dict[str, Tensor]:
    """Stack tensors of single modules, named as by `expert_tensors`, into our adapter parameters of all experts.

    Raises CheckpointError if an expert has no adapter, or if their ranks differ.
    """
    groups: dict[str, dict[tuple[int, int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.+)\.(lora_[AB])\.weight", name)
        piece = None if match is None else names.piece(f"{names.of_module(match[1])}.weight")
        if match is None or piece is None:
            raise CheckpointError(f"{file}: {name} is no adapter of a matrix of an expert")
        groups.setdefault(piece[0], {})[piece[1], piece[2], match[2]] = tensor
    stacked: dict[str, Tensor] = {}
    for hub, parts in groups.items():
        experts, matrices = 1 + max(expert for expert, _, _ in parts), len(names.pieces_of(hub))
        matrices_AB = []
        for expert in range(experts):
            As, Bs = ([parts.get((expert, n, leaf)) for n in range(matrices)] for leaf in ("lora_A", "lora_B"))
            matrices_AB.append(_joined([A for A in As if A is not None], [B for B in Bs if B is not None], matrices))
        shapes = {(A.shape, B.shape) for A, B in filter(None, matrices_AB)}
        if None in matrices_AB or len(shapes) > 1:
            raise CheckpointError(f"{file}: {hub}: give all matrices of all experts adapters of one rank")
        owner, _, leaf = str(names.to_ours(hub)).rpartition(".")
        prefix = f"{owner}.{leaf.removesuffix('_proj')}"
        stacked[f"{prefix}_lora_A"] = torch.stack([A for A, _ in filter(None, matrices_AB)])
        stacked[f"{prefix}_lora_B"] = torch.stack([B for _, B in filter(None, matrices_AB)])
    return stacked


def _joined(As: list[Tensor], Bs: list[Tensor], matrices: int) -> tuple[Tensor, Tensor] | None:
    """Return A and B of an expert's stacked matrices; None unless all `matrices` have adapters of one rank."""
    if len(As) < matrices or len(Bs) < matrices or len({A.shape for A in As}) > 1:
        return None
    if all(torch.equal(A, As[0]) for A in As):
        return As[0], torch.cat(Bs)
    return torch.cat(As), torch.block_diag(*Bs)
