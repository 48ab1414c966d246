"""Sampled prompts during training: accuracy, denoising and steps per canvas as the weights are now."""

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

SPARE = 1.25  # times the memory that a training step takes for a while, since free memory is in pieces
TEXTS = 8  # answers of an evaluation whose texts are kept


class Sampled(NamedTuple):
    """`record` for the metrics; `texts`, the records of the answers, for RUN/samples.jsonl."""

    record: Record
    texts: list[dict[str, Any]]


@contextmanager
def room_after(sampler: Sampler, device: torch.device) -> Iterator[None]:
    """Surrounds sampling, after which the memory of a training step has to be free on a GPU, as it was before."""
    if device.type != "cuda":  # elsewhere a sampler keeps the memory of its largest call
        yield
        return
    passing = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    yield
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    if free < SPARE * passing:
        sampler.release()


def keep_texts(path: Path, step: int, texts: Sequence[dict[str, Any]]) -> None:
    """Write the first answers of an evaluation after a step to a log, in place of what a killed run has written."""
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
    """Answer the rows' prompts, dealt out to the ranks, as `blockdiff eval` does; every rank gets the same result.

    choices: more for `evaluate`, such as an encoder.

    The record has `sample_accuracy, sample_steps_per_canvas, sample_max_steps, sample_tokens_per_forward, sample_count,
    sample_errors` and `sample_seconds` (until the last rank is done). Weights, modes, gradients and torch's generators
    stay as they are, and what the sampler keeps for its next call is given back where a training step would not fit
    beside it. Raises DataError for rows that are not of the task, and Interrupted between canvases when a rank
    is to stop.
    """
    with room_after(sampler, ranks.device), autocast(ranks.device, precision):
        found = evaluate(sampler, rows, task, ranks=ranks, batch_size=batch_size, seed=seed, **choices)
    record = {
        "sample_accuracy": found["solved_share"],
        "sample_steps_per_canvas": found["steps_per_canvas"],
        "sample_max_steps": sampler.generation.max_steps,
        "sample_tokens_per_forward": found["tokens_per_forward"],
        "sample_count": found["count"],
        "sample_errors": found["errors"],
        "sample_seconds": round(found["seconds"], 3),
    }
    return Sampled(record, found["records"])
