"""From what a request demands of its response (a template, a constraint ...) to the control that holds it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from blockdiff.errors import RequestError
from blockdiff.kernels.vocabulary import Classes
from blockdiff.sampling.constraints.automaton import TokenAutomaton, Tokens, of_bytes
from blockdiff.sampling.constraints.byte_automaton import of_regex, without
from blockdiff.sampling.constraints.json_schema import regex_of_schema
from blockdiff.sampling.constraints.token_bytes import token_bytes
from blockdiff.sampling.control import NOISE, Control
from blockdiff.sampling.template import FREE, spelt, template_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.sampling.request import Request
    from blockdiff.sampling.settings import SamplingSettings


def control_of(
    request: Request,
    prompt_tokens: Sequence[int],
    settings: SamplingSettings,
    *,
    canvases: int,
    max_steps: int,
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
    tokenizer, vocab_size, canvas_length = settings.tokenizer, settings.vocab_size, settings.canvas_length
    eos_ids, pad_id = settings.generation.eos_ids, settings.generation.pad_id
    mask_id = settings.diffusion.mask_id
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
    if automaton is not None and not bool(control.is_open(0)[0]):
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
