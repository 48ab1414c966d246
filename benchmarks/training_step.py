"""One optimiser step: encode once, pass one, pass two, both losses, backward and, in some lines, AdamW.

Both sides get the same weights, rows, noise, coins and scored canvases. Losses and all gradients are compared before
anything is timed. With LoRA the peer is transformers with PEFT. It has two copies of an adapter for a weight that two
of its modules share; their gradients add up to the gradient of our single one.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion

from benchmarks import peer
from benchmarks.attempts import attempt
from benchmarks.installed import installed
from benchmarks.models import Pair, Size, in_fp32, pair, with_wide_margins
from benchmarks.result import Agreement, Result, half_precision_bound
from benchmarks.settings import Settings
from benchmarks.timing import contenders, interleaved, once, probe
from blockdiff import checkpoint
from blockdiff.canvas import Batch, Canvas, CleanRow, lay_out
from blockdiff.checkpoint.adapter_names import peft_names
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, adapter_tensors, draw_adapters, targets
from blockdiff.models.diffusion_gemma.names import NAMES
from blockdiff.objective import Objective
from blockdiff.training.optimiser import build
from tests.support.peaks import peak_memory

SUITE = "training step"
# fp32 sums of thousands of terms in another order; in half precision the peer's own error is the bound
LOSS_BOUND, GRADIENT_BOUND, TENSOR_BOUND = 1e-5, 1e-4, 1e-3
ADAPTED, LOW_RANK = ("attention", "mlp", "experts"), LowRank(16, 32)


@dataclass(frozen=True)
class Case:
    """The choices that vary between lines: number format, AdamW, canvases per row (one of which is scored), LoRA."""

    dtype: torch.dtype = torch.float32
    autocast: bool = False
    update: bool = False
    canvases: int = 1
    lora: bool = False

    def __str__(self) -> str:
        words = ["bf16 autocast" if self.autocast else {torch.float32: "fp32"}.get(self.dtype, "bf16")]
        if self.update:
            words.append("with AdamW")
        if self.lora:
            words.append(f"LoRA of {', '.join(ADAPTED)}")
        if self.canvases > 1:
            words.append(f"1 of {self.canvases} canvases scored, peer runs all")
        return ", ".join(words)


def cases(size: Size, device: torch.device) -> list[Case]:
    """Return the lines of a size; the first is the one quoted."""
    fp32, bf16 = torch.float32, torch.bfloat16
    if device.type != "cuda":
        return [Case(), Case(update=True), Case(autocast=True), Case(canvases=4), Case(lora=True)]
    lines = [Case(bf16), Case(bf16, update=True), Case(bf16, lora=True)]
    # more canvases need a window longer than the row, unlike the released model's
    return lines if size.name == "released" else [*lines, Case(fp32), Case(autocast=True), Case(bf16, canvases=4)]


def run(sizes: list[Size], settings: Settings, done: Callable[[Result], object]) -> None:
    """Measure every case of every size; call `done` with each finished line."""
    has_peft = installed("peft", "PEFT") is not None
    for size in sizes:
        for case in cases(size, settings.device):
            if case.lora and not has_peft:
                continue
            with attempt(f"{SUITE}, {size.name}, {case}"):
                models = pair(size, settings.device, case.dtype, kernels=settings.kernels)
                done(measure(models, size, case, settings))


def measure(models: Pair, size: Size, case: Case, settings: Settings) -> Result:
    """Compare, then time in turns, then trace the memory; return the line."""
    device, vocabulary = settings.device, models.ours.vocab_size
    if case.lora:
        models = adapted(models)
    corruption = UniformCorruption(vocabulary)
    objective = Objective(models.ours, Linear(), corruption, seed=0, sweep=True)  # as the quickstart has it
    scored = case.canvases - 1

    def draw(seed: int) -> tuple[Batch, Batch]:
        """Return a batch with all canvases, and one with the scored canvases only."""
        whole = rows_of(size, vocabulary, models.ours.canvas_length, case.canvases, seed).to(device)
        is_scored_BC = (torch.arange(case.canvases) == scored).expand(whole.start_BC.shape)
        return whole, whole.select(is_scored_BC)[0]

    plain = case.dtype == torch.float32 and not case.autocast
    whole, batch = with_wide_margins(models.ours, draw, lambda drawn: objective(drawn[1])) if plain else draw(1)
    noisy_BCL, _ = objective.corruption.corrupt(
        whole.canvas_BCL, objective.schedule.alpha(whole.t_BC), whole.address_BC3, objective.seed
    )
    canvas_count, ar_count = batch.canvas_count(), batch.ar_count()
    precision = torch.autocast(device.type, torch.bfloat16) if case.autocast else contextlib.nullcontext()

    def losses() -> tuple[Tensor, Tensor]:
        sums = objective(batch)
        return sums["canvas"] / canvas_count, sums["ar"] / ar_count

    our_update = build(objective, lr=0.0) if case.update else None
    ours = gradient_step(models.ours, losses, precision, our_update)

    def step_of(model: DiffusionGemmaForBlockDiffusion, rows: str, experts: str) -> peer.TrainingStep:
        return peer.TrainingStep(model, whole, noisy_BCL, scored, rows, experts)

    # a rate of zero computes all of AdamW and leaves the compared weights unchanged
    parameters = [p for name, p in models.peer.named_parameters() if "vision" not in name]
    update = torch.optim.AdamW(parameters, lr=0.0, betas=(0.95, 0.99), fused=True) if case.update else None
    variants = {
        f"{experts}, pass one on {rows} rows": gradient_step(
            models.peer, step_of(models.peer, rows, experts), precision, update
        )
        for experts in peer.EXPERTS
        for rows in ("coin", "all")
    }

    if plain:
        agreement = _agreement(models, ours(), next(iter(variants.values()))())
    else:
        reference = in_fp32(models.peer)
        truth = gradient_step(reference, step_of(reference, "coin", "eager"), contextlib.nullcontext(), None)()
        theirs = variants["eager, pass one on coin rows"]()
        agreement = _half_agreement(models, reference, ours(), theirs, truth)
        del reference
    result = Result(SUITE, size.name, str(case), agreement)
    if not agreement.is_met:
        return result
    probed = probe({name: once(work, device) for name, work in variants.items()})
    work = {"ours": ours} | {name: variants[name] for name in contenders(probed)}
    times = interleaved({name: once(step, device) for name, step in work.items()}, settings.repeats)
    our_times = times.pop("ours")
    result = replace(result, ours=our_times, peers=times, probed=probed)
    fastest = variants[str(result.fastest_peer)]
    sides = ((ours, models.ours), (fastest, models.peer))
    peak, peer_peak = (peak_memory(step, device, release=model.zero_grad) for step, model in sides)
    return replace(result, memory=(peak, peer_peak))


def rows_of(size: Size, vocabulary: int, canvas_length: int, canvases: int, seed: int = 1) -> Batch:
    """Return rows of `prompt` tokens and whole canvases; every other row has the signal, t is spread evenly."""
    draw = torch.Generator().manual_seed(seed)
    width = size.prompt + canvases * canvas_length
    tokens_BS = torch.randint(3, vocabulary, (size.rows, width), generator=draw).tolist()
    rows = []
    for b, tokens in enumerate(tokens_BS):
        of_row = []
        for c in range(canvases):
            start = size.prompt + c * canvas_length
            clean = tokens[start : start + canvas_length]
            t = (b + 0.5) / size.rows
            of_row.append(Canvas(clean, start, t=t, coin=b % 2 == 0, address=(0, b, c)))
        rows.append(CleanRow(tokens, of_row, sample_id=b))
    return lay_out(rows, canvas_length, pad_id=0)


def gradient_step(
    model: torch.nn.Module,
    losses: Callable[[], tuple[Tensor, Tensor]],
    precision: contextlib.AbstractContextManager,
    update: torch.optim.Optimizer | None,
) -> Callable[[], tuple[float, float]]:
    """Return a call that clears gradients, computes losses and gradients, and updates; it returns the losses."""

    def run() -> tuple[float, float]:
        model.zero_grad(set_to_none=True)
        with precision:
            canvas, ar = losses()
        (canvas + ar).backward()
        if update is not None:
            update.step()
        return float(canvas.detach()), float(ar.detach())

    return run


def adapted(models: Pair) -> Pair:
    """Return both models with the same adapters, transformers' by PEFT."""
    from peft import PeftModel

    model = models.ours
    adapt(model, targets(model, dict.fromkeys(ADAPTED, LOW_RANK)))
    draw_adapters(model, 0, model.device, model.dtype)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():  # with B = 0 the effect of A would not show
        for tensor in adapter_tensors(model).values():
            tensor.add_((torch.randn(tensor.shape, generator=draw) * 0.02).to(tensor))
    with tempfile.TemporaryDirectory() as folder:
        directory = checkpoint.save_adapter(model, Path(folder) / "adapter")
        wrapped = PeftModel.from_pretrained(models.peer, directory, is_trainable=True)
    return Pair(model.train(), wrapped.get_base_model().train())


def _agreement(models: Pair, ours: tuple[float, float], theirs: tuple[float, float]) -> Agreement:
    """Return in fp32 the relative errors of the losses, of all gradients as one vector, and of the worst tensor."""
    total, worst = _gradient_error(_our_gradients(models), _peer_gradients(models, models.peer))
    return Agreement(
        {
            "losses": (loss_error(ours, theirs), LOSS_BOUND),
            "gradients": (total, GRADIENT_BOUND),
            "worst tensor": (worst, TENSOR_BOUND),
        }
    )


def _half_agreement(
    models: Pair,
    reference: DiffusionGemmaForBlockDiffusion,
    ours: tuple[float, float],
    theirs: tuple[float, float],
    truth: tuple[float, float],
) -> Agreement:
    """Return our bf16 errors against the peer in fp32, bounded by those of the peer's own bf16."""
    exact = _peer_gradients(models, reference)
    total, _ = _gradient_error(_our_gradients(models), exact)
    their_total, _ = _gradient_error(_peer_gradients(models, models.peer), exact)
    return Agreement(
        {
            "losses to fp32": (loss_error(ours, truth), max(2 * loss_error(theirs, truth), 0.01)),
            "gradients to fp32": (total, half_precision_bound(their_total)),
        }
    )


def _our_gradients(models: Pair) -> list[Tensor]:
    """Return the gradients of all trained parameters, adapters in PEFT's layout."""
    gradients = []
    for name, parameter in models.ours.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(peft_names(name, models.ours)[1](gradient) if "lora" in name else gradient)
    return gradients


def _peer_gradients(models: Pair, peer: DiffusionGemmaForBlockDiffusion) -> list[Tensor]:
    """Return the peer's gradients of the same parameters; PEFT's two copies of an adapter are added up."""
    theirs = {name.replace(".default", ""): p for name, p in peer.named_parameters(remove_duplicate=False)}
    gradients = []
    for name, parameter in models.ours.named_parameters():
        if parameter.requires_grad:
            keys = peft_names(name, models.ours)[0] if "lora" in name else [NAMES.to_hub(name)]
            copies = [theirs[key] for key in keys if key in theirs]
            each = [torch.zeros_like(copy) if copy.grad is None else copy.grad for copy in copies]
            gradients.append(torch.stack(each).sum(0))
    return gradients


def _gradient_error(gradients: list[Tensor], truths: list[Tensor]) -> tuple[float, float]:
    """Return the relative 2-norm error against the true gradients: of all as one vector, and of the worst tensor."""
    squared_error = squared_norm = worst = 0.0
    for gradient, truth in zip(gradients, truths, strict=True):
        error, norm = float((gradient.float() - truth.float()).norm()), float(truth.float().norm())
        squared_error, squared_norm = squared_error + error**2, squared_norm + norm**2
        worst = max(worst, error / norm if norm else math.inf if error else 0.0)
    return math.sqrt(squared_error / squared_norm), worst


def loss_error(values: tuple[float, float], truth: tuple[float, float]) -> float:
    return max(abs(value / true - 1) for value, true in zip(values, truth, strict=True))
