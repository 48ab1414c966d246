"""Run a task: a sampler answers the questions; right answers and costs are counted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from blockdiff.data.image_parts import for_template
from blockdiff.data.rows import Row
from blockdiff.evals.questions import Question, Task, longest_response, questions_of
from blockdiff.evals.summary import summary
from blockdiff.objective import evaluating
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.turns import measuring
from blockdiff.sampling.request import Result
from blockdiff.sampling.trace import CommittedCanvas

if TYPE_CHECKING:
    from blockdiff.data.chat import Encoder
    from blockdiff.sampling.sampler import Sampler

ALONE = Ranks(torch.device("cpu"))


def evaluate(
    sampler: Sampler,
    rows: Sequence[Row | Question],
    task: Task,
    *,
    ranks: Ranks = ALONE,
    batch_size: int = 100,
    seed: int = 0,
    max_steps: int | None = None,
    max_new_tokens: int | None = None,
    encoder: Encoder | None = None,
    thinking: bool = False,
    best_of: int = 1,
    allow_control_tokens: bool = False,
    facts: Callable[[Question, Result], dict[str, Any]] = lambda question, result: {},
) -> dict[str, Any]:
    """Answer the question of every row by sampling and count right answers; the ranks share the rows.

    Every rank gets `task`, the figures of `summary`, `seconds` (until the last rank is done), `first_canvas_seconds`
    (from the start to a row's first canvas, median over rows, None without canvases), `seed`, `max_steps`,
    `max_new_tokens`, `batch_size`, `thinking`, `best_of`, `allow_control_tokens` as used, and `records` (one per row,
    in order). `seed` and a row's index key the draws, so the number of ranks changes nothing beyond rounding. The
    model's modes and gradients are left unchanged.

    max_new_tokens: None bounds responses by the longest reference, or by the sampler's limit if longer ones can be
    right. encoder: prompts get the tokens that training gives them (system prompt, thinking). thinking: ask the chat
    template for reasoning. best_of: draw this many answers to a question and keep the one with the best own score.
    allow_control_tokens: read control tokens in prompts as tokens, not as text. facts: returns further entries of an
    answer's record; called in the main thread.

    Raises DataError if a row does not belong to the task, and Interrupted between canvases when a rank is to stop.
    """
    questions = questions_of(rows, task, encoder)
    max_new_tokens = max_new_tokens or longest_response(sampler, questions, task, thinking)
    started = time.perf_counter()
    mine = questions[ranks.row_rank :: ranks.row_world]
    first_canvas: dict[str | int, float] = {}

    with evaluating(sampler.model), measuring(sampler.model, ranks, "the sampling of prompts") as look:

        def on_canvas(canvas: CommittedCanvas) -> None:
            first_canvas.setdefault(canvas.id, time.perf_counter() - started)
            look()

        stream = sampler.stream(
            [question.request(thinking, best_of, allow_control_tokens) for question in mine],
            seed=seed,
            max_new_tokens=max_new_tokens,
            max_steps=max_steps,
            batch_size=batch_size,
            on_canvas=on_canvas,
        )
        results = dict(stream)
        answers = [_record(question, results[n], task) | facts(question, results[n]) for n, question in enumerate(mine)]
    # With `best_of`, the first draw of a row has the row's id.
    dealt = ranks.gather_rows((answers, [first_canvas[q.place] for q in mine if q.place in first_canvas]))
    records = [dealt[index % ranks.row_world][0][index // ranks.row_world] for index in range(len(questions))]
    waits = [wait for _, of_rank in dealt for wait in of_rank]
    return {
        "task": task.name,
        **summary(records, task.group),
        "first_canvas_seconds": statistics.median(waits) if waits else None,
        "seconds": time.perf_counter() - started,
        "seed": seed,
        "max_steps": max_steps or sampler.generation.max_steps,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "thinking": thinking,
        "best_of": best_of,
        "allow_control_tokens": allow_control_tokens,
        "records": records,
    }


def _record(question: Question, result: Result, task: Task) -> dict[str, Any]:
    record = {
        "id": question.id,
        "prompt": question.prompt if isinstance(question.prompt, str) else list(for_template(question.prompt)),
        "reference": question.reference,
        "text": result.text,
        "is_solved": result.error is None and task.solves(question, result.text),
        **task.facts(question, result.text),
        "steps": list(result.steps),
        "forwards": asdict(result.forwards),
        "length": len(result.tokens),
        "finish_reason": result.finish_reason,
    }
    more = {name: getattr(result, name) for name in ("reasoning", "score", "draw")} | {"places": result.places or None}
    more["error"] = None if result.error is None else f"{question.where}: {result.error}"
    return record | {name: value for name, value in more.items() if value is not None}
