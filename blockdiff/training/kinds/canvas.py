"""Canvases: a model learns to denoise canvases, and beside them next tokens (docs/objective.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import methodcaller
from typing import Annotated, Any, ClassVar, Literal

import torch

from blockdiff.canvas import Batch
from blockdiff.canvas_inputs import corrupt_canvases
from blockdiff.data.collate import Collator
from blockdiff.data.images import ImageReader
from blockdiff.diffusion.corruption import Corruption, MaskCorruption
from blockdiff.diffusion.schedule import Linear, Schedule, StratifiedTime, TimeDraw
from blockdiff.diffusion.weight import NoWeight, Weight
from blockdiff.errors import RecipeError
from blockdiff.metrics import METRICS, Record
from blockdiff.models.family import NO_HEAD, Family
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.objective import Objective
from blockdiff.parallel.ranks import Ranks
from blockdiff.training import recipe_choices as choices
from blockdiff.training.data import Data
from blockdiff.training.kinds.canvas_heldout import heldout
from blockdiff.training.kinds.kind import Drawn, Kind, Needs
from blockdiff.training.kinds.next_token import NextToken
from blockdiff.training.recipe import Recipe, Share
from blockdiff.training.recipe_choices import MaskToken, UniformTokens, described
from blockdiff.training.starting_model import StartingModel, shape_of
from blockdiff.training.step import Loss

PARTS = ("canvas", "response", "weighted", "corrupted", "kept")
OF_CANVASES = tuple(key for key in METRICS if key.startswith(tuple(f"heldout_{part}_" for part in PARTS)))


class Denoising(Kind):
    """The keys and verbs of everything that denoises canvases."""

    normalisation: Literal["token", "example", "corrupted"] = "token"
    ar_loss: Annotated[choices.ArLoss | None, choices.AR_LOSS] = choices.ArLoss()
    schedule: Annotated[Schedule, choices.SCHEDULE] = Linear()
    time: Annotated[TimeDraw, choices.TIME] = StratifiedTime()
    corruption: Annotated[choices.AnyCorruption, choices.CORRUPTION] = UniformTokens()
    positions: Literal["all", "corrupted"] = "all"
    stop_gradient: bool = False  # into the encoder, from the canvas loss
    sweep: Literal["auto", True, False] = "auto"  # encode while denoising; auto: if weights are sharded
    coin: Share = 0.5

    inherited: ClassVar[tuple[str, ...]] = (
        *("normalisation", "ar_loss", "schedule", "time", "corruption", "positions", "stop_gradient", "coin"),
    )

    metrics: ClassVar[tuple[str, ...]] = (*OF_CANVASES, *NextToken.metrics)

    def without_effect(self, recipe: Recipe) -> list[Needs]:
        """Return the generation keys of next tokens, which have no effect unless the run samples next tokens."""
        samples_them = str(recipe.evaluation.strategy).startswith(("next_token", "verified", "speculative"))
        needs = "next tokens (`--strategy next_token`); the temperature of canvases falls from t_max to t_min"
        return [(recipe.generation, "generation", ("temperature", "top_k", "top_p"), samples_them, needs)]

    @property
    def measured(self) -> tuple[str, ...]:
        """The metrics of canvases and, if `ar_loss` is set, of next tokens."""
        return self.metrics if self.ar_loss is not None else OF_CANVASES

    def refuse(self, recipe: Recipe) -> None:
        """Raise RecipeError for an invalid noise schedule, or for a mean over corrupted tokens if others are scored."""
        refuse_schedule(self.schedule)
        if self.normalisation == "corrupted" and self.positions != "corrupted":
            raise RecipeError(
                "objective.normalisation: a mean over corrupted tokens is of their losses; set objective.positions: "
                "corrupted"
            )

    def require(self, recipe: Recipe, config: Family) -> None:
        """Raise RecipeError for a drafter, a model without canvases, and a next-token loss that it cannot have."""
        if config.is_drafter:
            raise RecipeError(
                f"model.path: {recipe.model.path} is a drafter; say for which model, "
                "objective: {kind: drafter, target: MODEL}"
            )
        if not config.denoises:
            raise RecipeError(
                f"objective.kind: {self.kind} trains canvases, and a causal model has none; choose next_token, or give "
                "the model canvases (`blockdiff init --from`)"
            )
        if self.ar_loss is not None and not config.predicts_next_tokens:
            raise RecipeError(f"objective.ar_loss: {NO_HEAD}; leave it out")

    def needs_tokenizer(self, recipe: Recipe) -> bool:
        """Return True if the recipe names tokens, or needs a mask token that the model's config does not have."""
        if super().needs_tokenizer(recipe) or isinstance(self.corruption, UniformTokens):
            return super().needs_tokenizer(recipe)
        shape = shape_of(recipe)
        return self.corruption != MaskToken() or shape is None or shape.mask is None

    def sweeps(self, recipe: Recipe) -> bool:
        """Return True if clean rows are encoded within the denoise passes (`objective.sweep`)."""
        return recipe.parallel.shard == "full" if self.sweep == "auto" else self.sweep

    def noise(self, base: StartingModel) -> Corruption:
        """The corruption of canvases: the recipe's for this tokenizer, or an object from Python.

        Raises CheckpointError if the family does not support it.
        """
        corruption: Any = self.corruption
        if isinstance(corruption, UniformTokens | MaskToken):
            reserved = (base.eos_id, base.pad_id, getattr(base.tokenizer, "bos_token_id", None))
            corruption = corruption.for_tokenizer(base.tokenizer, base.vocab_size, reserved, base.mask_id)
        name = "mask" if isinstance(corruption, MaskCorruption) else "uniform"
        base.config.require(corruptions=name)
        checked: Corruption = corruption
        return checked

    def parts(self, recipe: Recipe, base: StartingModel) -> dict[str, Any]:
        """Return the arguments of the objective except its model."""
        return {
            "schedule": self.schedule,
            "corruption": self.noise(base),
            "seed": recipe.seed,
            "positions": self.positions,
            "divisor": "corrupted" if self.normalisation == "corrupted" else "scored",
            "stop_gradient": self.stop_gradient,
            "sweep": self.sweeps(recipe),
        }

    def collator(self, recipe: Recipe, base: StartingModel, reader: ImageReader | None) -> Collator:
        """The collator of rows with canvases, or without for a causal model that a policy trains."""
        return self.collate(
            recipe,
            base,
            reader,
            time=self.time,
            coin_probability=self.coin,
            scores_ar=self.ar_loss is not None,
            normalisation="example" if self.normalisation == "example" else "token",
            ar_scope="all" if self.ar_loss is None else self.ar_loss.scope,
        )

    def drawn(self, recipe: Recipe, base: StartingModel, batch: Batch) -> Drawn:
        """Return the batch with noised canvases."""
        noisy, is_corrupted_BCL = corrupt_canvases(batch, self.schedule, self.noise(base), recipe.seed, base.vocab_size)
        return Drawn(batch, noisy.canvas_BCL, is_corrupted_BCL)

    def losses(self, objective: Any) -> dict[str, Loss]:
        """Return the divisors and weights of the canvas loss and the next-token loss."""
        ar_weight = 0.0 if self.ar_loss is None else self.ar_loss.weight
        return {"canvas": Loss(objective.canvas_count), "ar": Loss(methodcaller("ar_count"), ar_weight)}

    def evaluate(self, objective: Any, batches: Iterable[Batch], ranks: Ranks, precision: str | None) -> Record:
        """Return the held-out losses and accuracies (`heldout`)."""
        return heldout(objective, batches, ranks, precision)

    def record(self, objective: Any) -> dict[str, Any]:
        """Return the keys without `sweep`, with the schedule and weight that the objective has (maybe from Python)."""
        record: dict[str, Any] = self.model_dump(mode="json", exclude={"sweep"})
        parts = [key for key in ("schedule", "weight") if key in record and hasattr(objective, key)]
        return record | {key: described(getattr(objective, key)) for key in parts}

    def facts(self, recipe: Recipe, base: StartingModel, data: Data, digest_of: Callable[[str], str]) -> dict[str, Any]:
        """Add whether passes are swept together, which changes the rounding of sums."""
        return super().facts(recipe, base, data, digest_of) | {"objective.sweep": self.sweeps(recipe)}


def refuse_schedule(schedule: Schedule) -> None:
    """Raise RecipeError unless alpha(t) is a probability that never rises and noise(t) is 1 - alpha(t)."""
    t = torch.linspace(0, 1, 129, dtype=torch.float64)
    alpha, noise, name = schedule.alpha(t), schedule.noise(t), type(schedule).__name__
    wrong = None
    if not all(isinstance(each, torch.Tensor) and each.shape == t.shape for each in (alpha, noise)):
        wrong = "alpha(t) and noise(t) must be tensors of the shape of t"
    elif not ((alpha > -1e-6) & (alpha < 1 + 1e-6)).all():
        wrong = f"alpha(t) is from {alpha.min():.3g} to {alpha.max():.3g}, and a probability is from 0 to 1"
    elif (rising := alpha.diff() > 1e-6).any():
        wrong = f"alpha(t) rises after t = {t[:-1][rising][0]:.3g}, and more noise must not keep more tokens"
    elif not torch.allclose(noise, 1 - alpha, atol=1e-4):
        wrong = "noise(t) must be 1 - alpha(t)"
    if wrong:
        raise RecipeError(f"objective.schedule: {name}: {wrong}; change it (docs/extending.md)")


class Canvas(Denoising):
    """A run that denoises canvases, with every choice of noise and loss."""

    kind: str = "canvas"
    weight: Annotated[Weight, choices.WEIGHT] = NoWeight()
    prediction: Literal["posterior", "leave_one_out"] = "posterior"

    inherited: ClassVar[tuple[str, ...]] = (*Denoising.inherited, "weight", "prediction")
    given: ClassVar[tuple[str, ...]] = ("objective",)

    @classmethod
    def suits(cls, config: Family) -> bool:
        """Return True for models that denoise."""
        return config.denoises

    def make(self, recipe: Recipe, base: StartingModel, model: BlockDiffusionModel, dtype: torch.dtype | None) -> Any:
        """Return the objective, constructed by the class from Python if one is given."""
        make: Any = recipe.given.objective or Objective
        return make(model, **self.parts(recipe, base))

    def parts(self, recipe: Recipe, base: StartingModel) -> dict[str, Any]:
        """Return the arguments of the objective except its model."""
        base.config.require(predictions=self.prediction)
        return super().parts(recipe, base) | {"weight": self.weight, "prediction": self.prediction}


KIND = Canvas
