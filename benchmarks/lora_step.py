"""The gradient of one LoRA step: encode, pass one, pass two, both losses, backward; beside transformers with PEFT.

Both sides have the same frozen weights, adapters, rows, noise and coins. PEFT has two copies of an adapter where
transformers has two modules over one weight, whose gradients together are that of our one. Losses and the gradients of
all adapters are compared before anything is timed.
"""

from __future__ import annotations

import contextlib
import copy
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import peer
from benchmarks.attempts import attempt
from benchmarks.installed import installed
from benchmarks.models import Pair, Size, pair, with_wide_margins
from benchmarks.result import Agreement, Result, half_precision_bound
from benchmarks.settings import Settings
from benchmarks.timing import contenders, interleaved, once, peak_memory, probe
from benchmarks.training_step import GRADIENT_BOUND, LOSS_BOUND, gradient_step, loss_error, rows_of
from blockdiff import checkpoint
from blockdiff.canvas import Batch
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, adapter_tensors, draw_adapters, targets
from blockdiff.objective import Objective

SUITE = "LoRA step"
CASES = {
    "attention": ("attention",),
    "attention and MLP": ("attention", "mlp"),
    "attention, MLP and experts": ("attention", "mlp", "experts"),
}
RANK, ALPHA = 16, 32


def run(sizes: list[Size], settings: Settings, done: Callable[[Result], object]) -> None:
    """Every choice of adapted parts for every size; without PEFT there is nothing to compare with."""
    dtype = torch.float32 if settings.device.type == "cpu" else torch.bfloat16
    for size in sizes if installed("peft", "PEFT") is not None else ():
        for name, parts in CASES.items():
            with attempt(f"{SUITE}, {size.name}, {name}"):
                models = pair(size, settings.device, dtype, kernels=settings.kernels)
                done(measure(models, size, name, parts, settings))


def measure(models: Pair, size: Size, name: str, parts: tuple[str, ...], settings: Settings) -> Result:
    """One line: adapt both alike, compare, time in turns, trace the memory."""
    device, model = settings.device, models.ours
    adapt(model, targets(model, {part: LowRank(RANK, ALPHA) for part in parts}))
    draw_adapters(model, 0, device, model.dtype)
    with torch.no_grad():  # a B of 0 would hide what A does
        generator = torch.Generator().manual_seed(1)
        for tensor in adapter_tensors(model).values():
            tensor.add_((torch.randn(tensor.shape, generator=generator) * 0.02).to(tensor))
    theirs = _adapted_peer(models)
    model.train()
    corruption = UniformCorruption(model.vocab_size)
    objective = Objective(model, Linear(), corruption, seed=0, sweep=True)  # as the quickstart has it

    def draw(seed: int) -> tuple[Batch, Batch]:
        whole = rows_of(size, model.vocab_size, model.canvas_length, 1, seed).to(device)
        return whole, whole

    is_exact = model.dtype == torch.float32
    batch = (with_wide_margins(model, draw, lambda drawn: objective(drawn[1])) if is_exact else draw(1))[0]
    noisy_BCL, _ = objective.corruption.corrupt(
        batch.canvas_BCL, objective.schedule.alpha(batch.t_BC), batch.address_BC3, objective.seed
    )
    canvas_count, ar_count = batch.canvas_count(), batch.ar_count()

    def losses() -> Any:
        sums = objective(batch)
        return sums["canvas"] / canvas_count, sums["ar"] / ar_count

    plain = contextlib.nullcontext()
    ours = gradient_step(model, losses, plain, None)
    variants = {
        experts: gradient_step(theirs, peer.TrainingStep(theirs, batch, noisy_BCL, experts=experts), plain, None)
        for experts in peer.EXPERTS
    }
    if is_exact:
        values, truth = ours(), variants["eager"]()
        bounds = {"losses": (loss_error(values, truth), LOSS_BOUND)}
        agreement = Agreement(bounds | {"gradients": (_error(models, theirs), GRADIENT_BOUND)})
    else:
        reference = copy.deepcopy(theirs).float()
        truth = gradient_step(reference, peer.TrainingStep(reference, batch, noisy_BCL), plain, None)()
        own, values = variants["eager"](), ours()
        bound = half_precision_bound(_error_of(theirs, reference))
        agreement = Agreement(
            {
                "losses to fp32": (loss_error(values, truth), max(2 * loss_error(own, truth), 0.01)),
                "gradients to fp32": (_error(models, reference), bound),
            }
        )
        del reference
    result = Result(SUITE, size.name, f"{'fp32' if is_exact else 'bf16'}, {name}", agreement)
    if not agreement.is_met:
        return result
    probed = probe({name: once(work, device) for name, work in variants.items()})
    work = {"ours": ours} | {name: variants[name] for name in contenders(probed)}
    times = interleaved({name: once(step, device) for name, step in work.items()}, settings.repeats)
    our_times = times.pop("ours")
    result = replace(result, ours=our_times, peers=times, probed=probed)
    sides = ((ours, model), (variants[str(result.fastest_peer)], theirs))
    peak, peer_peak = (peak_memory(step, device, release=side.zero_grad) for step, side in sides)
    return replace(result, memory=(peak, peer_peak))


def _adapted_peer(models: Pair) -> Any:
    """The peer with PEFT's adapters of the same values, through the format that both read."""
    from peft import PeftModel

    with tempfile.TemporaryDirectory() as folder:
        directory = checkpoint.save_adapter(models.ours, Path(folder) / "adapter")
        return PeftModel.from_pretrained(models.peer, directory, is_trainable=True).get_base_model().train()


def _their_gradients(theirs: Any) -> dict[str, torch.Tensor]:
    """The gradients of PEFT's adapters by our names, those of two copies added."""
    keys = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    return {name: grad for name, grad in keys.items() if grad is not None}


def _error(models: Pair, theirs: Any) -> float:
    """The relative 2-norm error of our adapters' gradients against theirs."""
    from blockdiff.checkpoint.adapters import peft_names

    found, error, norm = _their_gradients(theirs), 0.0, 0.0
    for name, parameter in models.ours.named_parameters():
        if not parameter.requires_grad:
            continue
        keys, arrange = peft_names(name, models.ours)
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        pairs = [found[key].float() for key in keys if key in found]
        truth = sum(pairs, torch.zeros(())) if pairs else torch.zeros(())
        error += float((arrange(grad.float()) - truth).norm()) ** 2
        norm += float(torch.as_tensor(truth).norm()) ** 2
    return math.sqrt(error / norm)


def _error_of(theirs: Any, reference: Any) -> float:
    """The relative error of PEFT's own gradients against those of its fp32 copy."""
    mine, truth = _their_gradients(theirs), _their_gradients(reference)
    error = sum(float((mine[name].float() - grad).norm()) ** 2 for name, grad in truth.items())
    return math.sqrt(error / sum(float(grad.norm()) ** 2 for grad in truth.values()))
