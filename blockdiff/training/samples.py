"""Sampled prompts during training: accuracy, denoising steps per canvas and rewards as the weights are now."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blockdiff import evals
from blockdiff.data.rows import Row
from blockdiff.evals.questions import Question, Task, questions_of
from blockdiff.evals.run import evaluate
from blockdiff.metrics import MetricsLog, Record
from blockdiff.parallel.ranks import Ranks
from blockdiff.rl.prompts import Prompts
from blockdiff.rl.reward import Rewards, failure_lines
from blockdiff.sampling import Result, Sampler
from blockdiff.training.progress import Progress
from blockdiff.training.recipe import Recipe
from blockdiff.training.rollouts import Rollouts, room_after
from blockdiff.training.step import autocast

if TYPE_CHECKING:
    from blockdiff.training.build import Built

TEXTS = 8  # answers of an evaluation whose texts are kept
UNJUDGED = Task("none", is_solved=lambda question, text: False)


class Sampled(NamedTuple):
    """`record` for the metrics; `texts`, the records of the answers, for RUN/samples.jsonl."""

    record: Record
    texts: list[dict[str, Any]]


def sample_run(recipe: Recipe, built: Built, sampler: Sampler, ranks: Ranks, show: Progress) -> Sampled:
    """Answer `evaluation.prompts` of a run: by the rewards of reinforcement learning, else by the task alone."""
    data, precision = built.data, built.precision
    if isinstance(data.prompts, Prompts):
        assert isinstance(built.rollouts, Rollouts)
        return sample_rewarded(recipe, sampler, data.prompts, built.rollouts.rewards, ranks, precision, show)
    task = evals.task(recipe.evaluation.task)
    return sample_prompts(sampler, data.prompts, task, ranks, recipe.seed, precision=precision, encoder=data.encoder)


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


def judging_task(recipe: Recipe, prompts: Prompts) -> Task:
    """The task of an evaluation: UNJUDGED in place of `exact`, the default, where a prompt has no response.

    Raises DataError for prompts that the task does not take.
    """
    task, questions = evals.task(recipe.evaluation.task), [row.question for row in prompts.rows]
    if task.name == "exact" and not all(question.reference for question in questions):
        task = UNJUDGED
    questions_of(questions, task)
    return task


def sample_rewarded(
    recipe: Recipe,
    sampler: Sampler,
    prompts: Prompts,
    rewards: Rewards,
    ranks: Ranks,
    precision: str | None,
    show: Progress,
) -> Sampled:
    """The figures of `sample_prompts`, and `sample_reward`, the mean reward of the answers.

    They are asked as those of rollouts are, and answered up to the sampler's own limit, as a reward may be for longer
    answers than a row's response. Without a task that judges there is no `sample_accuracy`.
    """
    task = judging_task(recipe, prompts)

    def earned(question: Question, result: Result) -> dict[str, Any]:
        if result.error is not None:
            return {"reward": 0.0, "reward_failures": {}}
        found = rewards(prompts.rows[question.place], result)
        return {"reward": found.total, "rewards": found.values, "reward_failures": found.failures}

    record, texts = sample_prompts(
        sampler,
        [row.question for row in prompts.rows],
        task,
        ranks,
        recipe.seed,
        precision=precision,
        max_new_tokens=sampler.generation.max_new_tokens,
        thinking=recipe.data.thinking,
        allow_control_tokens=recipe.data.control_tokens == "allow",
        facts=earned,
    )
    for line in failure_lines([text["reward_failures"] for text in texts]):
        show.line(line)
    record = {"sample_reward": sum(text["reward"] for text in texts) / len(texts)} | record
    if task is UNJUDGED:
        del record["sample_accuracy"]
        for text in texts:
            del text["is_solved"]
    return Sampled(record, texts)
