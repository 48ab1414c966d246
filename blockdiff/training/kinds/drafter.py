"""A drafter: it learns to propose, in blocks, the tokens that its target would choose (docs/drafters.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import methodcaller
from typing import Any, ClassVar, Literal

import torch

from blockdiff import checkpoint
from blockdiff.canvas import Batch
from blockdiff.data.canvas_choice import CanvasChoice, RandomCanvases
from blockdiff.data.collate import Collator
from blockdiff.data.images import ImageReader
from blockdiff.draft_objective import BlockMask, DraftObjective
from blockdiff.errors import BlockdiffError, RecipeError
from blockdiff.metrics import Record
from blockdiff.models.family import Family
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import store
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.shard import load_split
from blockdiff.training.data import Data
from blockdiff.training.kinds.drafter_heldout import heldout_drafts
from blockdiff.training.kinds.kind import Drawn, Kind
from blockdiff.training.recipe import Recipe
from blockdiff.training.recipe_checks import refuse_changed
from blockdiff.training.recipe_choices import Positive
from blockdiff.training.starting_model import StartingModel, computed_in, stored_below
from blockdiff.training.step import Loss

WITHOUT = {"model": ("router", "images"), "data": ("canvases",), "evaluation": ("prompts", "strategy")}


class Drafter(Kind):
    """Learn to predict blocks that begin at random tokens of responses, from the target's hidden states of the row."""

    kind: str = "drafter"
    target: str  # the model that is drafted for
    anchors: Positive = 512  # blocks of an example, at random tokens of its responses
    loss: Literal["dpace", "decay"] = "dpace"  # how the places of a block are weighted
    labels: Literal["tokens", "distribution"] = "tokens"  # the row's tokens, or the target's predictions
    normalisation: Literal["token", "example"] = "token"

    paths: ClassVar[tuple[str, ...]] = ("target",)
    inherited: ClassVar[tuple[str, ...]] = ("anchors", "loss", "labels", "normalisation")
    metrics: ClassVar[tuple[str, ...]] = ("heldout_accepted_length", "heldout_draft_accuracy", "heldout_draft_loss")
    trains_whole: ClassVar[bool] = True
    unit: ClassVar[str] = "block"

    @property
    def settings_from(self) -> str | None:
        """The target's name."""
        return self.target

    def refuse(self, recipe: Recipe) -> None:
        """Raise RecipeError for adapters and for images, routers, canvases and sampled prompts."""
        refuse_changed(recipe, WITHOUT, "a drafter learns without it (objective.kind: drafter); leave it out")
        if recipe.lora.trains:
            raise RecipeError("lora: a drafter trains whole, and is small; leave lora out")

    def require(self, recipe: Recipe, config: Family) -> None:
        """Raise RecipeError for a model that predicts no blocks."""
        if config.mask is None:
            name = recipe.model.path or recipe.model.preset
            raise RecipeError(f"objective.kind: {name} is no drafter; `blockdiff init --drafter-for` makes one")

    def make(self, recipe: Recipe, base: StartingModel, model: BlockDiffusionModel, dtype: torch.dtype | None) -> Any:
        """Return the objective over a drafter and a target, neither with weights yet."""
        assert base.target_config is not None, "its target was read with it"
        target = checkpoint.empty(base.target_config, kernels=model.kernels)
        store(target, stored_below(target, self.target, recipe))
        if dtype is not None:
            target.to(computed_in(recipe) or dtype)
        try:
            return DraftObjective(model, target, self.loss, self.labels)
        except BlockdiffError as error:
            raise RecipeError(f"objective.target: {error}") from None

    def others(self) -> list[str]:
        """Return the name of the target."""
        return [self.target]

    def beside(self, objective: Any) -> dict[str, BlockDiffusionModel]:
        """Return the target, by its name in a plan."""
        return {"target": objective.target}

    def load_others(self, recipe: Recipe, objective: Any, mesh: Mesh) -> list[tuple[str, str, BlockDiffusionModel]]:
        """Load the target, split over the ranks as the drafter is. Adapters of the target are not merged."""
        dtype = recipe.train.autocast or recipe.model.dtype
        target = load_split(self.target, mesh, dtype, recipe.model.kernels, quantize=recipe.model.quantize)
        objective.draft_for(target)
        return [("target", self.target, target)]

    def stride(self, base: StartingModel) -> int:
        """Return 1: blocks begin at any token."""
        return 1

    def canvases(self, recipe: Recipe) -> CanvasChoice | None:
        """Return the choice of `anchors` random blocks."""
        return RandomCanvases(self.anchors)

    def collator(self, recipe: Recipe, base: StartingModel, reader: ImageReader | None) -> Collator:
        """The collator of rows with blocks."""
        return self.collate(recipe, base, normalisation=self.normalisation, are_blocks=True)

    def drawn(self, recipe: Recipe, base: StartingModel, batch: Batch) -> Drawn:
        """Return the batch with the masks of its blocks."""
        assert base.mask_id is not None
        noise = BlockMask(base.mask_id).corrupt(batch.canvas_BCL, batch.t_BC, batch.address_BC3, recipe.seed)
        return Drawn(batch, *noise, has_noise=False)

    def losses(self, objective: Any) -> dict[str, Loss]:
        """Return the divisor of the draft loss."""
        return {"draft": Loss(methodcaller("canvas_count"))}

    def evaluate(self, objective: Any, batches: Iterable[Batch], ranks: Ranks, precision: str | None) -> Record:
        """Return the metrics of held-out blocks (`heldout_drafts`)."""
        return heldout_drafts(objective, batches, ranks, precision)

    def facts(self, recipe: Recipe, base: StartingModel, data: Data, digest_of: Callable[[str], str]) -> dict[str, Any]:
        """Add the digest of the target's weights."""
        return super().facts(recipe, base, data, digest_of) | {"objective.target": digest_of(self.target)}


KIND = Drafter
