"""Rollouts: answers that the engine draws with the present weights, their rewards, and the batches made of them.

A round draws several answers to each of its prompts. They are the batches of one or more optimiser steps, in one or
more passes. Each answer has its own seed, which follows from the round, the index of the prompt and the number of the
draw. So a round follows from weights and recipe alone.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch

from blockdiff.errors import DataError, RequestError, RunError
from blockdiff.files import json_digest
from blockdiff.metrics import Record
from blockdiff.objective import evaluating
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.turns import measuring
from blockdiff.rl.batches import ROWS, Answer, Recorder, canvas_batch, examples, head_batch
from blockdiff.rl.policy import PolicyObjective, RolloutBatch
from blockdiff.rl.prompts import Prompt, Prompts
from blockdiff.rl.reward import Rewards, advantages, failure_lines
from blockdiff.sampling import Request, Sampler
from blockdiff.sampling.prepare import prepare_sequences
from blockdiff.sampling.trace import CommittedCanvas
from blockdiff.seeding import Stream, words
from blockdiff.training.built import Source
from blockdiff.training.data import Data, cache_directory
from blockdiff.training.progress import Progress
from blockdiff.training.recipe import Recipe
from blockdiff.training.samples import room_after
from blockdiff.training.step import autocast

SEEN = ("actions", "clipped", "surprise", "kl", "positions", "reaccepted")  # in the objective's `measured`


@dataclass(frozen=True)
class Round:
    """The shape of a round: its prompts, the answers to each, the passes over them, and what is learnt from them.

    over: whose draws are the actions. batch_size: answers of an optimiser step. has_kl: whether the divergence from the
    reference is in the loss. has_examples: whether the ordinary objective is. asks_head: whether a trained next-token
    head returns its likeliest tokens in addition to those of canvases.
    """

    over: Literal["next_token", "canvas"]
    prompts: int
    answers: int
    passes: int
    advantage: Literal["centred", "standardised"]
    batch_size: int
    has_kl: bool
    has_examples: bool
    asks_head: bool

    @property
    def steps(self) -> int:
        """The number of optimiser steps for which a round has batches."""
        return self.prompts * self.answers // self.batch_size * self.passes


class Rollouts(Source):
    """The batches of a policy's optimiser steps: `rollouts(step)`, called for one step after the other, from 1 on.

    sampler: samples with the weights that train. They change in place, so that captured graphs stay valid. rewards:
    judges the answers.
    """

    def __init__(
        self,
        recipe: Recipe,
        shape: Round,
        data: Data,
        objective: PolicyObjective,
        sampler: Sampler,
        rewards: Rewards,
        ranks: Ranks,
        precision: str | None,
        show: Progress,
    ) -> None:
        self.recipe, self.shape, self.objective = recipe, shape, objective
        self.prompts, self.order, self.collator = data.train, data.order, data.collator
        self.sampler, self.rewards = sampler, rewards
        self.ranks, self.precision, self.show = ranks, precision, show
        template = str(data.encoder.tokenizer.chat_template)
        self._tokenizer_fingerprint = json_digest([data.encoder.tokenizer_fingerprint, template])
        self._round = 0
        self._had_spread = True  # whether rewards of a group differed in the round before
        self._updates: list[list[RolloutBatch]] = []  # of the round
        self._counted: defaultdict[str, float] = defaultdict(float)

    def __call__(self, step: int) -> list[RolloutBatch]:
        """Return this rank's micro-batches of an optimiser step, on the CPU: as many on every rank, and at least one.

        Raises DataError for a prompt that cannot be answered, and Interrupted if a rank is to stop meanwhile.
        """
        number, within = divmod(step - 1, self.shape.steps)
        if number + 1 != self._round:
            if within:
                raise RunError(
                    f"step {step} is within a round of rollouts, and a round begins anew if a run is resumed; resume "
                    "from a checkpoint at the end of a round"
                )
            self._begin(number + 1, step)
        return self._updates[within % len(self._updates)]

    def may_stop(self, step: int) -> bool:
        """Return True if `step` is the last optimiser step of its round."""
        return step % self.shape.steps == 0

    def read(self, ranks: Ranks, seconds: float) -> Record:
        """Return the metrics of all rounds and updates since the last call, over all ranks.

        Omits means over zero items and non-finite sums, which a skipped step leaves.
        """
        seen, counted, record = self._seen(ranks), self._counted, Record()
        self.objective.measured.clear()
        if actions := seen["actions"]:
            names = {"ratio_clipped": "clipped", "entropy": "surprise"} | ({"kl": "kl"} if self.shape.has_kl else {})
            record |= {key: seen[name] / actions for key, name in names.items() if math.isfinite(seen[name])}
        if seen["positions"]:
            record["acceptance_changed"] = seen["reaccepted"] / seen["positions"]
        if answers := counted["answers"]:  # a round has begun
            mean = counted["reward"] / answers
            record |= {
                "reward": mean,
                "reward_spread": max(0.0, counted["reward squared"] / answers - mean**2) ** 0.5,
                "rewards": {name: counted[f"reward {name}"] / answers for name in self.rewards.functions},
                "reward_failures": int(counted["failures"]),
                "groups_without_spread": counted["even groups"] / counted["groups"],
                "answer_tokens": counted["tokens"] / answers,
                "rollout_seconds": counted["seconds"],
                "rollout_tokens_per_second": counted["tokens"] / max(1e-9, counted["seconds"]),
            }
        if counted["canvases"]:
            record["rollout_steps_per_canvas"] = counted["steps"] / counted["canvases"]
        if counted["drafted"]:
            record["agreement"] = counted["stood"] / counted["drafted"]
        counted.clear()
        return record | {"update_seconds": seconds - record.get("rollout_seconds", 0.0)}

    def counts(self, ranks: Ranks) -> dict[str, float]:
        """Return the counts since the last `read`, over all ranks, for a checkpoint; without seconds."""
        return {f"seen {name}": value for name, value in self._seen(ranks).items()} | {
            name: value for name, value in self._counted.items() if name != "seconds"
        }

    def restore_counts(self, counts: Mapping[str, float], ranks: Ranks) -> None:
        """Continue from the `counts` of a checkpoint."""
        for name, value in counts.items():
            if not name.startswith("seen "):
                self._counted[name] = value
            elif ranks.row_rank == 0:
                self.objective.measured[name.removeprefix("seen ")] = value

    def _seen(self, ranks: Ranks) -> dict[str, float]:
        """Return the sums that the objective has measured, over all ranks."""
        mine = [torch.as_tensor(self.objective.measured[name], device=ranks.device).double() for name in SEEN]
        return dict(zip(SEEN, ranks.sum_of_rows(torch.stack(mine)).tolist(), strict=True))

    def _begin(self, number: int, step: int) -> None:
        """Draw and judge the answers of a round, and make the batches of its optimiser steps."""
        began, group, size = time.perf_counter(), self.shape.answers, self.shape.batch_size
        self.sampler.forget()  # drop cached prompts even if no weight has changed: a resumed run has none, either
        answers, spread = self._answers(number), False
        self._require_rewards(answers, step)
        if not self._round:  # the memory that an optimiser step needs is not known before the first
            self.sampler.release()
        for first in range(0, len(answers), group):
            of_group = answers[first : first + group]
            for answer, advantage in zip(
                of_group, advantages([each.reward for each in of_group], self.shape.advantage), strict=True
            ):
                answer.advantage = advantage
            is_even = all(answer.advantage == 0 for answer in of_group)
            self._counted["even groups"] += is_even
            spread |= not is_even
        if self._had_spread and not spread:
            self.show.line(
                f"note      step {step}: the answers to each prompt have equal rewards, which teach nothing; if that "
                "goes on, give rewards that tell answers apart, or raise objective.answers"
            )
        self._had_spread = spread
        self._count(answers)
        self._counted["seconds"] += time.perf_counter() - began
        starts = range(0, len(answers), size)
        self._updates = [
            self._batches(answers[first : first + size], number, step + update) for update, first in enumerate(starts)
        ]
        if len(self._updates) * self.shape.passes > 1:
            self._updates = [[self._with_old(batch) for batch in update] for update in self._updates]
        self._round = number

    def _answers(self, number: int) -> list[Answer]:
        """Return all answers of a round with their rewards, in the order of prompts and draws, on every rank.

        A rank draws all answers of its prompts, which share the pages of the prompt.
        """
        shape, ranks, model, sampler = self.shape, self.ranks, self.objective.model, self.sampler
        rows = [self.prompts.rows[index] for _, index in self.order(number)]
        groups = range(ranks.row_rank, len(rows), ranks.row_world)
        places = [slot * shape.answers + draw for slot in groups for draw in range(shape.answers)]
        requests = [self._request(number, index, rows[index // shape.answers]) for index in places]
        drawn, recorder, began, total = list[Answer](), Recorder(), time.perf_counter(), 0
        refusal: str | None = None
        precise, room = autocast(ranks.device, self.precision), room_after(sampler, ranks.device)
        with evaluating(model), precise, room, measuring(model, ranks, "the rollouts") as look:
            prompt_of = {slot: self._prompt_tokens(requests[n * shape.answers]) for n, slot in enumerate(groups)}

            def on_canvas(canvas: CommittedCanvas) -> None:
                recorder.canvas(canvas)
                look()

            is_watched = sampler.settings.denoises
            stream = sampler.stream(
                requests, batch_size=ROWS, on_canvas=on_canvas, on_step=recorder.step if is_watched else None
            )
            for count, (n, result) in enumerate(stream, start=1):
                slot, row = places[n] // shape.answers, rows[places[n] // shape.answers]
                if result.error is not None:
                    refusal = f"{row.question.where}: the prompt cannot be answered: {result.error}"
                    continue
                tokens = list(result.tokens)  # copied before a reward function can change the result
                earned = self.rewards(row, result)
                parts = earned.total, earned.values, earned.failures, list(result.steps)
                canvases = recorder.take(places[n]) if shape.over == "canvas" else []
                agreed, is_cut = recorder.agreed(places[n], result), result.finish_reason == "length"
                drawn.append(Answer(places[n], prompt_of[slot], tokens, *parts, canvases, agreed, is_cut))
                total += len(tokens)
                self.show.rollouts(count, len(requests), total / (time.perf_counter() - began))
        names = [each.name for each in fields(Answer)]
        gathered = ranks.gather_rows((refusal, [[getattr(answer, name) for name in names] for answer in drawn]))
        if refusals := [reason for reason, _ in gathered if reason is not None]:  # all ranks raise together
            raise DataError(refusals[0])
        answers = [Answer(**dict(zip(names, values, strict=True))) for _, of_rank in gathered for values in of_rank]
        return sorted(answers, key=lambda answer: answer.place)

    def _require_rewards(self, answers: Sequence[Answer], step: int) -> None:
        """Raise DataError, on all ranks, if a reward function has failed for every answer of a round."""
        for name in self.rewards.functions:
            if all(name in answer.failures for answer in answers):
                raise DataError(
                    f"step {step}: the reward {name} has failed for all {len(answers)} answers of the round "
                    f"({answers[0].failures[name]}); mend it"
                )

    def check(self, asked: Sequence[Prompts]) -> None:
        """Raise DataError for a prompt that cannot be answered, before the run begins.

        Prompts that an earlier run has checked are skipped; an empty file in the cache directory records them.
        """
        directory, settings, data = cache_directory(self.recipe.data.cache), self.sampler.settings, self.recipe.data
        facts = [repr(settings.generation), repr(settings.strategy), settings.canvas_length, settings.positions]
        facts += [data.thinking, data.control_tokens, self._tokenizer_fingerprint]
        marker = f"answerable-{json_digest([[each.fingerprint for each in asked], *facts])}"
        if directory is not None and (directory / marker).is_file():
            return
        for row in (row for each in asked for row in each.rows):
            try:
                prepare_sequences(self._request(0, 0, row), settings)
            except RequestError as error:
                raise DataError(f"{row.question.where}: {error}") from None
        if directory is not None:
            with suppress(OSError):  # without the file the next run checks again
                directory.mkdir(parents=True, exist_ok=True)
                (directory / marker).touch()

    def _request(self, number: int, index: int, row: Prompt) -> Request:
        """Return the request of one draw, with its own seed and, with `asks_head`, for the head's likeliest tokens."""
        data, is_foretold = self.recipe.data, self.shape.asks_head
        high, low = words(self.recipe.seed, Stream.ROLLOUT, (number, *divmod(index, self.shape.answers)), 2).tolist()
        request = row.question.request(data.thinking, allow_control_tokens=data.control_tokens == "allow")
        return replace(request, id=index, seed=(high << 32) | low, scores=is_foretold, top_logprobs=int(is_foretold))

    def _prompt_tokens(self, request: Request) -> list[int]:
        return list(request.as_tokens(self.sampler.tokenizer, self.sampler.settings.vocab_size).tokens)

    def _count(self, answers: Sequence[Answer]) -> None:
        """Add the answers of a round to the metrics of the next `read`, and show which rewards failed."""
        counted = self._counted
        for answer in answers:
            counted["answers"] += 1
            counted["reward"] += answer.reward
            counted["reward squared"] += answer.reward**2
            counted["tokens"] += len(answer.tokens)
            counted["canvases"] += len(answer.steps) * (self.shape.over == "canvas")
            counted["steps"] += sum(answer.steps)
            counted["drafted"] += answer.agreed[0]
            counted["stood"] += answer.agreed[1]
            for name, value in answer.rewards.items():
                counted[f"reward {name}"] += value
            counted["failures"] += len(answer.failures)
        counted["groups"] += len(answers) / self.shape.answers
        for line in failure_lines([answer.failures for answer in answers]):
            self.show.line(line)

    # -- batches ---------------------------------------------------------------------------------------------------

    def _batches(self, answers: Sequence[Answer], number: int, step: int) -> list[RolloutBatch]:
        """Return this rank's micro-batches of an optimiser step over these answers.

        Answers without an advantage are left out unless the divergence is learnt from them. Answers of similar size are
        in one micro-batch. At each index, the micro-batches of all ranks have equally many steps.
        """
        ranks = self.ranks
        contributors = [answer for answer in answers if answer.advantage or self.shape.has_kl]
        contributors.sort(key=lambda answer: -answer.size)
        rows = self.recipe.train.micro_batch_size or max(1, -(-len(contributors) // ranks.row_world))
        turn = rows * ranks.row_world
        parts = [contributors[first : first + turn] for first in range(0, len(contributors), turn)] or [[]]
        batches = []
        for part in parts:
            share = part[ranks.row_rank :: ranks.row_world]
            batch = head_batch(share, self.collator)
            if self.shape.over == "canvas":
                batch = canvas_batch(share, self.collator, max((answer.most_steps for answer in part), default=1))
            if self.shape.has_examples:
                batch = replace(batch, examples=examples(share, self.collator, number, step, len(answers)))
            batches.append(batch)
        batches[0] = replace(batches[0], answers=torch.tensor(len(answers) / ranks.row_world, dtype=torch.float64))
        return batches

    def _with_old(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch with its actions' log-probabilities under the present weights, computed as in updates."""
        with torch.no_grad(), autocast(self.ranks.device, self.precision):
            log_p_N = self.objective.actions(batch.to(self.ranks.device), is_measured=False).log_p_N
        return replace(batch, old_N=log_p_N.cpu())
