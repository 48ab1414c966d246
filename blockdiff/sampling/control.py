"""What may stand where in the canvases of one request: a template, a constraint, banned texts, a penalty, a draft.

Pinned tokens, holes, banned tokens and constraints are one thing: for every position a set of tokens that can stand
there, which may depend on what stands before and after it. `predict` makes distributions over those sets alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdiff.kernels.vocabulary import Classes
from blockdiff.sampling.constraints.automaton import TokenAutomaton
from blockdiff.sampling.constraints.paths import completable, forced
from blockdiff.sampling.template import FREE
from blockdiff.seeding import Stream, uniform

NOISE = 0.5  # of a draft


@dataclass(frozen=True, eq=False)
class CanvasControl:
    """What holds one canvas of a request; tensors lie on the model's device.

    pinned_L: int64 tokens that are given, -1 where the model decides; they stand in every canvas. start_L: int64, what
    the first canvas holds, -1 where it is noise; `first_step` is the step at which it enters the schedule.

    classes: the tokens that can stand in the free positions, as one class, where no automaton decides. automaton,
    state, is_final_S: a constraint, the state before the canvas, and the states it may end in; its draws are addressed
    by (seed, number of the canvas, step). is_text_L: positions where the response cannot end. penalty, seen_V: tokens
    seen before are less likely by this factor.
    """

    number: int
    seed: int
    pinned_L: Tensor | None = None
    start_L: Tensor | None = None
    first_step: int = 0
    classes: Classes | None = None
    automaton: TokenAutomaton | None = None
    state: int = 0
    is_final_S: Tensor | None = None
    is_text_L: Tensor | None = None
    penalty: float = 1.0
    seen_V: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Control:
    """What holds one request. It has no state: what was committed is given to it.

    pins: the tokens of a template over all canvases, -1 in its holes, eos after its end. draft: tokens to start from.
    """

    canvas_length: int
    canvases: int
    max_steps: int
    device: torch.device
    prompt_tokens: Sequence[int]
    vocab_size: int
    eos_ids: Sequence[int]
    pins: Sequence[int] | None = None
    draft: Sequence[int] = ()
    noise: float = NOISE
    classes: Classes | None = None
    automaton: TokenAutomaton | None = None
    penalty: float = 1.0

    @property
    def holds_distributions(self) -> bool:
        """Whether it says what may stand where, and not only where a canvas starts."""
        return self.classes is not None or self.automaton is not None

    def begin(self, number: int, committed: Sequence[int], seed: int) -> CanvasControl:
        """The control of canvas `number` after the committed tokens; `seed` is that of the request's draws."""
        L, device = self.canvas_length, self.device
        pinned_L = start_L = is_text_L = automaton = is_final_S = seen_V = None
        state = first_step = 0
        if self.pins is not None:
            pinned_L = torch.tensor(self.pins[number * L : (number + 1) * L])
            is_text_L = (pinned_L < 0).to(device)
        draft = self.draft[number * L : (number + 1) * L]
        if draft:
            is_kept_L = uniform(seed, Stream.DRAFT, (number,), L) >= self.noise
            start_L = torch.tensor(draft).where(is_kept_L, FREE).to(device)
            first_step = min(self.max_steps - 1, round(self.max_steps * (1 - self.noise)))
        if self.automaton is not None:
            state, is_open_S = self.automaton.run(committed), self.is_open(number + 1)
            # What the constraint leaves no choice of is pinned, so that the model sees it from the first step on.
            given_L = torch.full((L,), FREE) if pinned_L is None else pinned_L
            pinned_L = forced(self.automaton, state, is_open_S, given_L)
            automaton, is_final_S = self.automaton.on(device), is_open_S.to(device)
        if self.penalty != 1.0:
            seen_V = torch.zeros(self.vocab_size, dtype=torch.bool)
            seen_V[torch.tensor([*self.prompt_tokens, *committed])] = True
            seen_V = seen_V.to(device)
        return CanvasControl(
            number=number,
            seed=seed,
            pinned_L=None if pinned_L is None else pinned_L.to(device),
            start_L=start_L,
            first_step=first_step,
            classes=self.classes if automaton is None else automaton.classes,
            automaton=automaton,
            state=state,
            is_final_S=is_final_S,
            is_text_L=is_text_L,
            penalty=self.penalty,
            seen_V=seen_V,
        )

    def obstacle(self, committed: Sequence[int], canvases: int) -> str | None:
        """What is wrong with the committed tokens of so many canvases; None while they can be, or are, what was asked.

        What `predict` gives never is wrong.
        """
        if self.automaton is None or bool(self.is_open(canvases)[self.automaton.run(committed)]):
            return None
        return "the response left its constraint; commit the argmax canvases that predict gives"

    def is_open(self, canvas: int) -> Tensor:
        """From which states the canvases from this one on can complete the response, bool [S + 1]."""
        assert self.automaton is not None
        if self.pins is None:
            return completable(self.automaton, (self.canvases - canvas) * self.canvas_length)
        return _open_states(self.automaton, tuple(self.pins[canvas * self.canvas_length :]))


@functools.lru_cache(maxsize=64)
def _open_states(automaton: TokenAutomaton, pins: tuple[int, ...]) -> Tensor:
    """From which states these tokens, with text in the holes, lead to acceptance: bool [S + 1]."""
    is_open_S, next_of_text = automaton.is_accepting_S, automaton.next_SC[:, ~automaton.is_end_C]
    places = automaton.class_V[list(pins)].tolist()
    for pin, place in zip(reversed(pins), reversed(places), strict=True):
        if pin == FREE:
            is_open_S = is_open_S[next_of_text].any(-1)
        elif place < automaton.next_SC.shape[1]:
            is_open_S = is_open_S[automaton.next_SC[:, place]]
        else:
            return torch.zeros_like(is_open_S)
    return is_open_S
