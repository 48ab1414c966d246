"""The control of one response: the tokens that its request allows after the tokens committed so far.

`Request` has the fields; `compile_control` makes tokens, token classes and an automaton from them, and `Control.begin`
the tensors of a canvas. Tensors: L positions of a canvas, N of the whole response, S states, V tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockdiff.errors import RequestError
from blockdiff.kernels.vocabulary import Classes
from blockdiff.sampling.canvas_control import FREE, CanvasControl
from blockdiff.sampling.constraints.byte_automaton import ByteAutomaton, texts_without
from blockdiff.sampling.constraints.compile_limit import compile_limit
from blockdiff.sampling.constraints.json_object import ANY_OBJECT, any_object
from blockdiff.sampling.constraints.json_schema import schema_automaton
from blockdiff.sampling.constraints.paths import completable, completable_later, completable_pins, forced
from blockdiff.sampling.constraints.regex import regex_automaton
from blockdiff.sampling.constraints.token_automaton import TokenAutomaton, token_automaton
from blockdiff.sampling.constraints.tokens import Tokens, token_texts
from blockdiff.sampling.request import Request
from blockdiff.sampling.template import parse_template
from blockdiff.seeding import Stream, signed, uniform

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.sampling.settings import SamplingSettings

NOISE = 0.5  # the noise level of a draft, if its request sets none


@dataclass(eq=False)
class Control:
    """The control of one response. Pass committed tokens to `take` in their order.

    max_tokens, max_steps: the most tokens of the response and the most steps of a canvas; device: the model's. pins:
    given tokens over whole canvases, FREE between them (None: no token is given). start: tokens over whole canvases
    from which denoising starts, each replaced with noise with probability `noise`. penalty: the factor that makes
    tokens less likely that occurred before. classes, automaton: as in `CanvasControl`, the automaton on the CPU.
    open_NS: row n has the states from which n more tokens can complete the response; the last row also holds for larger
    n. min_tokens: the number of tokens before which the response cannot end; early_NS: the states from which it can be
    completed, by the number of tokens still missing from `min_tokens`.

    num_taken: the number of tokens taken; state: the automaton's state after them; is_seen_V: the tokens that they and
    the prompt contain.
    """

    canvas_length: int
    max_tokens: int
    max_steps: int
    device: torch.device
    pins: list[int] | None = None
    start: Sequence[int] = ()
    noise: float = 0.0
    penalty: float = 1.0
    classes: Classes | None = None
    automaton: TokenAutomaton | None = None
    open_NS: Tensor | None = None
    min_tokens: int = 0
    early_NS: Tensor | None = None
    num_taken: int = 0
    state: int = 0
    is_seen_V: Tensor | None = None

    def begin(self, seed: int, tail: Sequence[int] = ()) -> CanvasControl:
        """Return the control of the canvas that follows the tokens taken.

        seed: the seed of the request's draws; tail: the prompt's last tokens, if the canvas begins with them.
        """
        L, seen_V = self.canvas_length - len(tail), self.is_seen_V
        seen_BV, number = None if seen_V is None else seen_V[None].clone(), self._number
        control = self._canvases(self.num_taken, L, number, [self.state], seed, seen_BV)
        start = self.start[self.num_taken : self.num_taken + L]
        if start:
            is_kept_L = uniform(seed, Stream.START, (number,), L) >= self.noise
            control = replace(control, start_BL=torch.tensor(start).where(is_kept_L, FREE)[None].to(self.device))
        return control.behind(tail)

    @property
    def _number(self) -> int:
        """The index of the next canvas. Rounded up, because the first canvas may have begun with the prompt's tail."""
        return -(-self.num_taken // self.canvas_length)

    @property
    def first_step(self) -> int:
        """The step at which the next canvas begins: 0, or later if it starts from a draft."""
        if self.num_taken >= len(self.start):
            return 0
        return min(self.max_steps - 1, round(self.max_steps * (1 - self.noise)))

    def next_tokens(self, draft: Sequence[int], first: int, count: int, seed: int) -> CanvasControl:
        """Return the control of `count` single tokens, as next-token sampling draws them one after another.

        The draft follows the tokens taken. The tokens are those at its positions from `first` on, each after the
        draft's tokens before it; the last one may be the position after the draft's end.
        """
        states, seen_BV, state = [], None, self.state
        if self.is_seen_V is not None:
            seen_BV = self.is_seen_V.repeat(count, 1)
        for index in range(first + count):
            if index >= first:
                states.append(state)
            if index + 1 < first + count:
                if self.automaton is not None:
                    state = self.automaton.run(draft[index : index + 1], state)
                if seen_BV is not None:
                    seen_BV[max(0, index + 1 - first) :, draft[index]] = True
        first += self.num_taken
        return self._canvases(first, 1, first, states, seed, seen_BV)

    def possible(self, draft: Sequence[int]) -> list[int]:
        """Return a draft's tokens up to the first that the control excludes. Pinned tokens replace the draft's."""
        tokens, state = list[int](), self.state
        for position, token in enumerate(draft, self.num_taken):
            pinned = FREE if self.pins is None else self.pins[position]
            token = token if pinned == FREE else pinned
            if self.automaton is not None:
                state = self.automaton.run([token], state)
                if not bool(self._is_open(position + 1)[state]):
                    break
            tokens.append(token)
        return tokens

    def take(self, tokens: Sequence[int]) -> None:
        """Advance the control by committed tokens."""
        self.num_taken += len(tokens)
        if self.automaton is not None:
            self.state = self.automaton.run(tokens, self.state)
        if self.is_seen_V is not None:
            self.is_seen_V[torch.tensor(tokens, device=self.device)] = True

    @property
    def obstacle(self) -> str | None:
        """An error message if no valid response can follow the tokens taken, else None.

        Tokens that `predict` returns never cause it.
        """
        if self.automaton is None or bool(self._is_open(self.num_taken)[self.state]):
            return None
        return "the response left its constraint; commit the argmax canvases that predict gives"

    def copy(self) -> Control:
        """Return the control of another response to the same request."""
        return replace(self, is_seen_V=None if self.is_seen_V is None else self.is_seen_V.clone())

    def _is_open(self, position: int) -> Tensor:
        """Return the states before `position` from which the response can be completed, bool [S + 1]."""
        assert self.open_NS is not None
        if self.early_NS is not None and position <= self.min_tokens:
            return self.early_NS[min(self.min_tokens - position, len(self.early_NS) - 1)]
        return self.open_NS[min(self.max_tokens - position, len(self.open_NS) - 1)]

    def _canvases(
        self, first: int, length: int, number: int, states: list[int], seed: int, seen_BV: Tensor | None
    ) -> CanvasControl:
        """Return the control of consecutive canvases of `length` tokens, from the response's position `first` on.

        number: the index of the first canvas; states: the automaton's state before each canvas; seen_BV: the tokens
        that occurred before each canvas (None: no penalty).
        """
        B, device, parts = len(states), self.device, dict[str, Any]()
        given_BL = pinned_BL = torch.full((B, length), FREE)
        if self.pins is not None:
            given_BL = pinned_BL = torch.tensor(self.pins[first : first + B * length]).view(B, length)
        if self.automaton is not None:
            is_final_BS = torch.stack([self._is_open(first + (n + 1) * length) for n in range(B)])
            place_BL = torch.arange(first, first + B * length).view(B, length)
            is_text_BL = (given_BL < 0) if self.pins is not None else place_BL < self.min_tokens
            # Tokens to which the constraint leaves no alternative are pinned, so the model sees them at every step.
            each = zip(states, is_final_BS, given_BL, is_text_BL, strict=True)
            pinned_BL = torch.stack([forced(self.automaton, *of_canvas) for of_canvas in each])
            number_B = torch.arange(number, number + B, device=device)
            parts |= dict(
                automaton=self.automaton.on(device),
                state_B=torch.tensor(states, device=device),
                is_final_BS=is_final_BS.to(device),
                is_text_BL=is_text_BL.to(device),
                seed_B=torch.full((B,), signed(seed), device=device),
                number_B=number_B,
            )
        if seen_BV is not None:
            parts |= dict(is_seen_BV=seen_BV, factor_B=torch.full((B,), self.penalty, device=device))
        return CanvasControl(pinned_BL.to(device), classes=self.classes, **parts)


@compile_limit()
def compile_control(
    request: Request,
    prompt_tokens: Sequence[int],
    settings: SamplingSettings,
    *,
    max_tokens: int,
    max_steps: int,
    device: torch.device | str = "cpu",
    by_head: bool = False,
) -> Control | None:
    """Compile the control of a request; None if the request has none.

    max_tokens: the most tokens of the response; a template sets its own number. by_head: whether the next-token head
    decides every token. Raises RequestError for a control that cannot be satisfied.
    """
    if not request.control_in_words:
        return None
    device, generation, mask_id = torch.device(device), settings.generation, settings.diffusion.mask_id
    tail = settings.tail(len(prompt_tokens))
    pins, start = _pins(request, settings, tail, by_head), _start(request, settings, max_tokens, tail)
    languages = _languages(request, settings)
    if languages and start and mask_id is not None:
        raise RequestError(
            "a model of mask noise never changes what is not masked, so a draft may break a constraint; give one of "
            "the two"
        )
    max_tokens = max_tokens if pins is None else len(pins)
    forbidden = {token for token in (*request.banned, mask_id) if isinstance(token, int)}
    vocab_size, eos_ids, banned = settings.vocab_size, generation.eos_ids, tuple(sorted(forbidden))
    classes = automaton = open_NS = early_NS = seen_V = None
    if languages or request.min_tokens:
        is_text = request.regex is not None or request.json_schema is not None
        tokenizer = settings.tokenizer if languages else None  # None: any text is allowed, so no token's text is needed
        automaton = _automaton(
            tokenizer,
            vocab_size,
            languages or (texts_without(()),),
            eos_ids,
            generation.pad_id,
            banned,
            is_text=is_text,
        )
        classes, open_NS = automaton.on(device).classes, _open(automaton, pins, max_tokens)
        if request.min_tokens:
            early_NS = _early(automaton, request.min_tokens, max_tokens)
    elif pins is not None or banned or request.repetition_penalty != 1.0:
        classes = _one_class(None if pins is None else settings.tokenizer, vocab_size, eos_ids, banned, device)
    if request.repetition_penalty != 1.0:
        seen_V = torch.zeros(vocab_size, dtype=torch.bool)
        seen_V[list(prompt_tokens)] = True
        seen_V = seen_V.to(device)
    return Control(
        settings.canvas_length,
        max_tokens,
        max_steps,
        device,
        pins,
        start,
        NOISE if request.noise is None else request.noise,
        request.repetition_penalty,
        classes,
        automaton,
        open_NS,
        request.min_tokens,
        early_NS,
        is_seen_V=seen_V,
    )


def _open(automaton: TokenAutomaton, pins: list[int] | None, max_tokens: int) -> Tensor:
    """Return `Control.open_NS`; RequestError if no response can be completed."""
    open_NS = completable(automaton, max_tokens) if pins is None else completable_pins(automaton, tuple(pins))
    if bool(open_NS[-1, 0]):
        return open_NS
    if pins is not None:
        raise RequestError("no text of the template's form satisfies the constraint; change one of the two")
    raise RequestError(
        f"no text of at most {max_tokens} tokens satisfies the constraint; raise max_new_tokens (over HTTP, max_tokens)"
    )


def _early(automaton: TokenAutomaton, min_tokens: int, max_tokens: int) -> Tensor:
    """Return `Control.early_NS`; RequestError if no response of at least `min_tokens` tokens can be completed."""
    if min_tokens <= max_tokens:
        early_NS = completable_later(automaton, min_tokens, max_tokens - min_tokens)
        if bool(early_NS[-1, 0]):
            return early_NS
    raise RequestError(
        f"no response of at most {max_tokens} tokens that may be given has min_tokens, {min_tokens}; lower it, or "
        "raise max_new_tokens (over HTTP, max_tokens)"
    )


def require_tokenizer(name: str, settings: SamplingSettings) -> PreTrainedTokenizerBase:
    """Return the tokenizer; RequestError, which names the field `name` that needs it, if there is none."""
    if settings.tokenizer is None:
        raise RequestError(f"the words of {name} need a tokenizer, and there is none")
    return settings.tokenizer


def _pins(request: Request, settings: SamplingSettings, tail: int, by_head: bool) -> list[int] | None:
    """Return the template's tokens over whole canvases, FREE in its holes, with eos and fill after its end.

    Each text is tokenised by itself. None without a template. tail: the number of positions of the first canvas that
    hold prompt tokens. by_head: add at least one eos, so that the answer does not depend on the canvas length; without
    a head, a template that fills its last canvas gets no eos.
    """
    if request.template is None:
        return None
    tokenizer, eos_ids = require_tokenizer("a template", settings), settings.generation.eos_ids
    pins: list[int] = []
    for part in parse_template(request.template):
        if isinstance(part, str):
            pins += request.spelt(part, tokenizer, "the template's text")
        elif part.tokens is None:
            raise RequestError(f"the template's hole <?{part.name}> has no size; one of 16 tokens is <?16>")
        else:
            pins += [FREE] * part.tokens
    if any(token in eos_ids for token in pins):
        raise RequestError("the template has the token that ends a response; leave it out, it comes by itself")
    if settings.diffusion.mask_id in pins:
        raise RequestError("the template has the mask token of the model's noise; write a hole instead")
    least = int(by_head and bool(eos_ids))
    rest = least + -(tail + len(pins) + least) % settings.canvas_length
    if rest and not eos_ids:
        raise RequestError(
            f"the template has {len(pins)} tokens, and no eos is known that could follow them; "
            f"make it fill canvases of {settings.canvas_length}"
        )
    return pins + settings.ending(rest)


def _start(request: Request, settings: SamplingSettings, max_tokens: int, tail: int) -> list[int]:
    """Return the draft's tokens over whole canvases, followed by eos and fill, or by noise if there is no eos."""
    if request.draft is None:
        return []
    if not settings.denoises:
        raise RequestError("a draft is where denoising starts, and next_token denoises nothing; leave it out")
    start = request.spelt(request.draft, require_tokenizer("a draft", settings), "the draft")
    eos_ids = settings.generation.eos_ids
    if len(start) > max_tokens:
        raise RequestError(
            f"the draft has {len(start)} tokens, but the response at most {max_tokens}; "
            "shorten it or raise max_new_tokens (over HTTP, max_tokens)"
        )
    rest = -(tail + len(start)) % settings.canvas_length
    return start + (settings.ending(rest) if eos_ids else [FREE] * rest)


def _languages(request: Request, settings: SamplingSettings) -> tuple[ByteAutomaton, ...]:
    """Return the automata that the response's bytes must satisfy, for the constraint and for banned texts."""
    automata = []
    if request.regex is not None or request.json_schema is not None:
        require_tokenizer("a constraint", settings)
        if request.json_schema == ANY_OBJECT:
            automata.append(any_object())
        elif request.json_schema is not None:
            automata.append(schema_automaton(request.json_schema))
        else:
            automata.append(regex_automaton(request.regex or ""))
    for id in request.banned:
        if not isinstance(id, str) and not 0 <= id < settings.vocab_size:
            raise RequestError(f"banned token {id!r} is not one of the model's {settings.vocab_size} ids")
    if texts := tuple(each for each in request.banned if isinstance(each, str)):
        require_tokenizer("banned texts", settings)
        automata.append(texts_without(tuple(text.encode() for text in texts)))
    return tuple(automata)


@functools.lru_cache(maxsize=32)
def _automaton(
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    languages: tuple[ByteAutomaton, ...],
    eos_ids: tuple[int, ...],
    pad_id: int | None,
    banned: tuple[int, ...],
    is_text: bool,
) -> TokenAutomaton:
    """Return the automaton over tokens of the texts that are in all languages; cached.

    tokenizer: None if no token needs its text. is_text: whether tokens without a text are excluded before the end.
    """
    tokens = Tokens((), vocab_size) if tokenizer is None else token_texts(tokenizer, vocab_size)
    language = functools.reduce(ByteAutomaton.both, languages)
    has_fill = tokenizer is not None and pad_id is not None and pad_id < vocab_size and not tokens.texts[pad_id]
    fill = pad_id if has_fill else None
    return token_automaton(language, tokens, eos_ids, fill, banned, allows_special=not is_text)


@functools.lru_cache(maxsize=32)
def _one_class(
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    eos_ids: tuple[int, ...],
    banned: tuple[int, ...],
    device: torch.device,
) -> Classes:
    """Return the allowed tokens as one class: all of them, or with a tokenizer its text tokens, minus the banned ones.

    Cached: equal requests get the same object, so that their canvases are computed together.
    """
    class_V = torch.zeros(vocab_size, dtype=torch.int64)
    if tokenizer is not None:
        special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        class_V[len(tokenizer) :] = 1
        class_V[[id for id in {*special, *tokenizer.all_special_ids, *eos_ids} if id < vocab_size]] = 1
    class_V[list(banned)] = 1
    if bool(class_V.all()):
        raise RequestError("every token is banned; allow some")
    return Classes.of(class_V, 1).to(device)
