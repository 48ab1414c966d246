"""The reader of a run's checkpoints: what goes on from one has its tensors, whichever ranks wrote them.

Every rank verifies some of the files and reads its own pieces.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from blockdiff import __version__
from blockdiff.checkpoint.files import first_line
from blockdiff.errors import CheckpointError, RunError
from blockdiff.files import digest, seal
from blockdiff.metrics import FILE_NAME
from blockdiff.parallel.ranks import Ranks
from blockdiff.tensor_pieces import is_spread, like, piece_of
from blockdiff.training.checkpoint_content import (
    ALONE,
    AVERAGE,
    FORMAT,
    MODEL,
    OPTIMISER,
    STREAMED,
    TRAINER,
    Facts,
    SavedTensors,
    require_like,
    saved_weights,
    short_name,
)
from blockdiff.training.optimiser import Ema

# Facts that may differ when a run goes on: they say in which parts sums are made.
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
        trainer = _read_trainer(checkpoint)
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
    if was.get(STREAMED) != now.get(STREAMED) and ranks.is_main:
        warnings.warn(
            f"{checkpoint}: the rows of data.train, which are streamed, have changed since the run began; it goes on "
            "after as many rows as it had",
            stacklevel=2,
        )
    changed = [
        f"saved with {key} {json.dumps(was.get(key))}, resumed with {json.dumps(now.get(key))}"
        for key in ROUNDING
        if was.get(key) != now.get(key)
    ]
    if ranks.world != world:
        changed.append(f"saved by {world} process{'es' * (world > 1)}, resumed by {ranks.world}")
    is_sharded = any(map(is_spread, saved_weights(objective).values()))
    if saved.is_sharded != is_sharded:
        changed.append(f"saved {_words(saved.is_sharded)}, resumed {_words(is_sharded)}")
    if changed and ranks.is_main:
        warnings.warn(
            f"{checkpoint}: {'; '.join(changed)}: the same batches and draws, but sums are rounded differently",
            stacklevel=2,
        )
    with _readable(checkpoint):
        _fill(checkpoint, MODEL, saved_weights(objective), saved)
        _fill_optimiser(checkpoint, objective, optimiser, saved, values)
        if average is not None:
            _fill(checkpoint, AVERAGE, average.state(), saved)
    return int(trainer["step"])


def read_counts(checkpoint: Path) -> dict[str, float]:
    """The counts that were saved with a checkpoint, which the next record of the log goes on from."""
    with _readable(checkpoint):
        counts: dict[str, float] = _read_trainer(checkpoint)["counts"]
        return counts


def restore_weights(
    checkpoint: Path, objective: nn.Module, average: Ema | None = None, ranks: Ranks | None = None
) -> None:
    """Load only the weights of a checkpoint, and their average: the best ones, to export. All ranks call it."""
    with _readable(checkpoint):
        kinds = (MODEL, *((AVERAGE,) if average is not None else ()))
        saved = _verified(checkpoint, _read_trainer(checkpoint), kinds, ranks or ALONE)
        _fill(checkpoint, MODEL, saved_weights(objective), saved)
        if average is not None:
            _fill(checkpoint, AVERAGE, average.state(), saved)


def open_checkpoint(checkpoint: Path) -> SavedTensors:
    """The weights of a checkpoint and, if there is one, their average, verified and to be read tensor by tensor."""
    with _readable(checkpoint):
        trainer = _read_trainer(checkpoint)
        saved = SavedTensors(checkpoint, trainer["digests"])
        return _verified(checkpoint, trainer, [kind for kind in (MODEL, AVERAGE) if saved.has(kind)], ALONE)


def _read_trainer(checkpoint: Path) -> dict[str, Any]:
    """The content of trainer.json; ValueError where it was changed, RunError for one of another format."""
    trainer: dict[str, Any] = json.loads((checkpoint / TRAINER).read_text(encoding="utf-8"))
    if not isinstance(trainer, dict) or "facts" not in trainer:
        raise ValueError(f"{TRAINER} has changed since it was written")
    if trainer.get("format") != FORMAT:
        writer = f"blockdiff {trainer['version']}" if "version" in trainer else "an unreleased blockdiff"
        raise RunError(
            f"{checkpoint}: was written by {writer} in format {trainer.get('format')}, and this is blockdiff "
            f"{__version__}, which reads format {FORMAT}; go on with that version, or start another run from its "
            "weights with model.path"
        )
    if trainer.pop("seal") != seal(trainer):
        raise ValueError(f"{TRAINER} has changed since it was written")
    if trainer["step"] != int(checkpoint.name.removeprefix("step-")):
        raise ValueError(f"{TRAINER} is that of step {trainer['step']}")
    return trainer


def _verified(checkpoint: Path, trainer: Mapping[str, Any], kinds: Iterable[str], ranks: Ranks) -> SavedTensors:
    """The tensors of a checkpoint, whose digests are compared; ValueError on all ranks where one differs."""
    saved = SavedTensors(checkpoint, trainer["digests"])
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
    names = [name for name in sorted({*was, *now} - {*ROUNDING, STREAMED}) if was.get(name) != now.get(name)]
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


def _fill(checkpoint: Path, kind: str, tensors: Mapping[str, Tensor], saved: SavedTensors) -> None:
    """Give tensors the values that a checkpoint has for them, each rank its own pieces.

    Raises RunError naming the first that is missing or of another shape or dtype, before any is changed.
    """
    ours = {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()}
    theirs = {name: f"{found.dtype} {list(found.shape)}" for name, found in saved.tensors(kind).items()}
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            saved_form, model_form = theirs.get(name, "missing"), ours.get(name, "missing")
            raise RunError(
                f"{checkpoint / kind}.safetensors: {name} is {saved_form} there and {model_form} in the model"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            piece = piece_of(tensor)
            saved.copy(kind, name, piece.block, piece.local)


def _fill_optimiser(
    checkpoint: Path,
    objective: nn.Module,
    optimiser: torch.optim.Optimizer,
    saved: SavedTensors,
    values: dict[str, Any],
) -> None:
    """Give an optimiser the state that was saved, each rank its own pieces.

    Raises RunError for the state of a parameter that does not train now. State in the shape of its parameter is spread
    as that is now; other state is the same on all ranks.
    """
    named = {short_name(name): parameter for name, parameter in objective.named_parameters()}
    place = {
        parameter: index
        for index, parameter in enumerate(p for group in optimiser.param_groups for p in group["params"])
    }
    state: dict[int, dict[str, Any]] = {}
    for full_name in (*saved.tensors(OPTIMISER), *values["state"]):
        name, _, key = full_name.rpartition("/")
        parameter = named.get(name)
        if parameter is None or parameter not in place:
            raise RunError(
                f"{checkpoint / OPTIMISER}.safetensors: {name} was trained in the run to resume and is not trained now"
            )
        value: Any = values["state"].get(full_name)
        if (found := saved.tensors(OPTIMISER).get(full_name)) is not None:
            require_like(full_name, parameter, found.shape)
            has_its_shape = found.shape == tuple(parameter.shape)
            block = piece_of(parameter).block if has_its_shape else None
            value = saved.read(OPTIMISER, full_name, block)
            # One at a time goes where it stays, so that the host does not hold the state of all parameters.
            value = like(parameter, value.to(parameter.device)) if has_its_shape else value
        state.setdefault(place[parameter], {})[key] = value
    groups = optimiser.state_dict()["param_groups"]
    for group, kept in zip(groups, values["groups"], strict=False):
        group |= kept
    # load_state_dict puts every tensor where this optimiser wants it (the step counter of a fused one, say).
    optimiser.load_state_dict({"state": state, "param_groups": groups})
