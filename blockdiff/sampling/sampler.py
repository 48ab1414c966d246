"""The simple door: prompts in, results out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from blockdiff.checkpoint import load
from blockdiff.checkpoint.files import find
from blockdiff.checkpoint.generation import Generation
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.errors import RequestError
from blockdiff.sampling.choices import Choices
from blockdiff.sampling.context import Context
from blockdiff.sampling.loop import OnCanvas, OnStep, generate_in_lockstep
from blockdiff.sampling.request import Pending, Prompt, Request, Result, as_request, draws_of
from blockdiff.sampling.scores import best, score
from blockdiff.sampling.strategies import as_strategy
from blockdiff.sampling.strategy import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.models.family import BlockDiffusionModel


class Sampler:
    """Answers prompts with a model; what may be left out is said at `Context`."""

    def __init__(
        self,
        model: BlockDiffusionModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        generation: Generation | None = None,
        choices: Choices | None = None,
        strategy: Strategy | str | None = None,
    ):
        self.context = Context(model, tokenizer, generation, choices, strategy)

    @property
    def model(self) -> BlockDiffusionModel:
        """The model that answers."""
        return self.context.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """What turns words into tokens and back."""
        return self.context.tokenizer

    @property
    def generation(self) -> Generation:
        """The settings, with the special tokens that are in force."""
        return self.context.generation

    @property
    def choices(self) -> Choices:
        """What the model was trained for."""
        return self.context.choices

    @property
    def strategy(self) -> Strategy:
        """How canvases are denoised."""
        return self.context.strategy

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | Path,
        dtype: str = "bfloat16",
        device: str = "auto",
        kernels: str = "auto",
        strategy: Strategy | str | None = None,
    ) -> Sampler:
        """A sampler from a checkpoint directory or a Hub id, with its tokenizer and settings; the rest as in `load`.

        What cannot be used is refused before the weights are read.
        """
        directory = find(path_or_hub_id)
        generation, tokenizer = Generation.from_pretrained(directory), load_tokenizer(directory)
        strategy = as_strategy(strategy, generation)
        model = load(directory, dtype=dtype, device=device, kernels=kernels)
        return cls(model, tokenizer, generation, strategy=strategy)

    def generate(
        self,
        prompts: Sequence[Prompt | Result],
        seed: int = 0,
        max_new_tokens: int | None = None,
        max_steps: int | None = None,
        batch_size: int = 32,
        on_canvas: OnCanvas | None = None,
        on_step: OnStep | None = None,
    ) -> list[Result]:
        """Answer prompts: raw texts, message lists or `Request`s; one `Result` each, in the same order.

        `batch_size` rows run together. `max_new_tokens` is rounded up to whole canvases. `on_canvas` is called with
        every committed canvas and `on_step` with every denoising step (which costs a copy to the host each). A prompt
        that cannot be used gives a result with an `error`; the others are answered. A `Result` among the prompts, as
        `read_prompts` has for a line that is none, is returned as it is.
        """
        settings = self.generation
        if max_new_tokens is not None:
            settings = replace(settings, max_new_tokens=max_new_tokens)
        if max_steps is not None:
            settings = replace(settings, max_steps=max_steps)
        self.context.canvases(settings.max_new_tokens)  # refuses what no prompt fits before
        results: dict[int, Result] = {}
        asked: list[Pending] = []
        scored: set[int] = set()
        for place, prompt in enumerate(prompts):
            if isinstance(prompt, Result):
                results[place] = prompt
                continue
            request = as_request(prompt, place)
            try:
                pending = self.context.pending(_with_defaults(request, settings), place, seed)
                asked += draws_of(pending, request.best_of)
                scored |= {place} if request.scores or request.best_of > 1 else set()
            except RequestError as error:
                results[place] = Result.failed(request.id, error)
        generate_in_lockstep(self.context, asked, batch_size, on_canvas, on_step)
        self._score([each for each in asked if each.place in scored and each.error is None], batch_size)
        answers: dict[int, list[Result]] = {}
        for each in asked:
            answers.setdefault(each.place, []).append(self.context.result(each))
        results |= {place: best(draws) for place, draws in answers.items()}
        return [results[place] for place in range(len(prompts))]

    def _score(self, answered: Sequence[Pending], batch_size: int) -> None:
        """Give each answer its log-probabilities by next-token prediction."""
        if not answered:
            return
        if self.choices.objective.get("ar_loss", "not said") in ("none", None):
            warnings.warn(
                "this model was trained without the next-token loss (objective.ar_loss: none): its scores say nothing",
                stacklevel=2,
            )
        found = score(self.model, [a.prompt_tokens for a in answered], [a.tokens for a in answered], batch_size)
        for each, its in zip(answered, found, strict=True):
            each.logprobs = its.logprobs


def _with_defaults(request: Request, settings: Generation) -> Request:
    """A request with the settings of the call where it brings none of its own."""
    return replace(
        request,
        max_new_tokens=settings.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens,
        max_steps=settings.max_steps if request.max_steps is None else request.max_steps,
    )
