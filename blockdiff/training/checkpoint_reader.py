"""The reader of a run's checkpoints. Any ranks can read what any other ranks wrote.

Every rank verifies a share of the files and reads the pieces that it needs.
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
    require_shardable,
    saved_weights,
    short_name,
)
from blockdiff.training.optimiser import Ema

# Facts that may differ when a run is resumed: they only change the order of sums.
ROUNDING = ("train.micro_batch_size", "objective.sweep")
# Facts that are compared by a hash, with words for the message.
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
    """Load a checkpoint into an objective, its optimiser and its average, bit for bit, and return its step.

    All ranks must call it. Raises RunError with every fact, or the first tensor, in which the saved run differs from
    this one, and for files that have changed. It warns about another number of processes, another mesh or another
    `train.micro_batch_size`, with which draws are the same but sums are rounded differently, and about changed logs.
    """
    ranks = ranks or ALONE
    kinds = (MODEL, OPTIMISER, *((AVERAGE,) if average is not None else ()))
    with _readable(checkpoint):
        trainer = _read_trainer(checkpoint)
        # Compare facts before tensors: with other options there may be other files.
        was, now = trainer["facts"], json.loads(json.dumps(dict(facts)))
        _refuse_other_facts(checkpoint, was, now)
        saved = _verified(checkpoint, trainer, kinds, ranks)
        world, values = trainer["world"], trainer["optimiser"]
        for name, log in trainer["logs"].items() if ranks.is_main else ():
            written = checkpoint.parents[1] / name
            if not written.is_file() or digest(written, log["bytes"]) != log["digest"]:
                effect = "; the best step is chosen from its remaining records" if name == FILE_NAME else ""
                warnings.warn(
                    f"{written}: was removed or edited since step {trainer['step']} was saved{effect}", stacklevel=2
                )
    if was.get(STREAMED) != now.get(STREAMED) and ranks.is_main:
        warnings.warn(
            f"{checkpoint}: the streamed rows of data.train have changed since the run began; it continues at the same "
            "number of rows",
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
            f"{checkpoint}: {'; '.join(changed)}: batches and draws are the same, but sums are rounded differently",
            stacklevel=2,
        )
    with _readable(checkpoint):
        _fill(checkpoint, MODEL, saved_weights(objective), saved)
        _fill_optimiser(checkpoint, objective, optimiser, saved, values)
        if average is not None:
            _fill(checkpoint, AVERAGE, average.state(), saved)
    return int(trainer["step"])


def read_counts(checkpoint: Path) -> dict[str, float]:
    """Return the running sums of `Source.counts` at a checkpoint, for `Source.restore_counts`.

    The next record of the log is made of them.
    """
    with _readable(checkpoint):
        counts: dict[str, float] = _read_trainer(checkpoint)["counts"]
        return counts


def restore_weights(
    checkpoint: Path, objective: nn.Module, average: Ema | None = None, ranks: Ranks | None = None
) -> None:
    """Load only the weights of a checkpoint and their average, for export. All ranks must call it."""
    with _readable(checkpoint):
        kinds = (MODEL, *((AVERAGE,) if average is not None else ()))
        saved = _verified(checkpoint, _read_trainer(checkpoint), kinds, ranks or ALONE)
        _fill(checkpoint, MODEL, saved_weights(objective), saved)
        if average is not None:
            _fill(checkpoint, AVERAGE, average.state(), saved)


def open_checkpoint(checkpoint: Path) -> SavedTensors:
    """Open the weights of a checkpoint and their average if there is one, and verify their files."""
    with _readable(checkpoint):
        trainer = _read_trainer(checkpoint)
        saved = SavedTensors(checkpoint, trainer["digests"])
        return _verified(checkpoint, trainer, [kind for kind in (MODEL, AVERAGE) if saved.has(kind)], ALONE)


def _read_trainer(checkpoint: Path) -> dict[str, Any]:
    """The content of trainer.json. Raises ValueError if it has changed, RunError if it has another format."""
    trainer: dict[str, Any] = json.loads((checkpoint / TRAINER).read_text(encoding="utf-8"))
    if not isinstance(trainer, dict) or "facts" not in trainer:
        raise ValueError(f"{TRAINER} has changed since it was written")
    if trainer.get("format") != FORMAT:
        writer = f"blockdiff {trainer['version']}" if "version" in trainer else "an unreleased blockdiff"
        raise RunError(
            f"{checkpoint}: was written by {writer} in format {trainer.get('format')}, and this is blockdiff "
            f"{__version__}, which reads format {FORMAT}; resume with that version, or start another run from its "
            "weights with model.path"
        )
    if trainer.pop("seal") != seal(trainer):
        raise ValueError(f"{TRAINER} has changed since it was written")
    if trainer["step"] != int(checkpoint.name.removeprefix("step-")):
        raise ValueError(f"{TRAINER} is that of step {trainer['step']}")
    return trainer


def _verified(checkpoint: Path, trainer: Mapping[str, Any], kinds: Iterable[str], ranks: Ranks) -> SavedTensors:
    """Open the tensors of a checkpoint and compare digests. Raises ValueError on all ranks if one differs."""
    saved = SavedTensors(checkpoint, trainer["digests"])
    with ranks.guarded(f"reading {checkpoint.name}"), ranks.at_own_pace(f"reading {checkpoint.name}"):
        problem = saved.verify(kinds, ranks)
    if problems := [each for each in ranks.gather(problem) if each is not None]:
        raise ValueError(problems[0])
    return saved


@contextmanager
def _readable(checkpoint: Path) -> Iterator[None]:
    """Turn errors about a checkpoint's files in a block into a RunError of one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError, CheckpointError) as error:
        reason = f"{error} is missing in {TRAINER}" if isinstance(error, KeyError) else first_line(error)
        if isinstance(error, OSError) and error.filename:
            reason = f"{Path(error.filename).name}: {error.strerror}"
        raise RunError(f"{checkpoint}: cannot be read ({reason}); remove it to resume from an earlier one") from None


def _words(is_sharded: bool) -> str:
    return "sharded" if is_sharded else "unsharded"


def _refuse_other_facts(checkpoint: Path, was: dict[str, Any], now: dict[str, Any]) -> None:
    names = [name for name in sorted({*was, *now} - {*ROUNDING, STREAMED}) if was.get(name) != now.get(name)]
    if "model.tokenizer" in names:  # the digests of rows differ because of it
        names = [name for name in names if name not in ("data.train", "data.heldout")]
    differing = [
        HASHED.get(name) or f"{name} {json.dumps(was.get(name))}, not {json.dumps(now.get(name))}" for name in names
    ]
    if differing:
        raise RunError(
            f"{checkpoint}: the run was started with {'; '.join(differing)}; set it back (also what Python passed), or "
            "start another run in another directory"
        )


def _fill(checkpoint: Path, kind: str, tensors: Mapping[str, Tensor], saved: SavedTensors) -> None:
    """Copy a checkpoint's values into tensors, of which each rank has its own pieces.

    Raises RunError with the first tensor that is missing or has another shape or dtype, before any is changed.
    """
    ours = {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()}
    theirs = {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in saved.tensors(kind).items()}
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
    """Load a checkpoint's state into an optimiser.

    State in the shape of its parameter is sharded like it; other state is the same on all ranks. Raises RunError for
    the state of a parameter that does not train now.
    """
    named = {short_name(name): parameter for name, parameter in objective.named_parameters()}
    index_of = {
        parameter: index
        for index, parameter in enumerate(p for group in optimiser.param_groups for p in group["params"])
    }
    state: dict[int, dict[str, Any]] = {}
    for full_name in (*saved.tensors(OPTIMISER), *values["state"]):
        name, _, key = full_name.rpartition("/")
        parameter = named.get(name)
        if parameter is None or parameter not in index_of:
            raise RunError(
                f"{checkpoint / OPTIMISER}.safetensors: {name} was trained in the run to resume and is not trained now"
            )
        value: Any = values["state"].get(full_name)
        if (tensor := saved.tensors(OPTIMISER).get(full_name)) is not None:
            require_shardable(full_name, parameter, tensor.shape)
            is_sharded = tensor.shape == tuple(parameter.shape)
            block = piece_of(parameter).block if is_sharded else None
            value = saved.read(OPTIMISER, full_name, block)
            # Each is moved to its device at once, so that the host never has the state of all parameters.
            value = like(parameter, value.to(parameter.device)) if is_sharded else value
        state.setdefault(index_of[parameter], {})[key] = value
    groups = optimiser.state_dict()["param_groups"]
    for group, saved_group in zip(groups, values["groups"], strict=False):
        group |= saved_group
    # load_state_dict moves every tensor to the device that the optimiser needs (a fused one's step counter, say).
    optimiser.load_state_dict({"state": state, "param_groups": groups})
