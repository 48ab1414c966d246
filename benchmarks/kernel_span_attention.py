"""Span attention against compiled FlexAttention and SDPA, over the geometries of training and of sampling.

Inputs are prepared for each peer, untimed: prefix and own keys joined, key heads repeated if a backend has no groups,
masks built. Outputs and gradients of row 0 are compared with fp32 before anything is timed. A peer that computes
something else is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attempts import attempt
from benchmarks.installed import installed
from benchmarks.kernel_lines import Work, agreement, computes, rates, timed
from benchmarks.models import Size
from benchmarks.quick_start import Ceilings
from benchmarks.result import Agreement, Result
from benchmarks.settings import Settings
from blockdiff.kernels import resolve
from blockdiff.spans import Spans, denoise_spans, encode_spans
from tests.oracles import span_attention as reference

SUITE = "span attention"
COMPARED_QUERIES = 1024  # whose fp32 scores are in memory together

Attend = Callable[..., Tensor]  # ours: q, prefix k and v, own k and v; a peer: q, k, v, heads before tokens


@dataclass(frozen=True)
class Heads:
    """A kind of layer: h query heads, K key heads of d numbers, and its window."""

    h: int
    K: int
    d: int
    window: int | None

    def __str__(self) -> str:
        return f"d {self.d}, {self.h}/{self.K} heads, {'full' if self.window is None else f'window {self.window}'}"


@dataclass(frozen=True)
class Shape:
    """B rows with P prefix and O own keys, and the spans of their T queries."""

    name: str
    kind: str
    heads: Heads
    prefix: int
    own: int
    spans: Spans
    trains: bool

    @property
    def pairs(self) -> int:
        """Return the number of query-key pairs that are seen: the useful work."""
        lo, hi = self.spans.bounds_BT4[..., ::2].long(), self.spans.bounds_BT4[..., 1::2].long()
        return int((hi - lo).clamp(min=0).sum())

    def flops(self, with_backward: bool) -> float:
        """Return the useful operations: two products forward, five backward."""
        return (14 if with_backward else 4) * self.heads.h * self.heads.d * self.pairs

    def bytes(self, element_size: int) -> int:
        """Return the bytes that a forward must read and write, each once."""
        B, T = self.spans.bounds_BT4.shape[:2]
        keys = 2 * (self.prefix + self.own) * self.heads.K
        return B * self.heads.d * element_size * (keys + 2 * T * self.heads.h)


SLIDING, FULL = Heads(16, 8, 256, 1024), Heads(16, 2, 512, None)  # the released model's two kinds of layers


def training(name: str, heads: Heads, rows: int, S: int, C: int, L: int) -> Iterator[Shape]:
    """Yield the encode of clean rows of S tokens, and the denoise of C canvases of L tokens in each row."""
    yield Shape(
        name, f"encode {rows} x {S}", heads, 0, S, encode_spans(torch.zeros(rows, S).long(), heads.window), True
    )
    start_BC = (torch.arange(C) * S // C).expand(rows, C)
    spans = denoise_spans(start_BC, torch.zeros_like(start_BC), torch.full_like(start_BC, L), L, heads.window)
    yield Shape(name, f"denoise {rows} x {C} canvases over {S}", heads, S, C * L, spans, True)


def sampling(name: str, heads: Heads, rows: int, prefix: int, L: int) -> Shape:
    """Return one canvas per row after `prefix` cached tokens; sliding layers keep the last window - 1 of them."""
    held = prefix if heads.window is None else min(prefix, heads.window - 1)
    start = torch.full((rows, 1), held)
    own = denoise_spans(start, torch.zeros_like(start), torch.full_like(start, L), L)
    spans = Spans(own.bounds_BT4, sees_all=True)
    return Shape(name, f"sample {rows} x {prefix}", heads, held, L, spans, False)


def shapes() -> Iterator[Shape]:
    """Yield every shape of the released model."""
    for heads in (SLIDING, FULL):
        for rows, S, C in ((16, 1024, 4), (4, 4096, 16), (1, 16_384, 64)):
            yield from training("released", heads, rows, S, C, 256)
        for rows in (1, 8, 64):
            for prefix in (512, 8192, 65_536):
                yield sampling("released", heads, rows, prefix, 256)


def run(sizes: list[Size], settings: Settings, done: Callable[[Result], object]) -> None:
    """Measure every shape on a GPU if `sizes` have the released model; call `done` with each finished line."""
    if settings.device.type != "cuda":
        print(f"{SUITE}: needs a GPU", file=sys.stderr)
        return
    attend, ceilings = resolve(settings.kernels).span_attention, Ceilings.of(settings.device)
    for shape in shapes() if "released" in {size.name for size in sizes} else ():
        for with_backward in (False, True) if shape.trains else (False,):
            with attempt(f"{SUITE}, {shape.heads}, {shape.kind}{', with backward' * with_backward}"):
                done(measure(shape, with_backward, attend, settings, ceilings))


def measure(
    shape: Shape, with_backward: bool, attend: Callable[..., Any], settings: Settings, ceilings: Ceilings | None
) -> Result:
    """Compare row 0 with fp32, then time in turns, then trace the memory; return the line."""
    device = settings.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    spans = Spans(shape.spans.bounds_BT4.to(device), shape.spans.sees_all)
    tensors, grad_out = draw(shape, device, dtype)

    def ours(q: Tensor, prefix_k: Tensor, prefix_v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
        out = attend(q, prefix_k, prefix_v, own_k, own_v, spans, 1.0)
        assert isinstance(out, Tensor)
        return out

    case = f"{shape.heads}, {shape.kind}, {'forward and backward' if with_backward else 'forward'}"
    result = Result(SUITE, shape.name, case, _agreement(spans, tensors, grad_out, ours, with_backward))
    if not result.agreement.is_met:
        return result
    works = {}
    with torch.no_grad():
        values = ours(*tensors)
        found = {
            name: peer
            for name, peer in peers(shape, spans, tensors).items()
            if computes(name, lambda peer=peer: [peer[0](*peer[1]).transpose(1, 2)], [values])  # type: ignore[misc]
        }
    for name, (peer, prepared) in found.items():
        works[name] = _work(peer, prepared, grad_out.transpose(1, 2), with_backward)
    line = timed(result, _work(ours, tensors, grad_out, with_backward), works, settings)
    return rates(line, shape.flops(with_backward), None if with_backward else shape.bytes(2), ceilings)


def draw(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Draw q, prefix k and v, own k and v as normed heads produce them, and the gradient of the output."""
    g = torch.Generator(device).manual_seed(0)
    (B, T), heads = shape.spans.bounds_BT4.shape[:2], shape.heads
    sizes = [(B, T, heads.h, heads.d), *[(B, shape.prefix, heads.K, heads.d)] * 2]
    sizes += [*[(B, shape.own, heads.K, heads.d)] * 2, (B, T, heads.h, heads.d)]
    q, *keys, grad_out = (torch.randn(*size, generator=g, device=device, dtype=dtype) for size in sizes)
    return [x.requires_grad_(shape.trains) for x in (q.mul_(2 / heads.d**0.5), *keys)], grad_out


def _work(attend: Attend, tensors: list[Tensor], grad_out: Tensor, with_backward: bool) -> Work:
    def forward() -> None:
        with torch.no_grad():
            attend(*tensors)

    def both() -> None:
        torch.autograd.grad(attend(*tensors), tensors, grad_out, allow_unused=True)  # an empty prefix may be unused

    return both if with_backward else forward


# -- comparing -------------------------------------------------------------------------------------------------


def _agreement(spans: Spans, tensors: list[Tensor], grad_out: Tensor, ours: Attend, backward: bool) -> Agreement:
    """Return relative errors of row 0 against fp32; in half precision twice SDPA's are the bound."""

    dense = spans.dense(tensors[1].shape[1], tensors[3].shape[1])[:, None]

    def sdpa(*x: Tensor) -> Tensor:
        return _sdpa(dense, None, *_whole(list(x))).transpose(1, 2)

    names = ["output", *("grad q", "grad prefix k", "grad prefix v", "grad own k", "grad own v")[: 5 * backward]]
    truth = _truth(spans, [x[:1] for x in tensors], grad_out[:1], backward)
    mine, theirs = (_of_row_0(attend, tensors, grad_out, backward) for attend in (ours, sdpa))
    named = [dict(zip(names, each, strict=True)) for each in (mine, theirs, truth)]
    return agreement(*named, is_fp32=tensors[0].dtype == torch.float32)


def _of_row_0(attend: Attend, tensors: list[Tensor], grad_out: Tensor, backward: bool) -> list[Tensor]:
    with torch.set_grad_enabled(backward):
        out = attend(*tensors)
    grads = torch.autograd.grad(out, tensors, grad_out, allow_unused=True) if backward else ()
    filled = (torch.zeros_like(x) if grad is None else grad for x, grad in zip(tensors, grads, strict=False))
    return [x.detach()[:1] for x in (out, *filled)]


def _truth(spans: Spans, tensors: list[Tensor], grad_out: Tensor, backward: bool) -> list[Tensor]:
    """Return the reference in fp32, computed for some queries and one key head at a time."""
    wide = [x.detach().float().requires_grad_(backward) for x in tensors]
    out = torch.empty_like(wide[0])
    group = tensors[0].shape[2] // tensors[3].shape[2]
    for lo in range(0, out.shape[1], COMPARED_QUERIES):
        queries = slice(lo, lo + COMPARED_QUERIES)
        some = Spans(spans.bounds_BT4[:1, queries])
        for head in range(tensors[3].shape[2]):
            of_group = slice(head * group, (head + 1) * group)
            pk, pv, ok, ov = (x[:, :, head : head + 1] for x in wide[1:])
            with torch.set_grad_enabled(backward):
                part, _ = reference.span_attention(wide[0][:, queries, of_group], pk, pv, ok, ov, some, 1.0)
            if backward:
                part.backward(grad_out[:, queries, of_group].float())
            out[:, queries, of_group] = part.detach()
    return [out.detach(), *(x.grad for x in wide if x.grad is not None)]


# -- the peers -------------------------------------------------------------------------------------------------


Peers = dict[str, tuple[Attend, list[Tensor]]]  # a peer, and its q, k and v


def peers(shape: Shape, spans: Spans, tensors: list[Tensor]) -> Peers:
    """Return the peers for a geometry; one that cannot run is named when it is tried."""
    whole = [x.detach().requires_grad_(shape.trains) for x in _whole(tensors)]
    repeated = [x.detach().repeat_interleave(whole[0].shape[1] // x.shape[1], 1) for x in whole]
    repeated = [x.requires_grad_(shape.trains) for x in repeated]
    dense = spans.dense(shape.prefix, shape.own)[:, None]
    found: Peers = {}
    if tensors[0].is_cuda:
        mask = None if spans.sees_all else dense
        backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION}
        if mask is None:
            backends["flash"] = SDPBackend.FLASH_ATTENTION
        else:
            backends["efficient"] = SDPBackend.EFFICIENT_ATTENTION
        flash_3 = installed("flash_attn_interface", "FlashAttention-3")
        if flash_3 is not None and spans.sees_all:  # it has no mask of two spans
            in_order = [x.detach().transpose(1, 2).contiguous().requires_grad_(shape.trains) for x in whole]
            found["FlashAttention-3, no mask"] = partial(_flash_3, flash_3), in_order
        for name, backend in backends.items():
            found[f"SDPA {name}, {'no' if mask is None else 'dense'} mask"] = partial(_sdpa, mask, backend), repeated
        try:
            found["FlexAttention, compiled"] = _flex(shape, spans), whole
        except Exception as error:
            print(f"{SUITE}: FlexAttention not available: {str(error)[:200]}", file=sys.stderr)
    found["SDPA, dense mask"] = partial(_sdpa, dense, None), whole
    return found


def _whole(tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, and k and v of both sources joined, heads before tokens."""
    q, prefix_k, prefix_v, own_k, own_v = tensors
    k, v = torch.cat([prefix_k, own_k], 1), torch.cat([prefix_v, own_v], 1)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _sdpa(is_seen: Tensor | None, backend: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v, is_seen, scale=1.0, enable_gqa=q.shape[1] > k.shape[1])
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_seen, scale=1.0)


def _flash_3(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run FlashAttention-3, which has tokens before heads; earlier versions also return the log-sum-exp."""
    out = module.flash_attn_func(q, k, v, softmax_scale=1.0, causal=False)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def _flex(shape: Shape, spans: Spans) -> Attend:
    """Return compiled FlexAttention with a BlockMask of the same geometry."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # it would stop compiling after a few shapes
    (B, T), prefix = spans.bounds_BT4.shape[:2], shape.prefix
    prefix_lo, prefix_hi, own_lo, own_hi = (x.contiguous() for x in spans.bounds_BT4.unbind(-1))

    def is_seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        in_prefix = (j >= prefix_lo[b, i]) & (j < prefix_hi[b, i])
        return in_prefix | ((j - prefix >= own_lo[b, i]) & (j - prefix < own_hi[b, i]))

    mask = torch.compile(create_block_mask)(is_seen, B, None, T, prefix + shape.own, device=spans.bounds_BT4.device)
    attend: Any = torch.compile(flex_attention, dynamic=False)
    return partial(attend, block_mask=mask, scale=1.0, enable_gqa=True)
