"""The engine: many requests at once, each with its own seed, settings and prefix, a denoising step at a time.

One step encodes chunks of prompts and whatever rounds have proposed or committed, lets the rounds settle what was
encoded, and lets every running sequence's round propose (`rounds`). `Scheduler` chooses the sequences that run,
`Encoding` encodes, and prefixes are in `Pages`.
"""

from __future__ import annotations

import functools
from collections import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from blockdiff import memory
from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.checkpoint.generation import Generation
from blockdiff.errors import BlockdiffError, EngineError, RequestError
from blockdiff.models.pages import Pages
from blockdiff.sampling.encoding import CapturedEncode, Encoding
from blockdiff.sampling.graphs import BrokenCapture, Graphs, row_counts, step_capture, warn_of_no_graphs
from blockdiff.sampling.one_caller import OneCaller, one_caller
from blockdiff.sampling.prepare import prepare_sequences, sampling_settings
from blockdiff.sampling.request import Request, Result, require_seed
from blockdiff.sampling.rounds import Proposer, proposer_for, round_of
from blockdiff.sampling.rounds.canvases import RunningCanvas
from blockdiff.sampling.scheduler import Scheduler
from blockdiff.sampling.scores import best
from blockdiff.sampling.sequence import NOT_FINITE, Sequence
from blockdiff.sampling.settings import SamplingSettings
from blockdiff.sampling.strategy import Strategy
from blockdiff.sampling.trace import CommittedCanvas, Step, Verification
from blockdiff.sampling.verification import verify
from blockdiff.sampling.warm_up import WarmUp

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.models.model import BlockDiffusionModel

MAX_WAITING = 10_000
CHUNK_TOKENS = 512
UNCAPTURED = "graphs: no step of this model can be captured; that takes CUDA and Triton"
Event = Step | Verification | CommittedCanvas | Result


@dataclass(frozen=True)
class Load:
    """Counts of an engine: sequences that wait and rows that are denoised, and by kind of layer its pages.

    pages: in use; shared: those of them that several rows refer to; cached: not in use, but their tokens can be shared.
    """

    waiting: int
    rows: int
    pages: dict[str, int]
    shared: dict[str, int]
    cached: dict[str, int]


class Engine(OneCaller):
    """Answers requests as they come. `submit` them, call `step` until it is False, and read `events` in between.

    `sampling_settings` says which of tokenizer, generation, diffusion and strategy may be left out, and what then takes
    their place; `settings` stands for all four. `seed` is what the seeds of requests that bring none follow from.

    max_rows: requests that run at the same time; max_waiting: requests that may wait for it; tokens_per_step: the most
    tokens that a step encodes and denoises, as far as prompts can wait (None: twice the canvases of `max_rows` rows);
    page_tokens: of `Pages`; capacity: tokens that all rows may have together (None: as many as memory has room for when
    the first request comes); layers with a window get pages for what they see of `max_rows` rows; chunk_tokens: prompts
    are encoded in chunks of so many tokens, in whole blocks if the model's clean tokens see such; pages: where prefixes
    lie (None: pages of its own); graphs: whether steps that can be are captured in CUDA graphs and replayed (None: on a
    GPU, where attention reads pages); buckets: row counts that captured steps are padded to (None: `row_counts`).

    One thread at a time may call the engine, and nobody after `close`; else EngineError is raised, and nothing is lost.
    """

    def __init__(
        self,
        model: BlockDiffusionModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        generation: Generation | None = None,
        diffusion: DiffusionSettings | None = None,
        strategy: Strategy | str | None = None,
        *,
        settings: SamplingSettings | None = None,
        seed: int = 0,
        max_rows: int = 32,
        max_waiting: int = MAX_WAITING,
        tokens_per_step: int | None = None,
        page_tokens: int = 128,
        chunk_tokens: int = CHUNK_TOKENS,
        capacity: int | None = None,
        pages: Pages | None = None,
        graphs: bool | None = None,
        buckets: abc.Sequence[int] | None = None,
    ):
        counts = dict(max_rows=max_rows, max_waiting=max_waiting, page_tokens=page_tokens, chunk_tokens=chunk_tokens)
        for name, count in counts.items():
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {count!r}")
        require_seed(seed)
        super().__init__()
        self.model = model
        self.settings = settings or sampling_settings(model, tokenizer, generation, diffusion, strategy)
        self.seed = seed
        self.pages = pages or Pages(model, page_tokens, capacity=0)
        self._scheduler = Scheduler(
            self.pages,
            max_waiting,
            chunk_tokens := self.settings.in_blocks(chunk_tokens),
            round_of(self.settings.strategy).answer_chunk(self.settings, chunk_tokens),
            self.settings.round_length,
        )
        self._scheduler.limit(max_rows, tokens_per_step)
        self.most_rows = max_rows = self._scheduler.max_rows
        self._asked, self._has_room = capacity, pages is not None
        self._buckets, self._capture = buckets, None if graphs is False else step_capture(model.denoiser)
        if graphs and self._capture is None:
            raise ValueError(UNCAPTURED)
        self._encoding = Encoding(self.pages)
        self._make_buffers()
        self._sequences: dict[str | int, Sequence] = {}  # the first draw of each submitted request
        self._unfinished = 0
        self._events: list[tuple[Sequence, Event]] = []  # of requests whose caller brings no list
        self._now = 0  # steps so far

    def _make_buffers(self) -> None:
        """Make the buffers of calls over `most_rows` rows, and graphs that are empty; no row is in them."""
        rows, model, settings = self.most_rows, self.model, self.settings
        graphs = self._graphs = Graphs(self._capture, self._buckets or row_counts(rows))
        graphs.follow(self.pages.weight_addresses)
        self._encoding.captured = None
        if graphs.captures and step_capture(model.encoder) is not None:
            self._encoding.captured = CapturedEncode(self.pages, rows, settings.round_length, graphs)
        self._proposer = proposer_for(model, settings, self.pages, rows, graphs)
        self._narrow: dict[int, Proposer] = {}  # of reads, by the length of their canvases
        self._calls = WarmUp(self.pages, self._proposer, settings, self._scheduler, self._encoding.captured)

    # -- requests in, events out -------------------------------------------------------------------------------

    @one_caller
    def submit(self, request: Request, watch: bool = False, draws: list[Sequence] | None = None) -> str | int:
        """Take a request, and return its id; with `watch` each of its steps is an event, and costs a copy to the host.

        draws: what `prepare_sequences` has made of the request, perhaps in another thread (None: it is made here).
        Raises RequestError for one that cannot be answered, and Full where too many wait already.
        """
        if not isinstance(request, Request):
            kind = type(request).__name__
            raise RequestError(f"submit takes a Request, got a {kind}; Request('first', prompt=...) makes one of text")
        if request.id in self._sequences:
            raise RequestError(f"a request with the id {request.id!r} is being answered; give each its own")
        sequences = draws or prepare_sequences(request, self.settings, self.seed, self.model.device)
        self.enter(sequences, watch)
        self._sequences[request.id] = sequences[0]
        return request.id

    @one_caller
    def enter(
        self,
        draws: list[Sequence],
        watch: bool = False,
        events: list[tuple[Sequence, Event]] | None = None,
        captures: bool = True,
    ) -> None:
        """Take all draws of a request, as `submit` does; ids may come several times, and `cancel` finds none.

        events: gets the events, each after its sequence (None: they are among those of `events`); captures: whether
        steps of these rows may be captured.
        """
        first = draws[0]
        num_tokens = len(first.prompt_tokens) + first.max_tokens
        if num_tokens > self.capacity:
            raise RequestError(
                f"the prompt of {len(first.prompt_tokens)} tokens and a response of {first.max_tokens} need memory for "
                f"{num_tokens} tokens, and there is room for {self.capacity}; shorten it or lower max_new_tokens"
            )
        if not self.pages.holds(num_tokens, self._scheduler.most_added(first.longest_run)):
            raise RequestError(
                f"{first.longest_run} tokens of images that follow one another need more memory than there is for one "
                "call; put text between them, or raise max_rows"
            )
        for draw in draws:
            draw.is_watched, draw.may_capture = watch, captures
            draw.events = self._events if events is None else events
        self._scheduler.add(*draws)
        self._unfinished += 1

    @one_caller
    def cancel(self, id: str | int) -> bool:
        """End a request with the tokens that it has; False where no request of this id is being answered."""
        first = self._sequences.get(id)
        for draw in [] if first is None else [each for each in first.draws if not each.is_done]:
            draw.finish_reason = "cancelled"
            self._leave(draw)
        return first is not None

    @one_caller
    def clear(self) -> None:
        """Drop all unanswered requests, without results, and give back their pages; new requests may be submitted."""
        self.drop([*self._scheduler.waiting, *self._scheduler.admitted])
        self._sequences.clear()
        self._events.clear()

    def close(self) -> None:
        """Drop all unanswered requests, without results, and give back their pages; no other call may follow."""
        if not self.is_closed:
            self.clear()
            self.is_closed = True

    @one_caller
    def drop(self, firsts: abc.Collection[Sequence]) -> None:
        """Drop those of some requests, by their first draws, that are unanswered, and give back their pages."""
        for first in firsts:
            left = [draw for draw in first.draws if not draw.is_done]
            for draw in left:
                draw.is_done = True
                self._scheduler.leave(draw)
            self._unfinished -= bool(left)
        if not self._unfinished:
            self._scheduler.running = []

    @one_caller
    def limit(self, max_rows: int) -> None:
        """Set how many requests run at the same time; where more than ever before may, those that run begin anew."""
        if max_rows > self.most_rows:
            self.most_rows = max_rows
            self._begin_anew()
        self._scheduler.limit(max_rows)

    def _leave_graphs(self, error: BrokenCapture) -> None:
        """Go on without captured steps, and without anything that the broken capture has touched."""
        warn_of_no_graphs(error)
        self._capture = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Go on in new buffers; the canvases that run are drawn again, with the same numbers."""
        self._scheduler.preempt_all()
        denoised = self.denoised_canvases
        self._make_buffers()
        self._proposer.denoised = denoised

    @one_caller
    @torch.no_grad()
    def warm_up(self, say: abc.Callable[[int, int], object] = lambda done, calls: None) -> None:
        """Run what the first requests would wait for: kernels are compiled, and steps of few rows to many captured.

        say: called before every call, and at the end, with the number of those that are done and of all. Raises
        EngineError where requests are unanswered, and BlockdiffError where the device has no memory for the rows.
        """
        if self._unfinished:
            raise EngineError("warm_up: requests are unanswered; call it before the first one")
        work, rows = self._calls, [count for count in self._graphs.buckets or [1] if count <= self.most_rows]
        calls: list[abc.Callable[[], object]] = [lambda: self.capacity, work.encode, work.verify]
        calls += [work.filtered, work.constrained]
        calls += [functools.partial(work.step, count, times=2) for count in rows]
        for done, call in enumerate(calls):
            say(done, len(calls))
            try:
                call()
            except BrokenCapture as error:  # without captured steps no more kernels are needed
                self._leave_graphs(error)
                break
        say(len(calls), len(calls))

    @one_caller
    def grow(self, tokens: int | None, rows: int, run: int = 0) -> bool:
        """Let pages of so many tokens be taken, by at most `rows` rows at once; False where memory has no room for all.

        tokens: None: as many as there is memory for; run: the tokens of the longest run of images. Raises
        BlockdiffError where the device has no memory for the calls of `most_rows` rows, or for no page beside them.
        """
        self._has_room = True
        self._proposed([])  # steps that follow read the pages where they lie then
        if not self._unfinished:  # requests under way are left alone
            self._calls.measure()
        has_room = self.pages.grow(tokens, rows, self._scheduler.most_added(run))
        if not self.pages.capacity and self.pages.kept_free is not None:
            raise BlockdiffError(
                f"{self.model.device}: {memory.size(self.pages.kept_free)} for the calls of {self.most_rows} rows "
                "leave no memory for pages; let fewer run together"
            )
        return has_room

    @one_caller
    def events(self) -> list[Event]:
        """The events since the last call: watched steps and verifications, committed canvases, and results."""
        events = [event for _, event in self._events]
        self._events.clear()
        return events

    @property
    def capacity(self) -> int:
        """The number of tokens that the pages hold at most, which take their memory now where they have none."""
        if not self._has_room:
            self.grow(self._asked, self.most_rows)
        return self.pages.capacity

    @property
    def captures(self) -> bool:
        """True where steps that can be are captured."""
        return self._capture is not None

    @property
    def unfinished(self) -> int:
        """The number of requests that are not answered yet."""
        return self._unfinished

    @property
    def load(self) -> Load:
        """The sequences and pages of the engine now."""
        pages = self.pages.statistics
        waiting, rows = len(self._scheduler.waiting), sum(each.paged is not None for each in self._scheduler.running)
        return Load(waiting, rows, pages.pages, pages.shared, pages.cached)

    @property
    def denoised_canvases(self) -> int:
        """The number of canvases that the model has denoised so far, padding included."""
        return sum(each.denoised for each in (self._proposer, *self._narrow.values()))

    @property
    def encoded_tokens(self) -> int:
        """The number of tokens that the model has encoded so far, padding included."""
        return self._encoding.tokens

    @one_caller
    @torch.no_grad()
    def step(self) -> bool:
        """Let every admitted sequence go on by an encode, a proposal or both; False when nothing is left to do."""
        self._scheduler.admit()
        self._graphs.follow(self.pages.weight_addresses)
        self._encode(self._scheduler.chunks())
        while chunks := self._scheduler.chunks(of_running=True):  # verified canvases that end with the head's own token
            self._encode(chunks)
        self._scheduler.give_way()
        self._propose(self._scheduler.start_running())
        return self._unfinished > 0

    def _encode(self, chunks: list[tuple[Sequence, int]]) -> None:
        """Encode chunks of sequences, and let go of those that have ended when nothing of them is left to encode."""
        try:
            encoded = self._encoding.encode(chunks)
        except BrokenCapture as error:
            self._leave_graphs(error)
            return
        if encoded:
            self._settle(encoded)
        for each in [each for each in self._scheduler.admitted if each.is_over]:
            self._leave(each)

    def _settle(self, sequences: list[Sequence]) -> None:
        """Let the head read what was encoded of sequences, and their rounds commit what it accepts."""
        found = verify(self.model, self.settings, sequences)
        for sequence, verification in zip(sequences, found, strict=True):
            if verification is None:
                number, count = len(sequence.steps) + 1, sequence.round.verifications(sequence) + 1
                sequence.error = f"{NOT_FINITE} (canvas {number}, verification {count})"
                continue
            if sequence.is_watched and verification.draft:
                sequence.events.append((sequence, verification))
            sequence.round.settle(sequence, verification, self.pages, self.settings)

    def _propose(self, running: list[Sequence]) -> None:
        """Let running sequences propose: canvases are denoised once, and finished where their rounds say how."""
        try:
            finished = self._proposed(running)
        except BrokenCapture as error:
            self._leave_graphs(error)
            return
        self._now += 1
        for canvas in finished:
            canvas.round.finish(canvas, self.pages, self.settings)
            if canvas.sequence.is_over:
                self._leave(canvas.sequence)

    def _proposed(self, running: list[Sequence]) -> list[RunningCanvas]:
        """The canvases that are finished with this step; those of other lengths are denoised by themselves."""
        length, by_length = self.settings.canvas_length, dict[int, list[Sequence]]()
        for sequence in running:
            by_length.setdefault(sequence.canvas_length, []).append(sequence)
        finished = self._proposer.propose(by_length.pop(length, []), self._now)
        for narrow in by_length.keys() - self._narrow.keys():
            settings = self.settings.narrowed(narrow)
            self._narrow[narrow] = proposer_for(self.model, settings, self.pages, self.most_rows, Graphs(None))
        for narrow, proposer in self._narrow.items():
            finished = [*finished, *proposer.propose(by_length.get(narrow, []), self._now)]
        return finished

    def _leave(self, sequence: Sequence) -> None:
        """Give a sequence's place and pages back; the last draw of a request to leave makes its result an event."""
        sequence.is_done = True
        self._scheduler.leave(sequence)
        draws = sequence.draws
        if not all(draw.is_done for draw in draws):
            return
        result = best([draw.result(self.settings) for draw in draws])
        if self._sequences.get(sequence.request.id) is draws[0]:
            del self._sequences[sequence.request.id]
        self._unfinished -= 1
        sequence.events.append((draws[0], result))
