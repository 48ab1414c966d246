"""What a run keeps on disk to go on: `checkpoints/step-N` directories, written beside, fsynced, renamed.

A checkpoint holds weights, optimiser state, averaged weights and step, and no random state: every draw is addressed.
Its tensors are safetensors files and the rest is JSON, so no file is a pickle. Models in Hub layout are written by
`blockdiff.checkpoint`.
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from blockdiff.checkpoint.files import first_line
from blockdiff.errors import RESUME, CheckpointError, RunError
from blockdiff.files import digest, remove_directory, remove_leftovers, seal
from blockdiff.metrics import FILE_NAME
from blockdiff.parallel.ranks import Ranks
from blockdiff.pieces import is_spread
from blockdiff.training.checkpoint_tensors import fill, unpack, weights_of
from blockdiff.training.ema import Ema
from blockdiff.training.saved import AVERAGE, MODEL, OPTIMISER, Saved
from blockdiff.training.saving import FOLDER, FORMAT, READABLE, TRAINER, Facts, Saver, steps_saved

if TYPE_CHECKING:
    from blockdiff.training.recipe import Recipe

ALONE = Ranks(torch.device("cpu"))
# Facts that may differ when a run goes on; they say in which parts sums are made. Older runs may lack one.
ROUNDING = ("train.micro_batch_size", "objective.sweep")
# Facts that are compared by a hash, which says nothing to a reader.
HASHED = {
    "model": "a model of another shape (model)",
    "model.path": "other weights below its adapters (model.path)",
    "model.tokenizer": "another tokenizer (model.tokenizer)",
    "data.train": "other training rows (data.train), or rows that become tokens in another way",
    "data.heldout": "other held-out rows (data.heldout)",
    "evaluation.prompts": "other prompts (evaluation.prompts)",
}
SIGNS_OF_A_RUN = (FOLDER, FILE_NAME, "recipe.yaml")


@contextmanager
def entered(run: Path, resume: bool, ranks: Ranks) -> Iterator[Path | None]:
    """Hold a run directory; gives the checkpoint to go on from, None to start at step 0.

    Inside, no other process trains into the directory, and a start that fails leaves no empty one. All ranks call it
    before any of them writes. Raises RunError when a run is there and `resume` is not asked for, when another process
    holds the directory, and when the ranks see different checkpoints.
    """
    saved = steps_saved(run)
    if not resume and any((run / sign).exists() for sign in SIGNS_OF_A_RUN):
        reached = f"saved up to step {max(saved)}" if saved else "with no checkpoint yet"
        raise RunError(f"{run} already holds a run {reached}; {RESUME}, or choose another output")
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
        try:
            if ranks.is_main:
                remove_leftovers(run / FOLDER)
            yield saved[max(saved)] if saved else None
        except BaseException:
            for directory in (run / FOLDER, run):
                if ranks.is_main and directory.is_dir() and not any(directory.iterdir()):
                    directory.rmdir()
            raise
    finally:
        if handle is not None:
            os.close(handle)


def _is_locked(handle: int) -> bool:
    """Lock an open directory until it is closed or its process dies; False where another process holds the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system that has no locks for directories
        pass
    return True


def save(
    run: Path,
    step: int,
    objective: nn.Module,
    optimiser: torch.optim.Optimizer,
    facts: Facts,
    ranks: Ranks | None = None,
    *,
    average: Ema | None = None,
) -> Path:
    """Write `checkpoints/step-N` and return it when it is complete: see `Saver.start`.

    A kill at any moment leaves the earlier checkpoints as they were and at most a hidden directory that `entered`
    removes.
    """
    Saver(run, ranks or ALONE).start(step, objective, optimiser, facts, average)
    return run / FOLDER / f"step-{step}"


def prune(run: Path, keep: int, *, keep_every: int = 0, protect: Collection[int] = ()) -> None:
    """Remove checkpoints but the newest `keep` (at least 1), multiples of `keep_every`, and steps to `protect`."""
    saved = steps_saved(run)
    for step in list(saved)[: -max(keep, 1)]:
        if step not in protect and not (keep_every and step % keep_every == 0):
            remove_directory(saved[step])


def restore(
    checkpoint: Path,
    objective: nn.Module,
    optimiser: torch.optim.Optimizer,
    facts: Facts,
    *,
    average: Ema | None = None,
    ranks: Ranks | None = None,
) -> int:
    """Load a checkpoint into what trains, its optimiser and its average, bit for bit, and return its step.

    All ranks call it, each verifies some of the files and reads its own pieces. Raises RunError naming every fact, or
    the first tensor, in which the run to resume differs from this one, and for files that are not as they were
    written. Another number of processes, another mesh or another `train.micro_batch_size` is one warning: the draws
    stay the same, sums are rounded differently. So is a log that was changed since.
    """
    ranks = ranks or ALONE
    kinds = (MODEL, OPTIMISER, *((AVERAGE,) if average is not None else ()))
    with _readable(checkpoint):
        trainer = _trainer_of(checkpoint)
        # Before any tensors: with other options there may be other files.
        was, now = trainer["facts"], json.loads(json.dumps(dict(facts)))
        _refuse_other_facts(checkpoint, was, now)
        saved = _verified(checkpoint, trainer, kinds, ranks)
        world, values = trainer["world"], trainer["optimiser"]
        for name, log in trainer["logs"].items() if ranks.is_main else ():
            written = checkpoint.parents[1] / name
            if not written.is_file() or digest(written, log["bytes"]) != log["digest"]:
                rest = "; which step was the best is read off what is left" if name == FILE_NAME else ""
                warnings.warn(
                    f"{written}: was removed or edited since step {trainer['step']} was saved{rest}", stacklevel=2
                )
    changed = [
        f"saved with {key} {json.dumps(was[key])}, resumed with {json.dumps(now.get(key))}"
        for key in ROUNDING
        if key in was and was[key] != now.get(key)
    ]
    if ranks.world != world:
        changed.append(f"saved by {world} process{'es' * (world > 1)}, resumed by {ranks.world}")
    is_sharded = any(map(is_spread, weights_of(objective).values()))
    if saved.is_sharded != is_sharded:
        changed.append(f"saved {_words(saved.is_sharded)}, resumed {_words(is_sharded)}")
    if changed and ranks.is_main:
        warnings.warn(
            f"{checkpoint}: {'; '.join(changed)}: the same batches and draws, but sums are rounded differently",
            stacklevel=2,
        )
    with _readable(checkpoint):
        fill(checkpoint, MODEL, weights_of(objective), saved)
        unpack(checkpoint, objective, optimiser, saved, values)
        if average is not None:
            fill(checkpoint, AVERAGE, average.state(), saved)
    return int(trainer["step"])


def as_begun(recipe: Recipe, checkpoint: Path, ranks: Ranks) -> Recipe:
    """A recipe in which `objective.sweep: auto` has become what the run of a checkpoint began with.

    Runs that were saved before recipes had this key made one sweep on a CPU and where weights were split.
    """
    if recipe.objective.sweep != "auto":
        return recipe
    with _readable(checkpoint):
        facts = _trainer_of(checkpoint)["facts"]
    is_split = recipe.parallel.names != ("replicate",)
    before = is_split or (ranks.device.type == "cpu" and recipe.given.objective is None)
    objective = recipe.objective.model_copy(update={"sweep": facts.get("objective.sweep", before)})
    return recipe.model_copy(update={"objective": objective})


def restore_weights(
    checkpoint: Path, objective: nn.Module, average: Ema | None = None, ranks: Ranks | None = None
) -> None:
    """Load only the weights of a checkpoint, and their average: the best ones, to export. All ranks call it."""
    with _readable(checkpoint):
        kinds = (MODEL, *((AVERAGE,) if average is not None else ()))
        saved = _verified(checkpoint, _trainer_of(checkpoint), kinds, ranks or ALONE)
        fill(checkpoint, MODEL, weights_of(objective), saved)
        if average is not None:
            fill(checkpoint, AVERAGE, average.state(), saved)


def opened(checkpoint: Path) -> Saved:
    """The weights of a checkpoint and, if there is one, their average, verified and to be read tensor by tensor."""
    with _readable(checkpoint):
        trainer = _trainer_of(checkpoint)
        saved = Saved(checkpoint, trainer["digests"])
        return _verified(checkpoint, trainer, [kind for kind in (MODEL, AVERAGE) if saved.has(kind)], ALONE)


def _trainer_of(checkpoint: Path) -> dict[str, Any]:
    """What trainer.json says; ValueError where it is not as it was written, RunError for one of an earlier format."""
    trainer: dict[str, Any] = json.loads((checkpoint / TRAINER).read_text(encoding="utf-8"))
    if not isinstance(trainer, dict) or "facts" not in trainer:
        raise ValueError(f"{TRAINER} has changed since it was written")
    if trainer.get("format", 1) > FORMAT:
        raise RunError(f"{checkpoint}: was written by a later blockdiff; go on with that version")
    if trainer.get("format") not in READABLE:
        raise RunError(
            f"{checkpoint}: the run was started by an earlier blockdiff, whose recipes have other keys; go on with "
            "that version, or start another run from its weights with model.path"
        )
    if trainer.pop("seal") != seal(trainer):
        raise ValueError(f"{TRAINER} has changed since it was written")
    if trainer["step"] != int(checkpoint.name.removeprefix("step-")):
        raise ValueError(f"{TRAINER} is that of step {trainer['step']}")
    return trainer


def _verified(checkpoint: Path, trainer: Mapping[str, Any], kinds: Iterable[str], ranks: Ranks) -> Saved:
    """The tensors of a checkpoint, whose digests are compared; ValueError on all ranks where one differs."""
    saved = Saved(checkpoint, trainer["digests"])
    with ranks.guarded(f"reading {checkpoint.name}"), ranks.at_own_pace(f"reading {checkpoint.name}"):
        problem = saved.verify(kinds, ranks)
    if (said := next((each for each in ranks.gather(problem) if each is not None), None)) is not None:
        raise ValueError(said)
    return saved


@contextmanager
def _readable(checkpoint: Path) -> Iterator[None]:
    """Makes one RunError of what is wrong with the files of a checkpoint."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError, CheckpointError) as error:
        reason = f"{error} is missing in {TRAINER}" if isinstance(error, KeyError) else first_line(error)
        if isinstance(error, OSError) and error.filename:
            reason = f"{Path(error.filename).name}: {error.strerror}"
        raise RunError(f"{checkpoint}: cannot be read ({reason}); remove it to go on from an earlier one") from None


def _words(is_sharded: bool) -> str:
    return "sharded" if is_sharded else "unsharded"


def _refuse_other_facts(checkpoint: Path, was: dict[str, Any], now: dict[str, Any]) -> None:
    names = [name for name in sorted({*was, *now} - {*ROUNDING}) if was.get(name) != now.get(name)]
    if "model.tokenizer" in names:  # which makes other tokens of the same rows
        names = [name for name in names if name not in ("data.train", "data.heldout")]
    differing = [
        HASHED.get(name) or f"{name} {json.dumps(was.get(name))}, not {json.dumps(now.get(name))}" for name in names
    ]
    if differing:
        raise RunError(
            f"{checkpoint}: the run was started with {'; '.join(differing)}; "
            "keep what it was started with (what was given from Python too), or start another run in another directory"
        )
