"""routed_tokens in Triton, as an op for torch without gradient."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from blockdiff.kernels.launch import Launch, cached_by_sizes, check_dtypes, check_without_gradient, registered
from blockdiff.kernels.routing import kernels
from blockdiff.kernels.tiles import elementwise, power_of_2, precision_of, tile_for, tile_of

PARTS = 8  # of every score's sum: the same for any number of tokens, whose bits do not depend on others


@registered("routed_tokens")
def _routed_tokens(
    x: Tensor, scale: Tensor, root: float, weight: Tensor, expert_scale: Tensor, k: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Experts int64 [N, k] and their fp32 weights of N tokens [..., D]."""
    E, D = weight.shape
    N = x.numel() // D
    index, of_expert = x.new_empty(N, k, dtype=torch.int64), x.new_empty(N, k, dtype=torch.float32)
    yield index, of_expert
    score, choose, columns = _routed_tokens_of(N, E, D, k, x.dtype, x.device)
    scores = x.new_empty(PARTS, N, columns, dtype=torch.float32)
    x = x.contiguous()
    score(x, scale, root, weight.contiguous(), scores, N)
    choose(x, scores, expert_scale, index, of_expert, N)


@cached_by_sizes
def _routed_tokens_of(
    N: int, E: int, D: int, k: int, dtype: torch.dtype, device: torch.device
) -> tuple[Launch, Launch, int]:
    """The launches that score the experts and choose them, and the columns of the scores."""
    tile = tile_for("routed_tokens", dtype, device, E).fitted(columns=E, inner=D)
    constants = dict(E=E, D=D, PARTS=PARTS, PRECISION=precision_of(dtype), **tile.options)
    score = Launch(kernels.router_scores, (tile.grid(N)[0], PARTS), **constants)
    choosing = elementwise(tile.columns, 512)
    constants = dict(E=E, TOP_K=k, CHOICES=power_of_2(k), PARTS=PARTS, **choosing.options)
    return score, Launch(kernels.routed_tokens, choosing.grid(N)[:1], **constants), tile.columns


def routed_tokens(
    x: Tensor, scale_D: Tensor, root: float, weight_ED: Tensor, expert_scale_E: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """As in torch.py; Unserved where a gradient is needed, and for more experts than the table of tiles has."""
    check_without_gradient("routed_tokens", x)
    check_dtypes("routed_tokens", x, weight_ED)
    tile_of("routed_tokens", x, len(weight_ED))
    index_Nk, weight_Nk = _routed_tokens(x, scale_D, root, weight_ED, expert_scale_E, k)
    return index_Nk, weight_Nk
