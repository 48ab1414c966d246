"""The engine: runs many requests together, each with its own seed, settings and prefix, one denoising step at a time.

A step encodes chunks of prompts and the tokens that rounds proposed or committed, lets the rounds settle the encoded
proposals, and then lets the round of every running sequence propose (`rounds`). `Scheduler` chooses the running
sequences, `Encoding` encodes, and `Pages` holds the prefixes.
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
    """Counts of an engine: waiting sequences, denoised rows, and pages by kind of layer.

    pages: in use; shared: in use by several rows; cached: not in use, but kept because their tokens can be shared.
    """

    waiting: int
    rows: int
    pages: dict[str, int]
    shared: dict[str, int]
    cached: dict[str, int]


class Engine(OneCaller):
    """Answers requests: `submit` them, call `step` until it returns False, and read `events` in between.

    `sampling_settings` documents the defaults of tokenizer, generation, diffusion and strategy; `settings` replaces all
    four. Requests without a seed derive theirs from `seed`.

    max_rows: the most requests that run together; max_waiting: the most requests that wait; tokens_per_step: the most
    tokens that a step encodes and denoises, beyond which prompts wait (None: twice the canvases of `max_rows` rows);
    page_tokens: as in `Pages`; capacity: the most tokens that all rows hold together (None: as many as memory allows
    when the first request arrives); layers with a window get only pages for the windows of `max_rows` rows;
    chunk_tokens: the length of the chunks in which prompts are encoded, rounded up to whole blocks if the model's clean
    tokens see blocks; pages: the store of prefixes (None: the engine makes its own); graphs: whether steps are captured
    in CUDA graphs and replayed if possible (None: on a GPU, if attention reads pages); buckets: the row counts that
    captured steps are padded to (None: `row_counts`).

    Only one thread at a time may call the engine, and none after `close`; any other call raises EngineError and changes
    nothing.
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
        """Make empty buffers for calls over `most_rows` rows, and an empty set of graphs."""
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
        """Add a request and return its id.

        watch: make each of its steps an event, at the cost of a copy to the host. draws: the result of
        `prepare_sequences`, made perhaps in another thread (None: it is called here). Raises RequestError for a request
        that cannot be answered, and Full if `max_waiting` requests already wait.
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
        """Add all draws of a request, as `submit` does, but without a check of its id; `cancel` does not find it.

        events: the list that gets pairs of a sequence and an event (None: `events` returns the events); captures:
        whether steps of these rows may be captured.
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
        """End a request with the tokens it has so far; False if no unanswered request has this id."""
        first = self._sequences.get(id)
        for draw in [] if first is None else [each for each in first.draws if not each.is_done]:
            draw.finish_reason = "cancelled"
            self._leave(draw)
        return first is not None

    @one_caller
    def clear(self) -> None:
        """Drop all unanswered requests without results and free their pages; new requests may be submitted."""
        self.drop([*self._scheduler.waiting, *self._scheduler.admitted])
        self._sequences.clear()
        self._events.clear()

    def close(self) -> None:
        """Drop all unanswered requests without results and free their pages; no other call may follow."""
        if not self.is_closed:
            self.clear()
            self.is_closed = True

    @one_caller
    def drop(self, firsts: abc.Collection[Sequence]) -> None:
        """Drop the requests whose first draws are `firsts`, except answered ones, and free their pages."""
        for first in firsts:
            unfinished = [draw for draw in first.draws if not draw.is_done]
            for draw in unfinished:
                draw.is_done = True
                self._scheduler.leave(draw)
            self._unfinished -= bool(unfinished)
        if not self._unfinished:
            self._scheduler.running = []

    @one_caller
    def limit(self, max_rows: int) -> None:
        """Set the largest number of requests that run together.

        Raising it above its previous maximum restarts the canvases that are being denoised.
        """
        if max_rows > self.most_rows:
            self.most_rows = max_rows
            self._begin_anew()
        self._scheduler.limit(max_rows)

    def _leave_graphs(self, error: BrokenCapture) -> None:
        """Continue without captured steps, in new buffers, because a broken capture may have damaged the old ones."""
        warn_of_no_graphs(error)
        self._capture = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Make new buffers. Canvases under way are denoised again from their first step, with the same draws."""
        self._scheduler.preempt_all()
        denoised = self.denoised_canvases
        self._make_buffers()
        self._proposer.denoised = denoised

    @one_caller
    @torch.no_grad()
    def warm_up(self, say: abc.Callable[[int, int], object] = lambda done, calls: None) -> None:
        """Compile kernels and capture steps of each row count, so that the first requests need not wait for them.

        say: called before every call and at the end with the number of finished calls and of all calls. Raises
        EngineError if requests are unanswered, and BlockdiffError if the device has too little memory for the rows.
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
        """Let at most `rows` rows hold `tokens` tokens in pages; False if memory has no room for all of them.

        tokens: None for as many as memory allows; run: the number of tokens of the longest run of images. Raises
        BlockdiffError if the device has no memory for the calls of `most_rows` rows, or for not even one page in
        addition to them.
        """
        self._has_room = True
        self._proposed([])  # later steps load the pages' new addresses
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
        """Return and clear the events since the last call: watched steps, verifications, canvases and results."""
        events = [event for _, event in self._events]
        self._events.clear()
        return events

    @property
    def capacity(self) -> int:
        """The most tokens that the pages hold. Allocates the pages if that has not been done yet."""
        if not self._has_room:
            self.grow(self._asked, self.most_rows)
        return self.pages.capacity

    @property
    def captures(self) -> bool:
        """True if the engine captures steps in CUDA graphs."""
        return self._capture is not None

    @property
    def unfinished(self) -> int:
        """The number of unanswered requests."""
        return self._unfinished

    @property
    def load(self) -> Load:
        """The current counts of sequences and pages."""
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
        """Advance every admitted sequence by an encode, a proposal or both; False if no request is left."""
        self._scheduler.admit()
        self._graphs.follow(self.pages.weight_addresses)
        self._encode(self._scheduler.chunks())
        while chunks := self._scheduler.chunks(of_running=True):  # verified canvases that end with the head's own token
            self._encode(chunks)
        self._scheduler.give_way()
        self._propose(self._scheduler.start_running())
        return self._unfinished > 0

    def _encode(self, chunks: list[tuple[Sequence, int]]) -> None:
        """Encode chunks of sequences, settle their proposals, and remove the sequences that are finished."""
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
        """Verify the encoded tokens of sequences with the next-token head; their rounds commit the accepted ones."""
        verifications = verify(self.model, self.settings, sequences)
        for sequence, verification in zip(sequences, verifications, strict=True):
            if verification is None:
                number, count = len(sequence.steps) + 1, sequence.round.verifications(sequence) + 1
                sequence.error = f"{NOT_FINITE} (canvas {number}, verification {count})"
                continue
            if sequence.is_watched and verification.draft:
                sequence.events.append((sequence, verification))
            sequence.round.settle(sequence, verification, self.pages, self.settings)

    def _propose(self, running: list[Sequence]) -> None:
        """Let every running sequence propose (a canvas is denoised by one step), and finish the canvases that are done.

        Sequences that are over leave. After a broken capture, canvases under way begin again without graphs.
        """
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
        """Return the canvases that this step finishes. Canvases of another length are denoised in their own batch."""
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
        """Free a sequence's row and pages. If it is the last draw of its request, add the result to the events."""
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
