"""Trackers of a run's metrics, in addition to metrics.jsonl: TensorBoard, W&B and others that Accelerate supports."""

from __future__ import annotations

import difflib
import math
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blockdiff.checkpoint.files import first_line
from blockdiff.errors import RunError
from blockdiff.files import write_text
from blockdiff.metrics import Record
from blockdiff.training.run import IDENTITY

PROJECT = "blockdiff"


class Trackers:
    """The open trackers of a run, on the main process only.

    names: Accelerate's names.
    config: shown on the run's page; nested mappings become `section.key`.
    start: the step from which a resumed run continues. TensorBoard drops later points of a killed run. W&B and trackio
        continue the same run and ignore steps that they have, whose values are equal.

    Raises RunError for a tracker that is unknown, not installed, or fails to start.
    """

    def __init__(self, names: Sequence[str], run_dir: Path, config: Mapping[str, Any], start: int = 0) -> None:
        check(names)
        self._open: dict[str, Any] = {}
        for name in dict.fromkeys(names):
            try:
                tracker = _tracker(name, run_dir, start)
                tracker.start()
                self._open[name] = tracker
                if start == 0:
                    tracker.store_init_configuration(_flat(config))
            except Exception as error:  # libraries raise different errors without a login or disk space
                self.close()
                raise RunError(
                    f"train.trackers: {name} does not start ({first_line(error)}); set it up or leave it out"
                ) from error

    def log(self, record: Record) -> None:
        """Pass the numbers of a metrics record to all trackers. One that fails is dropped, with a warning."""
        values = numbers(record)
        for name, tracker in list(self._open.items()):
            try:
                tracker.log(values, step=record["step"])
            except Exception as error:  # a server that is down must not end the training
                reason = first_line(error)
                warnings.warn(f"{name} gets no more metrics ({reason}); metrics.jsonl has them all", stacklevel=2)
                del self._open[name]

    def close(self) -> None:
        """Flush and close the trackers. Further calls do nothing."""
        while self._open:
            name, tracker = self._open.popitem()
            try:
                tracker.finish()
            except Exception as error:  # the run does not need it
                warnings.warn(f"{name} did not finish ({first_line(error)})", stacklevel=2)


def check(names: Sequence[str]) -> None:
    """Raise RunError for a tracker that is unknown or not installed."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = {str(each) for each in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            near = difflib.get_close_matches(name, LOGGER_TYPE_TO_CLASS, 1)
            choices = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}"
            raise RunError(f"train.trackers: no tracker is called {name!r}; {choices}")
        if name not in installed:
            package = name.replace("_", "-")
            raise RunError(f"train.trackers: {name} is not installed; pip install {package}, or leave it out")


def numbers(record: Record) -> dict[str, float]:
    """The finite numbers of a metrics record by name, without its step.

    The figures of each noise level are named by the middle of the level, "heldout_kept_loss/0.1", those of each token
    of a drafter's blocks by its number, "heldout_place/1", and rewards by their names, "reward/sudoku".
    """
    values = {key: value for key, value in record.items() if key != "step"}
    for level in record.get("heldout_levels", ()):
        middle = (level["t_from"] + level["t_to"]) / 2
        values |= {
            f"heldout_{key}/{middle:.3g}": value for key, value in level.items() if key not in ("t_from", "t_to")
        }
    values |= {f"reward/{name}": value for name, value in record.get("rewards", {}).items()}
    shares = record.get("heldout_places", ())
    values |= {f"heldout_place/{number}": share for number, share in enumerate(shares, start=1)}
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _tracker(name: str, run_dir: Path, start: int) -> Any:
    """Construct Accelerate's tracker of a name, so that it continues a resumed run if it can."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    tracker: Any = LOGGER_TYPE_TO_CLASS[name]
    settings: dict[str, Any] = {}
    if name == "tensorboard":
        settings = {"purge_step": start + 1 if start else 0}
    elif name == "wandb":
        settings = {"name": run_dir.name, "id": _identity(run_dir), "dir": str(run_dir), "resume": "allow"}
    elif name == "trackio":
        settings = {"name": f"{run_dir.name}-{_identity(run_dir)}", "resume": "allow"}
    if tracker.requires_logging_directory:
        return tracker(name, run_dir, **settings)  # its files are in RUN/NAME
    return tracker(PROJECT, **settings)


def _identity(run_dir: Path) -> str:
    """The run's id on a tracker's server: random, and stored in the run so that a resumed run keeps it."""
    file = run_dir / IDENTITY
    if not file.exists():
        write_text(file, uuid.uuid4().hex[:12] + "\n")
    return file.read_text(encoding="utf-8").strip()


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, bool | str | int | float]:
    """Flatten {"optim": {"lr": 0.1}} to {"optim.lr": 0.1}. Lists become text and None is left out."""
    flat: dict[str, bool | str | int | float] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[prefix + key] = value if isinstance(value, bool | str | int | float) else str(value)
    return flat
