"""A run directory: `Run` reads it, `hold_run` keeps it for one process, `prune` removes checkpoints of it."""

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
SIGNS_OF_A_RUN = (FOLDER, FILE_NAME)  # what only a run has
WRITTEN = (*SIGNS_OF_A_RUN, SAMPLES, MODEL, ADAPTER, RECIPE, REPORT, DATA, CURVES, IDENTITY)


@dataclass(frozen=True)
class Run:
    """A run directory: `Run("runs/a")`, and what `blockdiff.train` returns.

    A run that goes on or was stopped has records and a best step, and no report and no model yet. What is not there is
    a RunError, or of the model a CheckpointError.
    """

    directory: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", Path(self.directory))
        if not self.directory.is_dir():
            raise RunError(f"{self.directory}: no such directory; name the one that a training wrote into")

    @property
    def records(self) -> list[Record]:
        """The records of metrics.jsonl, in order."""
        return read(self._file(FILE_NAME))

    @property
    def report(self) -> dict[str, Any]:
        """The figures of the whole run, as report.json has them."""
        report: dict[str, Any] = json.loads(self._file(REPORT).read_text(encoding="utf-8"))
        return report

    @property
    def best(self) -> tuple[int, float] | None:
        """The saved step with the best value of `evaluation.best`, and that value; None where no metric decides.

        At the end of a run its weights are exported.
        """
        recipe = plain_yaml.parse(self._file(RECIPE).read_text(encoding="utf-8"))
        return best_saved(self.directory, self.records, recipe["evaluation"]["best"])

    def model(self, **options: Any) -> Any:
        """The exported model, with its adapters if it has some; `options` go to `blockdiff.load`."""
        return checkpoint.load(self.directory, **options)

    def checkpoint(self, which: str | int) -> Path:
        """The directory of a checkpoint: the "last" one, the "best" by `evaluation.best`, or that of a step."""
        saved = steps_saved(self.directory)
        if which == "best":
            if (found := self.best) is None:
                raise RunError(f"{self.directory}: no metric says which step was the best; name last or a step")
            return saved[found[0]]
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
            raise RunError(f"{path}: no such file; the run has not come to write it, or the directory holds no run")
        return path


@contextmanager
def hold_run(run: Path, resume: bool, ranks: Ranks, overwrite: bool = False) -> Iterator[Path | None]:
    """Hold a run directory; gives the checkpoint to go on from, None to start at step 0.

    With `overwrite` a run that is there is started over; `remove_run` removes it once the new one can begin.

    Inside, no other process trains into the directory, and a start that fails leaves no empty one. All ranks call it
    before any of them writes. Raises RunError when a run is there and neither `resume` nor `overwrite` is asked for,
    when files are there that a run would write over and that are no run's, when another process holds the directory,
    and when the ranks see different checkpoints.
    """
    saved = {} if overwrite else steps_saved(run)
    if resume and overwrite:
        raise RunError("resume goes on with a run and overwrite replaces it; ask for one of them")
    is_run = any((run / sign).exists() for sign in SIGNS_OF_A_RUN)
    strange = [run / name for name in WRITTEN if (run / name).exists()]
    if strange and not is_run:
        raise RunError(f"{strange[0]}: is there already and is no run's; choose another output")
    if is_run and not (resume or overwrite):
        reached = f"saved up to step {max(saved)}" if saved else "with no checkpoint yet"
        raise RunError(
            f"{run} already holds a run {reached}; {RESUME}, replace it with --overwrite, or choose another output"
        )
    latest = ranks.gather(max(saved, default=0))  # nobody goes on before everybody has looked
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
        run.mkdir(parents=True, exist_ok=True)  # a node may have a disk of its own
        try:
            if ranks.is_main:
                remove_leftovers(run / FOLDER)
            yield saved[max(saved)] if saved else None
        except BaseException:
            for directory in (run / FOLDER, run):
                is_begun = (run / RECIPE).exists()  # its files are a run's as long as the folder is there
                if ranks.is_main and not is_begun and directory.is_dir() and not any(directory.iterdir()):
                    directory.rmdir()
            raise
    finally:
        if handle is not None:
            os.close(handle)


def remove_run(run: Path) -> None:
    """Remove what a run has written into its directory, but its recipe; other files stay."""
    for step in steps_saved(run).values():
        remove_directory(step)
    for name in set(WRITTEN) - {FOLDER, RECIPE}:
        if (run / name).is_dir():
            remove_directory(run / name)
        else:
            (run / name).unlink(missing_ok=True)


def _is_locked(handle: int) -> bool:
    """Lock an open directory until it is closed or its process dies; False where another process holds the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system that has no locks for directories
        pass
    return True


def prune(run: Path, keep: int, *, keep_every: int = 0, protect: Collection[int] = ()) -> None:
    """Remove checkpoints but the newest `keep` (at least 1), multiples of `keep_every`, and steps to `protect`."""
    saved = steps_saved(run)
    for step in list(saved)[: -max(keep, 1)]:
        if step not in protect and not (keep_every and step % keep_every == 0):
            remove_directory(saved[step])


def require_decisive(metric: str) -> None:
    """Raises RunError for a metric that cannot decide which weights are the best."""
    if metric not in (decisive := decisive_metrics()):
        raise RunError(
            f"evaluation.best: no metric {metric!r}; choose one of {', '.join(decisive)} "
            "(one of your own goes into blockdiff.metrics.METRICS)"
        )


def metric_values(records: Sequence[Record], metric: str) -> list[tuple[int, float]]:
    """(step, value) of every record that has the metric, in the log's order; step 0 has no checkpoint."""
    return [(record["step"], float(record[metric])) for record in records if metric in record and record["step"] > 0]


def best_step(
    records: Sequence[Record], metric: str | None, among: Collection[int] | None = None
) -> tuple[int, float] | None:
    """The step with the best value of a metric, the earliest of equals, and the value.

    among: the steps that count, such as those with a checkpoint; None = all. Returns None without a metric and where no
    record has it. Raises RunError as `require_decisive` does.
    """
    if metric is None:
        return None
    require_decisive(metric)
    values = [pair for pair in metric_values(records, metric) if among is None or pair[0] in among]
    sign = -1 if METRICS[metric].better == "higher" else 1
    return min(values, key=lambda pair: sign * pair[1], default=None)


def evaluations_since_best(records: Sequence[Record], metric: str | None) -> int:
    """The number of measurements of a metric after its best value, which early stopping compares with its patience."""
    best = best_step(records, metric)
    return 0 if best is None or metric is None else sum(step > best[0] for step, _ in metric_values(records, metric))


def best_saved(run: Path, records: Sequence[Record], metric: str | None) -> tuple[int, float] | None:
    """The best step of a metric among the checkpoints of a run directory, and its value; None as in `best_step`."""
    return best_step(records, metric, among=steps_saved(run))
