"""What may stand where in the canvases of one request: a template, a constraint, banned texts, a penalty, a draft.

Pinned tokens, holes, banned tokens and constraints are one thing: for every position a set of tokens that can stand
there, which may depend on what stands before and after it. `predict` makes distributions over those sets alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.errors import RequestError
from blockdiff.kernels.vocabulary import Classes
from blockdiff.sampling.constraints.automaton import TokenAutomaton, Tokens, of_bytes
from blockdiff.sampling.constraints.byte_automaton import of_regex, without
from blockdiff.sampling.constraints.json_schema import regex_of_schema
from blockdiff.sampling.constraints.paths import completable, forced
from blockdiff.sampling.constraints.token_bytes import token_bytes
from blockdiff.sampling.template import FREE, spelt, template_tokens
from blockdiff.seeding import Stream, uniform

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.sampling.request import Request

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
            state, is_open_S = self.automaton.run(committed), self._is_open(number + 1)
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
        if self.automaton is None or bool(self._is_open(canvases)[self.automaton.run(committed)]):
            return None
        return "the response left its constraint; commit the argmax canvases that predict gives"

    def _is_open(self, canvas: int) -> Tensor:
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


def control_of(
    request: Request,
    prompt_tokens: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    canvas_length: int,
    canvases: int,
    max_steps: int,
    vocab_size: int,
    eos_ids: Sequence[int],
    pad_id: int | None = None,
    mask_id: int | None = None,
    device: torch.device | str = "cpu",
) -> Control | None:
    """What a request asks of its response, None if nothing; RequestError says what of it cannot be.

    canvases: the most there may be; a template has as many as it needs.
    """
    is_constrained = request.regex is not None or request.json_schema is not None
    if not (is_constrained or request.template is not None or request.draft is not None or request.banned) and (
        request.repetition_penalty == 1.0
    ):
        return None
    texts = [text for text in request.banned if isinstance(text, str)]
    if tokenizer is None and (is_constrained or request.template is not None or request.draft is not None or texts):
        raise RequestError("a template, a constraint, a draft and banned texts need a tokenizer, and there is none")
    for id in (id for id in request.banned if not isinstance(id, str)):
        if not 0 <= id < vocab_size:
            raise RequestError(f"banned token {id!r} is not one of the model's {vocab_size} ids")
    forbidden = tuple(sorted({*(id for id in request.banned if not isinstance(id, str))} | _one(mask_id)))

    pins = None
    if request.template is not None:
        assert tokenizer is not None
        pins = _pins(request, tokenizer, canvas_length, eos_ids, mask_id)
        canvases = len(pins) // canvas_length

    automaton = classes = None
    if is_constrained or texts:
        regex = regex_of_schema(request.json_schema) if request.json_schema is not None else request.regex
        automaton = _automaton(tokenizer, vocab_size, regex, tuple(texts), tuple(eos_ids), pad_id, forbidden)
    elif pins is not None or forbidden or request.repetition_penalty != 1.0:
        is_text = pins is not None
        of_tokens = tokenizer if is_text else None, vocab_size, is_text, tuple(eos_ids), forbidden
        classes = _one_class(*of_tokens, torch.device(device))

    draft: list[int] = []
    if request.draft is not None:
        assert tokenizer is not None
        if mask_id is not None and automaton is not None:
            raise RequestError(
                "a model of mask noise never changes what is not masked, so a draft may break a constraint; "
                "give one of the two"
            )
        draft = _draft(request.draft, request, tokenizer, canvases, canvas_length, eos_ids)

    control = Control(
        canvas_length=canvas_length,
        canvases=canvases,
        max_steps=max_steps,
        device=torch.device(device),
        prompt_tokens=prompt_tokens,
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        pins=pins,
        draft=draft,
        noise=NOISE if request.noise is None else request.noise,
        classes=classes,
        automaton=automaton,
        penalty=request.repetition_penalty,
    )
    if automaton is not None and not bool(control._is_open(0)[0]):
        if pins is not None:
            raise RequestError("no text of the template's form satisfies the constraint; change one of the two")
        raise RequestError(
            f"no text of at most {canvases * canvas_length} tokens satisfies the constraint; raise max_new_tokens"
        )
    return control


def _pins(
    request: Request,
    tokenizer: PreTrainedTokenizerBase,
    canvas_length: int,
    eos_ids: Sequence[int],
    mask_id: int | None,
) -> list[int]:
    """The tokens of a template over whole canvases, -1 in its holes, eos after its end."""
    pins = template_tokens(request, tokenizer)
    if any(token in eos_ids for token in pins):
        raise RequestError("the template has the token that ends a response; leave it out, it comes by itself")
    if mask_id in pins:
        raise RequestError("the template has the mask token of the model's noise; write a hole instead")
    missing = -len(pins) % canvas_length
    if missing and not eos_ids:
        raise RequestError(
            f"the template has {len(pins)} tokens, and no eos is known that could follow them; "
            f"make it fill canvases of {canvas_length}"
        )
    return pins + ([eos_ids[0]] * missing if missing else [])


def _draft(
    text: str,
    request: Request,
    tokenizer: PreTrainedTokenizerBase,
    canvases: int,
    canvas_length: int,
    eos_ids: Sequence[int],
) -> list[int]:
    """The tokens of a draft over whole canvases, eos (-1 where there is none) after its end."""
    draft = spelt(text, request, tokenizer, "the draft")
    if len(draft) > canvases * canvas_length:
        raise RequestError(
            f"the draft has {len(draft)} tokens, but the response at most {canvases * canvas_length}; "
            "shorten it or raise max_new_tokens"
        )
    fill = -len(draft) % canvas_length
    return draft + ([eos_ids[0]] if eos_ids else [FREE]) * fill


def _one(id: int | None) -> set[int]:
    return set() if id is None else {id}


@functools.lru_cache(maxsize=4)
def _tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Tokens:
    return Tokens(token_bytes(tokenizer), vocab_size)


@functools.lru_cache(maxsize=32)
def _automaton(
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    regex: str | None,
    banned: tuple[str, ...],
    eos_ids: tuple[int, ...],
    pad_id: int | None,
    forbidden: tuple[int, ...],
) -> TokenAutomaton:
    """The automaton of a constraint, made once for each constraint and tokenizer."""
    tokens = _tokens(tokenizer, vocab_size)
    language = None if regex is None else of_regex(regex)
    if banned:
        free = without([text.encode() for text in banned])
        language = free if language is None else language.both(free)
    assert language is not None
    fill = pad_id if pad_id is not None and pad_id < vocab_size and not tokens.texts[pad_id] else None
    return of_bytes(language, tokens, eos_ids, fill, forbidden, allows_special=regex is None)


@functools.lru_cache(maxsize=32)
def _one_class(
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    is_text: bool,
    eos_ids: tuple[int, ...],
    forbidden: tuple[int, ...],
    device: torch.device,
) -> Classes:
    """The tokens that can stand anywhere, as one class: all, or those of a text, but the forbidden ones.

    Requests of the same tokens have the same object: their canvases are held together.
    """
    class_V = torch.zeros(vocab_size, dtype=torch.int64)
    if is_text:
        assert tokenizer is not None
        special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        class_V[len(tokenizer) :] = 1
        class_V[[id for id in {*special, *tokenizer.all_special_ids, *eos_ids} if id < vocab_size]] = 1
    class_V[list(forbidden)] = 1
    if bool(class_V.all()):
        raise RequestError("every token is banned; allow some")
    return Classes.of(class_V, 1).to(device)
