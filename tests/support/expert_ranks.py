"""The ranks of `test_exchange.py`: experts split over processes, beside one process that has all."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from blockdiff.checkpoint import init
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.kernels import resolve
from blockdiff.layers.experts import Experts
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, adapters_of, draw_adapters, targets
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.objective import Objective
from blockdiff.parallel.exchange import expert_parallel
from blockdiff.parallel.ranks import Ranks
from blockdiff.training.recomputation import checkpoint_activations
from tests.objective.test_objective import L, V, batch_of, rows
from tests.support.oracle import TWO_LAYERS, oracle, ours, tiny_config, widen_routers

E, D, F, K = 4, 16, 8, 2
Found = dict[str, Tensor]


def error(got: Tensor, expected: Tensor) -> float:
    """The norm of the difference as a share of the norm; of something that is zero, the norm itself."""
    norm = float(expected.double().norm())
    return float((got.double() - expected.double()).norm()) / (norm or 1.0)


def assert_same(got: Found, expected: Found, tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert error(got[name], value) <= tolerance, f"{name}: {error(got[name], value):.1e}"


# -- the experts of one layer --------------------------------------------------------------------------------


def experts(is_adapted: bool, dtype: torch.dtype, kernels: str) -> Experts:
    draw = torch.Generator().manual_seed(1)
    module: Experts = Experts(E, D, F, resolve(kernels))
    if is_adapted:
        module.adapt(LowRank(3, 6))
    for parameter in module.parameters():
        parameter.data.normal_(0.0, 0.3, generator=draw)
    return module.to(dtype)


def routed(routing: str, tokens: list[int], dtype: torch.dtype) -> tuple[list[Tensor], ...]:
    """Tokens, the experts they choose and their weights, for each rank."""
    draw = torch.Generator().manual_seed(2)
    x = [torch.randn(n, D, generator=draw).to(dtype) for n in tokens]
    weight = [torch.rand(n, K, generator=draw).to(torch.promote_types(dtype, torch.float32)) for n in tokens]
    choices = {
        "anywhere": lambda n: torch.rand(n, E, generator=draw).argsort(1)[:, :K],
        "all to the first rank": lambda n: torch.tensor([0, 1]).expand(n, K),
        "all to the last expert": lambda n: torch.tensor([E - 1, E]).expand(n, K),
        "padding": lambda n: torch.full((n, K), E),
    }
    index = [choices[routing](n).clone() for n in tokens]
    index[-1][-1] = E  # a token of padding
    return x, index, weight


def outputs(module: Experts, x: Tensor, index: Tensor, weight: Tensor, loss_weight: Tensor) -> Found:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = module(x, index, weight)
    assert y.dtype == x.dtype
    (y * loss_weight).sum().backward()
    assert x.grad is not None and weight.grad is not None
    return {"y": y.detach(), "x": x.grad, "weight": weight.grad}


def one_layer(ranks: Ranks, directory: Path, is_adapted: bool, dtype: torch.dtype, kernels: str, limit: float) -> None:
    """Every routing: outputs and gradients of this rank's tokens and experts are those of the whole layer."""
    tokens = [7, 0, 5, 1][: ranks.world] if ranks.world > 2 else [9, 4]
    mesh = init_device_mesh("cpu", (ranks.world,))
    # in Triton's interpreter, which is slow, that of which a rank and an expert get nothing
    routings = ("all to the last expert", "anywhere", "all to the first rank", "padding")
    for routing in routings[: 1 if kernels == "triton" else None]:
        x, index, weight = routed(routing, tokens, dtype)
        loss_weight = torch.randn(sum(tokens), D, generator=torch.Generator().manual_seed(3)).to(dtype)
        whole = experts(is_adapted, dtype, kernels)
        expected = outputs(whole, torch.cat(x), torch.cat(index), torch.cat(weight), loss_weight)
        split = experts(is_adapted, dtype, kernels)
        expert_parallel(split, mesh)
        mine = ranks.rank
        got = outputs(split, x[mine], index[mine], weight[mine], loss_weight.split(tokens)[mine])
        assert_same(got, {name: value.split(tokens)[mine] for name, value in expected.items()}, limit)
        held = {name: p.grad.chunk(ranks.world)[mine] for name, p in whole.named_parameters()}
        assert_same({name: p.grad.to_local() for name, p in split.named_parameters()}, held, limit)
        with torch.no_grad():
            assert error(split(x[mine], index[mine], weight[mine]), got["y"]) <= limit  # another path without gradient


# -- whole models --------------------------------------------------------------------------------------------


def gradients(model: nn.Module, world: int) -> Found:
    """The gradients of the sum over the ranks, whole: an expert's are summed where it lies, the others' here."""
    found: Found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, name
        if isinstance(parameter.grad, DTensor):
            found[name] = parameter.grad.full_tensor()
        else:
            found[name] = parameter.grad.clone()
            if world > 1:
                dist.all_reduce(found[name])
    return found


def trained(model: DiffusionGemma, chosen: list, world: int, **options: bool) -> Found:
    """Losses and gradients of some rows, added up over the ranks."""
    losses = [*Objective(model, Linear(), UniformCorruption(V), 5, **options)(batch_of(chosen)).values()]
    sum(losses).backward()
    sums = torch.stack([loss.detach().double() for loss in losses])
    if world > 1:
        dist.all_reduce(sums)
    return {"losses": sums, **gradients(model, world)}


def exact(is_wide: bool, is_adapted: bool) -> DiffusionGemma:
    """A model with wide router margins, in fp64 or in fp32."""
    if is_wide:
        model = ours(oracle(tiny_config(canvas_length=L, **TWO_LAYERS)))
    else:
        model = init(tiny_config(canvas_length=L, **TWO_LAYERS), seed=3, device="cpu", kernels="torch")
        widen_routers(model)
    if is_adapted:
        adapt(model, targets(model, {part: LowRank(3, 6) for part in ("attention", "experts")}))
        draw_adapters(model, 0, torch.device("cpu"), model.dtype)
        draw = torch.Generator().manual_seed(7)
        for module in adapters_of(model).values():
            for name, parameter in module.named_parameters(recurse=False):
                if name.endswith("lora_B"):
                    parameter.data.normal_(0.0, 0.1, generator=draw)
    return model


def whole_model(ranks: Ranks, directory: Path, is_wide: bool, limit: float) -> None:
    """Losses and all gradients, with and without adapters, recomputation and one sweep, are those of one process."""
    everything = rows()
    mesh = init_device_mesh("cpu", (ranks.world,))
    for is_adapted, is_recomputed, one_sweep in ((False, False, False), (True, True, True), (False, True, True)):
        expected = trained(exact(is_wide, is_adapted), everything, 1)
        model = exact(is_wide, is_adapted)
        if is_recomputed:
            checkpoint_activations(model)
        expert_parallel(model, mesh)
        got = trained(model, everything[ranks.rank :: ranks.world], ranks.world, sweep=one_sweep)
        assert_same(got, expected, limit)
