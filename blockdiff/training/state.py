"""What a run keeps on disk to go on: `checkpoints/step-N` directories, written beside, fsynced, renamed.

A checkpoint holds weights, optimiser state and step, and no random state: every draw is addressed. No pickle:
tensors are safetensors, the rest is JSON. Models in Hub layout are written by `blockdiff.checkpoint`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blockdiff.errors import RunError
from blockdiff.training.metrics import FILE_NAME
from blockdiff.training.parallel import Parallel

FOLDER = "checkpoints"
MODEL, OPTIMISER, TRAINER = "model.safetensors", "optimiser.safetensors", "trainer.json"
SIGNS_OF_A_RUN = (FOLDER, FILE_NAME, "recipe.yaml")
_COMPLETE = re.compile(r"step-(\d+)")

Facts = Mapping[str, Any]


def steps_saved(run: Path) -> dict[int, Path]:
    """The complete checkpoints of a run directory by step, oldest first. A directory so named is complete."""
    found = [(_COMPLETE.fullmatch(path.name), path) for path in (run / FOLDER).glob("step-*")]
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def enter(run: Path, resume: bool, parallel: Parallel) -> Path | None:
    """Open a run directory and return the checkpoint to go on from, None to start at step 0.

    Raises RunError when a run is there and `resume` is not asked for. All ranks call it, before any writes.
    """
    saved = steps_saved(run)
    if not resume and any((run / sign).exists() for sign in SIGNS_OF_A_RUN):
        reached = f"saved up to step {max(saved)}" if saved else "with no checkpoint yet"
        raise RunError(f"{run} already holds a run {reached}; go on with --resume or choose another --output")
    latest = parallel.gather(max(saved, default=0))  # nobody goes on before everybody has looked
    if len(set(latest)) > 1:
        raise RunError(f"{run}: processes see checkpoints up to steps {latest}; put it where all of them see the same")
    if parallel.is_main:
        (run / FOLDER).mkdir(parents=True, exist_ok=True)
        for leftover in (run / FOLDER).glob(".step-*"):  # of a save or a removal that was killed
            shutil.rmtree(leftover)
    parallel.barrier()
    return saved[max(saved)] if saved else None


def save(
    run: Path,
    step: int,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    facts: Facts,
    keep: int,
    parallel: Parallel,
) -> Path:
    """Write `checkpoints/step-N`, then remove all but the newest `keep`; only the main process writes.

    `facts` (JSON values, such as seed and recipe) are compared by `restore`. A kill at any moment leaves the
    earlier checkpoints as they were and at most a hidden directory that `enter` removes.
    """
    final = run / FOLDER / f"step-{step}"
    if parallel.is_main:
        beside = final.with_name(f".{final.name}.partial")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        tensors, values = _pack(model, optimiser)
        save_file({name: t.detach().contiguous() for name, t in model.state_dict().items()}, beside / MODEL)
        save_file(tensors, beside / OPTIMISER)
        trainer = {"step": step, "facts": dict(facts), "optimiser": values}
        (beside / TRAINER).write_text(json.dumps(trainer, indent=1), encoding="utf-8")
        for path in (*beside.iterdir(), beside):
            _fsync(path)
        _remove(final)
        beside.rename(final)
        _fsync(final.parent)
        saved = steps_saved(run)
        for old in sorted(saved)[: -max(keep, 1)]:
            _remove(saved[old])
    parallel.barrier()
    return final


def restore(checkpoint: Path, model: nn.Module, optimiser: torch.optim.Optimizer, facts: Facts) -> int:
    """Load a checkpoint into a model and its optimiser, bit for bit, and return its step.

    Raises RunError naming the first fact or tensor in which the run to resume differs from this one.
    """
    try:
        trainer = json.loads((checkpoint / TRAINER).read_text(encoding="utf-8"))
        weights = load_file(checkpoint / MODEL)
        tensors = load_file(checkpoint / OPTIMISER)
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(
            f"{checkpoint}: cannot be read ({error}); remove it to go on from an earlier one"
        ) from None
    for name in sorted({*facts, *trainer["facts"]}):
        was, now = trainer["facts"].get(name), json.loads(json.dumps(facts.get(name)))
        if was != now:
            raise RunError(f"{checkpoint}: the run was started with {name} {was!r}, not {now!r}; keep it")
    state = model.state_dict()
    _refuse_difference(checkpoint / MODEL, _shapes(state), _shapes(weights))
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(weights[name])
    _unpack(checkpoint / OPTIMISER, model, optimiser, tensors, trainer["optimiser"])
    return int(trainer["step"])


def _pack(model: nn.Module, optimiser: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Optimiser state by `parameter name/key`: tensors, and what is not a tensor."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value.detach().contiguous()
            else:
                values[f"{name}/{key}"] = value
    return tensors, values


def _unpack(
    path: Path,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    values: dict[str, Any],
) -> None:
    named = dict(model.named_parameters())
    place = {
        parameter: index
        for index, parameter in enumerate(p for group in optimiser.param_groups for p in group["params"])
    }
    state: dict[int, dict[str, Any]] = {}
    for full_name, value in {**tensors, **values}.items():
        name, _, key = full_name.rpartition("/")
        parameter = named.get(name)
        if parameter is None or parameter not in place:
            raise RunError(f"{path}: {name} was trained in the run to resume and is not trained now")
        state.setdefault(place[parameter], {})[key] = value
    # load_state_dict puts every tensor where this optimiser wants it (the step counter of a fused one, say).
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})


def _shapes(state: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in state.items()}


def _refuse_difference(path: Path, ours: dict[str, str], theirs: dict[str, str]) -> None:
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            there, here = theirs.get(name, "missing"), ours.get(name, "missing")
            raise RunError(f"{path}: {name} is {there} there and {here} in the model")


def _remove(directory: Path) -> None:
    """Take a checkpoint's name away before its files: a removal that is killed must not look complete."""
    if directory.exists():
        hidden = directory.with_name(f".{directory.name}.removed")
        shutil.rmtree(hidden, ignore_errors=True)
        directory.rename(hidden)
        shutil.rmtree(hidden)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
