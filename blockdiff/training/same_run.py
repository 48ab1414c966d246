"""The facts of a run: the values that a run must share with a checkpoint to resume from it."""

from __future__ import annotations

import functools
import json
from typing import Any

from blockdiff.checkpoint.adapter_names import WEIGHTS
from blockdiff.checkpoint.digests import weights_digest
from blockdiff.checkpoint.files import find
from blockdiff.checkpoint.opening import ModelFiles, model_files
from blockdiff.data.stream import StreamedExamples
from blockdiff.files import json_digest, piecewise_digest
from blockdiff.parallel.ranks import Ranks
from blockdiff.training.checkpoint_content import STREAMED
from blockdiff.training.data import Data
from blockdiff.training.kinds.kind import kind_of
from blockdiff.training.progress import Progress
from blockdiff.training.recipe import Recipe
from blockdiff.training.starting_model import StartingModel

# The keys that may change when a run is resumed: its length, its display, what it keeps, and paths.
FREE = {
    "output",
    "lora.path",  # compared by content
    "model.path",  # the config is compared by content
    "model.preset",
    "model.tokenizer",  # compared by content
    "data.train",  # likewise
    "data.heldout",
    "data.images",
    "data.template",  # likewise, by the tokens of rows
    "data.cache",
    "evaluation.prompts",  # likewise
    "evaluation.prompts_every",
    *(f"train.{key}" for key in ("steps", "epochs", "log_every", "eval_every", "save_every", "keep", "keep_every")),
    *(f"train.{key}" for key in ("save_async", "trackers", "timeout")),
    "train.activation_checkpointing",  # it changes memory, not results
}


def resume_facts(
    recipe: Recipe, base: StartingModel, data: Data, objective: Any, ranks: Ranks, show: Progress
) -> dict[str, Any]:
    """The values that a resumed run must share with the saved run, by recipe key.

    Model, tokenizer, rows and prompts are compared by content, so they may be moved. Rank 0 reads frozen weights and
    the files of streamed rows, which may take long; `show` reports it.
    """

    @functools.cache  # a teacher may be the base
    def digest_of(name: str) -> str:
        with show.waiting(f"model     reading {name}, to recognise it when the run is resumed"):
            return str(ranks.from_main(f"reading {name}", lambda: _digest(model_files(name))))

    kind = kind_of(recipe)
    sections = json.loads(recipe.model_dump_json()) | {"objective": kind.record(objective)}
    del sections["parallel"]  # a run may resume on another mesh
    facts: dict[str, Any] = {}
    for name, section in sections.items():
        keys = {f"{name}.{key}": value for key, value in section.items()} if isinstance(section, dict) else {}
        facts |= {key: value for key, value in (keys or {name: section}).items() if key not in FREE}
    facts["model"] = json_digest(base.config.to_dict())
    if recipe.lora.trains:  # the run's checkpoints have only the adapters
        facts["model.path"] = digest_of(str(recipe.model.path))
    if (path := recipe.lora.path) is not None:
        facts["lora.path"] = ranks.from_main(f"reading {path}", lambda: piecewise_digest(find(path) / WEIGHTS))
    facts["model.tokenizer"] = data.encoder.tokenizer_fingerprint
    if isinstance(data.train, StreamedExamples):
        with show.waiting("data      reading the streamed rows, to recognise them when the run is resumed"):
            facts[STREAMED] = ranks.from_main("reading the streamed rows", data.train.content)
    facts["data.heldout"] = None if data.heldout is None else data.heldout.fingerprint
    return facts | kind.facts(recipe, base, data, digest_of)


def _digest(files: ModelFiles) -> str:
    """The digest of a model's weights, and of the adapter on them if there is one."""
    adapter = [] if files.adapter is None else [piecewise_digest(files.adapter / WEIGHTS)]
    return "+".join([weights_digest(files.weights), *adapter])
