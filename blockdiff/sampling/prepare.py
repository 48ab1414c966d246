"""From a request to the sequences that answer it: what a model's settings make of its fields, and what they refuse."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from blockdiff.errors import RequestError
from blockdiff.sampling.control import compile_control
from blockdiff.sampling.drafts import BlockDraft, CanvasDraft, Draft
from blockdiff.sampling.request import Request
from blockdiff.sampling.response import opens_reasoning
from blockdiff.sampling.sequence import Sequence
from blockdiff.sampling.strategies import Speculative, Verified, as_strategy, next_token_head
from blockdiff.sampling.strategy import require_shapes
from blockdiff.seeding import child_seed

if TYPE_CHECKING:
    from blockdiff.sampling.settings import SamplingSettings
    from blockdiff.sampling.strategy import Strategy


def prepare_sequences(
    request: Request, settings: SamplingSettings, seed: int = 0, device: torch.device | str = "cpu"
) -> list[Sequence]:
    """The answers to a request that are to be drawn: one, or `best_of`; RequestError says why it cannot be answered.

    seed: what the request's own seed follows from where it brings none; device: the model's. The seeds of answers after
    the first follow from that one's.
    """
    prompt, tokens, images = request.as_tokens(settings.tokenizer, settings.vocab_size, settings.image_reader)
    strategy = settings.strategy
    if request.strategy is not None:
        strategy = as_strategy(request.strategy, settings.generation)
        settings.require_fitting(strategy)
    is_verified = isinstance(strategy, Verified)
    max_tokens = settings.max_tokens(request.max_new_tokens or settings.generation.max_new_tokens)
    max_steps = request.max_steps or settings.generation.max_steps
    if settings.is_next_token:
        max_steps = 1
    elif isinstance(strategy, Verified):
        max_steps = strategy.steps  # of a round
    require_shapes(strategy, max_steps)
    if request.stop and settings.tokenizer is None:
        raise RequestError("stop has texts, which need a tokenizer, and there is none")
    if opens_reasoning(prompt) and (form := request.form):
        raise RequestError(
            f"{form} says the form of the whole response, but the chat template begins it with reasoning; turn that "
            "off in the template, or leave the form out"
        )
    control = compile_control(request, tokens, settings, max_tokens=max_tokens, max_steps=max_steps, device=device)
    if control is not None:
        max_tokens = settings.max_tokens(control.max_tokens)
        if control.classes is not None:
            _require_plain(strategy, max_steps)
            _require_plain(next_token_head(strategy) or strategy, max_steps)
    positions = settings.positions
    if positions is not None and len(tokens) > (room := positions - max_tokens):
        raise RequestError(
            f"the prompt has {len(tokens)} tokens, but the model's {positions} positions leave room for {room} before "
            f"a response of {max_tokens}; shorten it or lower max_new_tokens"
        )
    first = Sequence(
        request,
        child_seed(seed, request.id) if request.seed is None else request.seed,
        prompt,
        tokens,
        strategy,
        max_tokens,
        max_steps * settings.canvas_length if is_verified else max_steps,  # each round adds a token at least
        images,
        control=control,
        draft=_new_draft(strategy, settings),
    )
    if (first.is_scored or is_verified) and settings.diffusion.objective.get("ar_loss", "not said") in ("none", None):
        vain = "its next-token predictions, which verify drafts, know" if is_verified else "its scores say"
        warnings.warn(
            f"this model was trained without the next-token loss (objective.ar_loss: none): {vain} nothing",
            stacklevel=1,
        )
    first.draws.append(first)
    for n in range(1, request.best_of):
        another_draw(first, n)
    return first.draws


def _new_draft(strategy: Strategy, settings: SamplingSettings) -> Draft | None:
    """The draft of a response before its first round; None where nothing is drafted."""
    if not settings.is_next_token:
        return CanvasDraft() if isinstance(strategy, Verified) else None
    most = settings.block or 1
    block = strategy.block if isinstance(strategy, Speculative) else 1  # next tokens are drafted by nobody
    return BlockDraft(min(block or most, most) - 1, follows=block is None)


def another_draw(first: Sequence, draw: int) -> None:
    """Add another answer to the draws of `first`, before it has begun, with a seed that follows from its own."""
    own = replace(
        first, draw=draw, seed=child_seed(first.seed, draw), tokens=[], steps=[], top_logprobs=[], token_ids=[]
    )
    own.control = None if first.control is None else first.control.copy()
    own.draft = None if first.draft is None else replace(first.draft)
    first.draws.append(own)


def _require_plain(strategy: Strategy, max_steps: int) -> None:
    """Raise RequestError for a strategy that changes the distributions of a step."""
    if not all(strategy.shape(step, max_steps).is_plain for step in range(max_steps)):
        raise RequestError(
            "a strategy with top_k, top_p or min_p changes the draws that a template, a constraint, banned texts or a "
            "penalty hold; leave one of the two out"
        )
