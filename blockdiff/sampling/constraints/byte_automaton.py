"""Automata over the bytes of a text: of a regular expression, of all texts without certain words, and of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from blockdiff.errors import RequestError

# A character that no text has stands at the end of every text. Without it the automaton of outlines-core stops at the
# first match in the order of the alternatives, so `a|ab` would not hold "ab".
END = "\U0010ffff"
MOST_STATES = 1 << 14  # a step's work grows with them, and an expression can have exponentially many


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton; state S of its S states is the dead one, and state 0 is where it starts.

    next_SB: int32 [S + 1, 256]; is_accepting_S: bool [S + 1].
    """

    next_SB: Tensor
    is_accepting_S: Tensor

    @property
    def states(self) -> int:
        """The number of live states."""
        return len(self.next_SB) - 1

    def accepts(self, text: bytes) -> bool:
        """True where a text is in the language."""
        state = 0
        for byte in text:
            state = int(self.next_SB[state, byte])
        return bool(self.is_accepting_S[state])

    def trimmed(self) -> ByteAutomaton:
        """The same language without the states that cannot be reached or cannot accept; RequestError if it is empty."""
        S = self.states
        can_accept = reaching(self.next_SB, self.is_accepting_S)
        if not bool(can_accept[0]):
            raise RequestError("no text satisfies the constraint; loosen it")
        order, place = [0], torch.full((S + 1,), -1, dtype=torch.int64)
        place[0] = 0
        for state in order:  # which grows: breadth first, so the numbering follows the language
            for following in self.next_SB[state].unique().tolist():
                if can_accept[following] and place[following] < 0:
                    place[following] = len(order)
                    order.append(following)
        place[place < 0] = len(order)
        kept = torch.tensor(order)
        next_SB = torch.full((len(order) + 1, 256), len(order), dtype=torch.int32)
        next_SB[:-1] = place[self.next_SB[kept].long()].int()
        is_accepting_S = torch.zeros(len(order) + 1, dtype=torch.bool)
        is_accepting_S[:-1] = self.is_accepting_S[kept]
        return ByteAutomaton(next_SB, is_accepting_S)

    def both(self, other: ByteAutomaton) -> ByteAutomaton:
        """The texts that are in both languages; RequestError if there is none."""
        pairs = {(0, 0): 0}
        order, rows = [(0, 0)], []
        for one, two in order:  # which grows
            following = torch.stack((self.next_SB[one], other.next_SB[two]), -1).tolist()
            row = []
            for a, b in following:
                is_dead = a == self.states or b == other.states
                pair = (self.states, other.states) if is_dead else (a, b)
                if pair not in pairs and not is_dead:
                    if len(order) >= MOST_STATES:
                        raise too_large(len(order))
                    pairs[pair] = len(order)
                    order.append(pair)
                row.append(-1 if is_dead else pairs[pair])
            rows.append(row)
        next_SB = torch.tensor([*rows, [-1] * 256], dtype=torch.int32)
        next_SB[next_SB < 0] = len(order)
        accepting = [bool(self.is_accepting_S[one] & other.is_accepting_S[two]) for one, two in order]
        return ByteAutomaton(next_SB, torch.tensor([*accepting, False])).trimmed()


def reaching(next_SX: Tensor, is_aim_S: Tensor) -> Tensor:
    """From which states some aim can be reached, bool [S + 1]; next_SX: the state after each input, [S + 1, X]."""
    S = len(next_SX) - 1
    edges = (next_SX.long() * (S + 1) + torch.arange(S + 1)[:, None]).unique()
    before: dict[int, list[int]] = {}
    for edge in edges[edges < S * (S + 1)].tolist():
        before.setdefault(edge // (S + 1), []).append(edge % (S + 1))
    todo = is_aim_S.nonzero().squeeze(-1).tolist()
    found = set(todo)
    for state in todo:  # which grows
        new = [earlier for earlier in before.get(state, ()) if earlier not in found]
        found.update(new)
        todo += new
    is_reaching_S = torch.zeros(S + 1, dtype=torch.bool)
    is_reaching_S[todo] = True
    return is_reaching_S


@lru_cache(maxsize=32)
def of_regex(regex: str) -> ByteAutomaton:
    """The texts that match a regular expression as a whole, in the syntax of Rust's regex crate.

    `^` at its beginning and `$` at its end say nothing more and may stand there. RequestError for what is no regular
    expression, has look-around, or matches nothing, and where outlines-core is not installed.
    """
    try:
        from outlines_core import Index, Vocabulary
    except ImportError:
        raise RequestError("a constraint needs the package outlines-core; pip install outlines-core") from None
    whole = regex.removeprefix("^")
    backslashes = len(whole) - len(whole.removesuffix("$").rstrip("\\")) - 1
    if whole.endswith("$") and backslashes % 2 == 0:
        whole = whole[:-1]
    single_bytes = Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    try:
        Index(whole, single_bytes)  # for its own error: the group around it must not complete what is half written
        index = Index(f"(?:{whole}){END}", single_bytes)
    except (ValueError, TypeError) as error:
        raise RequestError(f"the regular expression {regex!r:.80} cannot be used: {_cause(error)}") from None
    edges, finals = index.get_transitions(), index.get_final_states()
    if len(edges) > MOST_STATES:
        raise too_large(len(edges))
    places: dict[int, int] = {index.get_initial_state(): 0}
    for state in {*edges, *(following for row in edges.values() for following in row.values())}:
        places.setdefault(state, len(places))
    S = len(places)
    from_, bytes_, to = [], [], []
    for state, row in edges.items():
        for byte, following in row.items():
            if byte < 256:
                from_.append(places[state])
                bytes_.append(byte)
                to.append(places[following])
    next_SB = torch.full((S + 1, 256), S, dtype=torch.int32)
    next_SB[torch.tensor(from_, dtype=torch.int64), torch.tensor(bytes_, dtype=torch.int64)] = torch.tensor(
        to, dtype=torch.int32
    )
    ended = torch.arange(S + 1)
    for byte in END.encode():
        ended = next_SB[ended, byte].long()
    is_final = torch.zeros(S + 1, dtype=torch.bool)
    is_final[[places[state] for state in finals]] = True
    return ByteAutomaton(next_SB, is_final[ended]).trimmed()


def without(words: Sequence[bytes]) -> ByteAutomaton:
    """All texts in which none of the words occurs (Aho and Corasick 1975)."""
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


def too_large(states: int) -> RequestError:
    """The refusal of an automaton of too many states."""
    return RequestError(
        f"the constraint has {states} states or more; shorten its counted repetitions (each of {{1,200}} is a state) "
        "or name fewer characters"
    )


def _cause(error: Exception) -> str:
    """The part of outlines-core's message that says why."""
    message = " ".join(str(error).split())
    if "anchored universal start state" in message:
        return "it looks around at its beginning; `^`, `$` and `\\b` can only stand at its ends"
    if "error building NFA" in message:
        return "it is not valid, or has look-around or back references, which automata cannot follow"
    if "vocabulary provided is incompatible" in message:
        return "a part of it matches nothing"
    return message[:200]
