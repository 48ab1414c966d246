"""The experts against transformers' (eager loop, grouped_mm, on a GPU also compiled by Inductor) and a padded bmm.

All sides hold the same weights in the same memory. Outputs and every gradient are compared before anything is timed;
a peer that computes something else, or cannot run here, is named and left out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DiffusionGemmaTextConfig
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaTextExperts

from benchmarks.attempts import attempt
from benchmarks.installed import installed
from benchmarks.kernel_span_attention import Ceilings
from benchmarks.models import Size
from benchmarks.result import Agreement, Result, half_precision_bound
from benchmarks.settings import Settings
from benchmarks.timing import contenders, interleaved, once, probe
from blockdiff.kernels import resolve
from tests.support.peaks import peak_memory

SUITE = "experts"
FP32_BOUND = 1e-4
PEER_BOUND = 0.05  # relative; an expert or a weight that is mistaken is far beyond

FORWARD, FROZEN, TRAINED = "forward", "forward and backward, frozen experts", "forward and backward, trained experts"
GRAPH = "forward in a CUDA graph"

Work = Callable[[], Any]
Mix = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # x, gate_up, down, index, weight -> y


@dataclass(frozen=True)
class Shape:
    """N tokens, of which each takes k of E experts; skewed: the popularity of experts falls like 1 / rank."""

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
        """Operations: three matrices of D x F a row; backward as much again, and once more for their gradients."""
        return {FROZEN: 12, TRAINED: 18}.get(kind, 6) * self.N * self.k * self.D * self.F

    def bytes(self, element_size: int, used: int) -> float:
        """Bytes that a forward must move: the experts in use, tokens in and out."""
        return element_size * (used * 3 * self.D * self.F + 2 * self.N * self.D)


CPU_SHAPES = (
    Shape("quickstart", 64 * 35, 8, 2, 96, 64),
    Shape("quickstart", 17, 8, 2, 96, 64, kinds=(FORWARD,)),
    Shape("15m", 4 * 192, 16, 4, 256, 128),
    Shape("15m", 64, 16, 4, 256, 128, kinds=(FORWARD,)),
)
CUDA_SHAPES = tuple(
    Shape("released", N, 128, 8, 2816, 704, skewed, (FORWARD, *((GRAPH,) if N <= 2048 else ()), FROZEN, TRAINED))
    for N in (256, 2048, 8192, 32_768)
    for skewed in (False, True)
)


class Inputs(NamedTuple):
    """The tensors that every candidate reads, and the gradient of the output."""

    x_ND: Tensor
    gate_up_EFD: Tensor
    down_EDF: Tensor
    index_Nk: Tensor
    weight_Nk: Tensor
    grad_ND: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """All but the routing in another dtype."""
        x, gate_up, down, index, weight, grad = self
        return Inputs(x.to(dtype), gate_up.to(dtype), down.to(dtype), index, weight, grad.to(dtype))


def run(sizes: list[Size], settings: Settings, done: Callable[[Result], object]) -> None:
    """Every shape that the device and the names of `sizes` ask for; `done` gets each line as it is finished."""
    device, names = settings.device, {size.name for size in sizes}
    is_cuda = device.type == "cuda"
    experts = resolve(settings.kernels).expert_mlp
    ceilings = Ceilings.measured(device) if is_cuda else None
    for shape in (*CPU_SHAPES, *CUDA_SHAPES):
        if shape in CUDA_SHAPES and not is_cuda:
            print(f"{SUITE}, {shape}: needs a GPU", file=sys.stderr)
        elif shape.name in names and (shape in CUDA_SHAPES) == is_cuda:
            with attempt(f"{SUITE}, {shape}"):
                inputs = draw(shape, device, torch.bfloat16 if is_cuda else torch.float32)
                for kind in shape.kinds:
                    with attempt(f"{SUITE}, {shape}, {kind}"):
                        done(measure(shape, kind, inputs, experts, settings, ceilings))


def draw(shape: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Normed tokens, weights that keep their size, and a routing without repetition whose weights add up to 1."""
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
    """One line: compare with fp32 eager (bf16: bounded by the error of bf16 eager), time in turns, trace memory."""
    device = settings.device

    def ours(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return experts(x, gate_up, down, index, weight)

    values = _work(ours, inputs, kind)()
    eager = _transformers("eager", shape)
    truth = _work(eager, inputs.to(torch.float32), kind)()
    theirs = values if inputs.x_ND.dtype == torch.float32 else _work(eager, inputs, kind)()
    result = Result(SUITE, shape.name, f"{shape}, {kind}", _agreement(values, theirs, truth))
    if not result.agreement.is_met:
        return result
    del truth, theirs
    works = {name: work for name, work in _peers(shape, kind, inputs) if _computes(name, work, values)}
    work = _work(ours, inputs, kind)
    if kind == GRAPH:
        work, works = _captured(work), dict(_captured_ones(works))
    if not works:
        print(f"{result.case}: no peer runs here", file=sys.stderr)
        return result
    probed = probe({name: once(each, device) for name, each in works.items()})
    chosen = {name: once(works[name], device) for name in contenders(probed)}
    times = interleaved({"ours": once(work, device)} | chosen, settings.repeats)
    our_times = times.pop("ours")
    result = replace(result, ours=our_times, peers=times, probed=probed)
    memory = None  # a graph's is set aside when it is captured
    if kind != GRAPH:
        memory = peak_memory(work, device), peak_memory(works[str(result.fastest_peer)], device)
    used = len(inputs.index_Nk.unique())
    rates = _rates(shape, kind, used, inputs.x_ND.element_size(), our_times.median, ceilings)
    return replace(result, case=f"{result.case}; {rates}", memory=memory)


def _work(mix: Mix, inputs: Inputs, kind: str) -> Work:
    """A call that gives the output and, where the kind has them, the gradients."""
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


def _rates(shape: Shape, kind: str, used: int, element_size: int, seconds: float, ceilings: Ceilings | None) -> str:
    rate = shape.flops(kind) / seconds
    words = f"{rate / 1e12:.3g} TFLOP/s"
    if ceilings is None:
        return words
    words += f" = {rate / ceilings.flops:.0%} of a product's"
    if kind in (FROZEN, TRAINED):
        return words
    bandwidth = shape.bytes(element_size, used) / seconds
    return f"{words}, {bandwidth / 1e12:.2f} TB/s = {bandwidth / ceilings.bandwidth:.0%} of a copy's"


# -- comparing -------------------------------------------------------------------------------------------------


NAMES = ("output", "grad x", "grad weight", "grad gate_up", "grad down")


def _agreement(ours: list[Tensor], theirs: list[Tensor], truth: list[Tensor]) -> Agreement:
    errors = {}
    for name, x, y, exact in zip(NAMES, ours, theirs, truth, strict=False):
        bound = FP32_BOUND if x.dtype == torch.float32 and x is y else half_precision_bound(_error(y, exact))
        errors[name] = (_error(x, exact), bound)
    return Agreement(errors)


def _error(values: Tensor, truth: Tensor) -> float:
    """Relative 2-norm error; infinite where anything is not a number."""
    error = float((values.float() - truth.float()).norm() / truth.float().norm().clamp(min=1e-30))
    return error if math.isfinite(error) else math.inf


def _computes(name: str, work: Work, ours: list[Tensor]) -> bool:
    """True for a peer that runs here and gives what we give."""
    try:
        error = max(_error(x, y) for x, y in zip(work(), ours, strict=True))
    except Exception as problem:  # whatever it says that cannot take this shape or device
        print(f"{name}: not available: {type(problem).__name__}: {str(problem)[:200]}", file=sys.stderr)
        return False
    if error > PEER_BOUND:
        print(f"{name}: left out, it differs by {error:.2g}", file=sys.stderr)
    return error <= PEER_BOUND


# -- the peers -------------------------------------------------------------------------------------------------


def _peers(shape: Shape, kind: str, inputs: Inputs) -> Iterator[tuple[str, Work]]:
    """The peers that there are; one that cannot run says so when it is tried."""
    yield "transformers eager", _work(_transformers("eager", shape), inputs, kind)
    grouped = _transformers("grouped_mm", shape)
    yield "transformers grouped_mm", _work(grouped, inputs, kind)
    capacity = int(inputs.index_Nk.flatten().bincount().max())
    if shape.E * capacity <= 4 * shape.N * shape.k:  # else nearly all of it is padding
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
    """DeepGEMM's grouped bf16 products, on rows sorted by expert and padded to its alignment; forward only."""

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
    """Their module's forward, on whatever weights it is given."""
    module = _module(implementation, shape)

    def mix(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        for name, value in (("gate_up_proj", gate_up), ("down_proj", down)):
            if getattr(module, name) is not value:
                module._parameters.pop(name, None)
                setattr(module, name, value)
        return module(x, index, weight)

    return mix


def _module(implementation: str, shape: Shape) -> DiffusionGemmaTextExperts:
    """Their module without weights."""
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
    """Every expert's tokens in a slab of as many rows as the fullest one has (known beforehand), two bmm."""

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
    """The same work as one graph's replay."""
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
