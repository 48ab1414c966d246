"""Part "updates" of the quick run: rollouts and updates of both policies of the released model, with adapters."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.quick_figures import Figures
from benchmarks.quick_sampling import ALPHABET, prompts, wait
from benchmarks.quick_start import calm, config_of, random_model, released
from blockdiff.checkpoint.generation import Generation
from blockdiff.data.collate import Collator
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear, StratifiedTime
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, draw_adapters, targets
from blockdiff.objective import evaluating
from blockdiff.rl.batches import Answer, canvas_batch, head_batch
from blockdiff.rl.policy import Policy, PolicyObjective, RolloutBatch
from blockdiff.sampling import Engine, Request, Result
from blockdiff.sampling.strategies import EntropyBound
from blockdiff.training import optimiser
from blockdiff.training.recomputation import checkpoint_activations

ANSWERS, TOKENS, CANVAS_STEPS = 8, 128, 8
CLOSE = 0.1  # nats, the mean difference of a token's log-probability between its draw and the update


def updates(figures: Figures, layers: int | None = None) -> None:
    """Measure rollouts of the head, an update over them, and an update over recorded steps of canvases.

    layers: of a smaller model (None: the released one). The model gets adapters.
    """
    figures.free(*figures.kept.keys() - {"ceilings", "model"})
    device, prompt = figures.device, figures.prompt
    model = released(figures) if layers is None else random_model(config_of(figures.preset, layers), device)
    calm(model)
    adapt(model, targets(model, {part: LowRank(16, 32) for part in ("attention", "mlp")}))
    draw_adapters(model, 0, device, model.dtype)
    checkpoint_activations(model)
    head = Policy("next_token", (1.0,), kl=0.01)
    objective = PolicyObjective(model, Linear(), UniformCorruption(model.vocab_size), policy=head)
    collator = Collator(model.canvas_length, 0, 1, 0, StratifiedTime())
    steps, count = optimiser.build(model, lr=1e-5), min(figures.rows, ANSWERS)
    asked = prompts(count, prompt, model.vocab_size)
    answers, drawn = list[Answer](), list[float]()

    def rollouts() -> dict[str, Any]:
        generation = Generation(eos_ids=(), pad_id=0, max_new_tokens=TOKENS)
        options = dict(tokenizer=character_tokenizer(ALPHABET), generation=generation, max_rows=count)
        seconds = list[float]()
        with evaluating(model):
            engine = Engine(model, strategy="next_token:temperature=1", capacity=2 * count * (prompt + 512), **options)
            for _ in range(2):  # the first time kernels are compiled and steps captured
                begin = time.monotonic()
                engine.pages.forget()
                for n, tokens in enumerate(asked):
                    engine.submit(Request(n, tokens=tokens, seed=n, scores=True))
                while engine.step():
                    pass
                wait(device)
                seconds.append(time.monotonic() - begin)
                results = sorted((x for x in engine.events() if isinstance(x, Result)), key=lambda each: each.id)
        for each in results:
            assert each.logprobs is not None, each.error
            drawn.extend(each.logprobs)
            answers.append(_answer(int(each.id), asked[int(each.id)], list(each.tokens)))
        line = dict(answers=count, tokens=len(drawn), first_seconds=seconds[0], seconds=seconds[1])
        return line | dict(tokens_per_second=len(drawn) / seconds[1])

    def of_head() -> dict[str, Any]:
        line = dict[str, Any]()
        if not drawn:  # the rollouts have failed, or were made by another process
            tokens = prompts(count, TOKENS, model.vocab_size)
            answers.extend(_answer(n, asked[n], of_row) for n, of_row in enumerate(tokens))
        batches = [head_batch([answer], collator) for answer in answers]
        if drawn:
            with torch.no_grad():
                log_p = torch.cat([objective.actions(batch.to(device)).log_p_N for batch in batches]).float().cpu()
            apart = float((log_p - torch.tensor(drawn)).abs().mean())
            short = f"log-probabilities are {apart:.2g} nats from those of the rollouts" if not apart < CLOSE else ""
            line = dict(mean_difference=apart, short=short)
        return line | _updated(objective, batches, steps, device)

    def of_canvases() -> dict[str, Any]:
        length, draws = model.canvas_length, torch.Generator().manual_seed(0)
        batches = []
        for n, tokens in enumerate(asked[:2]):
            seen = torch.randint(3, model.vocab_size, (CANVAS_STEPS, length), generator=draws)
            is_drawn = torch.arange(length) % CANVAS_STEPS <= torch.arange(CANVAS_STEPS)[:, None]
            trajectory = seen.tolist(), torch.where(is_drawn, seen, -1).tolist(), seen[-1].tolist()
            batches.append(canvas_batch([_answer(n, tokens, seen[-1].tolist(), [trajectory])], collator, CANVAS_STEPS))
        objective.policy = Policy("canvas", (0.8,) * CANVAS_STEPS, acceptance=EntropyBound(0.1))
        return dict(steps=CANVAS_STEPS) | _updated(objective, batches, steps, device)

    if layers is None:
        figures.make("rollouts", rollouts)
    figures.make("update of the head", of_head)
    figures.make("update of canvases", of_canvases)
    figures.free("model")  # which has adapters


def _answer(place: int, prompt: list[int], tokens: list[int], canvases: Any = ()) -> Answer:
    advantage = 1.0 if place % 2 else -1.0
    return Answer(place, prompt, tokens, 0.0, {}, {}, [1], list(canvases), advantage=advantage)


def _updated(
    objective: PolicyObjective, batches: list[RolloutBatch], steps: torch.optim.Optimizer, device: torch.device
) -> dict[str, Any]:
    """Make two updates over the same answers, the first of which compiles.

    Returns seconds, peak memory and the gradient's norm.
    """
    seconds, parameters = [], list(optimiser.trainable(objective.model).values())
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):
        begin = time.monotonic()
        for batch in batches:
            sums = objective(batch.to(device))
            (sums["policy"] / len(batches)).backward()
        norm = optimiser.gradient_norm(parameters)
        steps.step()
        steps.zero_grad()
        wait(device)
        seconds.append(time.monotonic() - begin)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if is_cuda else None
    line = dict(answers=len(batches), first_seconds=seconds[0], seconds=seconds[1], peak_gib=peak, gradient_norm=norm)
    return line if 0 < norm < float("inf") else line | dict(short=f"the gradient's norm is {norm}")
