"""The facts of a run: the values that must be the same for it to be resumed as the same run."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

from blockdiff.checkpoint.adapter_names import WEIGHTS
from blockdiff.checkpoint.digests import weights_digest
from blockdiff.checkpoint.opening import ModelFiles, model_files
from blockdiff.data.stream import StreamedExamples
from blockdiff.files import piecewise_digest
from blockdiff.parallel.ranks import Ranks
from blockdiff.rl.prompts import Prompts
from blockdiff.training.checkpoint_content import STREAMED
from blockdiff.training.data import Data
from blockdiff.training.progress import Progress
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
    "data.images",
    "data.template",  # likewise, by the tokens that it makes
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


def resume_facts(
    recipe: Recipe, base: StartingModel, data: Data, objective: Any, ranks: Ranks, show: Progress
) -> dict[str, Any]:
    """The values that a resumed run must share with the run that was saved, by recipe key.

    Model, tokenizer, rows and prompts are compared by their content, wherever they lie. Rank 0 reads what is long to
    read: the weights that stand still, and the files of streamed rows; `show` says that it does.
    """

    @functools.cache  # a teacher may be the base
    def digest_of(name: str) -> str:
        with show.waiting(f"model     reading {name}, to know it again on resuming"):
            return str(ranks.from_main(f"reading {name}", lambda: _digest(model_files(name))))

    sections = json.loads(recipe.model_dump_json()) | {"objective": objective_record(recipe, objective)}
    sections = {name: section for name, section in sections.items() if section is not None}
    del sections["parallel"]  # a run may go on with another number of processes, and spread otherwise
    sections["objective"]["sweep"] = recipe.sweeps
    if (distil := recipe.objective.distil) is not None:
        sections["objective"]["distil"] = {"teacher": digest_of(distil.teacher or str(recipe.model.path))}
    if (target := recipe.objective.draft_for) is not None:
        sections["objective"]["draft_for"] = digest_of(target)
    facts: dict[str, Any] = {}
    for name, section in sections.items():
        keys = {f"{name}.{key}": value for key, value in section.items()} if isinstance(section, dict) else {}
        facts |= {key: value for key, value in (keys or {name: section}).items() if key not in FREE}
    facts["model"] = _hash(base.config.to_dict())
    if recipe.lora.trains:  # a checkpoint of the run has the adapters alone
        facts["model.path"] = digest_of(str(recipe.model.path))
    facts["model.tokenizer"] = data.encoder.tokenizer_fingerprint
    facts["evaluation.prompts"] = (
        data.prompts.fingerprint
        if isinstance(data.prompts, Prompts)
        else _hash([asdict(replace(row, where="")) for row in data.prompts])
    )
    facts["data.train"] = data.train.fingerprint
    if isinstance(data.train, Prompts):  # which are no tokens yet
        facts["data.train"] = _hash([data.train.fingerprint, str(base.tokenizer.chat_template)])
    if isinstance(data.train, StreamedExamples):
        with show.waiting("data      reading the streamed rows, to know them again on resuming"):
            facts[STREAMED] = ranks.from_main("reading the streamed rows", data.train.content)
    facts["data.heldout"] = None if data.heldout is None else data.heldout.fingerprint
    return facts


def _digest(files: ModelFiles) -> str:
    """A digest of the weights of a model, and of the adapter over them if there is one."""
    adapter = [] if files.adapter is None else [piecewise_digest(files.adapter / WEIGHTS)]
    return "+".join([weights_digest(files.weights), *adapter])


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
