"""Sampled prompts during training: accuracy and denoising steps per canvas as the weights are now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from blockdiff.data.rows import Row
from blockdiff.evals.questions import Task
from blockdiff.evals.run import evaluate
from blockdiff.metrics import Record
from blockdiff.parallel.ranks import Ranks
from blockdiff.training.step import autocast

if TYPE_CHECKING:
    from blockdiff.data.chat import Encoder
    from blockdiff.sampling.sampler import Sampler


class Sampled(NamedTuple):
    """`record` for the metrics; `texts`, the records of the first few answers, for RUN/samples.jsonl."""

    record: Record
    texts: list[dict[str, Any]]


def sample_prompts(
    sampler: Sampler,
    rows: Sequence[Row],
    task: Task,
    ranks: Ranks,
    seed: int = 0,
    batch_size: int = 32,
    *,
    precision: str | None = None,
    encoder: Encoder | None = None,
    texts: int = 8,
) -> Sampled:
    """Answer the rows' prompts, dealt out to the ranks, as `blockdiff eval` does; every rank gets the same result.

    The record has `sample_accuracy, sample_steps_per_canvas, sample_max_steps, sample_tokens_per_forward, sample_count,
    sample_errors` and `sample_seconds` (until the last rank is done). Weights, modes, gradients and torch's generators
    stay as they are. Raises DataError for rows that are not of the task, and Interrupted between canvases when a rank
    is to stop.
    """
    with autocast(ranks.device, precision):
        found = evaluate(sampler, rows, task, ranks=ranks, batch_size=batch_size, seed=seed, encoder=encoder)
    record = {
        "sample_accuracy": found["solved_share"],
        "sample_steps_per_canvas": found["steps_per_canvas"],
        "sample_max_steps": sampler.generation.max_steps,
        "sample_tokens_per_forward": found["tokens_per_forward"],
        "sample_count": found["count"],
        "sample_errors": found["errors"],
        "sample_seconds": round(found["seconds"], 3),
    }
    return Sampled(record, found["records"][:texts])
