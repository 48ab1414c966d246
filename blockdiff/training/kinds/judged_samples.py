"""Sampled prompts of a policy's run: the mean reward of their answers, and the accuracy if a task judges them."""

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
    """Return the task of the evaluation.

    If that is `exact`, the default, and a prompt has no response, return UNJUDGED, which judges nothing.

    Raises DataError for prompts that the task does not accept.
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
    """Return the results of `sample_prompts`, with `sample_reward`, the mean reward of the answers.

    Requests are made as for rollouts. Answers end at the sampler's own limit, since a reward may favour answers longer
    than the row's response. Without a task that judges, `sample_accuracy` is left out.
    """
    task = judging_task(recipe, prompts)

    def earned(question: Question, result: Result) -> dict[str, Any]:
        if result.error is not None:
            return {"reward": 0.0, "reward_failures": {}}
        reward = rewards(prompts.rows[question.place], result)
        return {"reward": reward.total, "rewards": reward.values, "reward_failures": reward.failures}

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
