"""Low-rank adapters (LoRA, arXiv 2106.09685): W is frozen, and the trained scale * B A is added to it.

An adapter is part of the module that has the weight (`HasWeights`), so checkpoints, freezing and sharding see the same
model with a few more parameters. B A is formed only when adapters are merged. Encoding and denoising use the same
weights, so each weight has one adapter; it may act on noisy tokens only (`LowRank.noisy_only`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.once_differentiable import once_differentiable
from blockdiff.kernels.stored import StoredMatrix

LOW_RANK = ("lora_A", "lora_B", "gate_up_lora_A", "gate_up_lora_B", "down_lora_A", "down_lora_B")


@dataclass(frozen=True)
class LowRank:
    """The settings of an adapter: B A of rank `rank`, times alpha / rank, or alpha / sqrt(rank) with `rslora`.

    dropout: share of the inputs of A that are zeroed in training (experts have none). noisy_only: whether it acts on
    noisy tokens only. Clean tokens are then bit-equal to the base model's, and it cannot be merged into W.
    """

    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0
    noisy_only: bool = False

    @property
    def scale(self) -> float:
        """The factor of B A. Source of `rslora`: arXiv 2312.03732."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def is_low_rank(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2] in LOW_RANK


@torch.no_grad()
def draw_low_rank(A: Tensor, generator: torch.Generator) -> None:
    """Fill A uniformly from +-1 / sqrt(inputs), as PEFT does: Kaiming's bound for a slope of sqrt(5)."""
    A.uniform_(-(A.shape[-1] ** -0.5), A.shape[-1] ** -0.5, generator=generator)


@torch.no_grad()
def merged(
    weight: Tensor | StoredMatrix, A: Tensor, B: Tensor, scale: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Return weight + scale B A, one expert at a time if there are any: summed in at least fp32, rounded once to dtype.

    dtype: None for the weight's own; required for a stored weight.
    """
    if dtype is None:
        assert isinstance(weight, Tensor)
        dtype = weight.dtype
    wide = torch.promote_types(weight.dtype if isinstance(weight, Tensor) else dtype, torch.float32)
    out = torch.empty(weight.shape, dtype=dtype, device=A.device)
    for n in range(len(out)) if out.dim() == 3 else [...]:
        if isinstance(weight, Tensor):
            base = weight[n].to(wide)
        else:
            base = (weight if n is ... else weight.part(n)).decoded(wide)
        out[n].copy_(torch.addmm(base, B[n].to(wide), A[n].to(wide), alpha=scale))
    return out


class Adapted(NamedTuple):
    """The tensors of a linear layer and its adapter. base: x W^T if the weight is stored; `weight` is None then."""

    weight: Tensor | None
    base: Tensor | None
    bias: Tensor | None
    A: Tensor
    B: Tensor
    scale: float


class Casts(NamedTuple):
    """The adapters of layers that read the same tokens, cast to one dtype: all A stacked to one matrix, and each B.

    None: the matrix needs neither cast nor stacking, so the layer's own is used.
    """

    A_RD: Tensor | None
    B: tuple[Tensor | None, ...]

    @classmethod
    @torch.no_grad()
    def of(cls, layers: Sequence[Adapted], dtype: torch.dtype) -> Casts:
        """Cast and stack the adapters of layers, which share their dtype."""
        is_cast, A = layers[0].A.dtype is not dtype, layers[0].A
        stacked = torch.cat([layer.A for layer in layers]) if len(layers) > 1 else A if is_cast else None
        stacked = None if stacked is None else stacked.to(dtype)
        return cls(stacked, tuple([layer.B.to(dtype) if is_cast else None for layer in layers]))


def products(
    x: Tensor,
    layers: Sequence[Adapted],
    casts: Casts,
    dropped: Tensor | None = None,
    is_clean: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compute `W x + bias + scale B A dropped` of each layer; all read the same x [..., D].

    casts: the adapters in x's dtype. dropped: x after the adapters' dropout (None: x itself). is_clean: booleans [...]
    of tokens that the adapters do not change (None: they change all).
    """
    is_clean_N1 = None if is_clean is None else is_clean.reshape(-1, 1)
    scales = tuple([layer.scale for layer in layers])
    parts = [part for layer, B in zip(layers, casts.B, strict=True) for part in (*layer[:5], B)]
    outs: tuple[Tensor, ...] = _Products.apply(scales, x, dropped, is_clean_N1, casts.A_RD, *parts)
    return outs


class _Products(torch.autograd.Function):
    """All products of adapted layers as one autograd function, several times cheaper on the host than one for each."""

    @staticmethod
    def forward(
        ctx: Any,
        scales: tuple[float, ...],
        x: Tensor,
        dropped: Tensor | None,
        is_clean_N1: Tensor | None,
        A_RD: Tensor | None,
        *parts: Any,
    ) -> tuple[Tensor, ...]:
        weights, bases, biases = parts[0::6], parts[1::6], parts[2::6]
        A_RD = parts[3] if A_RD is None else A_RD
        casts = [B if cast is None else cast for B, cast in zip(parts[4::6], parts[5::6], strict=True)]
        narrowed_NR = F.linear(_rows(x if dropped is None else dropped), A_RD)
        if is_clean_N1 is not None:
            narrowed_NR.masked_fill_(is_clean_N1, 0)
        outs = []
        terms = zip(weights, bases, biases, casts, scales, _columns(narrowed_NR, casts), strict=True)
        for weight, base, bias, B, scale, narrowed in terms:
            out = base.clone() if weight is None else F.linear(x, weight, bias)
            out.view(-1, out.shape[-1]).addmm_(narrowed, B.t(), alpha=scale)
            outs.append(out)
        ctx.scales, ctx.dtype = scales, parts[3].dtype
        ctx.save_for_backward(x, dropped, is_clean_N1, narrowed_NR, A_RD, *weights, *casts)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, dropped, is_clean_N1, narrowed_NR, A_RD, *rest = ctx.saved_tensors
        weights, casts, flat = rest[: len(grads)], rest[len(grads) :], [_rows(grad) for grad in grads]
        _, needs_x, needs_dropped, _, _, *needs = ctx.needs_input_grad
        grad_narrowed_NR = torch.empty_like(narrowed_NR)
        for grad, B, scale, out in zip(flat, casts, ctx.scales, _columns(grad_narrowed_NR, casts), strict=True):
            out.addmm_(grad, B, beta=0, alpha=scale)
        if is_clean_N1 is not None:
            grad_narrowed_NR.masked_fill_(is_clean_N1, 0)
        of_parts: list[Tensor | None] = [None] * len(needs)
        for n, grad in enumerate(grads):
            of_parts[6 * n] = flat[n].t() @ _rows(x) if needs[6 * n] else None
            of_parts[6 * n + 1] = grad if needs[6 * n + 1] else None
            of_parts[6 * n + 2] = flat[n].sum(0) if needs[6 * n + 2] else None
        if any(needs[3::6]) or any(needs[4::6]):
            # one tensor for the gradients of all A and B, so that one operation casts them
            shapes = [(B.shape[1], A_RD.shape[1]) for B in casts] + [B.shape for B in casts]
            sizes = [rows * columns for rows, columns in shapes]
            together = A_RD.new_empty(sum(sizes))
            read_ND = _rows(x if dropped is None else dropped)
            torch.mm(grad_narrowed_NR.t(), read_ND, out=together[: A_RD.numel()].view(A_RD.shape))
            of_B = together.split(sizes)[len(casts) :]
            terms = zip(flat, _columns(narrowed_NR, casts), ctx.scales, of_B, casts, strict=True)
            for grad, narrowed, scale, grad_B, B in terms:
                grad_B.view(B.shape).addmm_(grad.t(), narrowed, beta=0, alpha=scale)
            cast = together.to(ctx.dtype).split(sizes)
            of_adapters = [part.view(shape) for part, shape in zip(cast, shapes, strict=True)]
            of_parts[3::6], of_parts[4::6] = of_adapters[: len(casts)], of_adapters[len(casts) :]
        grad_x = grad_dropped = None
        if needs_x:
            pairs = [(grad, weight) for grad, weight in zip(flat, weights, strict=True) if weight is not None]
            pairs += [(grad_narrowed_NR, A_RD)] if dropped is None else []
            for pair in pairs:
                grad_x = torch.mm(*pair) if grad_x is None else grad_x.addmm_(*pair)
            grad_x = None if grad_x is None else grad_x.view(x.shape)
        if needs_dropped:
            grad_dropped = torch.mm(grad_narrowed_NR, A_RD).view(x.shape)
        return None, grad_x, grad_dropped, None, None, *of_parts


def _rows(x: Tensor) -> Tensor:
    """Flatten tokens [..., D] to [N, D]."""
    return x.reshape(-1, x.shape[-1])


def _columns(narrowed_NR: Tensor, B: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split the products with the stacked A into one part for each layer."""
    return narrowed_NR.split([layer_B.shape[1] for layer_B in B], 1)
