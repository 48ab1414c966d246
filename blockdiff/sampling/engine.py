"""The engine: many requests at once, each with its own seed, settings and prefix, a denoising step at a time.

One step encodes what waits to be encoded (committed canvases, pieces of prompts) and denoises every live canvas once.
Who runs is the scheduler's business, the tensors of live canvases are `Live`'s, and the prefixes lie in pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from blockdiff.checkpoint.generation import Generation
from blockdiff.errors import RequestError
from blockdiff.models.pages import Pages
from blockdiff.sampling.choices import Choices
from blockdiff.sampling.context import NOT_FINITE, Context
from blockdiff.sampling.control import CanvasControl
from blockdiff.sampling.encoding import Encoding
from blockdiff.sampling.fixed_step import FixedStep
from blockdiff.sampling.graphs import Graphs, capture_of
from blockdiff.sampling.live import Finished, Live
from blockdiff.sampling.request import Pending, Request, Result, draws_of
from blockdiff.sampling.scheduler import Row, Scheduler, Slot
from blockdiff.sampling.scores import best
from blockdiff.sampling.strategies import is_guided
from blockdiff.sampling.strategy import Strategy
from blockdiff.sampling.trace import CommittedCanvas, Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.models.family import BlockDiffusionModel

MAX_WAITING = 10_000
CHUNK_TOKENS = 512
Event = Step | CommittedCanvas | Result


class Engine:
    """Answers requests as they come. `submit` them, call `step` until it is False, and read `events` in between.

    What may be left out of model, tokenizer, generation, choices and strategy is said at `Context`; `context` is all of
    them together. `seed` is what the seeds of requests that bring none follow from.

    max_rows: requests that run at the same time; max_waiting: those that may wait for it; tokens_per_step: what a step
    encodes and denoises at most, as far as prompts can wait (None: twice the canvases of `max_rows` rows); page_tokens,
    capacity: of `Pages`; chunk_tokens: the pieces in which prompts are encoded; canvases: how many of a response are
    denoised side by side; exact: a request's tokens are the same to the bit whatever else runs, on a CPU, because each
    runs in calls of its own; buckets: row counts that calls are padded to (None: none on a CPU); graphs: whether steps
    are captured in CUDA graphs and replayed where they can be (None: on a GPU, where attention reads pages); fixed: the
    `fixed` of an engine of the same context and pages that is closed, to go on with what that has captured.
    """

    def __init__(
        self,
        model: BlockDiffusionModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        generation: Generation | None = None,
        choices: Choices | None = None,
        strategy: Strategy | str | None = None,
        *,
        context: Context | None = None,
        seed: int = 0,
        max_rows: int = 32,
        max_waiting: int = MAX_WAITING,
        tokens_per_step: int | None = None,
        page_tokens: int = 128,
        chunk_tokens: int = CHUNK_TOKENS,
        capacity: int | None = None,
        canvases: int = 1,
        exact: bool = False,
        buckets: Sequence[int] | None = None,
        pages: Pages | None = None,
        graphs: bool | None = None,
        fixed: FixedStep | None = None,
    ):
        counts = dict(max_rows=max_rows, max_waiting=max_waiting, page_tokens=page_tokens, chunk_tokens=chunk_tokens)
        for name, count in {**counts, "canvases": canvases}.items():
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {count!r}")
        self.context = context or Context(model, tokenizer, generation, choices, strategy)
        self.seed, self.canvases, self.exact = seed, canvases, exact
        self.pages = pages or Pages(model, page_tokens, capacity)
        self.capacity = self.pages.free_tokens()
        if canvases > 1 and self.context.is_next_token:
            raise ValueError("canvases: next tokens are drawn one after the other, so there is one at a time; give 1")
        row_tokens = canvases * self.context.canvas_length
        least = chunk_tokens if self.context.is_next_token else 0
        tokens_per_step = tokens_per_step or max(2 * max_rows * row_tokens, least)
        if tokens_per_step < row_tokens:
            raise ValueError(f"tokens_per_step {tokens_per_step} is less than the {row_tokens} of one row's canvases")
        max_rows = min(max_rows, tokens_per_step // row_tokens)
        self._scheduler = Scheduler(
            self.pages,
            max_rows,
            max_waiting,
            chunk_tokens,
            tokens_per_step,
            self.context.canvas_length,
            canvases,
            exact,
            self.context.is_next_token,
        )
        if buckets is None and model.device.type != "cpu":
            buckets = [*range(1, 4), *range(4, 32, 4), *range(32, max_rows + 16, 16)]
        is_alone = exact or self.context.is_next_token
        capture = None if graphs is False or is_alone else capture_of(model)
        of_steps = None if capture is None or not self.pages.reads_tables else Graphs(capture)
        if graphs and of_steps is None:
            raise ValueError("graphs: no step of this model can be captured; that takes canvases, CUDA and Triton")
        self._encoding = Encoding(self.context, self.pages, exact)
        self._live = Live(self.context, self.pages, canvases, 1 if exact else max_rows, buckets, of_steps, fixed)
        self._rows: dict[str | int, Row] = {}  # the first draw of each submitted request
        self._unfinished = 0
        self._events: list[Event] = []
        self._answered: list[Row] = []
        self._now = 0  # steps so far
        self._has_changed = False  # a canvas has been finished since the last step

    # -- the door ----------------------------------------------------------------------------------------------

    def submit(self, request: Request, watch: bool = False) -> str | int:
        """Take a request, and return its id; with `watch` its steps are told, which costs a copy to the host each.

        Raises RequestError for one that cannot be answered, and Full where too many wait already.
        """
        if not isinstance(request, Request):
            kind = type(request).__name__
            raise RequestError(f"submit takes a Request, got a {kind}; Request('first', prompt=...) makes one of text")
        if request.id in self._rows:
            raise RequestError(f"a request with the id {request.id!r} is being answered; give each its own")
        self._rows[request.id] = self.enter(self.context.pending(request, 0, self.seed), request.best_of, watch)
        return request.id

    def enter(self, asked: Pending, best_of: int = 1, watch: bool = False) -> Row:
        """Take a request that has its tokens already; as `submit`, but that ids may come several times."""
        length = self.context.canvas_length
        strategy = asked.strategy or self.context.strategy
        guided = is_guided(strategy, asked.max_steps)
        needed = len(asked.prompt_tokens) + (1 + guided) * asked.canvases * length
        if needed > self.capacity:
            raise RequestError(
                f"the prompt of {len(asked.prompt_tokens)} tokens and its {asked.canvases} canvases need {needed} "
                f"tokens of memory, and there are {self.capacity}; shorten it or lower max_new_tokens"
            )
        rows = [Row(draw, strategy, watch, list(draw.prompt_tokens)) for draw in draws_of(asked, best_of)]
        for row in rows:
            row.draws, row.is_guided = rows, guided
        self._scheduler.add(*rows)
        self._unfinished += 1
        return rows[0]

    def cancel(self, id: str | int) -> bool:
        """End a request with what it has; False where none of this id is being answered."""
        row = self._rows.get(id)
        for draw in [] if row is None else [each for each in row.draws if not each.is_done]:
            draw.asked.finish_reason = "cancelled"
            self._leave(draw)
        return row is not None

    def close(self) -> None:
        """Give up what is not answered, without results, and give its pages back to those who share them."""
        self._scheduler.close()
        self._live.close()
        self._rows.clear()
        self._unfinished = 0
        self._has_changed = True

    def events(self) -> list[Event]:
        """What happened since the last call: steps that are watched, committed canvases, and results."""
        events, self._events = self._events, []
        return events

    def answered(self) -> list[Row]:
        """The rows that `enter` gave and that have a result since the last call, in the order of their ends."""
        answered, self._answered = self._answered, []
        return answered

    @property
    def fixed(self) -> FixedStep | None:
        """What has captured steps; None where none can be."""
        return self._live.fixed

    @property
    def unfinished(self) -> int:
        """How many requests are not answered yet."""
        return self._unfinished

    @property
    def forwards(self) -> int:
        """How many canvases the model has denoised so far, padding included."""
        return self._live.forwards

    @property
    def encoded_tokens(self) -> int:
        """How many tokens the model has encoded so far, padding included."""
        return self._encoding.tokens

    @torch.no_grad()
    def step(self) -> bool:
        """Encode what waits for it and denoise every live canvas once; False when nothing is left to do."""
        self._scheduler.seat()
        self._encode(self._scheduler.pieces())
        while pieces := self._scheduler.pieces(of_live=True):  # of rows that committed several canvases at once
            self._encode(pieces)
        self._denoise()
        return self._unfinished > 0

    def _encode(self, pieces: Sequence[tuple[Row, int]]) -> None:
        """Encode pieces of rows, and let those leave that waited for nothing else."""
        self._encoding.encode(pieces)
        for row in [row for row in self._scheduler.seated if row.asked.error or row.asked.finish_reason]:
            if row.asked.error or not row.missing:
                self._leave(row)

    # -- denoising ---------------------------------------------------------------------------------------------

    def _denoise(self) -> None:
        """One denoising step of as many rows that have everything encoded as may be live."""
        has_changed = self._scheduler.enliven()
        for row in self._scheduler.live:
            while len(row.slots) < self.canvases:  # the next canvases begin, as many as there are places for
                row.slots.append(self._begun(row))
                has_changed = True
        if has_changed or self._has_changed:
            self._live.arrange(self._scheduler.live)
            self._has_changed = False
        if not self._live.rows:
            return
        finished, told = self._live.step(self._now)
        self._now += 1
        self._events += told
        for each in finished:
            self._finish(each)

    def _begun(self, row: Row) -> Slot:
        """The next canvas of a row; none where it has no more, or where that needs to know what is committed."""
        asked, number = row.asked, len(row.asked.steps) + len(row.slots)
        if number >= asked.canvases or (row.slots and asked.control is not None):
            return Slot(row, None, self._now)
        control = None if asked.control is None else asked.control.begin(number, asked.tokens, asked.seed)
        return Slot(row, number, self._now - (0 if control is None else control.first_step), control)

    def _finish(self, finished: Finished) -> None:
        """Take note of a finished canvas, and commit it once those before it are committed."""
        slot, row = finished.slot, finished.slot.row
        if slot not in row.slots:  # an earlier canvas of this very step has ended the row
            return
        self._has_changed = True
        if not finished.is_finite:
            row.asked.error = f"{NOT_FINITE} (canvas {(slot.number or 0) + 1}, step {slot.first_step + slot.steps})"
            self._leave(row)
            return
        V = self.context.model.vocab_size
        if outside := [token for token in finished.tokens if not 0 <= token < V]:
            given = f"decide() gave token {outside[0]} in final_BL, which is none of the model's {V}"
            row.asked.error = f"strategy {type(row.strategy).__name__}: {given}; change it (docs/extending.md)"
            self._leave(row)
            return
        slot.final = finished.tokens
        if row.slots[0] is not slot:  # what comes after it sees what it will be
            final_L = torch.tensor(slot.final, device=self.context.model.device)
            slot.control = CanvasControl(slot.number or 0, row.asked.seed, pinned_L=final_L)
        while row.slots and row.slots[0].final is not None and not row.is_done and row.asked.finish_reason is None:
            self._commit(row, row.slots.pop(0))

    def _commit(self, row: Row, slot: Slot) -> None:
        """Add a finished canvas to the response, and to what is known where that is still needed."""
        asked, tokens = row.asked, slot.final or []
        kept = asked.commit(tokens, slot.steps, self.context.generation.eos_ids)
        kept -= self.context.stop(asked, kept)
        if asked.error is not None:
            self._leave(row)
            return
        said = (self.context.text(asked.tokens), slot.steps, asked.finish_reason, asked.max_steps, asked.demanded)
        self._events.append(CommittedCanvas(asked.id, slot.number or 0, asked.prompt, tokens, kept, *said))
        if asked.finish_reason is None:
            row.known += tokens
            row.slots = [each for each in row.slots if each.number is not None]  # a place without a canvas is free now
            return
        row.slots.clear()
        if asked.is_scored:  # the last token predicts nothing
            row.known += tokens[: kept - 1]
            if kept == 1 and row.before_D is not None:
                self._encoding.score(row, len(row.known), row.before_D[None, :][:0])
        if not row.missing:
            self._leave(row)

    def _leave(self, row: Row) -> None:
        """Give a row's seat and pages back, and tell the result when it was the last draw of its request."""
        row.is_done = self._has_changed = True
        self._scheduler.leave(row)
        if not all(draw.is_done for draw in row.draws):
            return
        asked = row.asked
        if (found := self._rows.get(asked.request_id)) is not None and found.draws is row.draws:
            del self._rows[asked.request_id]
        else:
            self._answered.append(row.draws[0])
        self._unfinished -= 1
        row.draws[0].result = best([self.context.result(draw.asked) for draw in row.draws])
        self._events.append(row.draws[0].result)
