"""Span attention against compiled FlexAttention and SDPA, over the geometries of training and of sampling.

Peers get what suits them, untimed: prefix and own keys in one tensor, key heads repeated where a backend has no
groups, masks built. Outputs and gradients of row 0 are compared with fp32 before anything is timed; a peer that
computes something else is left out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attempts import attempt
from benchmarks.installed import installed
from benchmarks.models import Size
from benchmarks.result import Agreement, Result, half_precision_bound
from benchmarks.settings import Settings
from benchmarks.timing import contenders, interleaved, once, probe
from blockdiff.kernels import resolve
from blockdiff.spans import Spans, denoise_spans, encode_spans
from tests.oracles import span_attention as reference
from tests.support.peaks import peak_memory

SUITE = "span attention"
FP32_BOUND = 1e-4
COMPARED_QUERIES = 1024  # of which the fp32 scores are held at once

PEER_BOUND = 0.05  # relative; a wrong mask is far beyond

Work = Callable[[], object]
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
        """Query-key pairs that are seen: the useful work."""
        lo, hi = self.spans.bounds_BT4[..., ::2].long(), self.spans.bounds_BT4[..., 1::2].long()
        return int((hi - lo).clamp(min=0).sum())

    def flops(self, with_backward: bool) -> float:
        """Useful operations: two products forward, five backward."""
        return (14 if with_backward else 4) * self.heads.h * self.heads.d * self.pairs

    def bytes(self, element_size: int) -> int:
        """Bytes of everything that a forward must read and write once."""
        B, T = self.spans.bounds_BT4.shape[:2]
        keys = 2 * (self.prefix + self.own) * self.heads.K
        return B * self.heads.d * element_size * (keys + 2 * T * self.heads.h)


SLIDING, FULL = Heads(16, 8, 256, 1024), Heads(16, 2, 512, None)  # the released model's two kinds of layers
SMALL = Heads(6, 2, 64, None)


def training(name: str, heads: Heads, rows: int, S: int, C: int, L: int) -> Iterator[Shape]:
    """The encode of clean rows of S tokens, and the denoise of C canvases of L tokens in each."""
    yield Shape(
        name, f"encode {rows} x {S}", heads, 0, S, encode_spans(torch.zeros(rows, S).long(), heads.window), True
    )
    start_BC = (torch.arange(C) * S // C).expand(rows, C)
    spans = denoise_spans(start_BC, torch.zeros_like(start_BC), torch.full_like(start_BC, L), L, heads.window)
    yield Shape(name, f"denoise {rows} x {C} canvases over {S}", heads, S, C * L, spans, True)


def sampling(name: str, heads: Heads, rows: int, prefix: int, L: int) -> Shape:
    """One canvas per row after `prefix` cached tokens, of which a sliding layer keeps the last window - 1."""
    held = prefix if heads.window is None else min(prefix, heads.window - 1)
    start = torch.full((rows, 1), held)
    own = denoise_spans(start, torch.zeros_like(start), torch.full_like(start, L), L)
    spans = Spans(own.bounds_BT4, sees_all=True)
    return Shape(name, f"sample {rows} x {prefix}", heads, held, L, spans, False)


def shapes(is_cuda: bool) -> Iterator[Shape]:
    """Every shape of a device; a GPU has the released model's."""
    if not is_cuda:
        yield from training("15m", SMALL, 4, 128, 2, 64)
        yield sampling("15m", SMALL, 1, 128, 64)
        return
    for heads in (SLIDING, FULL):
        for rows, S, C in ((16, 1024, 4), (4, 4096, 16), (1, 16_384, 64)):
            yield from training("released", heads, rows, S, C, 256)
        for rows in (1, 8, 64):
            for prefix in (512, 8192, 65_536):
                yield sampling("released", heads, rows, prefix, 256)


def run(sizes: list[Size], settings: Settings, done: Callable[[Result], object]) -> None:
    """Every shape that the device and the names of `sizes` ask for; `done` gets each line as it is finished."""
    is_cuda = settings.device.type == "cuda"
    attend, names = resolve(settings.kernels).span_attention, {size.name for size in sizes}
    if not is_cuda:
        for shape in shapes(True):
            print(f"{SUITE}, released, {shape.heads}, {shape.kind}: needs a GPU", file=sys.stderr)
    ceilings = Ceilings.measured(settings.device) if is_cuda else None
    for shape in shapes(is_cuda):
        if shape.name in names:
            for with_backward in (False, True) if shape.trains else (False,):
                with attempt(f"{SUITE}, {shape.heads}, {shape.kind}{', with backward' * with_backward}"):
                    done(measure(shape, with_backward, attend, settings, ceilings))


@dataclass(frozen=True)
class Ceilings:
    """The limits of this device: bf16 products (operations a second) and copies (bytes a second, read and written)."""

    flops: float
    bandwidth: float

    @staticmethod
    def measured(device: torch.device) -> Ceilings:
        """By a large square product and a large copy, the best of a few."""
        n = 8192
        a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        source = torch.empty(1 << 30, device=device, dtype=torch.uint8)
        target = torch.empty_like(source)
        product, copy = once(lambda: a @ b, device), once(lambda: target.copy_(source), device)
        product(), copy()
        flops = 2 * n**3 / min(product() for _ in range(10))
        return Ceilings(flops, 2 * source.numel() / min(copy() for _ in range(10)))


def measure(
    shape: Shape, with_backward: bool, attend: Callable[..., Any], settings: Settings, ceilings: Ceilings | None
) -> Result:
    """One line: compare row 0 with fp32, then time in turns, then trace the memory."""
    device = settings.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    spans = Spans(shape.spans.bounds_BT4.to(device), shape.spans.sees_all)
    tensors, grad_out = draw(shape, device, dtype)

    def ours(q: Tensor, prefix_k: Tensor, prefix_v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
        out = attend(q, prefix_k, prefix_v, own_k, own_v, spans, 1.0)
        assert isinstance(out, Tensor)
        return out

    case = f"{shape.heads}, {shape.kind}, {'forward and backward' if with_backward else 'forward'}"
    agreement = _agreement(spans, tensors, grad_out, ours, with_backward)
    result = Result(SUITE, shape.name, case, agreement)
    if not agreement.is_met:
        return result
    work = _work(ours, tensors, grad_out, with_backward)
    works = {}
    for name, (peer, prepared) in _checked(peers(shape, spans, tensors), ours, tensors).items():
        works[name] = _work(peer, prepared, grad_out.transpose(1, 2), with_backward)
    probed = probe({name: once(each, device) for name, each in works.items()})
    chosen = {name: once(works[name], device) for name in contenders(probed)}
    times = interleaved({"ours": once(work, device)} | chosen, settings.repeats)
    our_times = times.pop("ours")
    result = replace(result, ours=our_times, peers=times, probed=probed)
    memory = peak_memory(work, device), peak_memory(works[str(result.fastest_peer)], device)
    return replace(result, case=f"{case}; {_rates(shape, with_backward, our_times.median, ceilings)}", memory=memory)


def draw(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """q, prefix k and v, own k and v as normed heads have them, and the gradient of the output."""
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


def _rates(shape: Shape, with_backward: bool, seconds: float, ceilings: Ceilings | None) -> str:
    rate = shape.flops(with_backward) / seconds
    words = f"{rate / 1e12:.3g} TFLOP/s"
    if ceilings is None:
        return words
    words += f" = {rate / ceilings.flops:.0%} of a product's"
    if with_backward:
        return words
    bandwidth = shape.bytes(2) / seconds
    return f"{words}, {bandwidth / 1e12:.2f} TB/s = {bandwidth / ceilings.bandwidth:.0%} of a copy's"


# -- comparing -------------------------------------------------------------------------------------------------


def _agreement(spans: Spans, tensors: list[Tensor], grad_out: Tensor, ours: Attend, backward: bool) -> Agreement:
    """Relative errors of row 0 against fp32; in half precision bounded by twice those of SDPA."""

    dense = spans.dense(tensors[1].shape[1], tensors[3].shape[1])[:, None]

    def sdpa(*x: Tensor) -> Tensor:
        return _sdpa(dense, None, *_whole(list(x))).transpose(1, 2)

    names = ["output", *("grad q", "grad prefix k", "grad prefix v", "grad own k", "grad own v")[: 5 * backward]]
    truth = _truth(spans, [x[:1] for x in tensors], grad_out[:1], backward)
    mine, theirs = (_of_row_0(attend, tensors, grad_out, backward) for attend in (ours, sdpa))
    errors = {}
    for name, x, y, exact in zip(names, mine, theirs, truth, strict=True):
        if exact.numel():
            bound = FP32_BOUND if x.dtype == torch.float32 else half_precision_bound(_error(y, exact))
            errors[name] = (_error(x, exact), bound)
    return Agreement(errors)


def _of_row_0(attend: Attend, tensors: list[Tensor], grad_out: Tensor, backward: bool) -> list[Tensor]:
    with torch.set_grad_enabled(backward):
        out = attend(*tensors)
    grads = torch.autograd.grad(out, tensors, grad_out, allow_unused=True) if backward else ()
    filled = (torch.zeros_like(x) if grad is None else grad for x, grad in zip(tensors, grads, strict=False))
    return [x.detach()[:1] for x in (out, *filled)]


def _truth(spans: Spans, tensors: list[Tensor], grad_out: Tensor, backward: bool) -> list[Tensor]:
    """The reference in fp32, some queries and one key head at a time."""
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


def _error(values: Tensor, truth: Tensor) -> float:
    """Relative 2-norm error; infinite where anything is not a number."""
    error = float((values.float() - truth).norm() / truth.norm().clamp(min=1e-30))
    return error if math.isfinite(error) else math.inf


# -- the peers -------------------------------------------------------------------------------------------------


Peers = dict[str, tuple[Attend, list[Tensor]]]  # a peer, and its q, k and v


def peers(shape: Shape, spans: Spans, tensors: list[Tensor]) -> Peers:
    """The peers for a geometry; one that cannot run is named when it is tried."""
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
        if flash_3 is not None and spans.sees_all:  # it knows no mask of two spans
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


@torch.no_grad()
def _checked(candidates: Peers, ours: Attend, tensors: list[Tensor]) -> Peers:
    """The candidates that run and compute the same."""
    truth, found = ours(*tensors).float(), {}
    for name, (peer, prepared) in candidates.items():
        try:
            error = _error(peer(*prepared).transpose(1, 2), truth)
        except Exception as problem:  # whatever a backend says that does not take this shape
            print(f"{name}: not available: {type(problem).__name__}: {str(problem)[:200]}", file=sys.stderr)
            continue
        if error <= PEER_BOUND:
            found[name] = peer, prepared
        else:
            print(f"{name}: left out, its output differs by {error:.2g}", file=sys.stderr)
    return found


def _whole(tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, and k and v of both sources, heads before tokens."""
    q, prefix_k, prefix_v, own_k, own_v = tensors
    k, v = torch.cat([prefix_k, own_k], 1), torch.cat([prefix_v, own_v], 1)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _sdpa(is_seen: Tensor | None, backend: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v, is_seen, scale=1.0, enable_gqa=q.shape[1] > k.shape[1])
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_seen, scale=1.0)


def _flash_3(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-3 of tensors with tokens before heads; earlier versions also return the log-sum-exp."""
    out = module.flash_attn_func(q, k, v, softmax_scale=1.0, causal=False)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def _flex(shape: Shape, spans: Spans) -> Attend:
    """FlexAttention, compiled, with a BlockMask of the same geometry."""
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
