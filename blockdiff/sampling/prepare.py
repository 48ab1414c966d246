"""Make the settings by which a model answers, and the sequences that answer a request; or refuse either."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.checkpoint.files import DIFFUSION
from blockdiff.checkpoint.generation import Generation, special_tokens
from blockdiff.checkpoint.tokenizer import mismatch
from blockdiff.data.images import PROCESSORS, ImageReader
from blockdiff.data.tokenise import takes_images
from blockdiff.errors import CheckpointError, RequestError
from blockdiff.models.family import NO_HEAD
from blockdiff.sampling.control import compile_control
from blockdiff.sampling.request import Request
from blockdiff.sampling.response import opens_reasoning
from blockdiff.sampling.rounds import require_fitting, round_of
from blockdiff.sampling.sequence import Sequence
from blockdiff.sampling.settings import SamplingSettings
from blockdiff.sampling.strategies import Speculative, as_strategy, next_token_head
from blockdiff.sampling.strategy import Strategy, require_shapes
from blockdiff.seeding import child_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.models.model import BlockDiffusionModel

A_DRAFTER = "is a drafter; give it with --draft-model (draft_model=...) beside the model that it drafts for"


def sampling_settings(
    model: BlockDiffusionModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation: Generation | None = None,
    diffusion: DiffusionSettings | None = None,
    strategy: Strategy | str | None = None,
) -> SamplingSettings:
    """Make the sampling settings of a model; the arguments that are given replace the model's own.

    `tokenizer` may be None if every request has its prompt as tokens. `generation` defaults to generation_config.json
    and `diffusion` to blockdiff.json, both in the directory that the model was loaded from, else to transformers'
    settings and to the noise of the model's config. If the generation settings name no eos, the model's config does,
    else the tokenizer; with none, every response runs to its full length. `strategy` (an object or its text form,
    docs/sampling.md) defaults to that of `diffusion`, else to the family's, else to the released model's rules with the
    numbers of the generation settings; a causal model is sampled token by token, and a `Drafted` one verified. Noise
    and prediction are those of the model that drafts canvases.
    """
    if not hasattr(model, "vocab_size"):
        raise RequestError(f"model: {model!r:.60} is none; give what blockdiff.load(path) returns")
    if getattr(model, "target_layers", ()):
        raise RequestError(f"the model {A_DRAFTER}")
    config: Any = getattr(model, "config", None)
    origin, drafter = _origin(model), _drafter(model)
    generation = generation or (Generation.from_pretrained(origin, config) if origin else Generation())
    denoises = getattr(model, "denoises", True)
    block = drafter.canvas_length if drafter is not None and drafter.target_layers else None
    if drafter is not None and strategy is None:
        strategy = "verified" if block is None else "speculative"
    if diffusion is None:
        diffusion = _diffusion(origin, config)
        if drafter is not None and block is None:
            of_drafter = _diffusion(_origin(drafter), drafter.config)
            diffusion = replace(of_drafter, objective=diffusion.objective, prompts=diffusion.prompts)
    by_default = diffusion.strategy or getattr(config, "default_strategy", None)
    strategy = as_strategy(strategy or by_default, generation, denoises)
    if drafter is None and denoises and isinstance(strategy, Speculative) and diffusion.mask_id is not None:
        block = model.canvas_length  # the model drafts for itself
    way = round_of(strategy)
    if not denoises and way.denoises:
        raise RequestError(f"the strategy {strategy!r:.80} denoises canvases, and a causal model has none")
    if diffusion.mask_id is not None and diffusion.mask_id >= model.vocab_size:
        raise CheckpointError(
            f"{DIFFUSION}: mask_id {diffusion.mask_id} is none of the model's {model.vocab_size} tokens"
        )
    doubt = None if tokenizer is None else mismatch(tokenizer, model.vocab_size)
    if doubt is not None:
        warnings.warn(doubt, stacklevel=3)
    configs = [config] if drafter is None else [config, drafter.config]
    positions = None if config is None else min(each.max_position_embeddings for each in configs)
    aligned = config is not None and config.block is not None
    special = special_tokens(config, generation, tokenizer)
    settings = SamplingSettings(
        tokenizer,
        replace(generation, eos_ids=special.eos_ids, pad_id=special.pad_id),
        diffusion,
        strategy,
        canvas_length=model.canvas_length if way.denoises else 1,
        vocab_size=model.vocab_size,
        denoises=way.denoises,
        positions=positions // model.canvas_length * model.canvas_length if aligned and positions else positions,
        fill_id=None if config is None else config.fill,
        predicts_next_tokens=config is None or config.predicts_next_tokens,
        is_drafted=drafter is not None,
        block=block,
        image_reader=None if drafter is not None and block is None else _image_reader(model, tokenizer),
        aligned=aligned,
        is_seeded=getattr(config, "seeds_canvases", False),
    )
    require_fitting(strategy, settings)
    return settings


def _drafter(model: BlockDiffusionModel) -> BlockDiffusionModel | None:
    """Return the model that drafts for a target; None if the model has no drafter."""
    denoiser = getattr(model, "denoiser", model)
    return None if denoiser is model else denoiser


def _diffusion(origin: Path | None, config: Any) -> DiffusionSettings:
    """Return the diffusion settings stored with a checkpoint; if there are none, those of its family."""
    if origin is not None:
        return DiffusionSettings.from_pretrained(origin, config)
    return DiffusionSettings() if config is None else DiffusionSettings.of_family(config)


def _image_reader(model: BlockDiffusionModel, tokenizer: PreTrainedTokenizerBase | None) -> ImageReader | None:
    """Return the image reader of a model with images; the checkpoint's files determine how images are cut."""
    config: Any = getattr(model, "config", None)
    carried = getattr(model, "carried", None)
    tokens = None if config is None else config.image_tokens()
    if tokens is None or not takes_images(tokens, tokenizer):
        return None
    files = [] if carried is None else carried.side_files
    candidates = [file for file in files if file.name in PROCESSORS] or files
    return ImageReader(candidates[0].parent if candidates else {}, tokens, adapt=config.image_processor)


def _origin(model: BlockDiffusionModel) -> Path | None:
    """Return the directory of the model's checkpoint, if files were carried over from it."""
    carried = getattr(model, "carried", None)
    return next((file.parent for file in carried.side_files), None) if carried is not None else None


def prepare_sequences(
    request: Request, settings: SamplingSettings, seed: int = 0, device: torch.device | str = "cpu"
) -> list[Sequence]:
    """Make the sequences that answer a request: one, or `best_of`; RequestError if it cannot be answered.

    seed: the seed from which the request's seed derives if it has none; device: the model's. The seeds of later answers
    derive from the first one's.
    """
    prompt, tokens, images = request.as_tokens(settings.tokenizer, settings.vocab_size, settings.image_reader)
    if request.prompt is not None and settings.diffusion.prompts == "chat":
        warnings.warn(
            "this model was trained on conversations, and a raw prompt goes without its chat template; give messages "
            "(--chat) to ask it as it was trained",
            stacklevel=1,
        )
    strategy = settings.strategy
    if request.strategy is not None:
        strategy = as_strategy(request.strategy, settings.generation)
        require_fitting(strategy, settings)
    if not settings.predicts_next_tokens and (request.scores or request.best_of > 1):
        raise RequestError(f"{'scores' if request.scores else 'best_of'}: {NO_HEAD}; leave it out")
    way = round_of(strategy, settings.is_seeded)
    max_tokens = settings.max_tokens(request.max_new_tokens or settings.generation.max_new_tokens, len(tokens))
    max_steps = way.steps(strategy, request.max_steps or settings.generation.max_steps)
    require_shapes(strategy, max_steps)
    if request.stop and settings.tokenizer is None:
        raise RequestError("stop has texts, which need a tokenizer, and there is none")
    if opens_reasoning(prompt) and (form := request.form):
        raise RequestError(
            f"{form} says the form of the whole response, but the chat template begins it with reasoning; turn that "
            "off in the template, or leave the form out"
        )
    head = next_token_head(strategy)
    control = compile_control(
        request,
        tokens,
        settings,
        max_tokens=max_tokens,
        max_steps=max_steps,
        device=device,
        by_head=head is not None,
    )
    if control is not None:
        max_tokens = settings.max_tokens(control.max_tokens, len(tokens))
        if control.classes is not None:
            _require_plain(strategy, max_steps)
            _require_plain(head or strategy, max_steps)
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
        max_steps * way.rounds(settings),
        way.of(strategy, settings),
        settings.canvas_length,
        images,
        tail_length=settings.tail(len(tokens)),
        control=control,
    )
    reads_head, trained = first.round.head is not None, settings.diffusion.objective
    is_untrained = trained.get("ar_loss", "not said") in ("none", None) and trained.get("over") != "next_token"
    if (first.is_scored or reads_head) and is_untrained:
        use = "verify drafts" if way.denoises else "write the answer"
        vain = f"its next-token predictions, which {use}, know" if reads_head else "its scores say"
        warnings.warn(
            f"this model was trained without the next-token loss (objective.ar_loss: none): {vain} nothing",
            stacklevel=1,
        )
    first.draws.append(first)
    for n in range(1, request.best_of):
        another_draw(first, n)
    return first.draws


def another_draw(first: Sequence, draw: int) -> None:
    """Add another answer to the draws of `first`, before it begins, with a seed derived from the first one's."""
    seed, round = child_seed(first.seed, draw), replace(first.round)
    sequence = replace(first, draw=draw, seed=seed, round=round, tokens=[], steps=[], top_logprobs=[], token_ids=[])
    sequence.control = None if first.control is None else first.control.copy()
    first.draws.append(sequence)


def _require_plain(strategy: Strategy, max_steps: int) -> None:
    """Raise RequestError for a strategy with top_k, top_p or min_p in any of its `max_steps` steps."""
    if not all(strategy.shape(step, max_steps).is_plain for step in range(max_steps)):
        raise RequestError(
            "a strategy with top_k, top_p or min_p changes the draws that a template, a constraint, banned texts, "
            "min_tokens or a penalty hold; leave one of the two out"
        )
