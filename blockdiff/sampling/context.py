"""A model with all that answering needs beside it: its tokenizer, its settings, and what it was trained for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from blockdiff.checkpoint.files import CHOICES
from blockdiff.checkpoint.generation import Generation, special_tokens
from blockdiff.errors import CheckpointError, RequestError
from blockdiff.models.family import family_of
from blockdiff.sampling.choices import Choices
from blockdiff.sampling.demands import control_of
from blockdiff.sampling.reasoning import separated
from blockdiff.sampling.request import Pending, Request, Result, tokenised
from blockdiff.sampling.strategies import NextToken, as_strategy, is_guided
from blockdiff.sampling.strategy import Strategy
from blockdiff.sampling.tool_calls import called

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.models.family import BlockDiffusionModel

STOP_SPARE = 8  # special tokens that may stand within a text that ends a response
NOT_FINITE = "the model's logits are not finite; are its weights? a wider --dtype may help"


class Context:
    """What a sampler and an engine have in common.

    `tokenizer` may be None when every request brings its tokens. Without `generation` the settings are those beside
    the weights the model was loaded from, else transformers' defaults. Where they name no eos, the model's config does,
    else the tokenizer; with none, every response runs to its full length. Without `choices` the model is taken for what
    the blockdiff.json beside its weights says, else for a plain denoiser of uniform noise. Without `strategy` canvases
    are denoised by the released model's rules, with the numbers of the settings, and a causal model is sampled token by
    token; text may name one (docs/sampling.md). canvas_length: of the canvases that are sampled, 1 for next tokens.
    """

    def __init__(
        self,
        model: BlockDiffusionModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        generation: Generation | None = None,
        choices: Choices | None = None,
        strategy: Strategy | str | None = None,
    ):
        self.model, self.tokenizer = model, tokenizer
        self._has_warned = False  # of tokens without a text
        origin = _origin(model)
        generation = generation or (Generation.from_pretrained(origin) if origin else Generation())
        denoises = getattr(model, "denoises", True)
        self.strategy = as_strategy(strategy, generation, denoises)
        self.is_next_token = isinstance(self.strategy, NextToken)
        if not denoises and not self.is_next_token:
            raise RequestError(f"the strategy {self.strategy!r:.80} denoises canvases, and a causal model has none")
        self.canvas_length = 1 if self.is_next_token else model.canvas_length
        self.choices = choices or (Choices.from_pretrained(origin) if origin else Choices())
        mask_id = self.choices.mask_id
        if mask_id is not None and mask_id >= model.vocab_size:
            raise CheckpointError(f"{CHOICES}: mask_id {mask_id} is none of the model's {model.vocab_size} tokens")
        if tokenizer is not None and len(tokenizer) > model.vocab_size:
            warnings.warn(
                f"the tokenizer has {len(tokenizer)} tokens, the model {model.vocab_size}; is it that of the model?",
                stacklevel=3,
            )
        config = getattr(model, "config", None)
        self.positions = None if config is None else family_of(config).outline(config).positions
        special = special_tokens(config, generation, tokenizer)
        self.bos_id = special.bos_id
        self.generation = replace(generation, eos_ids=special.eos_ids, pad_id=special.pad_id)

    def canvases(self, max_new_tokens: int) -> int:
        """How many canvases a response of so many tokens has; RequestError where no prompt fits before them."""
        canvases = -(-max_new_tokens // self.canvas_length)
        if self.positions is not None and canvases * self.canvas_length >= self.positions:
            raise RequestError(
                f"max_new_tokens {max_new_tokens} leaves no room for a prompt in the model's {self.positions} "
                "positions; ask for fewer"
            )
        return canvases

    def excess(self, request: Request) -> int:
        """How many tokens too long a request's prompt is for the model's positions; 0 or less where it fits."""
        if self.positions is None:
            return 0
        prompt = tokenised(request, 0, 0, self.tokenizer, self.model.vocab_size).prompt_tokens
        canvases = self.canvases(request.max_new_tokens or self.generation.max_new_tokens)
        return len(prompt) + canvases * self.canvas_length - self.positions

    def pending(self, request: Request, place: int, seed: int) -> Pending:
        """A request as it waits to be answered; RequestError says why it cannot be.

        seed: what the request's own seed follows from where it brings none.
        """
        asked = tokenised(request, place, seed, self.tokenizer, self.model.vocab_size)
        asked.canvases = self.canvases(request.max_new_tokens or self.generation.max_new_tokens)
        asked.max_steps = request.max_steps or self.generation.max_steps
        asked.strategy = None if request.strategy is None else as_strategy(request.strategy, self.generation)
        if is_guided(asked.strategy or self.strategy, asked.max_steps) and self.bos_id is None:
            raise RequestError("guidance needs a bos token as an empty prompt, and neither model nor tokenizer has one")
        asked.is_scored = request.scores or request.best_of > 1
        if asked.is_scored and self.choices.objective.get("ar_loss", "not said") in ("none", None):
            warnings.warn(
                "this model was trained without the next-token loss (objective.ar_loss: none): its scores say nothing",
                stacklevel=1,
            )
        if isinstance(asked.strategy or self.strategy, NextToken) != self.is_next_token:
            raise RequestError(
                "some strategies denoise canvases and next_token does not, so not both can answer the requests of one "
                "sampler; use two"
            )
        if self.is_next_token:
            asked.max_steps = 1
            if request.draft is not None:
                raise RequestError("a draft is where denoising starts, and next_token denoises nothing; leave it out")
        if request.stop and self.tokenizer is None:
            raise RequestError("stop has texts, which need a tokenizer, and there is none")
        asked.stop = tuple(request.stop)
        length = self.canvas_length
        asked.demanded = request.demanded
        asked.control = control_of(
            request,
            asked.prompt_tokens,
            self.tokenizer,
            canvas_length=length,
            canvases=asked.canvases,
            max_steps=asked.max_steps,
            vocab_size=self.model.vocab_size,
            eos_ids=self.generation.eos_ids,
            pad_id=self.generation.pad_id,
            mask_id=self.choices.mask_id,
            device=self.model.device,
        )
        if asked.control is not None:
            asked.canvases = self.canvases(asked.control.canvases * length)
            if asked.control.holds_distributions:
                self._require_plain(asked.strategy or self.strategy, asked.max_steps)
        if self.positions is not None and len(asked.prompt_tokens) > self.positions - asked.canvases * length:
            raise RequestError(
                f"the prompt has {len(asked.prompt_tokens)} tokens, but the model's {self.positions} positions leave "
                f"room for {self.positions - asked.canvases * length} before {asked.canvases} canvases; "
                "shorten it or lower max_new_tokens"
            )
        return asked

    def _require_plain(self, strategy: Strategy, max_steps: int) -> None:
        """Raise RequestError for a strategy that changes the distributions of a step."""
        shapes = [strategy.shape(step, max_steps) for step in range(max_steps)]
        if self.choices.prediction == "posterior":  # of what this model predicts the noise level changes nothing
            shapes = [replace(shape, alpha=None) for shape in shapes]
        if not all(shape.is_plain for shape in shapes):
            raise RequestError(
                "a strategy with top_k, top_p, min_p, guidance, corrections or a race changes the draws that a "
                "template, a constraint, banned texts or a penalty hold; leave one of the two out"
            )

    def result(self, answered: Pending) -> Result:
        """The answer as the asker gets it."""
        if answered.error is not None:
            return Result.failed(answered.request_id, answered.error)
        reasoning, calls, answer = None, None, answered.tokens
        if self.tokenizer is not None:
            reasoning, answer = separated(answered.tokens, self.tokenizer)
            calls, answer = called(answer, self.tokenizer)
        text = self.text(answer)
        if answered.finish_reason == "stop":
            text = text[: min((place for place in map(text.find, answered.stop) if place >= 0), default=None)]
        return Result(
            answered.request_id,
            text,
            answered.tokens,
            str(answered.finish_reason),
            answered.steps,
            reasoning=reasoning,
            tool_calls=calls,
            logprobs=answered.logprobs,
            draw=answered.draw,
        )

    def stop(self, asked: Pending, fresh: int) -> int:
        """End a response at the first of its stop texts; returns how many of its last `fresh` tokens that leaves out.

        A response ends with the token that completes the text. Only special tokens have no bytes, so a text of n bytes
        that the fresh tokens complete begins in the n tokens before them, or in a few more.
        """
        if not asked.stop:
            return 0
        width = fresh + max(len(text.encode()) for text in asked.stop) + STOP_SPARE
        tail = self.text(asked.tokens[-width:])
        if not any(text in tail for text in asked.stop):
            return 0
        whole = len(asked.tokens)
        for count in range(whole - fresh + 1, whole + 1):
            said = self.text(asked.tokens[:count])
            if any(text in said for text in asked.stop):
                del asked.tokens[count:]
                asked.finish_reason = "stop"
                return whole - count
        return 0

    def text(self, tokens: Sequence[int]) -> str:
        """A response without its special tokens; "" where there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        # Not every eos of every tokenizer is a special token that decoding would leave out.
        size = len(self.tokenizer)
        if not self._has_warned and any(token >= size for token in tokens):
            self._has_warned = True
            warnings.warn(
                f"the model answers with tokens that the tokenizer, which has {size}, has no text for; "
                "is it that of the model?",
                stacklevel=1,
            )
        has_end = bool(tokens) and tokens[-1] in self.generation.eos_ids
        return str(self.tokenizer.decode(tokens[: -1 if has_end else None], skip_special_tokens=True))


def _origin(model: BlockDiffusionModel) -> Path | None:
    """The directory of the checkpoint that a model came from, if files were carried from one."""
    carried = getattr(model, "carried", None)
    return next((file.parent for file in carried.side_files), None) if carried is not None else None
