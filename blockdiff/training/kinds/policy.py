"""A policy: its own answers are rewarded, and it learns to give those above average more often (docs/rl.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, FiniteFloat

from blockdiff.canvas import Batch
from blockdiff.checkpoint.adapters import brings_rows
from blockdiff.checkpoint.files import find
from blockdiff.data.canvas_choice import NoCanvases
from blockdiff.data.collate import Collator
from blockdiff.data.dataset import check_conversations
from blockdiff.data.images import ImageReader
from blockdiff.data.order import AnyOrder, Order
from blockdiff.errors import RecipeError
from blockdiff.files import json_digest
from blockdiff.models.family import NO_HEAD, Family
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.parallel.ranks import Ranks
from blockdiff.rl.batches import ROWS, worst_rollouts
from blockdiff.rl.policy import PolicyObjective, policy_of, rollout_strategy
from blockdiff.rl.prompts import Prompts, read_prompts
from blockdiff.rl.reward import LARGEST, Rewards, failure_lines, make_rewards
from blockdiff.sampling import Sampler
from blockdiff.terminal import counted, printable
from blockdiff.training.built import Built, Source
from blockdiff.training.data import Data, Reading, sources
from blockdiff.training.kinds.canvas import Canvas
from blockdiff.training.kinds.judged_samples import judging_task, sample_rewarded
from blockdiff.training.kinds.kind import Needs
from blockdiff.training.kinds.next_token import WHY, NextToken
from blockdiff.training.kinds.rollouts import Rollouts, Round
from blockdiff.training.progress import Progress
from blockdiff.training.recipe import Amount, Recipe, Share, StrategyText
from blockdiff.training.recipe_checks import refuse_changed
from blockdiff.training.recipe_choices import Positive, UniformTokens
from blockdiff.training.samples import Sampled
from blockdiff.training.starting_model import StartingModel
from blockdiff.training.step import Counts, Loss

RewardWeight = Annotated[FiniteFloat, Field(ge=-LARGEST, le=LARGEST)]
OF_RESPONSES = {"data": ("pack", "streaming", "max_length", "on_bad_row", "turns")}


class Policy(Canvas):
    """Reinforcement learning: how answers are drawn, how they are rewarded, and how the gradient is computed.

    The keys of canvases are those of the ordinary objective, which learns answers of above-average reward (`sft`).
    """

    kind: str = "policy"
    over: Literal["next_token", "canvas"]  # the draws that are the actions
    reward: str | dict[str, RewardWeight] | None = None  # a task or module:function, or weights of several
    strategy: StrategyText | None = None  # of the rollouts; null = docs/rl.md
    answers: Annotated[int, Field(ge=2)] = 8  # to each prompt
    prompts_per_round: Positive = 16  # of rollouts
    passes: Positive = 1  # over the answers of a round
    ratio_clip: tuple[Share, Amount] = (0.2, 0.28)  # largest distance of a ratio below and above 1
    kl: Amount = 0.0  # weight of the divergence from the model without its adapters
    advantage: Literal["centred", "standardised"] = "centred"
    signal: Literal["held", "through"] = "held"  # the self-conditioning signal's path: left out, or differentiated
    sft: Amount = 0.0  # weight of the ordinary objective on answers of above-average reward

    given: ClassVar[tuple[str, ...]] = ("reward",)
    metrics: ClassVar[tuple[str, ...]] = (*Canvas.metrics, "sample_reward")
    learns_template: ClassVar[bool] = False
    length_from: ClassVar[str] = "tokens: how long a prompt and its answer are together is not known; say --tokens"

    @classmethod
    def suits(cls, config: Family) -> bool:
        """Return False: a recipe has to name this kind."""
        return False

    @classmethod
    def complete(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Set a missing `train.batch_size` to the number of answers of a round."""
        section, train = tree["objective"], tree.get("train")
        if not isinstance(train, dict) or "batch_size" in train:
            return tree
        sizes = [section.get(name, cls.model_fields[name].default) for name in ("prompts_per_round", "answers")]
        whole = {"batch_size": sizes[0] * sizes[1]} if all(isinstance(size, int) for size in sizes) else {}
        return tree | {"train": train | whole}

    @property
    def measured(self) -> tuple[str, ...]:
        """The metrics of canvases, and the reward of sampled prompts."""
        return (*super().measured, "sample_reward")

    def round(self, recipe: Recipe) -> Round:
        """Return the shape of a round of rollouts."""
        return Round(
            over=self.over,
            prompts=self.prompts_per_round,
            answers=self.answers,
            passes=self.passes,
            advantage=self.advantage,
            batch_size=recipe.train.batch_size,
            has_kl=self.kl > 0,
            has_examples=self.sft > 0,
            asks_head=self.over == "canvas" and self.ar_loss is not None,
        )

    def refuse(self, recipe: Recipe) -> None:
        """Raise RecipeError for keys that rounds of rollouts do not support."""
        super().refuse(recipe)
        t, e, answers = recipe.train, recipe.evaluation, self.prompts_per_round * self.answers
        if recipe.model.path is None:
            raise RecipeError(
                "objective.kind: policy: random weights earn no rewards; name a trained model with model.path"
            )
        if t.batch_size > answers or answers % t.batch_size:
            raise RecipeError(
                f"train.batch_size: {t.batch_size} does not divide the {answers} answers of a round "
                "(objective.prompts_per_round times objective.answers)"
            )
        if t.epochs is not None:
            raise RecipeError("train.epochs: rounds of rollouts have no end; give train.steps instead")
        if self.reward is None and not recipe.given.reward:
            raise RecipeError("objective.reward: missing; name a task or module:function, or give reward= from Python")
        if recipe.model.images != "none":
            raise RecipeError("model.images: rows with images are not rolled out; leave it out")
        refuse_changed(recipe, OF_RESPONSES, "is of rows with responses, and a policy answers prompts; leave it out")
        if self.over == "canvas" and (not isinstance(self.corruption, UniformTokens) or self.prediction != "posterior"):
            key, value = ("corruption", "uniform") if self.prediction == "posterior" else ("prediction", "posterior")
            raise RecipeError(
                f"objective.over: canvas: its draws are known for objective.{key}: {value} alone; choose next_token"
            )
        if self.signal == "through" and recipe.parallel.names != ("replicate",):
            raise RecipeError("objective.signal: through makes logits of all tokens on one device; leave parallel out")
        if recipe.lora.dropout:
            raise RecipeError("lora.dropout: the policy that is scored would not be the one that drew; leave it out")
        if self.over == "next_token" and recipe.lora.noisy_only:
            raise RecipeError("lora.noisy_only: next tokens are predicted by clean ones; leave it out")
        if self.kl and not recipe.lora.trains:
            raise RecipeError(
                "objective.kl: the reference is the model without its adapters; train adapters (`lora: {rank: 16}`)"
            )
        if self.kl and (recipe.lora.tokens or (recipe.lora.path and brings_rows(find(recipe.lora.path)))):
            raise RecipeError(
                "objective.kl: the reference would have the rows of lora.tokens as they train; leave them out"
            )
        steps = self.round(recipe).steps
        due = {"train.save_every": t.save_every, "train.eval_every": t.eval_every, "train.steps": t.steps or 0}
        for name, every in (due | {"evaluation.prompts_every": e.prompts_every}).items():
            if every % steps:
                raise RecipeError(
                    f"{name}: {every} is within a round of rollouts; choose a multiple of its {steps} steps"
                )

    def without_effect(self, recipe: Recipe) -> list[Needs]:
        """Return keys without effect for these actions, with one step a round, or without ordinary examples."""
        has_examples = self.sft > 0 or recipe.data.heldout is not None
        has_ratios = self.round(recipe).steps > 1
        several = "several steps a round (objective.passes or train.batch_size)"
        of_canvases = super().without_effect(recipe) if self.over == "canvas" else []
        return [
            *of_canvases,
            (recipe.data, "data", ("canvases",), has_examples, "objective.sft or data.heldout"),
            (self, "objective", ("signal",), self.over == "canvas", "objective.over: canvas"),
            (self, "objective", ("ratio_clip",), has_ratios, several),
        ]

    # -- the model and its data ------------------------------------------------------------------------------------

    def require(self, recipe: Recipe, config: Family) -> None:
        """Raise RecipeError for keys of canvases with a causal model, and for next tokens without a head."""
        if self.over == "next_token" and not config.predicts_next_tokens:
            raise RecipeError(f"objective.over: next_token: {NO_HEAD}; choose canvas")
        if config.denoises or config.is_drafter:
            super().require(recipe, config)
            return
        if self.over == "canvas":
            raise RecipeError("objective.over: canvas: the model is causal and has no canvases; choose next_token")
        if self.ar_loss is None:
            raise RecipeError("objective.ar_loss: none: next tokens are all that a causal model learns; leave it out")
        of_canvases = tuple(Canvas.model_fields.keys() - NextToken.model_fields.keys())
        refuse_changed(recipe, {"objective": of_canvases, "data": ("canvases",)}, WHY)

    def make(self, recipe: Recipe, base: StartingModel, model: BlockDiffusionModel, dtype: torch.dtype | None) -> Any:
        """Return the objective of canvases or next tokens, with the policy's loss."""
        strategy = rollout_strategy(self.over, self.strategy, base.generation, base.denoises)
        through = self.signal == "through"
        policy = policy_of(strategy, base.generation.max_steps, self.ratio_clip, self.kl, through=through)
        return PolicyObjective(model, policy=policy, **self.parts(recipe, base))

    def read_rows(self, recipe: Recipe, reading: Reading) -> tuple[Prompts, AnyOrder]:
        """Read the prompts of `data.train`, which need no response, and return them with their order."""
        d = recipe.data
        prompts = read_prompts(sources(d.train, recipe, "train"), d.chat, d.system, reading.watch)
        check_conversations(reading.encode, prompts.has_conversations)
        return prompts, Order(prompts.sizes, self.prompts_per_round, recipe.seed, prompts.weights)

    def read_prompts(self, recipe: Recipe, reading: Reading, is_chat: bool) -> Prompts:
        """Read the prompts of `evaluation.prompts`. Raises DataError for a prompt that the task does not accept."""
        d, e = recipe.data, recipe.evaluation
        rows = read_prompts(sources(e.prompts or (), recipe, "test"), is_chat, d.system, reading.watch).rows
        prompts = Prompts(rows[: e.prompts_count])
        judging_task(recipe, prompts)
        return prompts

    def collator(self, recipe: Recipe, base: StartingModel, reader: ImageReader | None) -> Collator:
        """Return the collator of canvases or, for a causal model, of rows without canvases."""
        collator = super().collator(recipe, base, reader)
        return collator if base.denoises else replace(collator, canvases=NoCanvases())

    def rewards(self, recipe: Recipe, data: Data) -> Rewards:
        """Return the functions that judge answers. Raises RecipeError or DataError if one cannot judge the prompts."""
        rows = [prompt for each in (data.train, data.prompts) for prompt in getattr(each, "rows", ())]
        return make_rewards(self.reward, recipe.given.reward or (), rows)

    def check_data(self, recipe: Recipe, data: Data) -> None:
        """Raise RecipeError or DataError for rewards that cannot judge the prompts, before weights are read."""
        self.rewards(recipe, data)

    def source(self, recipe: Recipe, built: Built, ranks: Ranks, show: Progress) -> Source:
        """Return the batches made of rollouts, after a check that every prompt can be answered."""
        base, data, objective = built.base, built.data, built.objective
        strategy = rollout_strategy(self.over, self.strategy, base.generation, base.denoises)
        rewards = self.rewards(recipe, data)
        sampler = Sampler(objective.model, base.tokenizer, base.generation, built.diffusion, strategy)
        if self.over == "next_token" and self.ar_loss is None:
            why = "the model was trained with ar_loss: none, so its head has learnt nothing"
            show.line(f"note      objective.over: next_token: {why}")
        rollouts = Rollouts(recipe, self.round(recipe), data, objective, sampler, rewards, ranks, built.precision, show)
        rollouts.check([each for each in (data.train, data.prompts) if isinstance(each, Prompts)])
        return rollouts

    def in_words(self, recipe: Recipe) -> str:
        """Return the number of answers of a step, in words."""
        return counted(recipe.train.batch_size, "answer")

    def show_step(self, recipe: Recipe, data: Data, step: int, rows: int) -> tuple[dict[str, Any], list[str]] | None:
        """Return the round to which an optimiser step belongs, as a record, and lines with its first `rows` prompts."""
        number = (step - 1) // self.round(recipe).steps + 1
        sizes = f"{self.prompts_per_round} prompts with {self.answers} answers each"
        first = f"round {number}: {sizes}, drawn when it begins"
        prompts = [data.train.rows[index].question.last_message for _, index in data.order(number)[:rows]]
        answers = self.prompts_per_round * self.answers
        record = {"step": step, "round": number, "prompts": self.prompts_per_round, "answers": answers}
        return record, [first, *(f"prompt    {printable(text)}" for text in prompts)]

    # -- the losses, and what is measured --------------------------------------------------------------------------

    def losses(self, objective: Any) -> dict[str, Loss]:
        """Return the policy's loss, and the losses of canvases and next tokens with weights multiplied by `sft`."""
        of_examples = super().losses(objective).items()
        ordinary = {name: replace(loss, weight=self.sft * loss.weight) for name, loss in of_examples}
        return ordinary | {"policy": Loss(methodcaller("answer_count"))}

    def why_unscored(self, counts: Counts) -> tuple[str, str] | None:
        """Return None: a round of equal rewards teaches nothing, but the next one may."""
        return None

    def sample(self, recipe: Recipe, built: Built, sampler: Sampler, ranks: Ranks, show: Progress) -> Sampled:
        """Answer the sampled prompts. Returns their metrics, with the mean reward, and a record of each answer."""
        assert isinstance(built.source, Rollouts)
        sampled = sample_rewarded(recipe, sampler, built.data.prompts, built.source.rewards, ranks, built.precision)
        for line in failure_lines([text["reward_failures"] for text in sampled.texts]):
            show.line(line)
        return sampled

    def facts(self, recipe: Recipe, base: StartingModel, data: Data, digest_of: Callable[[str], str]) -> dict[str, Any]:
        """Return digests of the prompts and of the chat template, and whether passes are swept together."""
        return {
            "data.train": json_digest([data.train.fingerprint, str(base.tokenizer.chat_template)]),
            "evaluation.prompts": data.prompts.fingerprint if isinstance(data.prompts, Prompts) else json_digest([]),
            "objective.sweep": self.sweeps(recipe),
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
        """Return the largest micro-batch of rollouts: answers as long as the rows, with an action for every token.

        If canvases are the actions, every step of every canvas is included. With `sft`, the rows are its ordinary
        examples, too.
        """
        batch = super().largest_batch(recipe, base, model, tokens, rows, image_tokens)
        rollouts = worst_rollouts(batch, base.canvas_length, base.generation.max_steps, self.over == "canvas")
        return replace(rollouts, examples=batch) if self.sft else rollouts

    def between_steps(self, recipe: Recipe, base: StartingModel, tokens: int, dtype: torch.dtype) -> dict[str, int]:
        """Return the bytes of the pages of rollouts drawn together, which are freed before an optimiser step."""
        rows = min(ROWS, self.prompts_per_round * self.answers)
        cached = base.config.cached_per_token
        return {"pages of rollouts": rows * tokens * cached * dtype.itemsize}


KIND = Policy
