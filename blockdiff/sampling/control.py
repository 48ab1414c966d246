"""The control of one request: its restrictions together, and what may stand in each of its canvases.

Pinned tokens, holes, banned tokens and constraints are one thing: for every position a set of tokens that can stand
there, which may depend on what stands before and after it. `predict` makes distributions over those sets alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.errors import RequestError
from blockdiff.kernels.vocabulary import Classes
from blockdiff.sampling.constraints.automaton import TokenAutomaton, Tokens, of_bytes
from blockdiff.sampling.constraints.byte_automaton import ByteAutomaton
from blockdiff.sampling.constraints.outlines import compile_limit
from blockdiff.sampling.constraints.paths import completable, forced
from blockdiff.sampling.constraints.token_bytes import token_bytes
from blockdiff.sampling.controls.restriction import FREE, Restriction
from blockdiff.seeding import Stream, uniform

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.sampling.request import Request
    from blockdiff.sampling.settings import SamplingSettings


@dataclass(frozen=True, eq=False)
class CanvasControl:
    """The tokens that may stand in one canvas of a request; tensors lie on the model's device.

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
class ResponseControl:
    """The control of a response, which `control_of` makes. It has no state: what was committed is given to it.

    canvases, max_steps: the most canvases of the response, and steps of each; classes, automaton: those of
    `CanvasControl`, made of the restriction.
    """

    restriction: Restriction
    canvas_length: int
    canvases: int
    max_steps: int
    prompt_tokens: Sequence[int]
    vocab_size: int
    device: torch.device
    classes: Classes | None = None
    automaton: TokenAutomaton | None = None

    @property
    def holds_distributions(self) -> bool:
        """True where it says what may stand where, and not only where a canvas starts."""
        return self.classes is not None or self.automaton is not None

    def begin(self, number: int, committed: Sequence[int], seed: int) -> CanvasControl:
        """The control of canvas `number` after the committed tokens; `seed` is that of the request's draws."""
        L, device, asked = self.canvas_length, self.device, self.restriction
        pinned_L = start_L = is_text_L = automaton = is_final_S = seen_V = None
        state = first_step = 0
        if asked.pins is not None:
            pinned_L = torch.tensor(asked.pins[number * L : (number + 1) * L])
            is_text_L = (pinned_L < 0).to(device)
        start = asked.start[number * L : (number + 1) * L]
        if start:
            is_kept_L = uniform(seed, Stream.DRAFT, (number,), L) >= asked.noise
            start_L = torch.tensor(start).where(is_kept_L, FREE).to(device)
            first_step = min(self.max_steps - 1, round(self.max_steps * (1 - asked.noise)))
        if self.automaton is not None:
            state, is_open_S = self.automaton.run(committed), self.is_open(number + 1)
            # What the constraint leaves no choice of is pinned, so that the model sees it from the first step on.
            given_L = torch.full((L,), FREE) if pinned_L is None else pinned_L
            pinned_L = forced(self.automaton, state, is_open_S, given_L)
            automaton, is_final_S = self.automaton.on(device), is_open_S.to(device)
        if asked.penalty != 1.0:
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
            penalty=asked.penalty,
            seen_V=seen_V,
        )

    def of_tokens(self) -> ResponseControl:
        """The same over canvases of one token each, as next-token sampling has it."""
        restriction = replace(self.restriction, start=())
        return replace(self, restriction=restriction, canvas_length=1, canvases=self.canvases * self.canvas_length)

    def obstacle(self, committed: Sequence[int], canvases: int) -> str | None:
        """The error of so many committed canvases; None while they can be, or are, what was asked.

        What `predict` gives never is wrong.
        """
        if self.automaton is None or bool(self.is_open(canvases)[self.automaton.run(committed)]):
            return None
        return "the response left its constraint; commit the argmax canvases that predict gives"

    def is_open(self, canvas: int) -> Tensor:
        """The states from which the canvases from this one on can complete the response, bool [S + 1]."""
        assert self.automaton is not None
        if self.restriction.pins is None:
            return completable(self.automaton, (self.canvases - canvas) * self.canvas_length)
        return _open_states(self.automaton, tuple(self.restriction.pins[canvas * self.canvas_length :]))


@compile_limit()
def control_of(
    request: Request,
    prompt_tokens: Sequence[int],
    settings: SamplingSettings,
    *,
    canvases: int,
    max_steps: int,
    device: torch.device | str = "cpu",
) -> ResponseControl | None:
    """The control of a request, None if it asks for none; RequestError says what of it cannot be.

    canvases: the most there may be; pins have as many as they need.
    """
    asked = [control.restriction(request, settings, canvases) for control in request.controls]
    if not asked:
        return None
    whole = functools.reduce(Restriction.joined, asked)
    mask_id, eos_ids, has_pins = settings.diffusion.mask_id, settings.generation.eos_ids, whole.pins is not None
    forbidden = tuple(sorted(whole.banned | (set() if mask_id is None else {mask_id})))
    if whole.pins is not None:
        canvases = len(whole.pins) // settings.canvas_length
    automaton = classes = None
    if whole.languages:
        automaton = _automaton(
            settings.tokenizer,
            settings.vocab_size,
            whole.languages,
            eos_ids,
            settings.generation.pad_id,
            forbidden,
            whole.is_text,
        )
        if mask_id is not None and whole.start:
            raise RequestError(
                "a model of mask noise never changes what is not masked, so a draft may break a constraint; "
                "give one of the two"
            )
    elif has_pins or forbidden or whole.penalty != 1.0:
        tokenizer = settings.tokenizer if has_pins else None
        classes = _one_class(tokenizer, settings.vocab_size, eos_ids, forbidden, torch.device(device))
    control = ResponseControl(
        restriction=whole,
        canvas_length=settings.canvas_length,
        canvases=canvases,
        max_steps=max_steps,
        prompt_tokens=prompt_tokens,
        vocab_size=settings.vocab_size,
        device=torch.device(device),
        classes=classes,
        automaton=automaton,
    )
    if automaton is not None and not bool(control.is_open(0)[0]):
        if has_pins:
            raise RequestError("no text of the template's form satisfies the constraint; change one of the two")
        raise RequestError(
            f"no text of at most {canvases * settings.canvas_length} tokens satisfies the constraint; "
            "raise max_new_tokens (over HTTP, max_tokens)"
        )
    return control


@functools.lru_cache(maxsize=64)
def _open_states(automaton: TokenAutomaton, pins: tuple[int, ...]) -> Tensor:
    """The states from which these tokens, with text in the holes, lead to acceptance: bool [S + 1]."""
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


@functools.lru_cache(maxsize=4)
def _tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Tokens:
    return Tokens(token_bytes(tokenizer), vocab_size)


@functools.lru_cache(maxsize=32)
def _automaton(
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    languages: tuple[ByteAutomaton, ...],
    eos_ids: tuple[int, ...],
    pad_id: int | None,
    forbidden: tuple[int, ...],
    is_text: bool,
) -> TokenAutomaton:
    """The automaton over tokens of all languages at once, made once for each set of them and tokenizer."""
    tokens = _tokens(tokenizer, vocab_size)
    language = functools.reduce(ByteAutomaton.both, languages)
    fill = pad_id if pad_id is not None and pad_id < vocab_size and not tokens.texts[pad_id] else None
    return of_bytes(language, tokens, eos_ids, fill, forbidden, allows_special=not is_text)


@functools.lru_cache(maxsize=32)
def _one_class(
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    eos_ids: tuple[int, ...],
    forbidden: tuple[int, ...],
    device: torch.device,
) -> Classes:
    """The tokens that can stand anywhere, as one class: all, or those of a text of the tokenizer, but the forbidden.

    Requests of the same tokens have the same object: their canvases are computed together.
    """
    class_V = torch.zeros(vocab_size, dtype=torch.int64)
    if tokenizer is not None:
        special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        class_V[len(tokenizer) :] = 1
        class_V[[id for id in {*special, *tokenizer.all_special_ids, *eos_ids} if id < vocab_size]] = 1
    class_V[list(forbidden)] = 1
    if bool(class_V.all()):
        raise RequestError("every token is banned; allow some")
    return Classes.of(class_V, 1).to(device)
