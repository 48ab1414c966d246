"""Rewards: functions of a row and its answer, added up with weights, and the advantages computed from them."""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from blockdiff import evals
from blockdiff.errors import BlockdiffError, DataError, RecipeError
from blockdiff.imported import imported
from blockdiff.rl.prompts import Prompt
from blockdiff.sampling.request import Result
from blockdiff.time_limit import TEMPLATE_SECONDS, time_limit

Reward = Callable[[Mapping[str, Any], Result], float]
Weighted = tuple[tuple[Reward, float], ...]
NAMED = 3  # failures that are reported
LARGEST = 1e12  # the largest reward and weight; their sums and squares are still finite


@dataclass(frozen=True)
class Rewarded:
    """The reward of an answer: the weighted sum, each function's value, and the reason for each one that failed."""

    total: float
    values: dict[str, float]
    failures: dict[str, str] = field(default_factory=dict)


class Rewards:
    """Calls reward functions by name. One that raises, takes too long or returns no usable number counts as 0.

    They run without gradients and without autocast, whatever the sampling used.
    functions: called with a prompt and a result; weights: by the same names.
    """

    def __init__(self, functions: Mapping[str, Callable[[Prompt, Result], float]], weights: Mapping[str, float]):
        self.functions, self.weights = functions, weights

    def __call__(self, prompt: Prompt, result: Result) -> Rewarded:
        """Return the reward of an answer."""
        values, failures = dict[str, float](), dict[str, str]()
        for name, function in self.functions.items():
            values[name] = 0.0
            try:
                with torch.no_grad(), _without_autocast(), time_limit(TEMPLATE_SECONDS):
                    value = float(function(prompt, result))
                if not abs(value) <= LARGEST:
                    raise ValueError(f"it gave {value}, which is no finite number of at most {LARGEST:g}")
                values[name] = value
            except (Exception, SystemExit) as error:  # whatever somebody else's function raises
                failures[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        return Rewarded(sum(self.weights[name] * value for name, value in values.items()), values, failures)


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Turn autocast off on every device in the block."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def weighted(reward: Reward | Mapping[Reward, float] | None) -> Weighted:
    """Return functions given in Python with their weights; a single function has weight 1, None gives ().

    Raises RecipeError for anything else.
    """
    if reward is None:
        return ()
    weights = reward if isinstance(reward, Mapping) else {reward: 1.0}
    for function, weight in weights.items():
        if not callable(function):
            raise RecipeError(f"reward: {function!r:.60} is no function; give one, or functions with their weights")
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not abs(weight) <= LARGEST:
            raise RecipeError(f"reward: the weight of {_name(function)} is {weight!r:.60}; give a finite number")
    return tuple(weights.items())


def make_rewards(asked: str | Mapping[str, float] | None, given: Weighted, prompts: Sequence[Prompt]) -> Rewards:
    """Return the rewards named in a recipe (`asked`) and those given in Python (`given`).

    A name is a task or "module:function". Raises RecipeError if a name is not a function of a row and a result, if two
    functions share a name, or if there is no reward; DataError if a task cannot judge one of the prompts.
    """
    weights = {asked: 1.0} if isinstance(asked, str) else dict(asked or {})
    functions: dict[str, Callable[[Prompt, Result], float]] = {}
    for name in weights:
        functions[name] = _of_task(name, prompts) if name in evals.TASKS else _of_row(name, _imported(name))
    for function, weight in given:
        if (name := _name(function)) in functions:
            raise RecipeError(
                f"objective.reward: {name} is the name of a function from Python, too; rename one of them"
            )
        functions[name], weights[name] = _of_row(name, function), weight
    if not functions:
        raise RecipeError("objective.reward: missing; name a task or module:function, or give reward= from Python")
    return Rewards(functions, weights)


def failure_lines(failures: Sequence[Mapping[str, str]]) -> list[str]:
    """Return lines that name the most frequent failures; `failures` has for each answer the failures by reward."""
    failed = Counter(f"{name}: {why}" for of_answer in failures for name, why in of_answer.items())
    return [
        f"note      {count} of {len(failures)} rewards failed and count 0: {failure}"
        for failure, count in failed.most_common(NAMED)
    ]


def steps_per_canvas(row: Mapping[str, Any], result: Result) -> float:
    """Return the mean number of denoising steps per canvas of the answer: a price, if its weight is negative."""
    return sum(result.steps) / max(1, len(result.steps))


def advantages(rewards: Sequence[float], kind: Literal["centred", "standardised"]) -> list[float]:
    """Return the advantages of the answers of one group.

    centred: the reward minus the mean of the others (RLOO, arXiv 2402.14740); its expected gradient is exact.
    standardised: the reward minus the mean of all, divided by their deviation (GRPO, arXiv 2402.03300); this is biased.
    If all rewards are equal, all advantages are exactly 0.
    """
    count, mean = len(rewards), math.fsum(rewards) / len(rewards)
    if max(rewards) == min(rewards):
        return [0.0] * count
    if kind == "centred":
        return [(reward - mean) * count / (count - 1) for reward in rewards]
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (count - 1))
    return [(reward - mean) / (deviation + 1e-4) for reward in rewards]


def _of_row(name: str, function: Reward) -> Callable[[Prompt, Result], float]:
    """Wrap a function to receive a copy of the prompt's row; RecipeError if it does not accept a row and a result."""
    if inspect.iscoroutinefunction(function):
        raise RecipeError(
            f"objective.reward: {name} is async, and rewards are called, not awaited; make it a plain function"
        )
    try:
        inspect.signature(function).bind({}, None)
    except TypeError as error:
        raise RecipeError(f"objective.reward: {name} is not a function of a row and a result: {error}") from None
    except ValueError:  # some functions of C have no signature
        pass
    return lambda prompt, result: function(copy.deepcopy(prompt.value), result)


def _of_task(name: str, prompts: Sequence[Prompt]) -> Callable[[Prompt, Result], float]:
    task = evals.task(name)
    for prompt in prompts:
        where = prompt.question.where
        try:
            needs_reference = task.solves(prompt.question, "")
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        if needs_reference:
            raise DataError(f"{where}: {name} compares with the row's response, and there is none; add it")
    return lambda prompt, result: float(task.solves(prompt.question, result.text))


def _name(function: Reward) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _imported(name: str) -> Reward:
    """Return the function that "module:function" names, also from modules in the caller's directory.

    Raises RecipeError if there is no such function.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        tasks = ", ".join(evals.TASKS)
        raise RecipeError(f"objective.reward: {name!r} is neither a task ({tasks}) nor module:function")
    try:
        value: Any = imported(name)
    except BlockdiffError as error:
        raise RecipeError(f"objective.reward: {error}") from None
    if not callable(value):
        raise RecipeError(f"objective.reward: {name} is a {type(value).__name__}, not a function of a row and a result")
    reward: Reward = value
    return reward
