"""What scoring one's own answers buys: the best of N draws by next-token log-probability against the draws themselves.

    python -m benchmarks.self_score MODEL --task sudoku --data test.jsonl --draws 4 [--limit 300] [--output FILE.json]

Every row is answered N times, each time from other draws. All figures are of these same answers: the share of them that
is right (what one draw gives), the share of rows whose highest-scored answer is right, by the mean and by the sum, and
the share of rows with any right answer, which no choice can pass. docs/sampling.md quotes what this prints.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import machine
from blockdiff.data.sources import Source, rows_of
from blockdiff.evals import TASKS, task
from blockdiff.evals.questions import longest_response, questions_of
from blockdiff.sampling import Result, Sampler
from blockdiff.sampling.scores import score
from blockdiff.seeding import child_seed
from blockdiff.terminal import quiet


def measure(
    sampler: Sampler, rows: Sequence[Any], name: str, draws: int, seed: int = 0, batch_size: int = 100
) -> dict[str, Any]:
    """Shares of right answers, and the seconds that sampling and scoring took."""
    its = task(name)
    questions = questions_of(rows, its)
    room = longest_response(sampler, questions, its)
    answers: list[list[Result]] = []
    began = time.perf_counter()
    for draw in range(draws):
        own = [replace(q.request(), seed=child_seed(child_seed(seed, q.place), draw)) for q in questions]
        answers.append(sampler.generate(own, max_new_tokens=room, batch_size=batch_size))
    sampled = time.perf_counter()
    # What `scores` adds to sampling: the engine has most of the encodes already.
    asked = [replace(q.request(), seed=child_seed(child_seed(seed, q.place), 0)) for q in questions]
    pairs = []
    for _ in range(3):
        for requests in (asked, [replace(request, scores=True) for request in asked]):
            started = time.perf_counter()
            sampler.generate(requests, max_new_tokens=room, batch_size=batch_size)
            pairs.append(time.perf_counter() - started)
    started = time.perf_counter()
    prompts = [_prompt(sampler, q.prompt) for q in questions]
    flat = [each for drawn in answers for each in drawn]
    scores = score(sampler.model, prompts * draws, [each.tokens for each in flat], batch_size)
    scored = time.perf_counter()
    is_right = [
        [each.error is None and its.is_solved(q, each.text) for q, each in zip(questions, drawn, strict=True)]
        for drawn in answers
    ]
    count = len(questions)

    def share(totals: list[float]) -> float:
        """The share of rows that are right when each takes the draw with the highest figure."""
        chosen = [max(range(draws), key=lambda draw, row=row: totals[draw * count + row]) for row in range(count)]  # type: ignore[misc]
        return sum(is_right[draw][row] for row, draw in enumerate(chosen)) / count

    return {
        "rows": count,
        "draws": draws,
        "one_draw": sum(map(sum, is_right)) / (count * draws),
        "each_draw": [sum(of_draw) / count for of_draw in is_right],
        "best_by_mean": share([each.mean for each in scores]),
        "best_by_sum": share([each.total for each in scores]),
        "any_right": sum(any(of_draw[row] for of_draw in is_right) for row in range(count)) / count,
        "all_right": sum(all(of_draw[row] for of_draw in is_right) for row in range(count)) / count,
        "steps_per_canvas": sum(sum(each.steps) for each in flat) / max(1, sum(len(each.steps) for each in flat)),
        "sampling_seconds": sampled - began,
        "rescoring_seconds": scored - started,
        "without_scores_seconds": statistics.median(pairs[0::2]),
        "with_scores_seconds": statistics.median(pairs[1::2]),
    }


def _prompt(sampler: Sampler, prompt: Any) -> list[int]:
    """The tokens of a prompt as the sampler lays it out."""
    from blockdiff.sampling.request import as_request, tokenised

    return tokenised(as_request(prompt, 0), 0, 0, sampler.tokenizer, sampler.model.vocab_size).prompt_tokens


def main(words: Sequence[str] | None = None) -> int:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.self_score", description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a checkpoint directory or hub id, trained with the next-token loss")
    parser.add_argument("--task", choices=TASKS, default="sudoku")
    parser.add_argument("--data", required=True, help="rows of the task")
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--limit", type=int, help="only the first N rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON to write")
    given = parser.parse_args(words)
    quiet()
    sampler = Sampler.from_pretrained(given.model, dtype="auto")
    rows = list(islice(rows_of(Source(given.data, split="test")), given.limit))
    found = measure(sampler, rows, given.task, given.draws, given.seed)
    text = json.dumps({**found, "machine": machine.describe(sampler.model.device)}, indent=1)
    print(text)
    if given.output is not None:
        given.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
