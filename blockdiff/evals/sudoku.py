"""Sudoku: the share of puzzles solved exactly, and what it took in denoising steps and time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from blockdiff.data.rows import Row
from blockdiff.data.sudoku import is_solved
from blockdiff.errors import DataError

if TYPE_CHECKING:
    from blockdiff.sampling.sampler import Sampler


def evaluate(
    sampler: Sampler,
    rows: Sequence[Row],
    batch_size: int = 100,
    seed: int = 0,
    max_steps: int | None = None,
    on_canvas: Callable[[Any], object] | None = None,
) -> dict[str, Any]:
    """Solve the puzzle of every row by sampling and check the text.

    Returns `task, count, solved, solved_share, errors, steps_per_canvas` (mean over canvases),
    `tokens_per_forward` (tokens up to eos per denoising step of their row), `seconds, seed` and `records`
    (one per puzzle, in order).
    Raises DataError for rows that are not sudoku.
    """
    if not rows:
        raise DataError("no puzzles to evaluate; name a file with at least one row")
    for row in rows:
        _check(row)
    prompts = [row.prompt or "" for row in rows]
    started = time.perf_counter()
    results = sampler.generate(
        prompts,
        seed=seed,
        max_new_tokens=_longest_response(sampler, rows),
        max_steps=max_steps,
        batch_size=batch_size,
        on_canvas=on_canvas,
    )
    seconds = time.perf_counter() - started
    records = [
        {
            "id": row.id if row.id is not None else place,
            "prompt": prompt,
            "text": result.text,
            "is_solved": result.error is None and is_solved(prompt, result.text),
            "givens": sum(cell.isdigit() for cell in prompt),
            "steps": list(result.steps),
            "finish_reason": result.finish_reason,
        }
        for place, (row, prompt, result) in enumerate(zip(rows, prompts, results, strict=True))
    ]
    solved = sum(bool(record["is_solved"]) for record in records)
    canvases = sum(len(result.steps) for result in results)
    forwards = sum(sum(result.steps) for result in results)
    return {
        "task": "sudoku",
        "count": len(rows),
        "solved": solved,
        "solved_share": solved / len(rows),
        "errors": sum(result.error is not None for result in results),
        "steps_per_canvas": forwards / max(1, canvases),
        "tokens_per_forward": sum(len(result.tokens) for result in results) / max(1, forwards),
        "seconds": seconds,
        "seed": seed,
        "records": records,
    }


def _check(row: Row) -> None:
    try:
        fits = row.prompt is not None and is_solved(row.prompt, row.response or "")
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from None
    if not fits:
        raise DataError(
            f"{row.where}: not a sudoku row; its response has to solve its prompt (blockdiff data sudoku)"
        )


def _longest_response(sampler: Sampler, rows: Sequence[Row]) -> int:
    """Tokens that the longest solution and its eos take: a model that never ends runs no further."""
    if sampler.tokenizer is None:
        return max(len(row.response or "") for row in rows) + 1
    responses = [row.response or "" for row in rows]
    encoded = sampler.tokenizer(responses, add_special_tokens=False)["input_ids"]
    return max(map(len, encoded)) + 1
