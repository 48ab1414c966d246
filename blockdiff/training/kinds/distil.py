"""Step distillation: the student learns to reach, from a state that it visits, the canvas that its teacher ends on.

Before each optimiser step an engine denoises every canvas of its batch with the student's present weights, after the
clean tokens before the canvas. One state on the way, chosen at random, replaces the noised canvas. The teacher denoises
the same canvas from the same noise, and the tokens on which it settles are the targets. Rows, losses, counts and
evaluation are those of canvases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from blockdiff import checkpoint
from blockdiff.canvas import Batch, Visited
from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.checkpoint.files import find
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.errors import DataError, RecipeError, RequestError
from blockdiff.metrics import Record
from blockdiff.models.adapters import is_adapter
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.pages import PAGE_TOKENS
from blockdiff.models.stored import store, stored_layers
from blockdiff.objective import Objective, evaluating
from blockdiff.parallel.ranks import Ranks
from blockdiff.sampling import Engine, Generation, Request, Sampler
from blockdiff.sampling.prepare import prepare_sequences
from blockdiff.sampling.rounds import CanvasRound
from blockdiff.sampling.trace import CommittedCanvas
from blockdiff.seeding import Stream, to_uniform, words
from blockdiff.training.built import Built, Source
from blockdiff.training.data import Data
from blockdiff.training.kinds.canvas import Denoising
from blockdiff.training.progress import Progress
from blockdiff.training.recipe import Recipe
from blockdiff.training.starting_model import StartingModel
from blockdiff.training.step import Counts, autocast

ROWS = 64  # canvases that are denoised together
COUNTED = ("canvases", "steps", "settled")


@dataclass(eq=False)
class Rollout:
    """A canvas to denoise: a state that the student visits, and the tokens on which the teacher settles.

    prompt: the tokens before the canvas. If it ends within a block, its last `tail` tokens are the canvas's first, and
    pinned. pick_K: a uniform number per step, by which `visit` chooses one of the visited states, each with the same
    probability. state: the chosen one, as tokens [L] and self-conditioning signal [L, D]. settled_L: None if the
    teacher took all its steps without meeting its stopping rule.
    """

    prompt: list[int]
    seed: int
    pick_K: list[float]
    tail: int = 0
    state: tuple[Tensor, Tensor] | None = None
    settled_L: list[int] | None = None

    def visit(self, step: int, tokens_L: Tensor, signal_LD: Tensor) -> None:
        """Keep the input of a step, in place of an earlier one, with probability 1 / (step + 1)."""
        if self.pick_K[step] * (step + 1) < 1:
            self.state = tokens_L.clone(), signal_LD.clone()


class Settled(Source):
    """The batches of `rows`, with states that the student visited and the tokens on which the teacher settled.

    student: a sampler of the model that trains. teacher: one of a frozen model. precision: the dtype of autocast.
    `seed` and the address of a canvas key its random draws.
    """

    def __init__(
        self,
        rows: Callable[[int], Sequence[Batch]],
        student: Sampler,
        teacher: Sampler,
        seed: int,
        precision: str | None = None,
    ) -> None:
        self.rows, self.student, self.teacher = rows, student, teacher
        self.seed, self.precision = seed, precision
        self._counted: defaultdict[str, float] = defaultdict(float)

    def __call__(self, step: int) -> list[Batch]:
        """This rank's micro-batches of an optimiser step."""
        return self.distilled(self.rows(step))

    def distilled(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the batches with visited states and settled canvases. A canvas that did not settle is not scored.

        Raises DataError if a canvas has no tokens before it.
        """
        by_place = [self._rollouts(batch) for batch in batches]
        rollouts = [rollout for of_batch in by_place for rollout in of_batch.values()]
        for _, canvas in self._run(self.student, rollouts, is_visited=True):
            self._counted["steps"] += canvas.steps
        for rollout, canvas in self._run(self.teacher, rollouts, is_visited=False):
            if canvas.steps < (canvas.max_steps or 0):  # its stopping rule has ended it
                rollout.settled_L = rollout.prompt[len(rollout.prompt) - rollout.tail :] + canvas.tokens
        self._counted["canvases"] += len(rollouts)
        self._counted["settled"] += sum(each.settled_L is not None for each in rollouts)
        return [self._distilled(batch, of_batch) for batch, of_batch in zip(batches, by_place, strict=True)]

    def read(self, ranks: Ranks, seconds: float) -> Record:
        """Return the student's steps per canvas since the last call, and the share of settled canvases, over ranks."""
        count, steps, settled = self.counts(ranks).values()
        self._counted.clear()
        return {"rollout_steps_per_canvas": steps / max(1, count), "rollout_settled": settled / max(1, count)}

    def counts(self, ranks: Ranks) -> dict[str, float]:
        """Return the counts since the last `read`, over all ranks, for a checkpoint."""
        mine = torch.tensor([self._counted[name] for name in COUNTED], dtype=torch.float64)
        return dict(zip(COUNTED, ranks.sum_of_rows(mine).tolist(), strict=True))

    def restore_counts(self, counts: Mapping[str, float], ranks: Ranks) -> None:
        """Continue from the `counts` of a checkpoint."""
        if ranks.row_rank == 0:
            self._counted.update(counts)

    def _rollouts(self, batch: Batch) -> dict[tuple[int, int], Rollout]:
        """Return a rollout for each canvas of a batch, by (row, canvas)."""
        is_there_BC = batch.length_BC > 0
        most = self.student.generation.max_steps
        drawn_NK = words(self.seed, Stream.ROLLOUT, batch.address_BC3[is_there_BC].unbind(1), 2 + most)
        seeds = [(high << 32) | low for high, low in drawn_NK[:, :2].tolist()]
        picks = to_uniform(drawn_NK[:, 2:]).tolist()
        rollouts = {}
        for (b, c), seed, pick in zip(is_there_BC.nonzero().tolist(), seeds, picks, strict=True):
            pinned_L, start = batch.is_pinned_BCL[b, c], int(batch.start_BC[b, c])
            tail = int(pinned_L.sum())
            prompt = batch.tokens_BS[b, batch.doc_start_BC[b, c] : start + tail].tolist()
            if not pinned_L[:tail].all() or tail != self.student.settings.tail(len(prompt)):
                raise DataError(
                    "data.train: a canvas with pinned places is rolled out if a prompt's tail pins them alone"
                )
            rollouts[b, c] = Rollout(prompt, seed, pick, tail)
        return rollouts

    def _run(
        self, sampler: Sampler, rollouts: list[Rollout], is_visited: bool
    ) -> Iterator[tuple[Rollout, CommittedCanvas]]:
        """Denoise the canvas of every rollout. Yields each rollout with its committed canvas.

        is_visited: whether the rollouts keep states (`Rollout.visit`).
        """
        model, settings, answers = sampler.model, sampler.settings, []
        for number, rollout in enumerate(rollouts):
            length = settings.canvas_length - rollout.tail
            request = Request(number, tokens=rollout.prompt, seed=rollout.seed, max_new_tokens=length)
            try:
                [answer] = prepare_sequences(request, settings, device=model.device)
            except RequestError as error:
                raise DataError(f"data.train: a canvas cannot be rolled out: {error}") from None
            assert isinstance(answer.round, CanvasRound)
            answer.round.on_inputs = rollout.visit if is_visited else None
            answers.append(answer)
        if not answers:
            return
        rows, page = min(ROWS, len(answers)), settings.in_blocks(PAGE_TOKENS)
        longest = max(len(rollout.prompt) for rollout in rollouts) + settings.canvas_length
        # A new engine every time: its tokens follow from weights and batches alone, also when a run is resumed.
        engine = Engine(
            model,
            settings=settings,
            max_rows=rows,
            max_waiting=len(answers),
            capacity=(rows + 1) * -(-longest // page) * page,
            graphs=False,
        )
        with evaluating(model), autocast(model.device, self.precision):
            for answer in answers:
                engine.enter([answer])
            while engine.step():
                pass
        for event in engine.events():
            if isinstance(event, CommittedCanvas):
                yield rollouts[int(event.id)], event

    def _distilled(self, batch: Batch, rollouts: dict[tuple[int, int], Rollout]) -> Batch:
        """Return the batch with the states and settled canvases of its rollouts."""
        model = self.student.model
        canvas_BCL, tokens_BCL, is_scored_BCL = (x.clone() for x in [batch.canvas_BCL] * 2 + [batch.is_scored_BCL])
        shape = *canvas_BCL.shape, model.vocabulary.signal_width
        signal_BCLD = torch.zeros(shape, dtype=model.dtype, device=model.device)
        settled = {
            index: (each.settled_L, *each.state)
            for index, each in rollouts.items()
            if each.settled_L is not None and each.state is not None
        }
        for index in rollouts.keys() - settled.keys():
            is_scored_BCL[index] = False
        if settled:  # one copy from the device for all canvases
            row_N, canvas_N = torch.tensor([*settled]).T
            settled_NL, tokens_NL, signal_NLD = zip(*settled.values(), strict=True)
            canvas_BCL[row_N, canvas_N] = torch.tensor(settled_NL)
            tokens_BCL[row_N, canvas_N] = torch.stack(tokens_NL).cpu()
            signal_BCLD[row_N, canvas_N] = torch.stack(signal_NLD)
        visited = Visited(tokens_BCL, signal_BCLD)
        return replace(batch, canvas_BCL=canvas_BCL, is_scored_BCL=is_scored_BCL, visited=visited)


class Distil(Denoising):
    """Learn, from states that the sampler visits, the tokens on which a teacher settles."""

    kind: str = "distil"
    teacher: str | None = None  # a checkpoint; null = the model that training starts from

    paths: ClassVar[tuple[str, ...]] = ("teacher",)

    def refuse(self, recipe: Recipe) -> None:
        """Raise RecipeError for random weights, a model split over ranks, and images."""
        super().refuse(recipe)
        if recipe.model.path is None:
            raise RecipeError(
                "objective.kind: distil: random weights settle on nothing; name a trained model with model.path"
            )
        if recipe.parallel.names != ("replicate",):
            raise RecipeError(
                "objective.kind: distil: every process samples at its own pace, so it must hold the whole model; leave "
                "parallel.shard, parallel.experts and parallel.tensor out"
            )
        if recipe.model.images != "none":
            raise RecipeError("objective.kind: distil: rows with images are not rolled out; leave model.images out")

    def make(self, recipe: Recipe, base: StartingModel, model: BlockDiffusionModel, dtype: torch.dtype | None) -> Any:
        """Return the objective of canvases for `model`.

        Batches bring states of canvases from the student's sampling, which it scores in place of noised canvases.
        """
        return Objective(model, **self.parts(recipe, base))

    def why_unscored(self, counts: Counts) -> tuple[str, str] | None:
        """Return why no canvas is scored, and a remedy; None if the teacher has settled on at least one."""
        if counts.divisors["canvas"]:
            return None
        return (
            "no canvas is scored: the teacher has settled on none within its denoising steps",
            "raise max_denoising_steps or confidence_threshold in the teacher's generation_config.json, "
            "or choose a teacher that was trained longer",
        )

    def others(self) -> list[str]:
        """Return the name of the teacher, unless it is the model that training starts from."""
        return [] if self.teacher is None else [self.teacher]

    def source(self, recipe: Recipe, built: Built, ranks: Ranks, show: Progress) -> Source:
        """Return batches with rollouts. Raises RecipeError if the teacher has other tokens or another canvas length."""
        directory, base = find(self.teacher or str(recipe.model.path)), built.base
        if self.teacher is not None:
            theirs = checkpoint.read_config(directory)
            if load_tokenizer(directory).get_vocab() != base.tokenizer.get_vocab():
                raise RecipeError(f"objective.teacher: {self.teacher} has other tokens than the model; name another")
            if (length := theirs.canvas_length) != base.canvas_length:
                raise RecipeError(
                    f"objective.teacher: {self.teacher} has canvases of {length} tokens, and the model of "
                    f"{base.canvas_length}; name another"
                )
        if self.teacher is None and recipe.lora.trains:
            frozen = below_adapters(built.model, recipe, base)
        else:
            frozen = checkpoint.load(directory, recipe.model.dtype, built.model.device, recipe.model.kernels)
        # Samplers without tokenizers: no canvas is decoded.
        generation = replace(Generation.from_pretrained(directory), eos_ids=base.generation.eos_ids)
        teacher = Sampler(frozen, None, generation, DiffusionSettings.from_pretrained(directory, base.config))
        student = Sampler(built.model, None, base.generation, built.diffusion)
        rows = super().source(recipe, built, ranks, show)
        return Settled(rows, student, teacher, recipe.seed, built.precision)

    def facts(self, recipe: Recipe, base: StartingModel, data: Data, digest_of: Callable[[str], str]) -> dict[str, Any]:
        """Add the digest of the teacher's weights."""
        teacher = self.teacher or str(recipe.model.path)
        return super().facts(recipe, base, data, digest_of) | {"objective.teacher": digest_of(teacher)}


def below_adapters(model: Any, recipe: Recipe, base: StartingModel) -> Any:
    """Return the model without its adapters. It shares the model's weights."""
    frozen = checkpoint.empty(base.config, recipe.model.kernels)
    store(frozen, {name: form for name, module in stored_layers(model).items() if (form := module.stored)})
    frozen.load_state_dict({name: x for name, x in model.state_dict().items() if not is_adapter(name)}, assign=True)
    return frozen.eval()


KIND = Distil
