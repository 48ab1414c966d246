"""Where metrics go beside metrics.jsonl: TensorBoard, W&B, trackio and the others that Accelerate knows, by name."""

from __future__ import annotations

import difflib
import json
import math
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blockdiff.checkpoint.files import first_line
from blockdiff.errors import RunError
from blockdiff.files import write_text

PROJECT = "blockdiff"
IDENTITY = "tracker.json"


class Trackers:
    """The trackers of a run: opened before training, fed records, closed at the end. For the main process only.

    names: as Accelerate calls them; config: what the run's page shows (nested mappings become `section.key`);
    start: the step a resumed run goes on from, after which the curves of a killed one are dropped where the tracker
    can (TensorBoard) or kept (W&B ignores steps it has; they are equal). Several runs of one project are told apart
    by the name of their directory. Raises RunError for a name that is unknown, not installed, or fails to start.
    """

    def __init__(self, names: Sequence[str], run_dir: Path, config: Mapping[str, Any], start: int = 0) -> None:
        check(names)
        self._open: dict[str, Any] = {}
        settings = dict(_flat_config(config))
        for name in dict.fromkeys(names):
            try:
                tracker = _make(name, run_dir, start)
                tracker.start()
                self._open[name] = tracker
                if start == 0:
                    tracker.store_init_configuration(settings)
            except Exception as error:  # not logged in, no network, no room: each library has its own
                self.finish()
                raise RunError(
                    f"train.trackers: {name} does not start ({first_line(error)}); see to it or leave it out"
                ) from error

    def log(self, record: Mapping[str, Any]) -> None:
        """Hand over the numbers of a metrics record. A tracker that fails is left out from then on, with a warning."""
        values = {key: value for key, value in numbers(record).items() if key != "step"}
        for name, tracker in list(self._open.items()):
            try:
                tracker.log(values, step=record["step"])
            except Exception as error:  # nobody's training ends because a server is down
                reason = first_line(error)
                warnings.warn(f"{name} gets no more metrics ({reason}); metrics.jsonl has them all", stacklevel=2)
                del self._open[name]

    def finish(self) -> None:
        """Write out what is still on its way, and close each tracker once, however often this is called."""
        while self._open:
            name, tracker = self._open.popitem()
            try:
                tracker.finish()
            except Exception as error:  # the run is complete without it
                warnings.warn(f"{name} did not finish ({first_line(error)})", stacklevel=2)


def check(names: Sequence[str]) -> None:
    """Raises RunError for a tracker that is unknown or not installed: worth knowing before anything is loaded."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    there = {str(each) for each in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            near = difflib.get_close_matches(name, LOGGER_TYPE_TO_CLASS, 1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}"
            raise RunError(f"train.trackers: no tracker is called {name!r}; {meant}")
        if name not in there:
            package = name.replace("_", "-")
            raise RunError(f"train.trackers: {name} is not installed; `pip install {package}` or leave it out")


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a metrics record.

    A list by noise level, {"heldout_levels": [{"t_from": 0, "t_to": 0.2, "kept_loss": 3}]}, becomes a curve for each
    measure and middle of a level: {"heldout_kept_loss/0.1": 3}.
    """
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, list):
            for level in value:
                if isinstance(level, dict) and {"t_from", "t_to"} <= level.keys():
                    middle = (level["t_from"] + level["t_to"]) / 2
                    inner = {name: x for name, x in level.items() if name not in ("t_from", "t_to")}
                    prefix = key.removesuffix("levels")
                    found |= {f"{prefix}{name}/{middle:.3g}": x for name, x in numbers(inner).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[key] = value
    return found


def _make(name: str, run_dir: Path, start: int) -> Any:
    """Accelerate's tracker of that name; its files lie in the run directory where it has a say."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    kind: Any = LOGGER_TYPE_TO_CLASS[name]
    run = run_dir.name
    if name == "tensorboard":
        return kind("tensorboard", run_dir, purge_step=start + 1 if start else 0)
    if name == "wandb":
        return kind(PROJECT, name=run, dir=str(run_dir), id=_identity(run_dir), resume="allow")
    if name == "trackio":
        return kind(PROJECT, name=f"{run}-{_identity(run_dir)}", resume="allow")
    if name == "mlflow":
        return kind(PROJECT, logging_dir=str(run_dir / "mlflow"), run_name=run)
    if name == "aim":
        return kind(run, logging_dir=str(run_dir))
    if name == "swanlab":
        return kind(PROJECT, experiment_name=run)
    return kind(run)


def _identity(run_dir: Path) -> str:
    """What a server knows the run by: drawn once, so that a resumed run goes on in the same place."""
    file = run_dir / IDENTITY
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["id"])
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError):
        warnings.warn(f"{file}: does not say what trackers know the run by; it gets a new page there", stacklevel=2)
    drawn = uuid.uuid4().hex[:12]
    write_text(file, json.dumps({"id": drawn}) + "\n")
    return drawn


def _flat_config(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat += _flat_config(value, f"{prefix}{key}.")
        elif value is not None:
            flat.append((f"{prefix}{key}", value if isinstance(value, bool | str | int | float) else str(value)))
    return flat
