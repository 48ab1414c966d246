"""`Kind`: the model, batches and losses of a run.

A kind has keys, the fields of its class, and methods, which a run calls in this order:

- `refuse`, `without_effect`: checks of a recipe that its schema cannot make
- `start`, `without_weights`, `load_others`: the model that training starts from, and the objective over it
- `read_data`, `source`: rows, and the batches of every optimiser step
- `losses`, `why_unscored`: the losses with their divisors and weights
- `evaluate`, `sample`: measurements during the run
- `record`, `facts`: the objective in the trained model's settings, and the values that a resumed run must share
- `largest_batch`, `between_steps`: the largest batch and other memory, for a plan

The defaults are those of a run over rows with responses. `make`, `losses`, `collator` and `evaluate` have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Any, ClassVar

import torch
from pydantic import field_serializer
from torch import Tensor

from blockdiff import evals
from blockdiff.canvas import Batch
from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.data.canvas_choice import CanvasChoice, NoCanvases
from blockdiff.data.collate import Collator
from blockdiff.data.images import ImageReader
from blockdiff.data.order import AnyOrder
from blockdiff.diffusion.schedule import StratifiedTime
from blockdiff.errors import CheckpointError
from blockdiff.evals.questions import questions_of
from blockdiff.files import json_digest
from blockdiff.kernels import Kernels
from blockdiff.metrics import Record
from blockdiff.models.family import Family
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.sampling import Sampler
from blockdiff.terminal import counted
from blockdiff.training.built import Built, Rows, Source
from blockdiff.training.checkpoint_content import require_distinct_names
from blockdiff.training.data import Data, Reading, encoder, image_reader, settle_template
from blockdiff.training.kinds import kinds
from blockdiff.training.plan.largest import worst_batch
from blockdiff.training.progress import Progress
from blockdiff.training.recipe import ObjectiveSection, Recipe, Section
from blockdiff.training.recipe_choices import described
from blockdiff.training.samples import Sampled, sample_prompts
from blockdiff.training.starting_model import (
    StartingModel,
    choose_trained,
    empty_model,
    read_starting_model,
    released_shape,
    starting_config,
)
from blockdiff.training.step import Counts, Loss

# Keys that have no effect without something else: their section, its name, the keys, whether that is there, its name.
Needs = tuple[Section, str, tuple[str, ...], bool, str]


@dataclass(frozen=True)
class Drawn:
    """A batch as the model sees it: noisy canvases, or blocks whose tokens after the first are masks.

    has_noise: False for blocks, which have no noise level, signal or fill.
    """

    batch: Batch
    noisy_BCL: Tensor
    is_corrupted_BCL: Tensor
    has_noise: bool = True


class Kind(ObjectiveSection):
    """A kind of run. The keys of its objective are the fields of its class."""

    given: ClassVar[tuple[str, ...]] = ()  # the parts from Python that it supports, of `objective` and `reward`
    metrics: ClassVar[tuple[str, ...]] = ()  # its held-out and sampled metrics that not every kind has
    trains_whole: ClassVar[bool] = False  # it has no adapters; `model.quantize` applies to another model
    unit: ClassVar[str] = "canvas"  # the name of the pieces of an example
    learns_template: ClassVar[bool] = True  # its rows are rendered with the trained model's chat template
    # What is missing when a plan does not know the longest row.
    length_from: ClassVar[str] = "data.max_length: missing, so the longest row is not known; set it, or say --tokens"

    @property
    def measured(self) -> tuple[str, ...]:
        """The `metrics` that a run with these keys measures."""
        return self.metrics

    @field_serializer("kind")
    def _name(self, kind: str) -> str:
        """Return the recorded name: `kind` for a kind of this folder, module and class for one from Python."""
        return kind if type(self) in kinds().values() else f"{type(self).__module__}.{type(self).__qualname__}"

    @property
    def settings_from(self) -> str | None:
        """The model whose tokenizer and settings the run uses; None: the model that trains."""
        return None

    # -- before anything is loaded ---------------------------------------------------------------------------------

    def refuse(self, recipe: Recipe) -> None:
        """Raise RecipeError for keys of other sections that this kind does not support."""

    def without_effect(self, recipe: Recipe) -> list[Needs]:
        """Return keys that have no effect unless something else is set, with that condition (`Needs`)."""
        return []

    # -- the model -------------------------------------------------------------------------------------------------

    def start(self, recipe: Recipe) -> StartingModel:
        """Read the config, tokenizer and settings of the model that training starts from."""
        config = starting_config(recipe)
        self.require(recipe, config)
        return read_starting_model(recipe, config, self.settings_from)

    def planned_start(self, recipe: Recipe) -> StartingModel:
        """`start` for a plan. A released model that is not available is replaced by its preset, without tokenizer."""
        try:
            return self.start(recipe)
        except CheckpointError:
            base = None if self.needs_tokenizer(recipe) else released_shape(recipe, self.settings_from)
            if base is None:
                raise
        self.require(recipe, base.config)
        return base

    def require(self, recipe: Recipe, config: Family) -> None:
        """Raise RecipeError for a model that this kind does not train."""

    def needs_tokenizer(self, recipe: Recipe) -> bool:
        """Whether the objective cannot be constructed without the model's tokenizer."""
        return any(isinstance(token, str) for token in recipe.lora.tokens)

    def without_weights(
        self,
        recipe: Recipe,
        base: StartingModel,
        kernels: str | Kernels | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """The objective, with a model that has its adapters and frozen parameters, but no memory for weights yet.

        kernels: replace the recipe's. dtype: of the weights (None: decided when they are filled).
        """
        model = empty_model(recipe, base, kernels, dtype)
        objective = self.make(recipe, base, model, dtype)
        require_distinct_names(objective)
        choose_trained(model, recipe, base.tokenizer)
        return objective

    def make(self, recipe: Recipe, base: StartingModel, model: BlockDiffusionModel, dtype: torch.dtype | None) -> Any:
        """Construct the module whose forward returns the sums of a batch's losses by name. model: without weights."""
        raise NotImplementedError

    def others(self) -> list[str]:
        """The names of the models that a run reads in addition to the one that it trains."""
        return []

    def beside(self, objective: Any) -> dict[str, BlockDiffusionModel]:
        """Return the models of an objective other than the one that trains, by their names in a plan."""
        return {}

    def load_others(self, recipe: Recipe, objective: Any, mesh: Mesh) -> list[tuple[str, str, BlockDiffusionModel]]:
        """Load the models other than the one that trains. Returns (role, name, model) of each."""
        return []

    # -- the data --------------------------------------------------------------------------------------------------

    def read_data(
        self,
        recipe: Recipe,
        base: StartingModel,
        ranks: Ranks | None = None,
        watch: Callable[..., Any] | None = None,
        day: date | None = None,
    ) -> Data:
        """Read and encode the rows of a recipe, or find them in the cache.

        With several ranks, one rank of each node fills the cache first. watch: an iterator that rows pass through. day:
        the date that chat templates write (None: today). Raises DataError with file and line for rows that cannot be
        used.
        """
        reader = image_reader(recipe, base)
        reading = Reading.of(recipe, encoder(recipe, base, self.stride(base), reader, day), ranks, watch)
        train, order = self.read_rows(recipe, reading)
        heldout = reading.heldout(recipe)
        settle_template(recipe, base, reading.encode, train.has_conversations, self.learns_template)
        prompts = [] if recipe.evaluation.prompts is None else self.read_prompts(recipe, reading, train.form == "chat")
        collator = self.collator(recipe, base, reader)
        return Data(recipe, reading.encode, train, heldout, prompts, collator, order)

    def read_rows(self, recipe: Recipe, reading: Reading) -> tuple[Any, AnyOrder]:
        """Read the rows that a run trains on, and return them with their order."""
        return reading.examples(recipe)

    def read_prompts(self, recipe: Recipe, reading: Reading, is_chat: bool) -> Any:
        """Read the rows of `evaluation.prompts`. Raises DataError for a row that is no question of `evaluation.task`.

        is_chat: make raw prompts user turns, because the run trains on conversations.
        """
        rows = reading.prompts(recipe)
        if is_chat and not reading.encode.chat:  # with `data.chat` the encoder does it
            rows = [row.as_conversation() for row in rows]
        questions_of(rows, evals.task(recipe.evaluation.task), reading.encode)
        return rows

    def check_data(self, recipe: Recipe, data: Data) -> None:
        """Raise RecipeError or DataError for rows that the run cannot use, before weights are read."""

    def stride(self, base: StartingModel) -> int:
        """The distance between possible starts of canvases in a response, in tokens."""
        return base.canvas_length

    def canvases(self, recipe: Recipe) -> CanvasChoice | None:
        """Return the rule that chooses the scored canvases of an example; None if examples have no canvases."""
        return recipe.data.canvases

    def collator(self, recipe: Recipe, base: StartingModel, reader: ImageReader | None) -> Collator:
        """The collator that makes batches of examples."""
        raise NotImplementedError

    def collate(
        self, recipe: Recipe, base: StartingModel, reader: ImageReader | None = None, **choices: Any
    ) -> Collator:
        """Construct a collator for the model. choices: further arguments of `Collator`."""
        return Collator(
            canvas_length=base.canvas_length,
            pad_id=base.pad_id,
            fill_id=base.eos_id if base.config.fill is None else base.config.fill,
            seed=recipe.seed,
            canvases=self.canvases(recipe) or NoCanvases(),
            reader=reader,
            aligned=base.aligned,
            **{"time": StratifiedTime()} | choices,
        )

    def source(self, recipe: Recipe, built: Built, ranks: Ranks, show: Progress) -> Source:
        """Return the source of the batches of optimiser steps. built: the parts of the run, without a source yet."""
        return Rows(built.data, ranks, recipe.train.micro_batch_size)

    def in_words(self, recipe: Recipe) -> str:
        """Describe the content of an optimiser step."""
        canvases = self.canvases(recipe)
        named = "next tokens" if canvases is None else described(canvases)
        if isinstance(named, dict):  # {last: 2}
            named = " ".join(str(word) for item in named.items() for word in item)
        scored = named if canvases is None else f"{named} canvas{'es' * (named != 1)}"
        return f"{counted(recipe.train.batch_size, 'example')}, {scored} of each"

    def show_step(self, recipe: Recipe, data: Data, step: int, rows: int) -> tuple[dict[str, Any], list[str]] | None:
        """Describe a step whose batch is made only when it runs: a record and lines to print. None for other steps."""
        return None

    def drawn(self, recipe: Recipe, base: StartingModel, batch: Batch) -> Drawn:
        """Return the batch as the model sees it, for `blockdiff inspect`. By default it has no noise."""
        return Drawn(batch, batch.canvas_BCL, torch.zeros_like(batch.is_scored_BCL))

    # -- the losses ------------------------------------------------------------------------------------------------

    def losses(self, objective: Any) -> dict[str, Loss]:
        """Return the divisor and the weight of each loss, by the names under which the objective returns the sums."""
        raise NotImplementedError

    def why_unscored(self, counts: Counts) -> tuple[str, str] | None:
        """Return why an optimiser step with these counts teaches nothing, and a remedy; None if it teaches."""
        if any(counts.divisors.values()):
            return None
        return "nothing is scored", "see in `blockdiff inspect RECIPE` what is scored of each row"

    # -- what is measured ------------------------------------------------------------------------------------------

    def evaluate(self, objective: Any, batches: Iterable[Batch], ranks: Ranks, precision: str | None) -> Record:
        """Return the held-out losses and accuracies, over the batches of all ranks."""
        raise NotImplementedError

    def sample(self, recipe: Recipe, built: Built, sampler: Sampler, ranks: Ranks, show: Progress) -> Sampled:
        """Answer the prompts of `evaluation.prompts`. Returns their metrics and a record of each answer."""
        data, task = built.data, evals.task(recipe.evaluation.task)
        return sample_prompts(
            sampler, data.prompts, task, ranks, recipe.seed, precision=built.precision, encoder=data.encoder
        )

    # -- what is remembered ----------------------------------------------------------------------------------------

    def record(self, objective: Any) -> dict[str, Any]:
        """Return the objective's keys and values, which the trained model and the checkpoints of the run store."""
        return self.model_dump(mode="json")

    def diffusion(self, objective: Any) -> DiffusionSettings:
        """Return the settings of the objective with which the trained model is sampled."""
        return DiffusionSettings.of(objective, self.record(objective))

    def facts(self, recipe: Recipe, base: StartingModel, data: Data, digest_of: Callable[[str], str]) -> dict[str, Any]:
        """Return the values, by recipe key, that must be the same when the run is resumed.

        None is the same as no entry. digest_of: returns the digest of a model's weights, by the model's path or Hub id.
        """
        return {
            "data.train": data.train.fingerprint,
            "evaluation.prompts": json_digest([asdict(replace(row, where="")) for row in data.prompts]),
        }

    # -- the memory of a run ---------------------------------------------------------------------------------------

    def largest_batch(
        self,
        recipe: Recipe,
        base: StartingModel,
        model: BlockDiffusionModel,
        tokens: int,
        rows: int,
        image_tokens: Sequence[int],
    ) -> Batch:
        """Return the largest micro-batch of `rows` rows of `tokens` tokens.

        image_tokens: the number of tokens of each image of a row.
        """
        return worst_batch(model, tokens, rows, self.canvases(recipe), self.stride(base), image_tokens)

    def between_steps(self, recipe: Recipe, base: StartingModel, tokens: int, dtype: torch.dtype) -> dict[str, int]:
        """Return the bytes on the device that are held only between optimiser steps, by their name in a plan."""
        return {}


def kind_of(recipe: Recipe) -> Kind:
    """Return the recipe's objective, which is its kind of run."""
    assert isinstance(recipe.objective, Kind), "every kind is found or given as one"
    return recipe.objective
