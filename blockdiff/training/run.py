"""A run directory: `Run` reads it, `hold_run` locks it for one process, `prune` removes old checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdiff import checkpoint, plain_yaml
from blockdiff.checkpoint.files import ADAPTER, MODEL, REPORT
from blockdiff.errors import RESUME, RunError
from blockdiff.files import remove_directory, remove_leftovers
from blockdiff.metrics import FILE_NAME, METRICS, SAMPLES, Record, decisive_metrics, read
from blockdiff.parallel.ranks import Ranks
from blockdiff.training.checkpoint_content import FOLDER, steps_saved

RECIPE, DATA, CURVES, IDENTITY = "recipe.yaml", "data.json", "curves.png", "tracker-id"
SIGNS_OF_A_RUN = (FOLDER, FILE_NAME)  # names that only a run directory has
WRITTEN = (*SIGNS_OF_A_RUN, SAMPLES, MODEL, ADAPTER, RECIPE, REPORT, DATA, CURVES, IDENTITY)


@dataclass(frozen=True)
class Run:
    """A run directory, `Run("runs/a")`; `blockdiff.train` returns one.

    A run that is not finished has records and a best step, but no report and no model yet. Missing files raise
    RunError, a missing model CheckpointError.
    """

    directory: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", Path(self.directory))
        if not self.directory.is_dir():
            raise RunError(f"{self.directory}: no such directory; name a run directory")

    @property
    def records(self) -> list[Record]:
        """The records of metrics.jsonl, in order."""
        return read(self._file(FILE_NAME))

    @property
    def report(self) -> dict[str, Any]:
        """The figures of the whole run, from report.json."""
        report: dict[str, Any] = json.loads(self._file(REPORT).read_text(encoding="utf-8"))
        return report

    @property
    def best(self) -> tuple[int, float] | None:
        """The saved step with the best value of `evaluation.best`, and that value; None if the recipe has no such key.

        The end of a run exports the weights of this step.
        """
        recipe = plain_yaml.parse(self._file(RECIPE).read_text(encoding="utf-8"))
        return best_saved(self.directory, self.records, recipe["evaluation"]["best"])

    def model(self, **options: Any) -> Any:
        """Load the exported model, with its adapters if it has some. options: of `blockdiff.load`."""
        return checkpoint.load(self.directory, **options)

    def checkpoint(self, which: str | int) -> Path:
        """The directory of a checkpoint: the "last" one, the "best" one by `evaluation.best`, or that of a step."""
        saved = steps_saved(self.directory)
        if which == "best":
            if (best := self.best) is None:
                raise RunError(f"{self.directory}: no step is the best without evaluation.best; name last or a step")
            return saved[best[0]]
        name = str(max(saved, default=0) if which == "last" else which)
        step = int(name) if name.isdecimal() else 0
        if step not in saved:
            steps = (
                f"name last, best or a step of {', '.join(map(str, saved))}"
                if saved
                else "the directory has none; --checkpoint is for the directory of a run that has saved one"
            )
            raise RunError(f"{self.directory}: no checkpoint {which}; {steps}")
        return saved[step]

    def _file(self, name: str) -> Path:
        path = self.directory / name
        if not path.is_file():
            raise RunError(f"{path}: no such file; the run has not written it yet, or the directory is not a run's")
        return path


@contextmanager
def hold_run(run: Path, resume: bool, ranks: Ranks, overwrite: bool = False) -> Iterator[Path | None]:
    """Lock a run directory around a block, and yield the checkpoint to resume from, or None to start at step 0.

    overwrite: start at step 0 although there is a run; `remove_run` removes it once the new one can begin.

    All ranks must call it before any of them writes. If the block fails at the start, empty directories are removed.
    Raises RunError if there is a run and neither `resume` nor `overwrite`, if there are files with the names of a run's
    but no run, if another process holds the lock, or if the ranks see different checkpoints.
    """
    saved = {} if overwrite else steps_saved(run)
    if resume and overwrite:
        raise RunError("resume continues a run and overwrite replaces it; choose one of them")
    is_run = any((run / sign).exists() for sign in SIGNS_OF_A_RUN)
    existing = [run / name for name in WRITTEN if (run / name).exists()]
    if existing and not is_run:
        raise RunError(f"{existing[0]}: exists already and is not a run's; choose another output")
    if is_run and not (resume or overwrite):
        reached = f"saved up to step {max(saved)}" if saved else "with no checkpoint yet"
        raise RunError(
            f"{run} already holds a run {reached}; {RESUME}, replace it with --overwrite, or choose another output"
        )
    latest = ranks.gather(max(saved, default=0))  # no rank continues before all have looked
    if len(set(latest)) > 1:
        raise RunError(f"{run}: processes see checkpoints up to steps {latest}; put it where all of them see the same")
    handle = refusal = None
    try:
        if ranks.is_main:
            try:
                (run / FOLDER).mkdir(parents=True, exist_ok=True)
                handle = os.open(run, os.O_RDONLY)
            except OSError as error:
                refusal = f"{run}: no run can be written there ({error.strerror}); choose another output"
            if handle is not None and not _is_locked(handle):
                refusal = f"{run}: another process trains into this directory; wait for its end or stop it"
        if (refusal := ranks.agree(refusal)) is not None:
            raise RunError(refusal)
        run.mkdir(parents=True, exist_ok=True)  # nodes may have separate disks
        try:
            if ranks.is_main:
                remove_leftovers(run / FOLDER)
            yield saved[max(saved)] if saved else None
        except BaseException:
            for directory in (run / FOLDER, run):
                is_begun = (run / RECIPE).exists()  # keep the folder, which marks its files as a run's
                if ranks.is_main and not is_begun and directory.is_dir() and not any(directory.iterdir()):
                    directory.rmdir()
            raise
    finally:
        if handle is not None:
            os.close(handle)


def remove_run(run: Path) -> None:
    """Remove the files that a run wrote into its directory, except its recipe."""
    for step in steps_saved(run).values():
        remove_directory(step)
    for name in set(WRITTEN) - {FOLDER, RECIPE}:
        if (run / name).is_dir():
            remove_directory(run / name)
        else:
            (run / name).unlink(missing_ok=True)


def _is_locked(handle: int) -> bool:
    """Lock an open directory until it is closed or its process dies. Returns False if another process has the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks for directories
        pass
    return True


def prune(run: Path, keep: int, *, keep_every: int = 0, protect: Collection[int] = ()) -> None:
    """Remove checkpoints, except the newest `keep` (at least 1), multiples of `keep_every`, and steps in `protect`."""
    saved = steps_saved(run)
    for step in list(saved)[: -max(keep, 1)]:
        if step not in protect and not (keep_every and step % keep_every == 0):
            remove_directory(saved[step])


def require_decisive(metric: str) -> None:
    """Raise RunError for a metric that `evaluation.best` cannot be."""
    if metric not in (decisive := decisive_metrics()):
        raise RunError(
            f"evaluation.best: no metric {metric!r}; choose one of {', '.join(decisive)} "
            "(one of your own goes into blockdiff.metrics.METRICS)"
        )


def metric_values(records: Sequence[Record], metric: str) -> list[tuple[int, float]]:
    """The (step, value) of every record with the metric after step 0, which has no checkpoint, in the log's order."""
    return [(record["step"], float(record[metric])) for record in records if metric in record and record["step"] > 0]


def best_step(
    records: Sequence[Record], metric: str | None, among: Collection[int] | None = None
) -> tuple[int, float] | None:
    """The earliest step with the best value of a metric, and the value; None if no record has the metric.

    metric: None has no best step. among: the steps to choose from, such as those with a checkpoint (None: all). Raises
    RunError as `require_decisive` does.
    """
    if metric is None:
        return None
    require_decisive(metric)
    values = [pair for pair in metric_values(records, metric) if among is None or pair[0] in among]
    sign = -1 if METRICS[metric].better == "higher" else 1
    return min(values, key=lambda pair: sign * pair[1], default=None)


def evaluations_since_best(records: Sequence[Record], metric: str | None) -> int:
    """The number of measurements of a metric after its best value."""
    best = best_step(records, metric)
    return 0 if best is None or metric is None else sum(step > best[0] for step, _ in metric_values(records, metric))


def best_saved(run: Path, records: Sequence[Record], metric: str | None) -> tuple[int, float] | None:
    """The step with the best value of a metric among a run's checkpoints, and the value; None as in `best_step`."""
    return best_step(records, metric, among=steps_saved(run))
