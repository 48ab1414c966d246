"""The simple interface: prompts in, results out."""

from __future__ import annotations

import sys
import threading
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from blockdiff.checkpoint import load, read_config
from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.checkpoint.generation import Generation
from blockdiff.checkpoint.opening import model_files, with_adapter
from blockdiff.decisions.form import ONE_BY_ONE, Asking
from blockdiff.decisions.question import Question
from blockdiff.errors import EngineError, RequestError
from blockdiff.models.pages import PAGE_TOKENS, Pages
from blockdiff.sampling.calibration import temperatures
from blockdiff.sampling.decide import Answer, RunningDecision, uncalibrated
from blockdiff.sampling.engine import UNCAPTURED, Engine, Event
from blockdiff.sampling.prepare import A_DRAFTER, prepare_sequences, sampling_settings
from blockdiff.sampling.read import Choices, Read, RunningRead
from blockdiff.sampling.request import Prompt, Request, Result, as_request, require_seed
from blockdiff.sampling.sequence import Sequence
from blockdiff.sampling.strategies import as_strategy
from blockdiff.sampling.strategy import Strategy
from blockdiff.sampling.trace import CommittedCanvas, Step, Verification

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.models.model import BlockDiffusionModel
    from blockdiff.parallel.mesh import Mesh

TOGETHER = 1024  # the least number of prompts of a stream that are tokenised, and whose images are held, at once
_T = TypeVar("_T")
OnCanvas = Callable[[CommittedCanvas], object]
OnStep = Callable[[Any], object]


class Sampler:
    """Answers prompts with a model; `sampling_settings` documents the arguments that may be left out.

    A sampler makes one engine at its first call and keeps it, with its captured steps and pages, for the next ones
    (`release` frees their memory). Weights may change in place between calls; if they have moved to another device or
    dtype, the engine is made again. Calls may overlap, in turns or from several threads. Their requests share the
    engine's rows; requests of earlier calls run first, and a step by one caller advances all. Under autocast every call
    has an engine of its own, because its steps read weights that torch has cast, which are freed when autocast ends.

    Prompts with the same beginning share its pages, within a call and from call to call while the weights do not
    change. pages: the store of prefixes (None: the sampler makes its own, which grows to hold the largest call so far).
    """

    def __init__(
        self,
        model: BlockDiffusionModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        generation: Generation | None = None,
        diffusion: DiffusionSettings | None = None,
        strategy: Strategy | str | None = None,
        pages: Pages | None = None,
    ):
        self.model, self.pages = model, pages
        self._turn = threading.RLock()  # its holder may call the engine
        self._engine: Engine | None = None
        self._state: object = None  # of the sampler and the model for which the engine was made
        self._room = 0, 0, 0  # the most that calls so far requested of pages, as in `Engine.grow`
        self._rows: dict[int, int] = {}  # of the calls under way
        self.settings = sampling_settings(model, tokenizer, generation, diffusion, strategy)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer."""
        return self.settings.tokenizer

    @property
    def generation(self) -> Generation:
        """The generation settings, with the special tokens that are in force."""
        return self.settings.generation

    @property
    def diffusion(self) -> DiffusionSettings:
        """The settings of diffusion that the model was trained for."""
        return self.settings.diffusion

    @property
    def strategy(self) -> Strategy:
        """The strategy by which canvases are denoised."""
        return self.settings.strategy

    def release(self) -> None:
        """Free the memory that the engine keeps between calls; running calls keep theirs to their end."""
        with self._turn:
            self._engine = None

    def forget(self) -> None:
        """Make the next calls encode prefixes again, as after writes to weights that torch does not track."""
        with self._turn:
            pages = self.pages if self._engine is None else self._engine.pages
            if pages is not None:
                pages.forget()

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | Path,
        dtype: str = "auto",
        device: str = "auto",
        kernels: str = "auto",
        strategy: Strategy | str | None = None,
        adapter: str | Path | None = None,
        mesh: Mesh | None = None,
        quantize: str | None = None,
        draft_model: str | Path | None = None,
        generation: Generation | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        over: BlockDiffusionModel | None = None,
    ) -> Sampler:
        """Load a sampler from a checkpoint directory or a Hub id, with its tokenizer and settings; see also `load`.

        adapter: a directory in PEFT's format; a tokenizer and settings in it take precedence over the model's. Invalid
        arguments are refused before the weights are read. mesh: the ranks over which the weights are split; each rank
        must make the same calls. generation, tokenizer: replace those of the checkpoint. over: the checkpoint's model,
        if it is in memory already (not with `mesh`). It is used in place of loading; an adapter is put over its
        weights, which both then share.
        """
        files = model_files(path_or_hub_id, adapter, with_weights=False)
        config = read_config(files.weights)
        if config.is_drafter:
            raise RequestError(f"{path_or_hub_id} {A_DRAFTER}")
        generation, tokenizer = generation or files.generation(), tokenizer or files.tokenizer()
        strategy = None if strategy is None else as_strategy(strategy, generation)
        if mesh is not None and mesh.is_split:
            from blockdiff.parallel.shard import load_split

            if draft_model is not None:
                raise RequestError("a draft model goes without tensor parallelism; leave one of the two out")
            split = load_split(path_or_hub_id, mesh, dtype, kernels, adapter, quantize)
            return cls(split, tokenizer, generation, strategy=strategy)
        if over is not None:
            model = over if adapter is None else with_adapter(over, adapter)
            return cls(model, tokenizer, generation, strategy=strategy)
        model = load(
            path_or_hub_id, dtype, device, kernels, adapter=adapter, quantize=quantize, draft_model=draft_model
        )
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
        graphs: bool | None = None,
    ) -> list[Result]:
        """Answer prompts: raw texts, message lists or `Request`s; one `Result` each, in the same order.

        `batch_size` rows run together. `max_new_tokens` is rounded up to whole canvases. `on_canvas` is called with
        every committed canvas, and `on_step` with every denoising step (each costs a copy to the host) and, for
        verified canvases, with every `Verification`. `graphs` is as in `Engine`. A `Result` among the prompts, as
        `read_prompts` returns for an invalid line, is returned unchanged.

        Raises RequestError for a prompt that cannot be answered, before any is. An answer that fails later has an
        `error`, and the others are still returned.
        """
        entries = self._entries(prompts, seed, max_new_tokens, max_steps, is_strict=True)
        answers = dict(self._answers(entries, batch_size, on_canvas, on_step, graphs))
        return [answers[index] for index in range(len(answers))]

    def stream(
        self,
        prompts: Iterable[Prompt | Result],
        seed: int = 0,
        max_new_tokens: int | None = None,
        max_steps: int | None = None,
        batch_size: int = 32,
        on_canvas: OnCanvas | None = None,
        on_step: OnStep | None = None,
        graphs: bool | None = None,
    ) -> Iterator[tuple[int, Result]]:
        """Yield the results of `generate` as they are finished: the index of a prompt, and its result.

        A prompt that cannot be answered yields a result with an `error`, and the others are answered. Thousands of
        prompts are prepared in parts, so that not all of their images are in memory.
        """
        prompts = _listed(prompts)
        _require_batch_size(batch_size)
        size = max(TOGETHER, 32 * batch_size)
        for first in range(0, len(prompts), size):
            part = prompts[first : first + size]
            entries = self._entries(part, seed, max_new_tokens, max_steps, is_strict=False, first=first)
            for index, result in self._answers(entries, batch_size, on_canvas, on_step, graphs):
                yield first + index, result

    def _entries(
        self,
        prompts: Iterable[Prompt | Result],
        seed: int,
        max_new_tokens: int | None,
        max_steps: int | None,
        is_strict: bool,
        first: int = 0,
    ) -> list[list[Sequence] | Result]:
        """Return the draws of each prompt, or its failed result if it is invalid; if `is_strict`, RequestError instead.

        first: the index of the first prompt.
        """
        prompts = _listed(prompts)
        require_seed(seed)
        settings = self.generation
        if max_new_tokens is not None:
            settings = replace(settings, max_new_tokens=max_new_tokens)
        if max_steps is not None:
            settings = replace(settings, max_steps=max_steps)
        if any(getattr(prompt, "max_new_tokens", None) is None for prompt in prompts):
            self.settings.max_tokens(settings.max_new_tokens)  # refuses what no prompt fits before
        entries: list[list[Sequence] | Result] = []
        for index, prompt in enumerate(prompts, start=first):
            if isinstance(prompt, Result):
                entries.append(prompt)
                continue
            try:
                request = _with_defaults(as_request(prompt, index), settings)
                entries.append(prepare_sequences(request, self.settings, seed, self.model.device))
            except RequestError as error:
                if is_strict:
                    raise _named(error, index, prompts) from None
                entries.append(Result.failed(prompt.id if isinstance(prompt, Request) else index, error))
        return entries

    def read(
        self,
        prompts: Iterable[Prompt],
        template: str,
        choices: Choices | None = None,
        steps: int = 1,
        draws: int = 4,
        seed: int = 0,
        batch_size: int = 32,
    ) -> list[Read]:
        """Read the distributions of a template's holes, for prompts as in `generate`: one `Read` each, in order.

        `<?answer>` is a hole for one of `choices["answer"]`, texts with the same number of tokens; `<?answer:3>` is a
        free hole of three tokens. Holes are read after `steps` denoising steps and averaged over `draws` draws of the
        noise. Raises RequestError for a read that cannot be done, before anything runs.
        """
        prompts = _listed(prompts)
        require_seed(seed)
        readings = []
        for index, prompt in enumerate(prompts):
            try:
                request = as_request(prompt, index)
                readings.append(
                    RunningRead.prepare(request, template, choices, self.model, self.settings, steps, draws, seed)
                )
            except RequestError as error:
                raise _named(error, index, prompts) from None
        for _, result in self._answers([each.sequences for each in readings], batch_size, None, None, None):
            if result.error is not None:
                raise RequestError(f"prompt {result.id!r}: {result.error}")
        return [reading.answer() for reading in readings]

    def decide(
        self,
        prompts: Iterable[Prompt],
        questions: abc.Sequence[Question],
        asking: Asking = ONE_BY_ONE,
        *,
        seed: int = 0,
        batch_size: int = 32,
        is_calibrated: bool = True,
    ) -> list[list[Answer]]:
        """Answer typed questions about each prompt (text or messages, as in `generate`), in order.

        asking: the form of the questions, the number of steps and draws, and whether questions share canvases;
        is_calibrated: whether temperatures fitted to such questions are applied. Raises RequestError for questions that
        cannot be asked, before anything runs.
        """
        prompts = _listed(prompts)
        require_seed(seed)
        running = []
        for index, prompt in enumerate(prompts):
            try:
                request = as_request(prompt, index)
                running.append(RunningDecision.prepare(request, questions, self.model, self.settings, asking, seed))
            except RequestError as error:
                raise _named(error, index, prompts) from None
        self.run(running, batch_size)
        fitted = temperatures(self.model, self.settings, asking) if is_calibrated else uncalibrated
        return [each.answers(fitted) for each in running]

    def run(self, decisions: Iterable[RunningDecision], batch_size: int = 32) -> None:
        """Run decisions prepared with this sampler's model and settings; each one records its own error."""
        for _ in self._answers([draws for each in decisions for draws in each.sequences], batch_size, None, None, None):
            pass

    def _answers(
        self,
        entries: list[list[Sequence] | Result],
        batch_size: int,
        on_canvas: OnCanvas | None,
        on_step: OnStep | None,
        graphs: bool | None,
    ) -> Iterator[tuple[int, Result]]:
        """Yield the index and result of each entry as it is finished; entries that are results already come first."""
        _require_batch_size(batch_size)
        yield from ((index, entry) for index, entry in enumerate(entries) if isinstance(entry, Result))
        indexed_draws = [(index, entry) for index, entry in enumerate(entries) if not isinstance(entry, Result)]
        if not indexed_draws:
            return
        longest = max(len(first.prompt_tokens) + first.max_tokens for _, (first, *_) in indexed_draws)
        count = sum(len(draws) for _, draws in indexed_draws)
        most_rows = min(2 * batch_size, count)  # that have pages at the same time
        page = self.settings.in_blocks(PAGE_TOKENS)
        tokens = (most_rows + 1) * -(-longest // page) * page
        room = tokens, most_rows, max(first.longest_run for _, (first, *_) in indexed_draws)
        unanswered = {id(draws[0]): (index, draws[0]) for index, draws in indexed_draws}
        events: list[tuple[Sequence, Event]] = []
        refused = list[tuple[int, Result]]()
        with self._turn:
            engine = self._engine_for(min(batch_size, count), room, graphs)
            self._rows[id(events)] = min(batch_size, count)
            for index, draws in indexed_draws:
                try:
                    engine.enter(draws, on_step is not None, events, captures=graphs is not False)
                except RequestError as error:
                    refused.append((index, Result.failed(draws[0].request.id, error)))
                    del unanswered[id(draws[0])]
        try:
            yield from refused
            while unanswered:
                came = self._step(engine, events)
                for _, event in came:
                    if isinstance(event, Step | Verification) and on_step is not None:
                        on_step(event)
                    elif isinstance(event, CommittedCanvas) and on_canvas is not None:
                        on_canvas(event)
                for first, event in came:
                    if isinstance(event, Result):
                        index, _ = unanswered.pop(id(first))
                        yield index, event
        finally:
            with self._turn:
                del self._rows[id(events)]
                if not engine.is_closed:  # a caller that stops early leaves sequences whose pages others may need
                    engine.drop([first for _, first in unanswered.values()])

    @property
    def encoded_tokens(self) -> int:
        """The number of tokens that the engine has encoded so far, padding included."""
        return 0 if self._engine is None else self._engine.encoded_tokens

    def _engine_for(self, rows: int, room: tuple[int, int, int], graphs: bool | None) -> Engine:
        """Return the engine for a call of `rows` rows; room: the arguments of `Engine.grow`."""
        model, engine = self.model, self._engine
        if torch.is_autocast_enabled(model.device.type):
            return self._made_engine(rows, room)
        state = self.settings, self.pages, model.device, model.dtype
        if engine is not None and state != self._state:
            if engine.unfinished:
                raise RequestError("the model or the settings have changed while a call is under way; end that first")
            engine = None
        elif engine is not None and self.pages is None and (rows > engine.most_rows or _exceeds(room, self._room)):
            # pages that were made at once leave too little memory to the calls of more rows
            fits = (engine.pages.grows or rows <= engine.most_rows) and engine.grow(*room)
            if not fits and not engine.unfinished:  # no room in addition to the held pages
                engine = None
        if engine is None:
            self._engine, self._state, self._room = None, state, (0, 0, 0)  # free its memory for the new one
            engine = self._engine = self._made_engine(rows, room)
        tokens, most_rows, run = (max(each) for each in zip(room, self._room, strict=True))
        self._room = tokens, most_rows, run
        if graphs and not engine.captures:
            raise ValueError(UNCAPTURED)
        engine.limit(max(rows, *self._rows.values(), 1))
        return engine

    def _made_engine(self, rows: int, room: tuple[int, int, int]) -> Engine:
        settings, pages = self.settings, self.pages
        engine = Engine(self.model, settings=settings, max_rows=rows, max_waiting=sys.maxsize, capacity=0, pages=pages)
        if pages is None:
            engine.grow(*room)
        return engine

    def _step(self, engine: Engine, events: list[tuple[Sequence, Event]]) -> list[tuple[Sequence, Event]]:
        """Return the events of a call; if there are none yet, first run a step for all calls."""
        with self._turn:
            if not events:
                if engine.is_closed:
                    raise EngineError("a step of another call failed, and the answers of this one with it; ask again")
                try:
                    engine.step()
                except BaseException:  # the step may be half done
                    engine.close()
                    self._engine = None if self._engine is engine else self._engine
                    raise
            came = events.copy()
            events.clear()
        return came


def _exceeds(room: tuple[int, ...], before: tuple[int, ...]) -> bool:
    return any(need > had for need, had in zip(room, before, strict=True))


def _require_batch_size(batch_size: object) -> None:
    if not isinstance(batch_size, int) or batch_size < 1:
        raise RequestError(f"batch_size must be an integer of at least 1, got {batch_size!r:.80}")


def _listed(prompts: Iterable[_T]) -> list[_T]:
    """Return the prompts as a list; RequestError if they are one text or not iterable."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        description = "one text" if isinstance(prompts, str) else f"{prompts!r:.80}"
        raise RequestError(f"prompts must be a list, got {description}; write [prompt]")
    return list(prompts)


def _named(error: RequestError, index: int, prompts: list[_T]) -> RequestError:
    """Return the error of one prompt, with its index if there are several."""
    return RequestError(f"prompts[{index}]: {error}") if len(prompts) > 1 else error


def _with_defaults(request: Request, settings: Generation) -> Request:
    """Fill in the request's missing `max_new_tokens` and `max_steps` from `settings`."""
    return replace(
        request,
        max_new_tokens=settings.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens,
        max_steps=settings.max_steps if request.max_steps is None else request.max_steps,
    )
