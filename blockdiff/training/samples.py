"""Sampled prompts during training: accuracy and denoising steps per canvas as the weights are now."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from blockdiff.data.rows import Row
from blockdiff.evals.run import Task, answer, ask, room, summary
from blockdiff.metrics import Record
from blockdiff.objective import evaluating
from blockdiff.parallel.ranks import Ranks, autocast

if TYPE_CHECKING:
    from blockdiff.data.chat import Encoder
    from blockdiff.sampling.sampler import Sampler

FILE_NAME = "samples.jsonl"


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
    """Answer the rows' prompts, dealt out to the ranks; every rank gets the same result.

    The record has `sample_accuracy, sample_steps_per_canvas, sample_tokens_per_forward, sample_count, sample_errors`
    and `sample_seconds` (until the last rank is done). Draws are addressed by `seed` and a row's place, so the world
    size changes nothing beyond rounding; weights, modes, gradients and torch's generators stay as they are.
    Raises DataError for rows that are not of the task, and Interrupted between canvases when a rank is to stop.
    """
    started = time.perf_counter()
    questions = ask(rows, task, encoder)
    pace = ranks.at_own_pace("the sampling of prompts")
    with evaluating(sampler.model), autocast(ranks.device, precision), pace as look:
        mine = answer(
            sampler,
            questions[ranks.rank :: ranks.world],
            task,
            batch_size=batch_size,
            seed=seed,
            max_steps=None,
            max_new_tokens=room(sampler, questions, task),
            on_canvas=lambda _: look(),
        )
    dealt = ranks.gather(mine)
    records = [dealt[place % ranks.world][place // ranks.world] for place in range(len(questions))]
    numbers = summary(records)
    record = {
        "sample_accuracy": numbers["solved_share"],
        "sample_steps_per_canvas": numbers["steps_per_canvas"],
        "sample_tokens_per_forward": numbers["tokens_per_forward"],
        "sample_count": numbers["count"],
        "sample_errors": numbers["errors"],
        "sample_seconds": round(time.perf_counter() - started, 3),
    }
    return Sampled(record, records[:texts])
