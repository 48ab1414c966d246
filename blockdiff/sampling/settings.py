"""The settings of a model's answers: what its checkpoint brings beside the weights, and what a caller gives instead."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.checkpoint.files import DIFFUSION
from blockdiff.checkpoint.generation import Generation, special_tokens
from blockdiff.checkpoint.tokenizer import OTHER_MODELS, mismatch
from blockdiff.data.images import PROCESSORS, ImageReader
from blockdiff.data.tokenise import takes_images
from blockdiff.errors import CheckpointError, RequestError
from blockdiff.models.drafted import Drafted
from blockdiff.models.family import family_of
from blockdiff.sampling.request import Request
from blockdiff.sampling.strategies import NextToken, Speculative, Verified, as_strategy
from blockdiff.sampling.strategy import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.models.model import BlockDiffusionModel

A_DRAFTER = "is a drafter; give it with --draft-model (draft_model=...) beside the model that it drafts for"


@dataclass(frozen=True)
class SamplingSettings:
    """The settings by which requests are answered where they do not bring their own; `sampling_settings` makes them.

    generation: steps, tokens, and the special tokens that are in force; diffusion: how the model was trained to
    denoise; strategy: how canvases are denoised; canvas_length: of the canvases that are sampled, 1 for next tokens;
    positions: the most tokens that the model can see (None: no bound); is_drafted: whether another model
    drafts; block: the most tokens of its blocks, the one that stands included (None: it drafts canvases, or nothing
    drafts); image_reader: of images in prompts (None: the model takes none).
    """

    tokenizer: PreTrainedTokenizerBase | None
    generation: Generation
    diffusion: DiffusionSettings
    strategy: Strategy
    canvas_length: int
    vocab_size: int
    positions: int | None = None
    is_drafted: bool = False
    block: int | None = None
    image_reader: ImageReader | None = None

    @property
    def round_length(self) -> int:
        """The most tokens of a canvas or of a drafter's block; 1 where next tokens are drawn one by one."""
        return self.block or self.canvas_length

    @property
    def is_next_token(self) -> bool:
        """True where responses grow token by token and nothing is denoised."""
        return draws_next_tokens(self.strategy)

    def require_fitting(self, strategy: Strategy) -> None:
        """Raise RequestError for a strategy that the model, or the drafter beside it, cannot answer by."""
        if isinstance(strategy, Speculative) and self.block is None:
            raise RequestError(
                "the strategy speculative needs a drafter; give one (--draft-model), or the strategy next_token"
            )
        if self.block is not None and not draws_next_tokens(strategy):
            raise RequestError("a drafter drafts next tokens; give the strategy speculative or next_token, or none")
        if self.is_drafted and self.block is None and not isinstance(strategy, Verified):
            raise RequestError("a draft model drafts for verified canvases alone; give the strategy verified, or none")
        if draws_next_tokens(strategy) != self.is_next_token:
            raise RequestError(
                "some strategies denoise canvases and next_token does not, so not both can answer the requests of one "
                "sampler; use two"
            )

    def max_tokens(self, max_new_tokens: int) -> int:
        """The most tokens of a response: so many, in whole canvases; RequestError where no prompt fits before them."""
        max_tokens = -(-max_new_tokens // self.canvas_length) * self.canvas_length
        if self.positions is not None and max_tokens >= self.positions:
            raise RequestError(
                f"max_new_tokens {max_new_tokens} leaves no room for a prompt in the model's {self.positions} "
                "positions; ask for fewer"
            )
        return max_tokens

    def excess(self, request: Request) -> int:
        """The number of tokens that a request's prompt is too long for the positions; 0 or less where it fits."""
        if self.positions is None:
            return 0
        tokens = request.as_tokens(self.tokenizer, self.vocab_size, self.image_reader).tokens
        return len(tokens) + self.max_tokens(request.max_new_tokens or self.generation.max_new_tokens) - self.positions

    def text(self, tokens: Sequence[int]) -> str:
        """The text of a response without its special tokens; "" where there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        size = len(self.tokenizer)
        if any(token >= size for token in tokens):
            warnings.warn(
                f"the model answers with tokens that the tokenizer, which has {size}, has no text for; {OTHER_MODELS}",
                stacklevel=1,
            )
        # Not every eos of every tokenizer is a special token that decoding would leave out.
        has_end = bool(tokens) and tokens[-1] in self.generation.eos_ids
        return str(self.tokenizer.decode(tokens[: -1 if has_end else None], skip_special_tokens=True))


def sampling_settings(
    model: BlockDiffusionModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation: Generation | None = None,
    diffusion: DiffusionSettings | None = None,
    strategy: Strategy | str | None = None,
) -> SamplingSettings:
    """The settings of a model, of which those that are given replace its own.

    `tokenizer` may be None when every request brings its tokens. `generation` defaults to generation_config.json and
    `diffusion` to blockdiff.json, both beside the weights that the model was loaded from, else to transformers'
    settings and to a denoiser of uniform noise. Where the generation settings name no eos, the model's config does,
    else the tokenizer; with none, every response runs to its full length. `strategy` (text may name one,
    docs/sampling.md) defaults to the released model's rules with the numbers of the generation settings; a causal model
    is sampled token by token, and a `Drafted` one verified. Noise and prediction are those of what drafts canvases.
    """
    if not hasattr(model, "vocab_size"):
        raise RequestError(f"model: {model!r:.60} is none; give what blockdiff.load(path) returns")
    if getattr(model, "target_layers", ()):
        raise RequestError(f"the model {A_DRAFTER}")
    origin, is_drafted = _origin(model), isinstance(model, Drafted)
    generation = generation or (Generation.from_pretrained(origin) if origin else Generation())
    denoises = getattr(model, "denoises", True)
    block = model.drafter.canvas_length if isinstance(model, Drafted) and model.drafter.target_layers else None
    if is_drafted and strategy is None:
        strategy = "verified" if block is None else "speculative"
    strategy = as_strategy(strategy, generation, denoises)
    if not denoises and not draws_next_tokens(strategy):
        raise RequestError(f"the strategy {strategy!r:.80} denoises canvases, and a causal model has none")
    if diffusion is None:
        diffusion = _diffusion(origin)
        if isinstance(model, Drafted) and block is None:
            diffusion = replace(_diffusion(_origin(model.drafter)), objective=diffusion.objective)
    if diffusion.mask_id is not None and diffusion.mask_id >= model.vocab_size:
        raise CheckpointError(
            f"{DIFFUSION}: mask_id {diffusion.mask_id} is none of the model's {model.vocab_size} tokens"
        )
    doubt = None if tokenizer is None else mismatch(tokenizer, model.vocab_size)
    if doubt is not None:
        warnings.warn(doubt, stacklevel=3)
    config = getattr(model, "config", None)
    configs = [config, model.drafter.config] if isinstance(model, Drafted) else [config]
    special = special_tokens(config, generation, tokenizer)
    settings = SamplingSettings(
        tokenizer,
        replace(generation, eos_ids=special.eos_ids, pad_id=special.pad_id),
        diffusion,
        strategy,
        canvas_length=1 if draws_next_tokens(strategy) else model.canvas_length,
        vocab_size=model.vocab_size,
        positions=None if config is None else min(family_of(each).outline(each).positions for each in configs),
        is_drafted=is_drafted,
        block=block,
        image_reader=None if is_drafted and block is None else _image_reader(model, tokenizer),
    )
    settings.require_fitting(strategy)
    return settings


def draws_next_tokens(strategy: Strategy) -> bool:
    """True for a strategy by which responses grow token by token."""
    return isinstance(strategy, NextToken | Speculative)


def _diffusion(origin: Path | None) -> DiffusionSettings:
    """The settings of diffusion beside a checkpoint; without one, those of uniform noise."""
    return DiffusionSettings.from_pretrained(origin) if origin else DiffusionSettings()


def _image_reader(model: BlockDiffusionModel, tokenizer: PreTrainedTokenizerBase | None) -> ImageReader | None:
    """The reader of images for a model that takes them; the files that it carries say how they are cut."""
    config, carried = getattr(model, "config", None), getattr(model, "carried", None)
    tokens = None if config is None else family_of(config).image_tokens(config)
    if tokens is None or not takes_images(tokens, tokenizer):
        return None
    files = [] if carried is None else carried.side_files
    found = [file for file in files if file.name in PROCESSORS] or files
    return ImageReader(found[0].parent if found else {}, tokens, adapt=family_of(config).image_processor)


def _origin(model: BlockDiffusionModel) -> Path | None:
    """The directory of the checkpoint that a model came from, if files were carried from one."""
    carried = getattr(model, "carried", None)
    return next((file.parent for file in carried.side_files), None) if carried is not None else None
