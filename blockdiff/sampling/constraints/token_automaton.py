"""From an automaton over bytes to one over a model's tokens, with tokens of equal effect grouped into classes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdiff.errors import RequestError
from blockdiff.kernels.vocabulary import Classes
from blockdiff.sampling.constraints.byte_automaton import ByteAutomaton, reaching
from blockdiff.sampling.constraints.compile_limit import seconds_left, too_large
from blockdiff.sampling.constraints.tokens import Tokens

MOST_STATES = 4096
MOST_PAIRS = 200_000  # states times the most successors of one: 51 million numbers for a canvas of 256
_RANDOM_SEED = 1
_NUMBERS = 4 << 20  # (state, text) pairs that are followed at once


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """A deterministic automaton over tokens. Its last state is the end, which an eos reaches and nothing leaves.

    class_V: the class of each token, C for a token that is never allowed. next_SC: the state after a class, S if it is
    not allowed (row S is dead); from every other state acceptance can be reached. is_end_C: the classes of eos and
    fill. The pair of a state s and its k-th successor has the number s K + k: successor_SK has the successors (S if
    there are fewer than K), and each edge has a pair and a class.
    """

    classes: Classes
    class_V: Tensor
    next_SC: Tensor
    is_accepting_S: Tensor
    is_end_C: Tensor
    successor_SK: Tensor
    pair_E: Tensor
    class_E: Tensor

    @property
    def states(self) -> int:
        """The number of states, the end included."""
        return len(self.next_SC) - 1

    def on(self, device: torch.device) -> TokenAutomaton:
        """Return the automaton on another device; cached."""
        return self if self.class_V.device == device else _on(self, device)

    def run(self, tokens: Sequence[int], state: int = 0) -> int:
        """Return the state after reading `tokens` from `state` on; `self.states` if they are not allowed."""
        for class_ in self.class_V[list(tokens)].tolist():
            state = self.states if class_ == self.next_SC.shape[1] else int(self.next_SC[state, class_])
        return state


@functools.lru_cache(maxsize=32)
def _on(automaton: TokenAutomaton, device: torch.device) -> TokenAutomaton:
    moved = {name: value.to(device) for name, value in vars(automaton).items()}
    return TokenAutomaton(**moved)


def token_automaton(
    automaton: ByteAutomaton,
    tokens: Tokens,
    eos_ids: Sequence[int],
    pad_id: int | None,
    banned: Sequence[int] = (),
    allows_special: bool = False,
) -> TokenAutomaton:
    """Make the automaton over tokens of a language of texts; the response is the tokens before the first eos.

    Any of `eos_ids` leads from an accepting state to the end, where only those and `pad_id` follow. Tokens without a
    text are never allowed, or with `allows_special` everywhere before the end, because they add no text. Raises
    RequestError if the tokens cannot write any text of the language, or if it needs too many states.
    """
    V = tokens.vocab_size
    ends = {id for id in (*eos_ids, pad_id) if id is not None and 0 <= id < V}
    without_text = [id for id in range(V) if not tokens.texts[id] and id not in ends and id not in banned]
    order, index_of_state, number_N = _reached(automaton, tokens)

    # Classes: tokens with one number, whose last token shows where all of them lead; then eos, fill and special tokens.
    numbers, class_N = number_N.unique(return_inverse=True)
    is_dead = numbers == 0
    texts = int((~is_dead).sum())
    class_of_number = torch.where(is_dead, -1, (~is_dead).cumsum(0) - 1)
    class_V = torch.full((V,), -1, dtype=torch.int64)
    class_V[tokens.ids] = class_of_number[class_N]
    class_V[[*ends]] = -1
    class_V[[id for id in banned if 0 <= id < V]] = -1
    usable = sorted(id for id in eos_ids if id in ends and id not in banned)
    S = len(order) + 1
    end = S - 1
    next_SC = torch.full((S + 1, texts + 3), S, dtype=torch.int64)
    last_C = torch.zeros(texts, dtype=torch.int64)
    alive = class_V >= 0
    last_C[class_V[alive]] = alive.nonzero().squeeze(-1)
    has_token = torch.zeros(texts + 3, dtype=torch.bool)
    has_token[class_V[alive]] = True
    index_of_state[automaton.states] = S
    next_SC[: S - 1, :texts] = _after(automaton, [tokens.texts[id] for id in last_C.tolist()], order, index_of_state)
    is_accepting_S = torch.zeros(S + 1, dtype=torch.bool)
    is_accepting_S[: S - 1] = automaton.is_accepting_S[order]
    is_accepting_S[end] = True
    if usable:
        class_V[usable] = texts
        next_SC[is_accepting_S.nonzero().squeeze(-1), texts] = end
    if pad_id is not None and pad_id not in eos_ids and usable and 0 <= pad_id < V:
        class_V[pad_id] = texts + 1
        next_SC[end, texts + 1] = end
    if allows_special and without_text:
        class_V[without_text] = texts + 2
        next_SC[: S - 1, texts + 2] = torch.arange(S - 1)
    is_end_C = torch.zeros(texts + 3, dtype=torch.bool)
    is_end_C[texts : texts + 2] = True

    # Drop classes without tokens.
    for id in (texts, texts + 1, texts + 2):
        has_token[id] = bool((class_V == id).any())
    new_class = torch.where(has_token, has_token.cumsum(0) - 1, int(has_token.sum()))
    class_V = torch.where(class_V >= 0, new_class[class_V], int(has_token.sum()))
    next_SC, is_end_C = next_SC[:, has_token], is_end_C[has_token]
    can_accept_S = reaching(next_SC, is_accepting_S)
    if not bool(can_accept_S[0]):
        raise RequestError("the tokenizer has no tokens for any text that satisfies the constraint; loosen it")
    next_SC = torch.where(can_accept_S[next_SC], next_SC, S)
    if not bool((next_SC < S).any()):
        raise RequestError("only the empty text satisfies the constraint, and no eos is known that could end it")
    classes = Classes.of(class_V, next_SC.shape[1])
    return TokenAutomaton(classes, class_V, next_SC, is_accepting_S, is_end_C, *_pairs(next_SC))


def _reached(automaton: ByteAutomaton, tokens: Tokens) -> tuple[list[int], Tensor, Tensor]:
    """Find the states that tokens with a text reach from the start, and group tokens that lead to the same states.

    Returns these states, the index of each state among them (int64 [states + 1], -1 for others), and for each of
    `tokens.ids` the number of its group, 0 for a token that is never allowed. The numbers are sums of random numbers,
    equal if two tokens lead from every reached state to the same state. Raises RequestError for too many states.
    """
    index_of_state = torch.full((automaton.states + 1,), -1, dtype=torch.int64)
    index_of_state[0] = 0
    order = [0]
    generator = torch.Generator().manual_seed(_RANDOM_SEED)
    number_of_state = torch.randint(-(2**62), 2**62, (automaton.states + 1,), generator=generator)
    number_of_state[automaton.states] = 0  # so that a token that is never allowed has the number 0
    tree = tokens.read_by(automaton)
    number_M = torch.zeros(len(tree.node_M) + 1, dtype=torch.int64)
    done, most = 0, max(1, _NUMBERS // (len(number_M) + sum(len(byte) for _, byte in tree.levels)))
    while done < len(order):
        if len(order) > MOST_STATES:
            raise too_large(len(order))
        seconds_left()
        some = order[done : done + most]
        done += len(some)
        for following_M in tree.after(automaton, torch.tensor(some)):
            factor = int(torch.randint(-(2**62), 2**62, (), generator=generator)) | 1
            number_M += number_of_state[following_M] * factor
            is_met = torch.zeros(automaton.states + 1, dtype=torch.bool)
            is_met[following_M] = True
            is_met[automaton.states] = False
            for following in is_met.nonzero().squeeze(-1).tolist():
                if index_of_state[following] < 0:
                    index_of_state[following] = len(order)
                    order.append(following)
    return order, index_of_state, number_M[tree.leaf_N]


def _after(automaton: ByteAutomaton, texts: Sequence[bytes], order: Sequence[int], index_of_state: Tensor) -> Tensor:
    """Return the state after each text from each state, as its index in `order`: int64 [states, texts]."""
    columns = []
    start = torch.tensor(order)
    for text in texts:
        state = start
        for byte in text:
            state = automaton.next_SB[state, byte].long()
        columns.append(index_of_state[state])
    return torch.stack(columns, -1) if columns else index_of_state.new_zeros(len(order), 0)


def _pairs(next_SC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `successor_SK`, `pair_E` and `class_E` of a `TokenAutomaton`; RequestError for too many pairs."""
    S = len(next_SC) - 1
    state_E, class_E = (next_SC[:S] < S).nonzero().unbind(-1)
    pairs, pair_E = (state_E * (S + 1) + next_SC[state_E, class_E]).unique(return_inverse=True)
    from_P, to_P = pairs // (S + 1), pairs % (S + 1)
    first_S = torch.searchsorted(from_P, torch.arange(S))
    k_P = torch.arange(len(pairs)) - first_S[from_P]
    K = int(k_P.max()) + 1
    if S * K > MOST_PAIRS:
        raise too_large(S)
    successor_SK = torch.full((S, K), S, dtype=torch.int64)
    successor_SK[from_P, k_P] = to_P
    return successor_SK, (from_P * K + k_P)[pair_E], class_E
