"""Answers as batches: what a step of their policy is computed from, and the ordinary objective's rows of good ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from blockdiff.canvas import PADDING_ROW, Batch, Canvas, CleanRow, lay_out
from blockdiff.data.chat import Example
from blockdiff.data.collate import Collator
from blockdiff.rl.policy import RolloutBatch

ROWS = 64  # answers that are drawn together

# Of a canvas: what each step saw, what it drew where that was accepted, else -1, and the tokens committed.
Trajectory = tuple[list[list[int]], list[list[int]], list[int]]


@dataclass
class Answer:
    """One answer: the tokens of its prompt and its own, what it earned, and the steps of its canvases."""

    place: int
    prompt: list[int]
    tokens: list[int]
    reward: float
    rewards: dict[str, float]
    failures: dict[str, str]
    steps: list[int]
    canvases: list[Trajectory] = field(default_factory=list)
    agreed: list[int] = field(default_factory=lambda: [0, 0])  # of the tokens that canvases proposed the head's, too
    is_cut: bool = False  # it has as many tokens as it may, and no end
    advantage: float = 0.0

    @property
    def size(self) -> int:
        """The number of tokens that a batch holds of it, all steps of its canvases counted."""
        return len(self.prompt) + len(self.tokens) + sum(len(seen) * len(own) for seen, _, own in self.canvases)

    @property
    def most_steps(self) -> int:
        """The most steps that one of its canvases took."""
        return max((len(seen) for seen, _, _ in self.canvases), default=1)


def head_batch(answers: Sequence[Answer], collator: Collator) -> RolloutBatch:
    """Prompts and answers in rows, whose actions are the answers' tokens; padding where there is no answer."""
    rows = []
    for answer in answers:
        weights = [0.0] * (len(answer.prompt) - 1) + [1.0] * len(answer.tokens) + [0.0]
        rows.append(CleanRow([*answer.prompt, *answer.tokens], (), answer.place, ar_weights=weights))
    return _laid_out(rows or [PADDING_ROW], answers, collator)


def canvas_batch(answers: Sequence[Answer], collator: Collator, steps: int) -> RolloutBatch:
    """Each answer's canvases after its prompt and its earlier canvases, with room for so many steps of each."""
    L, rows = collator.canvas_length, []
    for answer in answers:
        committed = [own for _, _, own in answer.canvases]
        clean = [*answer.prompt, *(token for own in committed[:-1] for token in own)]
        starts = range(len(answer.prompt), len(clean) + 1, L)
        canvases = [
            Canvas(own, start, address=(0, answer.place, number))
            for number, (own, start) in enumerate(zip(committed, starts, strict=True))
        ]
        rows.append(CleanRow(clean, canvases, answer.place, ar_weights=[0.0] * len(clean)))
    rows = rows or [replace(PADDING_ROW, canvases=[Canvas([0] * L, 0, length=0)])]
    batch = _laid_out(rows, answers, collator)
    seen_BCKL = torch.zeros(*batch.canvas_BCL.shape[:2], steps, L, dtype=torch.int64)
    action_BCKL = torch.full_like(seen_BCKL, -1)
    for b, answer in enumerate(answers):
        for c, (seen, actions, _) in enumerate(answer.canvases):
            seen_BCKL[b, c, : len(seen)], action_BCKL[b, c, : len(seen)] = torch.tensor([seen, actions])
    is_scored_BCL = (action_BCKL >= 0).any(2)
    return replace(batch, seen_BCKL=seen_BCKL, action_BCKL=action_BCKL, is_scored_BCL=is_scored_BCL)


def examples(answers: Sequence[Answer], collator: Collator, number: int, step: int, slots: int) -> Batch:
    """The answers of above-average reward as rows of the ordinary objective, at their places of so many slots.

    number: the round's, by which noise and coins are addressed as by an epoch. An answer that was cut off has whole
    canvases alone, so that it does not teach to end there.
    """
    found, places = list[Example](), list[int]()
    for answer in answers:
        L, count = collator.canvas_length, len(answer.tokens)
        count -= count % L if answer.is_cut else 0
        if answer.advantage > 0 and count:
            span = len(answer.prompt), len(answer.prompt) + count
            found.append(Example(answer.place, [*answer.prompt, *answer.tokens[:count]], [span]))
            places.append(answer.place % slots)
    if not found:
        return collator.lay_out([PADDING_ROW])
    return collator(found, epoch=number, step=step, slots=places, total_slots=slots)


def _laid_out(rows: Sequence[CleanRow], answers: Sequence[Answer], collator: Collator) -> RolloutBatch:
    batch = lay_out(rows, collator.canvas_length, collator.pad_id)
    advantage_B = torch.tensor([answer.advantage for answer in answers] or [0.0], dtype=torch.float64)
    laid_out = {each.name: getattr(batch, each.name) for each in fields(Batch)}
    none_BCKL = torch.zeros(*batch.canvas_BCL.shape[:2], 0, collator.canvas_length, dtype=torch.int64)
    return RolloutBatch(
        **laid_out,
        advantage_B=advantage_B,
        answers=torch.zeros((), dtype=torch.float64),
        seen_BCKL=none_BCKL,
        action_BCKL=none_BCKL,
    )
