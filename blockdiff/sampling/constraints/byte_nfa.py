"""Nondeterministic automata over bytes, which are built piece by piece and then made deterministic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from blockdiff.sampling.constraints.byte_automaton import MOST_STATES, ByteAutomaton
from blockdiff.sampling.constraints.compile_limit import seconds_left, too_large

Ranges = tuple[tuple[int, int], ...]  # of code points or bytes, both ends included
MOST_EDGES = 1 << 19
EVERY: Ranges = ((0, 0x10FFFF),)
_PLANES = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF))  # without surrogates


class ByteNfa:
    """A growing automaton: each method appends a piece after state `start` and returns the state at the piece's end.

    edges: the (lowest byte, highest byte, next state) triples of each state; free: the states that each state reaches
    without a byte. State 0 is the start. Raises RequestError if there are more than `most` states.
    """

    def __init__(self, most: int = MOST_STATES):
        self.edges: list[list[tuple[int, int, int]]] = [[]]
        self.free: list[list[int]] = [[]]
        self.most = most
        self.added = 0  # edges of characters and languages

    def state(self) -> int:
        """Add a state and return it."""
        if len(self.edges) >= self.most:
            raise too_large(len(self.edges))
        if len(self.edges) % 1024 == 0:
            seconds_left()
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1

    def _count(self, edges: int) -> None:
        seconds_left()
        self.added += edges
        if self.added > MOST_EDGES:
            raise too_large(len(self.edges))

    def join(self, start: int, end: int) -> int:
        """Add a transition without a byte from `start` to `end`, and return `end`."""
        self.free[start].append(end)
        return end

    def text(self, start: int, text: str) -> int:
        """Add the bytes of a fixed text."""
        for byte in text.encode():
            following = self.state()
            self.edges[start].append((byte, byte, following))
            start = following
        return start

    def space(self, start: int) -> int:
        """Add an optional space."""
        return self.join(start, self.text(start, " "))

    def character(self, start: int, ranges: Ranges) -> int:
        """Add any one character of the code point ranges."""
        end = self.state()
        self._count(len(utf8_ranges(ranges)))
        rest_states: dict[Sequence[tuple[int, int]], int] = {(): end}  # sequences with an equal rest share its states
        for sequence in utf8_ranges(ranges):
            for index in reversed(range(1, len(sequence))):
                rest = sequence[index:]
                if rest not in rest_states:
                    rest_states[rest] = self.state()
                    self.edges[rest_states[rest]].append((*rest[0], rest_states[rest[1:]]))
            self.edges[start].append((*sequence[0], rest_states[sequence[1:]]))
        return end

    def language(self, start: int, automaton: ByteAutomaton) -> int:
        """Add any text that a deterministic automaton accepts."""
        states, end = [self.state() for _ in range(automaton.states)], self.state()
        self.join(start, states[0])
        self._count(sum(map(len, _edges(automaton))))
        for state, edges in zip(states, _edges(automaton), strict=True):
            self.edges[state] = [(low, high, states[following]) for low, high, following in edges]
        for state in automaton.is_accepting_S.nonzero().squeeze(-1).tolist():
            self.join(states[state], end)
        return end

    def automaton(self, end: int, most: int = MOST_STATES) -> ByteAutomaton:
        """Make the deterministic automaton of the texts that lead from state 0 to `end`.

        Raises RequestError for more than `most` states, and NoText if there is no such text.
        """
        bounds = sorted({0, 256, *(bound for edges in self.edges for a, b, _ in edges for bound in (a, b + 1))})
        class_of = {byte: number for number, byte in enumerate(bounds)}
        reached: dict[int, frozenset[int]] = {}
        sets = {self._closed([0], end, reached): 0}
        order, rows = list(sets), []
        for states in order:  # which grows
            if len(order) > most:
                raise too_large(len(order))
            seconds_left()
            targets: list[list[int]] = [[] for _ in bounds[:-1]]
            for state in states:
                for low, high, following in self.edges[state]:
                    for number in range(class_of[low], class_of[high + 1]):
                        targets[number].append(following)
            row, same = [], dict[tuple[int, ...], int]()
            for each in map(tuple, targets):
                if each and each not in same:
                    following_states = self._closed(each, end, reached)
                    if following_states not in sets:
                        sets[following_states] = len(order)
                        order.append(following_states)
                    same[each] = sets[following_states]
                row.append(same[each] if each else -1)
            rows.append(row)
        widths = torch.tensor(bounds).diff()
        next_SB = torch.tensor([*rows, [-1] * len(widths)], dtype=torch.int32).repeat_interleave(widths, dim=1)
        next_SB[next_SB < 0] = len(order)
        return ByteAutomaton(next_SB, torch.tensor([*(end in states for states in order), False])).trimmed()

    def _closed(self, states: Sequence[int], end: int, reached: dict[int, frozenset[int]]) -> frozenset[int]:
        """Return the states that read a byte, or are `end`, and are reachable from `states` without a byte.

        reached: a cache of the result for each single state.
        """
        closure: set[int] = set()
        for state in states:
            if state not in reached:
                seen, todo = {state}, [state]
                for each in todo:  # which grows
                    new = [following for following in self.free[each] if following not in seen]
                    seen.update(new)
                    todo += new
                reached[state] = frozenset(each for each in seen if self.edges[each] or each == end)
            closure |= reached[state]
        return frozenset(closure)


@lru_cache(maxsize=16)
def _edges(automaton: ByteAutomaton) -> list[list[tuple[int, int, int]]]:
    """Return the (lowest byte, highest byte, next state) triples of each state."""
    next_SB = automaton.next_SB[:-1]
    begins = torch.ones_like(next_SB, dtype=torch.bool)
    begins[:, 1:] = next_SB.diff(dim=1) != 0
    triples: list[list[tuple[int, int, int]]] = [[] for _ in range(automaton.states)]
    state_E, low_E = begins.nonzero().unbind(-1)
    high_E = torch.where(state_E[1:] == state_E[:-1], low_E[1:] - 1, 255)
    high_E = torch.cat((high_E, torch.tensor([255])))
    following_E = next_SB[state_E, low_E]
    is_alive_E = following_E < automaton.states
    edges = torch.stack((state_E, low_E, high_E, following_E.long()), -1)[is_alive_E].tolist()
    for state, low, high, following in edges:
        triples[state].append((low, high, following))
    return triples


@lru_cache(maxsize=64)
def utf8_ranges(ranges: Ranges) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the sequences of byte ranges that encode the characters of some code point ranges."""
    sequences = list[tuple[tuple[int, int], ...]]()
    for low, high in ranges:
        for first, last in _PLANES:
            if max(low, first) <= min(high, last):
                sequences += _equally_long(max(low, first), min(high, last))
    return tuple(sequences)


def _equally_long(low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the byte range sequences of a code point range whose characters have the same number of bytes."""
    for following in range(1, len(chr(low).encode())):  # the number of last bytes, six bits each
        rest = (1 << 6 * following) - 1
        if low | rest == high | rest:
            continue
        if low & rest:
            middle = low | rest
        elif high & rest != rest:
            middle = (high & ~rest) - 1
        else:
            continue
        yield from _equally_long(low, middle)
        yield from _equally_long(middle + 1, high)
        return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))
