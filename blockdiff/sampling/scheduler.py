"""Who runs when: rows that wait, rows whose tokens are being encoded, rows that are denoised, and what memory allows.

Nothing here computes. The engine asks which tokens to encode in a step and tells what became of the rows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from blockdiff.errors import Full
from blockdiff.sampling.request import Pending, Result

if TYPE_CHECKING:
    from blockdiff.models.pages import PagedRow, Pages
    from blockdiff.sampling.control import CanvasControl
    from blockdiff.sampling.strategy import Strategy


@dataclass(eq=False)
class Slot:
    """A place for one canvas of a row in the batch that is denoised.

    number: which canvas of the response (None: the row has no canvas for this place); entered: the engine's step that
    was step 0 of the canvas, or would have been; control: what holds it; index: where its numbers are in the batch
    (None: not there yet); final: its tokens once it is finished, after so many steps.
    """

    row: Row
    number: int | None
    entered: int
    control: CanvasControl | None = None
    index: int | None = None
    has_begun: bool = False
    final: list[int] | None = None
    steps: int = 0

    @property
    def first_step(self) -> int:
        """The step at which the canvas enters the schedule."""
        return 0 if self.control is None else self.control.first_step


@dataclass(eq=False)
class Row:
    """A request on its way through the engine.

    known: the prompt and the committed canvases, all of which the next canvas must see; paged: their keys and values as
    far as they are encoded (None while the row has no seat); slots: its canvases that are live, in order. is_watched:
    whether its steps are told; told: the last step that was, by canvas. before_D: the hidden state of the last encoded
    token, of a row that is scored. is_guided, other: whether its canvases are seen without the prompt, too, and the
    prefix for that, bos and the committed canvases. draws: all answers to its request, of which this is one; result: of
    the request, with the first of them.
    """

    asked: Pending
    strategy: Strategy
    is_watched: bool = False
    known: list[int] = field(default_factory=list)
    paged: PagedRow | None = None
    slots: list[Slot] = field(default_factory=list)
    told: dict[int, int] = field(default_factory=dict)
    before_D: Tensor | None = None
    is_guided: bool = False
    other: PagedRow | None = None
    draws: list[Row] = field(default_factory=list)
    is_done: bool = False
    result: Result | None = None

    @property
    def missing(self) -> int:
        """How many known tokens are still to be encoded."""
        return len(self.known) - self.length

    @property
    def length(self) -> int:
        """How many known tokens are encoded."""
        return 0 if self.paged is None else self.paged.length

    @property
    def is_prompting(self) -> bool:
        """Whether it is the prompt that is being encoded."""
        return self.length < len(self.asked.prompt_tokens)

    def added_without_prompt(self, count: int) -> int:
        """How many tokens the prefix without the prompt gets when `count` more of the row are encoded."""
        if self.other is None or self.length + count < len(self.asked.prompt_tokens):
            return 0
        return count if self.other.length else 1

    def wanted(self, canvas_length: int) -> int:
        """How many tokens of memory the row takes until its next canvas is committed, with its other prefix."""
        other = 1 + len(self.known) - len(self.asked.prompt_tokens) + canvas_length if self.is_guided else 0
        return self.missing + canvas_length + other


@dataclass
class Scheduler:
    """Seats for rows, and a queue of at most `max_waiting` before them, in the order of arrival.

    At most `max_rows` rows are live. Meanwhile up to as many are encoded ahead, in groups, so that a row that ends is
    followed at once. chunk_tokens: a prompt is encoded in pieces that end at multiples of it; tokens_per_step: how many
    tokens a step encodes and denoises: prompts wait where canvases and commits leave no room, but one piece goes on in
    every step. exact: rows share nothing, for what others encoded may be rounded another way. is_next_token: a canvas
    is the one token that the last encoded one predicts.
    """

    pages: Pages
    max_rows: int
    max_waiting: int
    chunk_tokens: int
    tokens_per_step: int
    canvas_length: int
    canvases: int
    exact: bool = False
    is_next_token: bool = False
    waiting: deque[Row] = field(default_factory=deque)
    seated: list[Row] = field(default_factory=list)
    live: list[Row] = field(default_factory=list)
    preemptions: int = 0

    def add(self, *rows: Row) -> None:
        """Let rows wait for a seat, all or none; raises Full where the queue has no room for them."""
        if len(self.waiting) + len(rows) > self.max_waiting:
            raise Full(f"{len(self.waiting)} requests wait already, and no more than {self.max_waiting} may; ask later")
        self.waiting.extend(rows)

    def seat(self) -> None:
        """Give seats to rows that wait, as long as memory has room for all their tokens and a canvas."""
        seats = self.max_rows * (2 if self.live else 1)
        if 2 * (len(self.seated) - len(self.live)) >= self.max_rows:
            return
        while self.waiting and len(self.seated) < seats:
            row = self.waiting[0]
            row.paged, row.other = self.pages.open(), self.pages.open() if row.is_guided else None
            self._reuse(row, row.paged)
            if self.seated and row.wanted(self.canvas_length) > self.pages.free_tokens():
                self._unseat(row)
                return
            self.seated.append(self.waiting.popleft())

    def leave(self, row: Row) -> None:
        """Take a row's seat or its place in the queue away, and its pages."""
        if row.paged is None:
            self.waiting.remove(row)
        else:
            self.seated.remove(row)
            self._unseat(row)

    def close(self) -> None:
        """Give up all rows, and give their pages back."""
        for row in self.seated:
            self._unseat(row)
        self.seated.clear()
        self.waiting.clear()
        self.live = []

    def pieces(self, of_live: bool = False) -> list[tuple[Row, int]]:
        """The rows of which tokens are encoded in this step, and how many: committed canvases, then prompts.

        of_live: only of the rows that were live in the step before.
        """
        rows = [row for row in self.live if row.paged is not None] if of_live else self.seated
        filling = [row for row in rows if row.missing > 0]
        if not filling:
            return []
        filling.sort(key=lambda row: row.is_prompting)  # stable: within both, who sat down first
        room = self.tokens_per_step - len(self.live) * self.canvases * self.canvas_length
        chosen: list[tuple[Row, int]] = []
        pages: set[tuple[int, ...]] = set()  # that rows encode in this step, each with all before it
        for row in filling:
            if row.paged is None:  # it was preempted for one before it
                continue
            if row.is_prompting and self._shares_soon(row, pages):
                continue
            count = self._piece(row)
            if chosen and row.is_prompting and count > room:
                break
            if self._has_room(row, count):
                chosen.append((row, count))
                room -= count
        return [(row, count) for row, count in chosen if row.paged is not None]

    def enliven(self) -> bool:
        """Let rows that are encoded be live, those first that were before; whether there are others now."""
        live = [row for row in self.live if row.paged is not None and row.missing == 0]
        has_changed = len(live) < len(self.live)
        if len(live) < self.max_rows:
            there = set(map(id, live))
            ready = [row for row in self.seated if row.missing == 0 and id(row) not in there]
            live += ready[: self.max_rows - len(live)]
            has_changed = has_changed or len(live) > len(there)
        self.live = live
        return has_changed

    def _reuse(self, row: Row, paged: PagedRow) -> None:
        """Share what others have encoded of a row's tokens; of a scored row those that must still be scored are not."""
        prompt, scored = len(row.asked.prompt_tokens), len(row.asked.logprobs or ())
        end = prompt + scored - 1 if row.asked.is_scored else len(row.known)
        if self.is_next_token:  # the encode of the last token predicts the next
            end = min(end, len(row.known) - 1)
        if row.is_guided:  # the encode of the prompt's last token is where its other prefix begins
            end = min(end, prompt - 1)
        if not self.exact:
            self.pages.reuse(paged, row.known[:end])

    def _shares_soon(self, row: Row, pages: set[tuple[int, ...]]) -> bool:
        """Whether a row needs no piece now: what comes next in it is there already, or is encoded by a row before it.

        pages: those that are encoded in this step, to which the row's own next one is added.
        """
        end = row.length + self.pages.page_tokens
        if self.exact or row.is_guided or row.length % self.pages.page_tokens or end > len(row.asked.prompt_tokens):
            return False
        assert row.paged is not None
        self._reuse(row, row.paged)
        end = row.length + self.pages.page_tokens
        if row.missing == 0 or end > len(row.asked.prompt_tokens):
            return row.missing == 0
        page = tuple(row.known[:end])
        if page in pages:
            return True
        pages.add(page)
        return False

    def _piece(self, row: Row) -> int:
        """How many tokens of a row go into one call: up to the next multiple of a chunk, or one canvas.

        They depend on nothing but the row, so that a row that is encoded again is encoded by the same calls.
        """
        at, prompt = row.length, len(row.asked.prompt_tokens)
        if at < prompt:
            return min((at // self.chunk_tokens + 1) * self.chunk_tokens, prompt) - at
        # next tokens that are encoded again, after a preemption, need not be one by one
        size = self.chunk_tokens if self.is_next_token and not self.exact else self.canvas_length
        end = prompt + ((at - prompt) // size + 1) * size
        return min(end, len(row.known)) - at

    def _has_room(self, row: Row, count: int) -> bool:
        """Make room for more tokens of a row, if need be by preempting those that sat down after it, or itself."""
        while row.paged is not None and not all(
            self.pages.reserve(paged, added)
            for paged, added in ((row.paged, count), (row.other, row.added_without_prompt(count)))
            if paged is not None
        ):
            if len(self.seated) == 1:
                row.asked.error = f"there is no memory for its {row.length + count} tokens"
                return False
            self._preempt(self.seated[-1])
        return row.paged is not None

    def _preempt(self, row: Row) -> None:
        """Send a row back to the head of the queue; it keeps its committed canvases, and draws the others again."""
        self.preemptions += 1
        self.seated.remove(row)
        self._unseat(row)
        self.waiting.appendleft(row)

    def _unseat(self, row: Row) -> None:
        for each in (row.paged, row.other):
            if each is not None:
                self.pages.release(each)
        row.paged = row.other = None
        row.slots.clear()
