"""The order in which sequences run: which wait, are encoded or are denoised, as memory allows.

Nothing here computes. The engine requests the tokens to encode in a step, and reports finished sequences.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from blockdiff.errors import Full
from blockdiff.images import run_end

if TYPE_CHECKING:
    from blockdiff.models.pages import Pages
    from blockdiff.sampling.sequence import Sequence


MOST_OWNERS = 1000  # the most whose turns are remembered


@dataclass
class Scheduler:
    """The admitted sequences, and a queue of at most `max_waiting` sequences.

    Sequences are admitted in order of arrival, or, if they have owners, by turns of the owners; prompt chunks likewise.

    At most `max_rows` sequences run. Up to as many more are admitted and encoded meanwhile, in groups, so that a
    sequence that ends can be replaced in the same step.

    chunk_tokens: prompts are encoded in chunks that end at multiples of it, responses in chunks of `answer_chunk`;
    round_length: as in the settings; tokens_per_step: the tokens that a step encodes and denoises. Prompts wait if
    canvases and commits leave no room, but every step encodes at least one chunk. preemptions: the number of times that
    a sequence was sent back to the queue; turns: for each owner the number of steps that encoded its prompts, least
    recently served first.
    """

    pages: Pages
    max_waiting: int
    chunk_tokens: int
    answer_chunk: int
    round_length: int
    waiting: deque[Sequence] = field(default_factory=deque)
    admitted: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    max_rows: int = 1
    tokens_per_step: int = 0
    preemptions: int = 0
    turns: dict[str, int] = field(default_factory=dict)

    def limit(self, max_rows: int, tokens_per_step: int | None = None) -> None:
        """Set the most sequences that run and the tokens of a step; ValueError for fewer tokens than a canvas has.

        tokens_per_step: None for twice the canvases of `max_rows` rows.
        """
        self.tokens_per_step = tokens_per_step or max(2 * max_rows * self.round_length, self.answer_chunk)
        if self.tokens_per_step < self.round_length:
            raise ValueError(f"tokens_per_step {tokens_per_step} is less than the {self.round_length} of a canvas")
        self.max_rows = min(max_rows, self.tokens_per_step // self.round_length)

    def add(self, *sequences: Sequence) -> None:
        """Put sequences into the queue, all or none; raises Full if it has no room for them."""
        if len(self.waiting) + len(sequences) > self.max_waiting:
            raise Full(f"{len(self.waiting)} requests wait already, and no more than {self.max_waiting} may; ask later")
        self.waiting.extend(sequences)

    def admit(self) -> None:
        """Admit waiting sequences while memory has room for all their tokens and a canvas.

        A sequence whose owner has none admitted is admitted at once, if need be in place of a sequence of an owner with
        several.
        """
        max_admitted = self.max_rows * (2 if self.running else 1)
        begins_group = 2 * (len(self.admitted) - len(self.running)) < self.max_rows
        has_followed = False
        while self.waiting:
            first = self._next()
            has_none = bool(first.owner) and all(each.owner != first.owner for each in self.admitted)
            has_place = begins_group and len(self.admitted) < max_admitted
            if has_none and not has_place:
                has_place = len(self.admitted) < 2 * self.max_rows or self._free_place()
            if not has_place:
                return
            if not has_followed:
                self.pages.follow_weights()
                has_followed = True
            first.paged, shared = self.pages.open(), first.shared_tokens
            self._reuse(first)
            tokens = first.num_tokens_until_commit(self.round_length)
            while self.admitted and not self.pages.has_room(first.paged, tokens):
                if not (has_none and self._free_place()):
                    self._release(first)
                    first.shared_tokens = shared  # it finds them again
                    return
            self.waiting.remove(first)
            self.admitted.append(first)

    def _free_place(self) -> bool:
        """Preempt one sequence that does not run, of the owner with the most admitted; False if no owner has two."""
        counts, running = Counter(each.owner for each in self.admitted), set(map(id, self.running))
        several = [each for each in reversed(self.admitted) if counts[each.owner] > 1 and id(each) not in running]
        if several:
            self._preempt(max(several, key=lambda each: counts[each.owner]))
        return bool(several)

    def _next(self) -> Sequence:
        """Return the next sequence to admit: the first one whose owner has the fewest admitted."""
        if not self.waiting[0].owner:
            return self.waiting[0]
        counts = Counter(each.owner for each in self.admitted)
        return min(self.waiting, key=lambda each: counts[each.owner])

    def give_way(self) -> None:
        """Preempt sequences between two canvases if owners with fewer running sequences have no free row."""
        running = [each for each in self.running if each.paged is not None]
        if not any(each.owner for each in running):
            return
        rows = Counter(each.owner for each in running)
        without = Counter(each.owner for each in [*self.waiting, *self.admitted]) - rows
        free = self.max_rows - len(running)
        for sequence in running:
            poorer = sum(without[owner] for owner in without if rows[owner] + 1 < rows[sequence.owner])
            if poorer > free and sequence.round.is_between:
                self._preempt(sequence)
                rows[sequence.owner] -= 1
                free += 1

    def most_added(self, run: int) -> int:
        """The most tokens of a sequence that one call encodes, if its longest run of image tokens has `run`."""
        return max(self.chunk_tokens, self.round_length) + run

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue or the admitted ones, and free its pages."""
        if sequence.paged is None:
            self.waiting.remove(sequence)
        else:
            self.admitted.remove(sequence)
            self._release(sequence)

    def preempt_all(self) -> None:
        """Send all admitted sequences back to the queue in their order; each keeps its committed canvases."""
        for sequence in reversed(self.admitted.copy()):
            self._preempt(sequence)
        self.running = []

    def chunks(self, of_running: bool = False) -> list[tuple[Sequence, int]]:
        """Return pairs of a sequence and the number of its tokens to encode in this step.

        Committed canvases come before prompts. of_running: consider only sequences that ran in the step before.
        """
        candidates = [each for each in self.running if each.paged is not None] if of_running else self.admitted
        unencoded = [each for each in candidates if each.round.to_encode(each) > 0]
        if not unencoded:
            return []
        prompting = [each for each in unencoded if each.is_prompting]
        unencoded = [each for each in unencoded if not each.is_prompting] + self._by_turns(prompting)
        room = self.tokens_per_step - len(self.running) * self.round_length
        chosen: list[tuple[Sequence, int]] = []
        pages: set[tuple[int, ...]] = set()  # encoded in this step; each is its tokens and all tokens before them
        for sequence in unencoded:
            if sequence.paged is None:  # it was preempted to make room for a sequence before it
                continue
            if sequence.is_prompting and self._shares_soon(sequence, pages):
                continue
            count = self._chunk(sequence)
            if chosen and sequence.is_prompting and count > room:
                break
            if self._make_room(sequence, count):
                chosen.append((sequence, count))
                room -= count
        for owner in {sequence.owner for sequence, _ in chosen if sequence.owner and sequence.is_prompting}:
            self.turns[owner] = self.turns.pop(owner, 0) + 1  # served last, so moved to the end
            if len(self.turns) > MOST_OWNERS:
                del self.turns[next(iter(self.turns))]
        return [(sequence, count) for sequence, count in chosen if sequence.paged is not None]

    def _by_turns(self, prompting: list[Sequence]) -> list[Sequence]:
        """Sort prompts for encoding: in order of admission, or by turns of their owners.

        An owner's turns alternate between its earliest and its shortest prompt, so that a long prompt does not block
        the others and none waits for ever.
        """
        if not any(each.owner for each in prompting):
            return prompting
        of_owner: dict[str, list[Sequence]] = {}
        for each in prompting:
            of_owner.setdefault(each.owner, []).append(each)
        for owner, sequences in of_owner.items():
            if self.turns.get(owner, 0) % 2:
                sequences.sort(key=lambda each: each.num_uncomputed)
        last = {owner: index for index, owner in enumerate(self.turns)}
        owners = sorted(of_owner, key=lambda owner: last.get(owner, -1))
        ranks = zip_longest(*(of_owner[owner] for owner in owners))
        return [each for rank in ranks for each in rank if each is not None]

    def start_running(self) -> list[Sequence]:
        """Choose the running sequences among those with nothing left to encode, first those that already ran."""
        running = [each for each in self.running if each.paged is not None and not each.round.to_encode(each)]
        if len(running) < self.max_rows:
            still_running = set(map(id, running))
            ready = [each for each in self.admitted if not each.round.to_encode(each) and id(each) not in still_running]
            rows = Counter(each.owner for each in running)
            if any(rows):  # by turns: those whose owners have few rows come first
                ready.sort(key=lambda each: rows[each.owner])
            running += ready[: self.max_rows - len(running)]
        self.running = running
        return running

    def _reuse(self, sequence: Sequence) -> None:
        """Share pages in which other sequences encoded the same tokens, except for tokens that must be scored."""
        assert sequence.paged is not None
        end = (
            sequence.first_scored + len(sequence.logprobs or ()) - 1 if sequence.is_scored else len(sequence.token_ids)
        )
        if sequence.round.head is not None:  # the encode of the last token predicts the next
            end = min(end, len(sequence.token_ids) - 1)
        before = sequence.num_computed
        num_reused = self.pages.reuse(sequence.paged, sequence.identities[:end])
        sequence.shared_tokens += max(0, num_reused - max(before, sequence.num_preempted))

    def _shares_soon(self, sequence: Sequence, pages: set[tuple[int, ...]]) -> bool:
        """True if a sequence needs no chunk now: all of it is encoded, or another sequence encodes its next page.

        pages: the pages that earlier sequences encode in this step; the sequence's next page is added.
        """
        if can_share := sequence.num_computed % self.pages.page_tokens == 0:
            self._reuse(sequence)
        if sequence.num_uncomputed == 0 or (end := self._next_page(sequence)) > sequence.num_prompted:
            return sequence.num_uncomputed == 0
        page = tuple(sequence.identities[:end])
        if can_share and page in pages:
            return True
        pages.add(page)
        return False

    def _next_page(self, sequence: Sequence) -> int:
        """The end of the sequence's next full page that does not cut through a run of image tokens."""
        size = self.pages.page_tokens
        end = (sequence.num_computed // size + 1) * size
        while run_end(sequence.images, end) != end:
            end += size
        return end

    def _chunk(self, sequence: Sequence) -> int:
        """The number of a sequence's tokens that one call encodes: its proposal, or up to the next multiple of a chunk.

        A chunk that would end within a run of image tokens ends with the run.
        """
        start, prompt = sequence.num_computed, sequence.num_prompted
        if start < prompt:
            return run_end(sequence.images, min((start // self.chunk_tokens + 1) * self.chunk_tokens, prompt)) - start
        if sequence.round.proposal is not None:
            return len(sequence.token_ids) - start
        end = prompt + ((start - prompt) // self.answer_chunk + 1) * self.answer_chunk
        return min(end, len(sequence.token_ids)) - start

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Reserve pages for `count` more tokens; if need be, preempt the sequences admitted last, even this one."""
        while sequence.paged is not None:
            if self.pages.reserve(sequence.paged, count):
                return True
            if len(self.admitted) == 1:
                sequence.error = f"there is no memory for its {sequence.num_computed + count} tokens"
                return False
            self._preempt(self.admitted[-1])
        return False

    def _preempt(self, sequence: Sequence) -> None:
        """Send a sequence to the head of the queue. It keeps committed canvases; the others are denoised again."""
        self.preemptions += 1
        sequence.num_preempted = max(sequence.num_preempted, sequence.num_computed)
        self.admitted.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.paged is not None:
            self.pages.release(sequence.paged)
        sequence.paged = sequence.hidden_TD = None
        sequence.round.preempt(sequence)
