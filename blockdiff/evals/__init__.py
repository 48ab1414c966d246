"""Evaluation of a model on a task, one file per task: accuracy and costs together."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockdiff.evals.questions import Task

TASKS = ("countdown", "exact", "gsm8k", "pixel_sudoku", "sudoku")


def task(name: str | Task) -> Task:
    """The task called `name`, one of TASKS; a task is itself."""
    if not isinstance(name, str):
        return name
    if name not in TASKS:
        raise ValueError(f"{name!r} is none of {', '.join(TASKS)}")
    found: Task = import_module(f"blockdiff.evals.{name}").TASK
    return found
