"""The simple door: prompts in, results out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from blockdiff.checkpoint import load
from blockdiff.checkpoint.adapters import places_of
from blockdiff.checkpoint.files import GENERATION, VOCABULARY_FILES, holding
from blockdiff.checkpoint.generation import Generation
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.errors import RequestError
from blockdiff.models.pages import PAGE_TOKENS, Pages
from blockdiff.sampling.choices import Choices
from blockdiff.sampling.engine import Engine
from blockdiff.sampling.fixed_step import FixedStep
from blockdiff.sampling.request import Prompt, Request, Result, as_request
from blockdiff.sampling.sequence import Sequence, sequences_of
from blockdiff.sampling.settings import settings_of
from blockdiff.sampling.strategies import as_strategy
from blockdiff.sampling.strategy import Strategy
from blockdiff.sampling.trace import CommittedCanvas, Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.models.family import BlockDiffusionModel
    from blockdiff.parallel.mesh import Mesh

OnCanvas = Callable[[CommittedCanvas], object]
OnStep = Callable[[Step], object]


class Sampler:
    """Answers prompts with a model; what may be left out is said at `settings_of`.

    Prompts that begin alike share their beginning within a call; with `pages` (of this model, while its weights stay as
    they are) between calls, too, and then only one thread may call. Where steps are captured in CUDA graphs, the memory
    that they read and write is kept for the next call (`release` gives it back); weights may have changed in place or
    have moved by then. Under autocast nothing is kept: steps read the weights as torch has cast them, which are gone
    when autocast ends.
    """

    _kept: tuple[FixedStep, int] | None = None  # what has captured steps, and how many tokens its pages were asked for

    def __init__(
        self,
        model: BlockDiffusionModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        generation: Generation | None = None,
        choices: Choices | None = None,
        strategy: Strategy | str | None = None,
        pages: Pages | None = None,
    ):
        self.model, self.pages = model, pages
        self.settings = settings_of(model, tokenizer, generation, choices, strategy)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """What turns words into tokens and back."""
        return self.settings.tokenizer

    @property
    def generation(self) -> Generation:
        """The settings, with the special tokens that are in force."""
        return self.settings.generation

    @property
    def choices(self) -> Choices:
        """What the model was trained for."""
        return self.settings.diffusion

    @property
    def strategy(self) -> Strategy:
        """How canvases are denoised."""
        return self.settings.strategy

    def release(self) -> None:
        """Give back the memory that is kept from call to call."""
        self._kept = None

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | Path,
        dtype: str = "bfloat16",
        device: str = "auto",
        kernels: str = "auto",
        strategy: Strategy | str | None = None,
        adapter: str | Path | None = None,
        mesh: Mesh | None = None,
        quantize: str | None = None,
    ) -> Sampler:
        """A sampler from a checkpoint directory or a Hub id, with its tokenizer and settings; the rest as in `load`.

        adapter: a directory in PEFT's format; a tokenizer and settings beside it go before the model's. What cannot be
        used is refused before the weights are read. mesh: over which ranks the weights are split; each then makes the
        same calls.
        """
        places = places_of(path_or_hub_id, adapter)
        generation = Generation.from_pretrained(holding([GENERATION], places))
        tokenizer = load_tokenizer(holding(VOCABULARY_FILES, places))
        strategy = None if strategy is None else as_strategy(strategy, generation)
        if mesh is not None and mesh.is_split:
            from blockdiff.parallel.shard import load_split

            split = load_split(path_or_hub_id, mesh, dtype, kernels, adapter, quantize)
            return cls(split, tokenizer, generation, strategy=strategy)
        model = load(path_or_hub_id, dtype=dtype, device=device, kernels=kernels, adapter=adapter, quantize=quantize)
        return cls(model, tokenizer, generation, strategy=strategy)

    def generate(
        self,
        prompts: Iterable[Prompt | Result],
        seed: int = 0,
        max_new_tokens: int | None = None,
        max_steps: int | None = None,
        batch_size: int = 32,
        on_canvas: OnCanvas | None = None,
        on_step: OnStep | None = None,
        exact: bool = False,
        graphs: bool | None = None,
    ) -> list[Result]:
        """Answer prompts: raw texts, message lists or `Request`s; one `Result` each, in the same order.

        `batch_size` rows run together. `max_new_tokens` is rounded up to whole canvases. `on_canvas` is called with
        every committed canvas and `on_step` with every denoising step (which costs a copy to the host each). `exact`
        and `graphs` are those of `Engine`. A prompt that cannot be used gives a result with an `error`; the others are
        answered. A `Result` among the prompts, as `read_prompts` has for a line that is none, is returned as it is.
        """
        settings = (seed, max_new_tokens, max_steps, batch_size, on_canvas, on_step, exact, graphs)
        results = dict(self.stream(prompts, *settings))
        return [results[place] for place in range(len(results))]

    def stream(
        self,
        prompts: Iterable[Prompt | Result],
        seed: int = 0,
        max_new_tokens: int | None = None,
        max_steps: int | None = None,
        batch_size: int = 32,
        on_canvas: OnCanvas | None = None,
        on_step: OnStep | None = None,
        exact: bool = False,
        graphs: bool | None = None,
    ) -> Iterator[tuple[int, Result]]:
        """What `generate` gives, as it comes: the place of a prompt and its result."""
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            given = "one text" if isinstance(prompts, str) else f"{prompts!r:.80}"
            raise RequestError(f"prompts must be a list, got {given}; write [prompt]")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise RequestError(f"batch_size must be an integer of at least 1, got {batch_size!r:.80}")
        settings = self.generation
        if max_new_tokens is not None:
            settings = replace(settings, max_new_tokens=max_new_tokens)
        if max_steps is not None:
            settings = replace(settings, max_steps=max_steps)
        self.settings.canvases(settings.max_new_tokens)  # refuses what no prompt fits before
        asked: list[tuple[int, list[Sequence]]] = []
        for place, prompt in enumerate(prompts):
            if isinstance(prompt, Result):
                yield place, prompt
                continue
            request = _with_defaults(as_request(prompt, place), settings)
            try:
                asked.append((place, sequences_of(request, self.settings, seed, self.model.device)))
            except RequestError as error:
                yield place, Result.failed(request.id, error)
        if asked:
            yield from self._answers(asked, batch_size, on_canvas, on_step, exact, graphs)

    def _answers(
        self,
        asked: list[tuple[int, list[Sequence]]],
        batch_size: int,
        on_canvas: OnCanvas | None,
        on_step: OnStep | None,
        exact: bool,
        graphs: bool | None,
    ) -> Iterator[tuple[int, Result]]:
        """The results of requests, each given as its place and its draws, as they come, after these places."""
        length = self.settings.canvas_length
        longest = max(len(first.prompt_tokens) + first.canvases * length for _, (first, *_) in asked)
        count = sum(len(draws) for _, draws in asked)
        rows = min(2 * batch_size, count) + 1
        needed = rows * -(-longest // PAGE_TOKENS) * PAGE_TOKENS
        is_cast = torch.is_autocast_enabled(self.model.device.type)
        fixed, needed = self._taken(needed, graphs is not False and not exact and not is_cast)
        engine = Engine(
            self.model,
            settings=self.settings,
            max_rows=min(batch_size, count),
            max_waiting=count,
            exact=exact,
            graphs=graphs,
            pages=self.pages or (self._own_pages(needed) if fixed is None else fixed.pages),
            fixed=fixed,
        )
        del fixed  # the engine made a larger one where this was too small, and its memory must not be held beside it
        places: dict[int, int] = {}
        for place, draws in asked:
            try:
                engine.enter(draws, watch=on_step is not None)
                places[id(draws[0])] = place
            except RequestError as error:
                yield place, Result.failed(draws[0].request.id, error)
        try:
            while engine.unfinished:
                engine.step()
                for event in engine.events():
                    if isinstance(event, Step) and on_step is not None:
                        on_step(event)
                    elif isinstance(event, CommittedCanvas) and on_canvas is not None:
                        on_canvas(event)
                for first, result in engine.answered():
                    yield places[id(first)], result
        finally:
            engine.close()  # who stops listening leaves rows whose pages others may need
            if engine.fixed is not None:
                if self.pages is None:
                    engine.pages.forget()
                self._kept = None if is_cast else (engine.fixed, needed)

    def _taken(self, needed: int, captures: bool) -> tuple[FixedStep | None, int]:
        """What was kept, where a call that needs pages of so many tokens can use it, and how many these then are for.

        It is kept no more: the call has its memory, and a call that runs beside this one has memory of its own.
        """
        kept, self._kept = self._kept, None
        if kept is None or not captures or kept[0].is_stale or (self.pages is None and kept[1] < needed):
            return None, needed
        return kept

    def _own_pages(self, needed: int) -> Pages:
        """Pages for so many tokens, or for as many as there is memory for."""
        pages = Pages(self.model)
        return pages if needed > pages.free_tokens() else Pages(self.model, capacity=needed)


def _with_defaults(request: Request, settings: Generation) -> Request:
    """A request with the settings of the call where it brings none of its own."""
    return replace(
        request,
        max_new_tokens=settings.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens,
        max_steps=settings.max_steps if request.max_steps is None else request.max_steps,
    )
