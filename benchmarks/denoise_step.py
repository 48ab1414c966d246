"""One denoising step of `Sampler.generate` against transformers' `generate`.

The time of a call includes the prompt's encode, so a step is (time with more steps - time with fewer) / difference.
Both keep their stopping rule, with a confidence that no canvas reaches, so a step computes and waits as shipped.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion

from benchmarks import peer
from benchmarks.attempts import attempt
from benchmarks.models import Pair, Size, in_fp32, pair, with_wide_margins
from benchmarks.result import Agreement, Result, half_precision_bound
from benchmarks.settings import Settings
from benchmarks.timing import Stopwatch, contenders, interleaved, once, probe
from blockdiff.checkpoint.generation import Generation
from blockdiff.kernels.launch import forget_sizes
from blockdiff.sampling.request import Request
from blockdiff.sampling.request import Result as Answer
from blockdiff.sampling.sampler import Sampler
from tests.support.peaks import peak_memory

SUITE = "denoising step"
BATCHES = (1, 8)
CONFIDENCE = 1e-12  # mean entropies, in nats, stay above this
LOGIT_BOUND = 1e-4


def run(sizes: list[Size], settings: Settings, done: Callable[[Result], object]) -> None:
    """Measure every batch size of every size; call `done` with each finished line."""
    for size in sizes:
        for dtype in (torch.bfloat16, torch.float32) if settings.device.type == "cuda" else (torch.float32,):
            if size.name == "released" and dtype == torch.float32:
                continue
            name = f"{SUITE}, {size.name}, {dtype}"
            with attempt(name):
                models = pair(size, settings.device, dtype, kernels=settings.kernels)
                for rows in BATCHES:
                    with attempt(f"{name}, batch {rows}"):
                        for result in measure(models, size, rows, settings):
                            done(result)


@torch.no_grad()
def measure(models: Pair, size: Size, rows: int, settings: Settings) -> list[Result]:
    """Compare the logits of two steps, then time in turns, then trace the memory; return the lines.

    On CUDA a second line has the same steps without CUDA graphs; the first uses them where it can.
    """
    models.ours.eval(), models.peer.eval()
    device = settings.device
    ours = models.ours

    def draw(seed: int) -> tuple[Tensor, Tensor]:
        """Draw prompts and canvases."""
        draws = torch.Generator().manual_seed(1 + seed)
        tokens_BS = torch.randint(3, ours.vocab_size, (rows, size.prompt), generator=draws)
        canvas_BL = torch.randint(0, ours.vocab_size, (rows, ours.canvas_length), generator=draws)
        return tokens_BS.to(device), canvas_BL.to(device)

    def run(drawn: tuple[Tensor, Tensor]) -> object:
        return logits_of_two_steps(models, *drawn)

    tokens_BS, canvas_BL = with_wide_margins(ours, draw, run) if ours.dtype == torch.float32 else draw(1)
    case = f"{'fp32' if ours.dtype == torch.float32 else 'bf16'}, batch {rows}"
    result = Result(SUITE, size.name, case, agreement(models, tokens_BS, canvas_BL))
    if not result.agreement.is_met:
        return [result]

    few, many = size.steps
    requests = [Request(b, tokens=row, seed=b) for b, row in enumerate(tokens_BS.tolist())]
    sampler = Sampler(ours, None, Generation(confidence=CONFIDENCE, max_new_tokens=ours.canvas_length))

    def generate(steps: int, graphs: bool | None = None) -> Callable[[], list[Answer]]:
        return lambda: sampler.generate(requests, max_steps=steps, batch_size=rows, graphs=graphs)

    def generate_peer(steps: int, experts: str, cache: str) -> Callable[[], object]:
        return peer.generation(models.peer, tokens_BS, steps, CONFIDENCE, experts, cache)

    counted = peer.denoising_steps(models.peer, generate_peer(many, "eager", "dynamic"))
    if counted != many or any(answer.steps != [many] for answer in generate(many)()):
        raise RuntimeError(f"{size.name}: a canvas stopped before step {many}: the times would not be of equal work")

    def per_step(of: Callable[[int], Callable[[], object]]) -> Stopwatch:
        fewer, more = once(of(few), device), once(of(many), device)
        return lambda: (more() - fewer()) / (many - few)

    # With a static cache transformers compiles its step, which takes minutes.
    caches = ("dynamic", "static") if settings.compiled_peer else ("dynamic",)
    variants = {
        f"{experts}, {cache} cache": per_step(lambda n, e=experts, c=cache: generate_peer(n, e, c))  # type: ignore[misc]
        for experts in peer.EXPERTS
        for cache in caches
        if (experts, cache) != ("eager", "static")  # its loop over experts cannot be compiled whole
    }
    probed = probe(variants)
    ours_too = {"ours": per_step(generate)}
    if device.type == "cuda":
        ours_too["without graphs"] = per_step(lambda steps: generate(steps, False))
        if importlib.util.find_spec("triton") is not None:
            plain = per_step(lambda steps: _through_triton(generate(steps, False)))
            ours_too["without graphs, every launch through Triton"] = plain
    stopwatches = ours_too | {name: variants[name] for name in contenders(probed)}
    times = interleaved(stopwatches, settings.repeats, warmup=1)
    our_times = {name: times.pop(name) for name in ours_too}
    result = replace(result, peers=times, probed=probed)
    experts, cache = str(result.fastest_peer).removesuffix(" cache").split(", ")
    memory = peak_memory(generate(few), device), peak_memory(generate_peer(few, experts, cache), device)
    return [
        replace(result, ours=seconds, **({"memory": memory} if name == "ours" else {"case": f"{case}, {name}"}))
        for name, seconds in our_times.items()
    ]


def _through_triton(work: Callable[[], object]) -> Callable[[], object]:
    """Wrap work to run as with BLOCKDIFF_RELAUNCH=0 in the environment."""
    from blockdiff.kernels import relaunch

    def run() -> object:
        was_on, relaunch.IS_ON = relaunch.IS_ON, False
        forget_sizes()
        try:
            return work()
        finally:
            relaunch.IS_ON = was_on
            forget_sizes()

    return run


def agreement(models: Pair, tokens_BS: Tensor, canvas_BL: Tensor) -> Agreement:
    ours = logits_of_two_steps(models, tokens_BS, canvas_BL)
    theirs = _peer_logits(models.peer, tokens_BS, canvas_BL)
    names = ("logits", "logits after a signal")
    if models.ours.dtype == torch.float32:
        pairs = zip(names, ours, theirs, strict=True)
        return Agreement({name: (_error(a, b), LOGIT_BOUND) for name, a, b in pairs})
    truth = _peer_logits(in_fp32(models.peer), tokens_BS, canvas_BL)
    return Agreement(
        {
            f"{name} to fp32": (_error(a, c), half_precision_bound(_error(b, c)))
            for name, a, b, c in zip(names, ours, theirs, truth, strict=True)
        }
    )


def logits_of_two_steps(models: Pair, tokens_BS: Tensor, canvas_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return our logits of a denoise without a signal, and of a second one with these logits as its signal."""
    model = models.ours
    prefix = model.encode(tokens_BS)
    first = model.unembed(model.denoise(canvas_BL, prefix))
    return first, model.unembed(model.denoise(canvas_BL, prefix, model.soft_embedding(first)))


def _peer_logits(model: DiffusionGemmaForBlockDiffusion, tokens_BS: Tensor, canvas_BL: Tensor) -> tuple[Tensor, Tensor]:
    model.set_experts_implementation("eager")
    return peer.logits_of_two_steps(model, tokens_BS, canvas_BL)


def _error(values: Tensor, truth: Tensor) -> float:
    """Return the relative 2-norm error; infinite if any value is not a number."""
    error = float((values.float() - truth.float()).norm() / truth.float().norm())
    return error if math.isfinite(error) else math.inf
