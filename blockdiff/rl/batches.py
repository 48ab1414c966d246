"""Answers: how their steps are recorded during sampling, and the batches that train on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from blockdiff.canvas import PADDING_ROW, Batch, Canvas, CleanRow, lay_out
from blockdiff.data.collate import Collator
from blockdiff.data.example import Example
from blockdiff.diffusion.schedule import StratifiedTime
from blockdiff.rl.policy import RolloutBatch
from blockdiff.sampling import Result
from blockdiff.sampling.trace import CommittedCanvas, Step, Verification

ROWS = 64  # answers that are drawn together

# Of a canvas: the tokens each step saw, the accepted tokens it drew (-1: not accepted), and the committed tokens.
Trajectory = tuple[list[list[int]], list[list[int]], list[int]]


@dataclass
class Answer:
    """One answer: the tokens of prompt and answer, its reward, and the steps of its canvases."""

    place: int
    prompt: list[int]
    tokens: list[int]
    reward: float
    rewards: dict[str, float]
    failures: dict[str, str]
    steps: list[int]
    canvases: list[Trajectory] = field(default_factory=list)
    agreed: list[int] = field(default_factory=lambda: [0, 0])  # tokens: proposed, and of these the head's
    is_cut: bool = False  # it reached the token limit without an end
    advantage: float = 0.0

    @property
    def size(self) -> int:
        """The number of tokens in a batch with this answer, all steps of its canvases counted."""
        return len(self.prompt) + len(self.tokens) + sum(len(seen) * len(tokens) for seen, _, tokens in self.canvases)

    @property
    def most_steps(self) -> int:
        """The largest number of steps of one of its canvases; 1 without canvases."""
        return max((len(seen) for seen, _, _ in self.canvases), default=1)


class Recorder:
    """Records the steps of canvases, and the verifications of drafts, during sampling."""

    def __init__(self) -> None:
        self._steps: defaultdict[str | int, defaultdict[int, list[Step]]] = defaultdict(lambda: defaultdict(list))
        self._committed: defaultdict[str | int, list[CommittedCanvas]] = defaultdict(list)
        self._verified: defaultdict[str | int, list[int]] = defaultdict(lambda: [0, 0])

    def step(self, step: Step | Verification) -> None:
        """Record a step or a verification."""
        if isinstance(step, Verification):
            self._verified[step.id][0] += len(step.draft) - step.given
            self._verified[step.id][1] += step.accepted - step.given
        else:
            self._steps[step.id][step.canvas].append(step)

    def canvas(self, canvas: CommittedCanvas) -> None:
        """Record a committed canvas."""
        self._committed[canvas.id].append(canvas)

    def agreed(self, id: str | int, result: Result) -> list[int]:
        """Return the number of an answer's tokens that canvases proposed, and how many of these the head agrees with.

        If the result has `top_logprobs`, this counts the answer's tokens, and those which are the head's likeliest.
        Else it counts drafted and accepted tokens of verified canvases: [0, 0] if there are none.
        """
        if result.top_logprobs is None:
            return self._verified.pop(id, [0, 0])
        agreed = [token == top[0][0] for token, top in zip(result.tokens, result.top_logprobs, strict=True)]
        return [len(agreed), sum(agreed)]

    def take(self, id: str | int) -> list[Trajectory]:
        """Remove and return an answer's canvases: the tokens that each step saw and drew, and the committed tokens."""
        trajectories = []
        for canvas in self._committed.pop(id):
            steps = self._steps[id][canvas.canvas]
            seen = [step.tokens for step in steps]
            drawn = [
                [token if is_kept else -1 for token, is_kept in zip(step.sample, step.is_accepted, strict=True)]
                for step in steps
            ]
            # The last step commits its draw; tokens after the end are ignored.
            drawn[-1] = [*canvas.tokens[: canvas.kept], *[-1] * (len(canvas.tokens) - canvas.kept)]
            trajectories.append((seen, drawn, list(canvas.tokens)))
        del self._steps[id]
        return trajectories


def head_batch(answers: Sequence[Answer], collator: Collator) -> RolloutBatch:
    """Return a batch with a row per answer, prompt and answer; its actions are the answer's tokens.

    A single row of padding if `answers` is empty.
    """
    rows = []
    for answer in answers:
        weights = [0.0] * (len(answer.prompt) - 1) + [1.0] * len(answer.tokens) + [0.0]
        rows.append(CleanRow([*answer.prompt, *answer.tokens], (), answer.place, ar_weights=weights))
    return _laid_out(rows or [PADDING_ROW], answers, collator)


def canvas_batch(answers: Sequence[Answer], collator: Collator, steps: int) -> RolloutBatch:
    """Return a batch with a row per answer: its canvases after its prompt, up to `steps` steps for each canvas."""
    L, rows = collator.canvas_length, []
    for answer in answers:
        tail = _tail(answer, collator)
        first = len(answer.prompt) - len(tail)
        clean = [*answer.prompt, *(token for _, _, ids in answer.canvases[:-1] for token in ids)]
        canvases = [
            Canvas([*tail[: None if number == 0 else 0], *ids], first + number * L, address=(0, answer.place, number))
            for number, (_, _, ids) in enumerate(answer.canvases)
        ]
        canvases[:1] = [replace(canvas, pinned=range(len(tail))) for canvas in canvases[:1]]
        rows.append(CleanRow(clean, canvases, answer.place, ar_weights=[0.0] * len(clean)))
    rows = rows or [replace(PADDING_ROW, canvases=[Canvas([0] * L, 0, length=0)])]
    batch = _laid_out(rows, answers, collator)
    seen_BCKL = torch.zeros(*batch.canvas_BCL.shape[:2], steps, L, dtype=torch.int64)
    action_BCKL = torch.full_like(seen_BCKL, -1)
    for b, answer in enumerate(answers):
        for c, (seen, actions, ids) in enumerate(answer.canvases):
            free = slice(L - len(ids), None)  # behind the prompt's tail
            seen_BCKL[b, c, : len(seen)] = batch.canvas_BCL[b, c]
            seen_BCKL[b, c, : len(seen), free], action_BCKL[b, c, : len(seen), free] = torch.tensor([seen, actions])
    is_scored_BCL = (action_BCKL >= 0).any(2)
    return replace(batch, seen_BCKL=seen_BCKL, action_BCKL=action_BCKL, is_scored_BCL=is_scored_BCL)


def _tail(answer: Answer, collator: Collator) -> list[int]:
    """Return the last tokens of the prompt that open the first canvas; [] unless canvases are aligned to blocks."""
    length = len(answer.prompt)
    return answer.prompt[length - length % collator.canvas_length :] if collator.aligned else []


def worst_rollouts(batch: Batch, canvas_length: int, steps: int, is_canvas: bool) -> RolloutBatch:
    """Return the largest rollout batch: answers as long as the rows of `batch`, with an action for every token.

    If `is_canvas`, every canvas has `steps` steps, with an action for each of its tokens in each.
    """
    L, (rows, tokens) = canvas_length, batch.tokens_BS.shape
    canvases = max(1, (tokens - 1) // L)
    start, drawn = max(1, tokens - canvases * L), [[0] * L] * steps
    answer = Answer(0, [0] * start, [0] * (tokens - start), 0.0, {}, {}, [], [(drawn, drawn, [0] * L)] * canvases)
    collator = Collator(L, 0, 0, 0, StratifiedTime())
    return canvas_batch([answer] * rows, collator, steps) if is_canvas else head_batch([answer] * rows, collator)


def examples(answers: Sequence[Answer], collator: Collator, number: int, step: int, slots: int) -> Batch:
    """Return a batch of the answers with positive advantage, for the ordinary objective, in their slots of `slots`.

    number: the round's number; it keys noise and coins as an epoch does. An answer that was cut off keeps whole
    canvases only, so that it does not teach to end there. Padding if no answer has a positive advantage.
    """
    rows, places = list[Example](), list[int]()
    for answer in answers:
        L, count = collator.canvas_length, len(answer.tokens)
        count -= (len(_tail(answer, collator)) + count) % L if answer.is_cut else 0
        if answer.advantage > 0 and count > 0:
            span = len(answer.prompt), len(answer.prompt) + count
            rows.append(Example(answer.place, [*answer.prompt, *answer.tokens[:count]], [span]))
            places.append(answer.place % slots)
    if not rows:
        return collator.lay_out([PADDING_ROW])
    return collator(rows, epoch=number, step=step, slots=places, total_slots=slots)


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
