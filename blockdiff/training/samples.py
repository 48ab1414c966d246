"""Evaluation by sampled prompts during training: accuracy and denoising steps of the current weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from blockdiff.data.rows import Row
from blockdiff.evals.questions import Question, Task
from blockdiff.evals.run import evaluate
from blockdiff.metrics import MetricsLog, Record
from blockdiff.parallel.ranks import Ranks
from blockdiff.sampling import Sampler
from blockdiff.training.step import autocast

SPARE = 1.25  # free memory that a training step needs, relative to its peak, since free memory is fragmented
TEXTS = 8  # answers of an evaluation whose texts are kept


class Sampled(NamedTuple):
    """The metrics `record` of an evaluation, and `texts`, the records of its answers for RUN/samples.jsonl."""

    record: Record
    texts: list[dict[str, Any]]


@contextmanager
def room_after(sampler: Sampler, device: torch.device) -> Iterator[None]:
    """Release a sampler's memory after a block, if a training step would not fit on the GPU otherwise."""
    if device.type != "cuda":  # on other devices a sampler keeps the memory of its largest call
        yield
        return
    step_bytes = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    yield
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    if free < SPARE * step_bytes:
        sampler.release()


def keep_texts(path: Path, step: int, texts: Sequence[dict[str, Any]]) -> None:
    """Append the first answers of the evaluation after `step` to a log, and drop later ones of a killed run."""
    log = MetricsLog(path)
    log.cut(step - 1)
    for text in texts[:TEXTS]:
        log.append({"step": step, **text})


def sample_prompts(
    sampler: Sampler,
    rows: Sequence[Row | Question],
    task: Task,
    ranks: Ranks,
    seed: int = 0,
    batch_size: int = 32,
    *,
    precision: str | None = None,
    **choices: Any,
) -> Sampled:
    """Answer the prompts of rows, divided among the ranks, like `blockdiff eval`. All ranks return the same result.

    choices: further arguments of `evaluate`, such as an encoder.

    The record has `sample_accuracy, sample_steps_per_canvas, sample_max_steps, sample_tokens_per_forward, sample_count,
    sample_errors` and `sample_seconds` (until the last rank is done). Weights, modes, gradients and torch's generators
    do not change. The sampler's memory is released if a training step would not fit otherwise. Raises DataError for
    rows that are not of the task, and Interrupted between canvases if a rank should stop.
    """
    with room_after(sampler, ranks.device), autocast(ranks.device, precision):
        results = evaluate(sampler, rows, task, ranks=ranks, batch_size=batch_size, seed=seed, **choices)
    record = {
        "sample_accuracy": results["solved_share"],
        "sample_steps_per_canvas": results["steps_per_canvas"],
        "sample_max_steps": sampler.generation.max_steps,
        "sample_tokens_per_forward": results["tokens_per_forward"],
        "sample_count": results["count"],
        "sample_errors": results["errors"],
        "sample_seconds": round(results["seconds"], 3),
    }
    return Sampled(record, results["records"])
