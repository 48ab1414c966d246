"""Adapters of matrices that transformers has as one: what it computes there is one B A for all of them.

Of n matrices with adapters of rank r, one under the other, that is an adapter of rank n r: the As one under the other,
the Bs on a diagonal of blocks. Any adapter of the whole is one of each matrix, of the same A and its rows of B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from blockdiff.checkpoint.adapter_names import Part
from blockdiff.errors import CheckpointError
from blockdiff.layers.lora import LowRank


def fused_rank(low_rank: LowRank, count: int) -> LowRank:
    """The rank and alpha of `count` matrices taken as one: the same strength at `count` times the rank."""
    return replace(low_rank, rank=low_rank.rank * count, alpha=low_rank.alpha * _growth(low_rank, count))


def fused(module: str, parts: Mapping[tuple[str, int], Tensor], count: int) -> dict[str, Tensor]:
    """A and B of a whole of `count` matrices, of those of each by ("lora_A" or "lora_B", its place).

    Raises CheckpointError where some of them have no adapter, or one of another rank.
    """
    As, Bs = ([parts[leaf, n] for n in range(count) if (leaf, n) in parts] for leaf in ("lora_A", "lora_B"))
    if len(As) < count or len({x.shape for x in As}) > 1:
        raise CheckpointError(f"{module} is one matrix in transformers; give all parts of it adapters of one rank")
    return {"lora_A": torch.cat(As), "lora_B": torch.block_diag(*Bs)}


def apart(modules: dict[str, LowRank], parts: dict[str, Part], wholes: Mapping[str, list[str]]) -> None:
    """Give matrices of a whole adapters of the rank that each needs, in place, where B is a diagonal of blocks.

    wholes: our names of the modules of each whole, in order.
    """
    for names in wholes.values():
        count, low_rank = len(names), modules[names[0]]
        rank = low_rank.rank // count
        blocks = [slice(n * rank, (n + 1) * rank) for n in range(count)]
        Bs = [parts[f"{name}.lora_B"].read(None) for name in names]
        kept = [B[:, block] for B, block in zip(Bs, blocks, strict=True)]
        counts = [[int(x.count_nonzero()) for x in each] for each in (kept, Bs)]
        if low_rank.rank % count or counts[0] != counts[1]:
            continue
        alpha = round(low_rank.alpha / _growth(low_rank, count), 12)
        for name, block, B in zip(names, blocks, kept, strict=True):
            modules[name] = replace(low_rank, rank=rank, alpha=alpha)
            parts[f"{name}.lora_A"] = Part.of(parts[f"{name}.lora_A"].read(None)[block].clone())
            parts[f"{name}.lora_B"] = Part.of(B.contiguous())


def _growth(low_rank: LowRank, count: int) -> float:
    """The factor of alpha that leaves the scale the same when the rank is multiplied."""
    return count**0.5 if low_rank.rslora else count
