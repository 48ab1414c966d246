"""Automata over the bytes of a text, their intersection and difference, and the texts without certain words."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from blockdiff.errors import NoText, RequestError
from blockdiff.sampling.constraints.compile_limit import seconds_left, too_large

MOST_STATES = 1 << 14  # an expression can have exponentially many


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton over bytes with S live states, of which 0 is the start, and the dead state S.

    next_SB: the state after each byte, int32 [S + 1, 256]; is_accepting_S: whether a text that ends in a state is in
    the language, bool [S + 1].
    """

    next_SB: Tensor
    is_accepting_S: Tensor

    @property
    def states(self) -> int:
        """The number of live states."""
        return len(self.next_SB) - 1

    def accepts(self, text: bytes) -> bool:
        """True if a text is in the language."""
        state = 0
        for byte in text:
            state = int(self.next_SB[state, byte])
        return bool(self.is_accepting_S[state])

    def trimmed(self) -> ByteAutomaton:
        """Remove the states that cannot be reached or cannot accept; NoText if the language is empty."""
        S = self.states
        can_accept = reaching(self.next_SB, self.is_accepting_S)
        if not bool(can_accept[0]):
            raise NoText("no text satisfies the constraint; loosen it")
        order, index_S = [0], torch.full((S + 1,), -1, dtype=torch.int64)
        index_S[0] = 0
        for state in order:  # which grows: breadth first, so the numbering follows the language
            for following in self.next_SB[state].unique().tolist():
                if can_accept[following] and index_S[following] < 0:
                    index_S[following] = len(order)
                    order.append(following)
        index_S[index_S < 0] = len(order)
        live_states = torch.tensor(order)
        next_SB = torch.full((len(order) + 1, 256), len(order), dtype=torch.int32)
        next_SB[:-1] = index_S[self.next_SB[live_states].long()].int()
        is_accepting_S = torch.zeros(len(order) + 1, dtype=torch.bool)
        is_accepting_S[:-1] = self.is_accepting_S[live_states]
        return ByteAutomaton(next_SB, is_accepting_S)

    def without(self, other: ByteAutomaton) -> ByteAutomaton:
        """Return the automaton of the texts in this language and not in the other; NoText if there are none."""
        # The dead state of the other language is alive in its complement.
        dead = torch.full((1, 256), other.states + 1, dtype=torch.int32)
        return self.both(
            ByteAutomaton(torch.cat((other.next_SB, dead)), torch.cat((~other.is_accepting_S, dead[0, :1] < 0)))
        )

    def both(self, other: ByteAutomaton) -> ByteAutomaton:
        """Return the intersection of two languages; NoText if it is empty, RequestError for too many states."""
        # Bytes that both automata treat alike lead to the same pair, so only one byte of each such class is followed.
        class_B, first_C = byte_classes(torch.cat((self.next_SB, other.next_SB)))
        one_SC, two_SC = self.next_SB[:, first_C].tolist(), other.next_SB[:, first_C].tolist()
        one_dead, two_dead = self.states, other.states
        pairs = {(0, 0): 0}
        order, rows = [(0, 0)], []
        for one, two in order:  # which grows
            seconds_left()
            row = []
            for pair in zip(one_SC[one], two_SC[two], strict=True):
                if pair[0] == one_dead or pair[1] == two_dead:
                    row.append(-1)
                    continue
                if pair not in pairs:
                    if len(order) >= MOST_STATES:
                        raise too_large(len(order))
                    pairs[pair] = len(order)
                    order.append(pair)
                row.append(pairs[pair])
            rows.append(row)
        next_SB = torch.tensor([*rows, [-1] * len(first_C)], dtype=torch.int32)[:, class_B]
        next_SB[next_SB < 0] = len(order)
        accepting = [bool(self.is_accepting_S[one] & other.is_accepting_S[two]) for one, two in order]
        return ByteAutomaton(next_SB, torch.tensor([*accepting, False])).trimmed()


def byte_classes(next_SB: Tensor) -> tuple[Tensor, Tensor]:
    """Group the bytes that no state distinguishes: the class of each byte, int64 [256], and each class's first byte."""
    columns, column_B = next_SB.unique(dim=1, return_inverse=True)
    first_C = torch.full((columns.shape[1],), 256).scatter_reduce_(0, column_B, torch.arange(256), "amin")
    first_C, order_C = first_C.sort()
    return order_C.argsort()[column_B], first_C


def reaching(next_SX: Tensor, is_aim_S: Tensor) -> Tensor:
    """Return the states from which a state of `is_aim_S` can be reached, bool [S + 1].

    next_SX: the state after each input, [S + 1, X].
    """
    S = len(next_SX) - 1
    edges = (next_SX.long() * (S + 1) + torch.arange(S + 1)[:, None]).unique()
    before: dict[int, list[int]] = {}
    for edge in edges[edges < S * (S + 1)].tolist():
        before.setdefault(edge // (S + 1), []).append(edge % (S + 1))
    todo = is_aim_S.nonzero().squeeze(-1).tolist()
    seen = set(todo)
    for state in todo:  # which grows
        new = [earlier for earlier in before.get(state, ()) if earlier not in seen]
        seen.update(new)
        todo += new
    is_reaching_S = torch.zeros(S + 1, dtype=torch.bool)
    is_reaching_S[todo] = True
    return is_reaching_S


@lru_cache(maxsize=32)
def texts_without(words: tuple[bytes, ...]) -> ByteAutomaton:
    """Make the automaton of all texts that contain none of the words (Aho and Corasick 1975).

    Raises RequestError for words that are too long.
    """
    if (size := sum(map(len, words))) > MOST_STATES:
        raise RequestError(f"the banned texts have {size:,} bytes; {MOST_STATES:,} are the most")
    next_of: list[dict[int, int]] = [{}]
    ends = [False]
    for word in words:
        node = 0
        for byte in word:
            if byte not in next_of[node]:
                next_of[node][byte] = len(next_of)
                next_of.append({})
                ends.append(False)
            node = next_of[node][byte]
        ends[node] = True
    S = len(next_of)
    next_SB = torch.zeros((S + 1, 256), dtype=torch.int32)
    fallback, order = [0] * S, [0]
    for node in order:  # breadth first: a node's fallback is shorter than the node, so its row is there
        if node:
            next_SB[node] = next_SB[fallback[node]]
            ends[node] |= ends[fallback[node]]
        for byte, child in next_of[node].items():
            fallback[child] = int(next_SB[node, byte])
            next_SB[node, byte] = child
            order.append(child)
    is_word = torch.tensor([*ends, True])
    next_SB[is_word[next_SB.long()]] = S
    next_SB[S] = S
    return ByteAutomaton(next_SB, ~is_word).trimmed()
