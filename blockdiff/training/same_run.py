"""The facts of a run, which must be the same for it to be resumed as the same run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from blockdiff.checkpoint.files import find, fingerprint
from blockdiff.parallel.ranks import Ranks
from blockdiff.training.checkpoint_reader import saved_facts
from blockdiff.training.data import Data
from blockdiff.training.recipe import Recipe
from blockdiff.training.recipe_choices import described
from blockdiff.training.starting_model import StartingModel

# What may change when a run is resumed: its length, what is shown and kept, and where things lie.
FREE = {
    "output",
    "model.path",  # the shape of the model is compared by content, wherever it is said
    "model.preset",
    "model.tokenizer",  # compared by content
    "data.train",  # likewise
    "data.heldout",
    "data.cache",
    "evaluation.prompts",  # likewise
    "evaluation.prompts_every",
    *(f"train.{key}" for key in ("steps", "epochs", "log_every", "eval_every", "save_every", "keep", "keep_every")),
    *(f"train.{key}" for key in ("save_async", "trackers", "timeout")),
    "train.activation_checkpointing",  # the same numbers to the bit, in less memory
}


def objective_record(recipe: Recipe, objective: Any) -> dict[str, Any]:
    """The parts of the objective, by recipe key: read off the object, which may have other parts than the recipe.

    The order of its passes is no part of it.
    """
    record: dict[str, Any] = recipe.objective.model_dump(mode="json", exclude={"sweep"})
    live = [key for key in ("schedule", "weight") if hasattr(objective, key)]
    return record | {key: described(getattr(objective, key)) for key in live}


def facts_of(recipe: Recipe, base: StartingModel, data: Data, objective: Any) -> dict[str, Any]:
    """The values that a resumed run must share with the run that was saved, by recipe key."""
    sections = json.loads(recipe.model_dump_json()) | {"objective": objective_record(recipe, objective)}
    if not recipe.lora.trains:
        del sections["lora"]  # runs of before it have none
    if recipe.data.on_bad_row == "stop":
        del sections["data"]["on_bad_row"]  # nor this
    del sections["data"]["images"]  # where files lie
    if recipe.data.columns.images is None:
        del sections["data"]["columns"]["images"]
    if recipe.model.quantize is None:
        del sections["model"]["quantize"]  # nor this
    if recipe.optim.name != "muon":
        del sections["optim"]["momentum"]  # nor this
    distil = recipe.objective.distil
    if distil is None:
        del sections["objective"]["distil"]  # nor this
    else:  # by content, wherever it lies
        sections["objective"]["distil"] = {"teacher": fingerprint(find(distil.teacher or str(recipe.model.path)))}
    sections["objective"]["sweep"] = recipe.sweeps
    del sections["parallel"]  # a run may go on with another number of processes, and spread otherwise
    known: dict[str, Any] = {}
    for name, section in sections.items():
        leaves = {name: section}
        if isinstance(section, dict):
            leaves = {f"{name}.{key}": value for key, value in section.items()}
        known |= {key: value for key, value in leaves.items() if key not in FREE}
    # By content, wherever it lies: the shape of the model, the tokenizer, the examples, the prompts.
    known["model"] = _hash(base.config.to_dict())
    if recipe.lora.trains:  # a checkpoint of the run has the adapters alone
        known["model.path"] = fingerprint(find(str(recipe.model.path)))
    known["model.tokenizer"] = data.encoder.tokenizer_fingerprint
    known["evaluation.prompts"] = _hash([asdict(replace(row, where="")) for row in data.prompts])
    known["data.train"] = data.train.fingerprint
    known["data.heldout"] = None if data.heldout is None else data.heldout.fingerprint
    return known


def as_begun(recipe: Recipe, checkpoint: Path, ranks: Ranks) -> Recipe:
    """A recipe in which `objective.sweep: auto` has become what the run of a checkpoint began with.

    Runs that were saved before recipes had this key made one sweep on a CPU and where weights were split.
    """
    if recipe.objective.sweep != "auto":
        return recipe
    facts = saved_facts(checkpoint)
    is_split = recipe.parallel.names != ("replicate",)
    before = is_split or (ranks.device.type == "cpu" and recipe.given.objective is None)
    objective = recipe.objective.model_copy(update={"sweep": facts.get("objective.sweep", before)})
    return recipe.model_copy(update={"objective": objective})


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
