"""Sampled prompts of a run that is rewarded: the mean reward of their answers, and their accuracy if a task judges."""

from __future__ import annotations

from typing import Any

from blockdiff import evals
from blockdiff.evals.questions import Question, Task, questions_of
from blockdiff.parallel.ranks import Ranks
from blockdiff.rl.prompts import Prompts
from blockdiff.rl.reward import Rewards
from blockdiff.sampling import Result, Sampler
from blockdiff.training.recipe import Recipe
from blockdiff.training.samples import Sampled, sample_prompts

UNJUDGED = Task("none", is_solved=lambda question, text: False)


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
    record = {"sample_reward": sum(text["reward"] for text in texts) / len(texts)} | record
    if task is UNJUDGED:
        del record["sample_accuracy"]
        for text in texts:
            del text["is_solved"]
    return Sampled(record, texts)
