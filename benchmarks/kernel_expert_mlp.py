"""The experts against transformers' (eager loop, grouped_mm, on a GPU also compiled by Inductor) and a padded bmm.

All sides have the same weights in the same memory. Outputs and every gradient are compared before anything is timed. A
peer that computes something else, or cannot run here, is named and left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DiffusionGemmaTextConfig
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaTextExperts

from benchmarks.attempts import attempt
from benchmarks.installed import installed
from benchmarks.kernel_lines import Work, agreement, computes, rates, timed
from benchmarks.models import Size
from benchmarks.quick_start import Ceilings
from benchmarks.result import Result
from benchmarks.settings import Settings
from blockdiff.kernels import resolve

SUITE = "experts"
FORWARD, FROZEN, TRAINED = "forward", "forward and backward, frozen experts", "forward and backward, trained experts"
GRAPH = "forward in a CUDA graph"

Mix = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # x, gate_up, down, index, weight -> y


@dataclass(frozen=True)
class Shape:
    """N tokens, each routed to k of E experts; skewed: the popularity of experts falls like 1 / rank."""

    name: str
    N: int
    E: int
    k: int
    D: int
    F: int
    skewed: bool = False
    kinds: tuple[str, ...] = (FORWARD, FROZEN, TRAINED)

    def __str__(self) -> str:
        return f"{self.N:,} tokens, {self.k} of {self.E} experts, {'skewed' if self.skewed else 'uniform'}"

    def flops(self, kind: str) -> float:
        """Return operations of three products with D x F matrices a row.

        The backward takes as many again, and gradients of the weights as many once more.
        """
        return {FROZEN: 12, TRAINED: 18}.get(kind, 6) * self.N * self.k * self.D * self.F

    def bytes(self, element_size: int, used: int) -> float:
        """Return the bytes that a forward must move: the `used` experts, tokens in and out."""
        return element_size * (used * 3 * self.D * self.F + 2 * self.N * self.D)


SHAPES = tuple(
    Shape("released", N, 128, 8, 2816, 704, skewed, (FORWARD, *((GRAPH,) if N <= 2048 else ()), FROZEN, TRAINED))
    for N in (256, 2048, 8192, 32_768)
    for skewed in (False, True)
)


class Inputs(NamedTuple):
    """The tensors that all candidates read, and the gradient of the output."""

    x_ND: Tensor
    gate_up_EFD: Tensor
    down_EDF: Tensor
    index_Nk: Tensor
    weight_Nk: Tensor
    grad_ND: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """Return the inputs in another dtype, except the routing."""
        x, gate_up, down, index, weight, grad = self
        return Inputs(x.to(dtype), gate_up.to(dtype), down.to(dtype), index, weight, grad.to(dtype))


def run(sizes: list[Size], settings: Settings, done: Callable[[Result], object]) -> None:
    """Measure every shape on a GPU if `sizes` have the released model; call `done` with each finished line."""
    if settings.device.type != "cuda":
        print(f"{SUITE}: needs a GPU", file=sys.stderr)
        return
    experts, ceilings = resolve(settings.kernels).expert_mlp, Ceilings.of(settings.device)
    for shape in SHAPES if "released" in {size.name for size in sizes} else ():
        with attempt(f"{SUITE}, {shape}"):
            inputs = draw(shape, settings.device, torch.bfloat16)
            for kind in shape.kinds:
                with attempt(f"{SUITE}, {shape}, {kind}"):
                    done(measure(shape, kind, inputs, experts, settings, ceilings))


def draw(shape: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Draw normed tokens, weights that preserve their scale, and a routing.

    A token's experts are distinct, and their weights sum to 1.
    """
    g = torch.Generator(device).manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=g, device=device, dtype=dtype).mul_(scale)

    N, E, k, D, width = shape.N, shape.E, shape.k, shape.D, shape.F
    rank_E = torch.randperm(E, generator=g, device=device) + 1
    scores_NE = -(-torch.rand(N, E, generator=g, device=device).clamp(min=1e-9).log()).log()  # Gumbel
    if shape.skewed:
        scores_NE = scores_NE - rank_E.log()
    index_Nk = scores_NE.topk(k).indices
    weight_Nk = torch.rand(N, k, generator=g, device=device) + 0.1
    gate_up, down = normal(E, 2 * width, D, scale=D**-0.5), normal(E, D, width, scale=width**-0.5)
    return Inputs(normal(N, D), gate_up, down, index_Nk, weight_Nk / weight_Nk.sum(-1, keepdim=True), normal(N, D))


def measure(
    shape: Shape,
    kind: str,
    inputs: Inputs,
    experts: Callable[..., Tensor],
    settings: Settings,
    ceilings: Ceilings | None,
) -> Result:
    """Compare with fp32 eager, time in turns, trace the memory; return the line.

    In bf16 the error of bf16 eager is the bound.
    """

    def ours(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return experts(x, gate_up, down, index, weight)

    values = _work(ours, inputs, kind)()
    eager = _transformers("eager", shape)
    truth = _work(eager, inputs.to(torch.float32), kind)()
    theirs = values if inputs.x_ND.dtype == torch.float32 else _work(eager, inputs, kind)()
    named = [dict(zip(NAMES, each, strict=False)) for each in (values, theirs, truth)]
    result = Result(
        SUITE, shape.name, f"{shape}, {kind}", agreement(*named, is_fp32=inputs.x_ND.dtype == torch.float32)
    )
    if not result.agreement.is_met:
        return result
    del truth, theirs, named
    works = {name: work for name, work in _peers(shape, kind, inputs) if computes(name, work, values)}
    work = _work(ours, inputs, kind)
    if kind == GRAPH:
        work, works = _captured(work), dict(_captured_ones(works))
    if not works:
        print(f"{result.case}: no peer runs here", file=sys.stderr)
        return result
    line = timed(result, work, works, settings, has_peak=kind != GRAPH)  # a graph's memory is allocated at its capture
    is_backward = kind in (FROZEN, TRAINED)
    nbytes = None if is_backward else shape.bytes(inputs.x_ND.element_size(), len(inputs.index_Nk.unique()))
    return rates(line, shape.flops(kind), nbytes, ceilings)


def _work(mix: Mix, inputs: Inputs, kind: str) -> Work:
    """Return a call that computes the output and, if `kind` has them, the gradients."""
    x, gate_up, down, index, weight, grad = inputs

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [mix(x, gate_up, down, index, weight)]

    trained = [t.detach().requires_grad_() for t in (x, weight, gate_up, down)]
    wanted = trained if kind == TRAINED else trained[:2]

    def both() -> list[Tensor]:
        first, second = trained[2:] if kind == TRAINED else (gate_up, down)
        out = mix(trained[0], first, second, index, trained[1])
        return [out.detach(), *torch.autograd.grad(out, wanted, grad)]

    return forward if kind in (FORWARD, GRAPH) else both


NAMES = ("output", "grad x", "grad weight", "grad gate_up", "grad down")


# -- the peers -------------------------------------------------------------------------------------------------


def _peers(shape: Shape, kind: str, inputs: Inputs) -> Iterator[tuple[str, Work]]:
    """Yield the peers; one that cannot run here says so when it is tried."""
    yield "transformers eager", _work(_transformers("eager", shape), inputs, kind)
    grouped = _transformers("grouped_mm", shape)
    yield "transformers grouped_mm", _work(grouped, inputs, kind)
    capacity = int(inputs.index_Nk.flatten().bincount().max())
    if shape.E * capacity <= 4 * shape.N * shape.k:  # else the slab is nearly all padding
        yield "padded bmm", _work(_padded(capacity), inputs, kind)
    deep_gemm = installed("deep_gemm", "DeepGEMM") if inputs.x_ND.is_cuda and kind == FORWARD else None
    if deep_gemm is not None:
        yield "DeepGEMM, bf16", _work(_deep_gemm(deep_gemm), inputs, kind)
    if inputs.x_ND.is_cuda and not shape.skewed:  # minutes of autotuning, which sees shapes and not the routing
        torch._dynamo.reset()
        module = _module("grouped_mm", shape)

        def mix(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor) -> Tensor:
            weights = {"gate_up_proj": gate_up, "down_proj": down}
            return torch.func.functional_call(module, weights, (x, index, weight))

        compiled = torch.compile(mix, mode="max-autotune-no-cudagraphs", dynamic=False)
        yield "grouped_mm, autotuned by Inductor", _work(compiled, inputs, kind)


def _deep_gemm(module: Any) -> Mix:
    """Return DeepGEMM's grouped bf16 products on rows sorted by expert, padded to its alignment; forward only."""

    def mix(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        (N, k), E = index.shape, len(down)
        aligned = module.get_mk_alignment_for_contiguous_layout()
        chosen, order = index.flatten().sort(stable=True)
        counts = torch.bincount(chosen, minlength=E)
        padded = (counts + aligned - 1) // aligned * aligned
        begin, first = padded.cumsum(0) - padded, counts.cumsum(0) - counts
        place = begin[chosen] + torch.arange(N * k, device=x.device) - first[chosen]
        rows = (N * k // aligned + min(E, N * k)) * aligned
        owner = torch.full((rows,), -1, dtype=torch.int32, device=x.device)
        owner[place] = chosen.int()
        x_MD = x.new_zeros(rows, x.shape[1]).index_copy_(0, place, x[order // k])
        h, y = x.new_empty(rows, gate_up.shape[1]), x.new_empty(rows, down.shape[1])
        module.m_grouped_bf16_gemm_nt_contiguous(x_MD, gate_up, h, owner)
        gate, up = h.chunk(2, -1)
        a = torch.nn.functional.gelu(gate, approximate="tanh") * up
        module.m_grouped_bf16_gemm_nt_contiguous(a, down, y, owner)
        of_slot = torch.empty_like(order).scatter_(0, order, place)
        return (y[of_slot].view(N, k, -1) * weight[..., None]).sum(1).to(x.dtype)

    return mix


def _transformers(implementation: str, shape: Shape) -> Mix:
    """Return the forward of transformers' module, on any weights."""
    module = _module(implementation, shape)

    def mix(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        for name, value in (("gate_up_proj", gate_up), ("down_proj", down)):
            if getattr(module, name) is not value:
                module._parameters.pop(name, None)
                setattr(module, name, value)
        return module(x, index, weight)

    return mix


def _module(implementation: str, shape: Shape) -> DiffusionGemmaTextExperts:
    """Return transformers' module without weights."""
    config = DiffusionGemmaTextConfig(
        num_experts=shape.E,
        top_k_experts=shape.k,
        hidden_size=shape.D,
        moe_intermediate_size=shape.F,
        hidden_activation="gelu_pytorch_tanh",
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        return DiffusionGemmaTextExperts(config)


def _padded(capacity: int) -> Mix:
    """Return two bmm over a slab of `capacity` rows for every expert, the fullest expert's (known beforehand)."""

    def mix(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        E, (N, k) = gate_up.shape[0], index.shape
        expert, order = index.flatten().sort(stable=True)
        first_E = torch.searchsorted(expert, torch.arange(E, device=x.device))
        place = expert * capacity + torch.arange(N * k, device=x.device) - first_E[expert]
        slab = x.new_zeros(E * capacity, x.shape[1]).index_copy(0, place, x.index_select(0, order // k))
        gate, up = torch.bmm(slab.view(E, capacity, -1), gate_up.transpose(1, 2)).chunk(2, -1)
        y = torch.bmm(F.gelu(gate, approximate="tanh") * up, down.transpose(1, 2)).flatten(0, 1)
        of_slot = torch.empty_like(place).scatter(0, order, place)
        return (y.index_select(0, of_slot).view(N, k, -1) * weight[..., None]).sum(1).to(x.dtype)

    return mix


# -- CUDA graphs -----------------------------------------------------------------------------------------------


def _captured(work: Work) -> Work:
    """Return the replay of the work's CUDA graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _captured_ones(works: dict[str, Work]) -> Iterator[tuple[str, Work]]:
    for name, work in works.items():
        if name == "transformers eager":
            continue  # it reads the routing on the host
        try:
            yield name, _captured(work)
        except Exception as problem:
            print(f"{name}: no CUDA graph: {type(problem).__name__}: {str(problem)[:200]}", file=sys.stderr)
