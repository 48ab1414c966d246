"""Evaluation of a model on a task, one file per task: accuracy and costs together."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blockdiff.errors import BlockdiffError
from blockdiff.imported import imported

if TYPE_CHECKING:
    from blockdiff.evals.questions import Task

TASKS = ("countdown", "exact", "gsm8k", "pixel_sudoku", "sudoku")


def task(name: str | Task) -> Task:
    """Return the task called `name`, or `name` itself if it is a Task.

    name: one of TASKS, or "module:name". The latter is a `Task`, or a function (question, text) that returns whether
    the text answers the question. Raises BlockdiffError if there is no such task.
    """
    if not isinstance(name, str):
        return name
    if ":" in name:
        return _own(name, imported(name))
    if name not in TASKS:
        raise BlockdiffError(f"{name!r} is none of {', '.join(TASKS)}, nor module:function")
    built_in: Task = import_module(f"blockdiff.evals.{name}").TASK
    return built_in


def _own(name: str, value: Any) -> Task:
    """Return a user's object `value` as a task: a Task itself, or a Task made of a function.

    Raises BlockdiffError if it is neither.
    """
    from blockdiff.evals.questions import Task

    if isinstance(value, Task):
        return value
    if not callable(value):
        raise BlockdiffError(f"{name} is a {type(value).__name__}; name a Task, or a function of a question and a text")
    return Task(name, value, is_open=True)
