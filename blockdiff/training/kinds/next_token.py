"""Next tokens: a causal model learns every token of its rows from those before it."""

from __future__ import annotations

from collections.abc import Iterable
from operator import methodcaller
from typing import Annotated, Any, ClassVar, Literal

import torch

from blockdiff.canvas import Batch
from blockdiff.data.canvas_choice import CanvasChoice
from blockdiff.data.collate import Collator
from blockdiff.data.images import ImageReader
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.errors import RecipeError
from blockdiff.metrics import Record
from blockdiff.models.family import Family
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.objective import Objective
from blockdiff.parallel.ranks import Ranks
from blockdiff.training import recipe_choices as choices
from blockdiff.training.kinds.canvas_heldout import heldout
from blockdiff.training.kinds.kind import Kind, Needs
from blockdiff.training.recipe import Recipe
from blockdiff.training.recipe_checks import refuse_changed
from blockdiff.training.starting_model import StartingModel
from blockdiff.training.step import Loss

WHY = "is of canvases, and a causal model has none; leave it out, or give the model canvases (`blockdiff init --from`)"


class NextToken(Kind):
    """A run that learns next tokens, of whole rows or of responses only."""

    kind: str = "next_token"
    normalisation: Literal["token", "example"] = "token"
    ar_loss: Annotated[choices.ArLoss, choices.NEXT_TOKENS] = choices.ArLoss()

    inherited: ClassVar[tuple[str, ...]] = ("normalisation", "ar_loss")
    given: ClassVar[tuple[str, ...]] = ("objective",)
    metrics: ClassVar[tuple[str, ...]] = ("heldout_ar_loss", "heldout_ar_accuracy")

    @classmethod
    def suits(cls, config: Family) -> bool:
        """True for causal models."""
        return not config.denoises

    def refuse(self, recipe: Recipe) -> None:
        """Raise RecipeError if keys of canvases are set."""
        refuse_changed(recipe, {"data": ("canvases",)}, WHY)

    def without_effect(self, recipe: Recipe) -> list[Needs]:
        """Return the generation keys that only a model that denoises canvases uses."""
        keys = ("max_steps", "entropy_bound", "t_min", "t_max", "stability", "confidence")
        return [(recipe.generation, "generation", keys, False, "a model that denoises canvases")]

    def require(self, recipe: Recipe, config: Family) -> None:
        """Raise RecipeError if the model denoises."""
        if config.denoises:
            raise RecipeError(
                "objective.kind: next_token is for causal models, and this one denoises canvases; choose canvas"
            )

    def make(self, recipe: Recipe, base: StartingModel, model: BlockDiffusionModel, dtype: torch.dtype | None) -> Any:
        """Return the objective. Its schedule and corruption are never used, because a causal model has no canvases."""
        make: Any = recipe.given.objective or Objective
        return make(model, Linear(), UniformCorruption(base.vocab_size), seed=recipe.seed)

    def canvases(self, recipe: Recipe) -> CanvasChoice | None:
        """Return None: examples have no canvases."""
        return None

    def collator(self, recipe: Recipe, base: StartingModel, reader: ImageReader | None) -> Collator:
        """The collator of rows without canvases."""
        return self.collate(recipe, base, reader, normalisation=self.normalisation, ar_scope=self.ar_loss.scope)

    def losses(self, objective: Any) -> dict[str, Loss]:
        """Return the divisor and weight of the next-token loss."""
        return {"ar": Loss(methodcaller("ar_count"), self.ar_loss.weight)}

    def evaluate(self, objective: Any, batches: Iterable[Batch], ranks: Ranks, precision: str | None) -> Record:
        """The held-out losses and accuracies, as `heldout` describes them."""
        return heldout(objective, batches, ranks, precision)


KIND = NextToken
