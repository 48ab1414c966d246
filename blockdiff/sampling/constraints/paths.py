"""The best canvas and a random one under an automaton: exact dynamic programming over (position, state).

The model predicts every position independently. So Viterbi's recursion finds the accepted canvas with the largest
product of probabilities (arXiv 2505.23061 does so for diffusion models). A backward pass and a forward draw sample a
canvas from that product, conditioned on being accepted. Numbers are logarithms in fp64; nothing is read on the host.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from blockdiff.kernels import IN_TORCH, Kernels
from blockdiff.sampling.constraints.token_automaton import TokenAutomaton

NUMBERS = 16 << 20  # the numbers of (position, edge) or (position, pair) in memory at once, 128 MiB


class Paths(NamedTuple):
    """The token classes of the best and of a random canvas, and the marginals over all accepted canvases."""

    best_BL: Tensor  # int64
    random_BL: Tensor  # int64
    share_BLC: Tensor  # fp64: the probability that the token of a position is of a class, over all accepted canvases
    is_possible_B: Tensor  # bool: whether the automaton accepts any canvas here


def paths(
    automaton: TokenAutomaton,
    log_sum_BLC: Tensor,
    maximum_BLC: Tensor,
    start_B: Tensor,
    is_final_BS: Tensor,
    uniform_BL2: Tensor,
    kernels: Kernels = IN_TORCH,
) -> Paths:
    """Find the best and a random canvas from the states `start_B` to any final state.

    log_sum_BLC and maximum_BLC: fp64, of the logits of each class's tokens, -inf for a class that is not allowed.
    is_final_BS: bool [B, S + 1]. uniform_BL2: numbers in [0, 1) that pick the random canvas: the next state, and the
    class that leads to it.
    """
    B, L, _ = log_sum_BLC.shape
    rows = max(1, NUMBERS // (L * max(automaton.successor_SK.numel(), 1)))
    arguments = log_sum_BLC, maximum_BLC, start_B, is_final_BS, uniform_BL2
    parts = [_paths(automaton, kernels, *(each[lo : lo + rows] for each in arguments)) for lo in range(0, B, rows)]
    return parts[0] if len(parts) == 1 else Paths(*(torch.cat(column) for column in zip(*parts, strict=True)))


@functools.lru_cache(maxsize=64)
def completable(automaton: TokenAutomaton, tokens: int) -> Tensor:
    """Return the states from which n tokens, fill included, can reach acceptance, for n = 0, 1, ...: bool [N, S + 1].

    There are at most `tokens` + 1 rows, and none after the row from which on all would be equal.
    """
    rows_NS = [automaton.is_accepting_S]
    for _ in range(tokens):
        earlier_S = rows_NS[-1].clone()
        earlier_S[:-1] = rows_NS[-1][automaton.successor_SK].any(-1)
        if bool((earlier_S == rows_NS[-1]).all()):
            break
        rows_NS.append(earlier_S)
    return torch.stack(rows_NS)


@functools.lru_cache(maxsize=64)
def completable_later(automaton: TokenAutomaton, before: int, after: int) -> Tensor:
    """Return the states from which n tokens that do not end the text, then `after` of any kind, can reach acceptance.

    Row n is for n = 0 .. `before`: bool [N, S + 1]. Rows that would repeat the last one are left out.
    """
    is_open_NS, next_of_text = completable(automaton, after), automaton.next_SC[:, ~automaton.is_end_C]
    is_open_S = is_open_NS[min(after, len(is_open_NS) - 1)].clone()
    is_open_S[automaton.states - 1] = False
    rows_NS = [is_open_S]
    for _ in range(before):
        earlier_S = rows_NS[-1][next_of_text].any(-1)
        if bool((earlier_S == rows_NS[-1]).all()):
            break
        rows_NS.append(earlier_S)
    return torch.stack(rows_NS)


@functools.lru_cache(maxsize=64)
def completable_pins(automaton: TokenAutomaton, pins: tuple[int, ...]) -> Tensor:
    """Return the states from which the last n of N `pins` can lead to acceptance, for n = 0 .. N: bool [N + 1, S + 1].

    A pin of -1 is any token that does not end the text.
    """
    is_open_S, next_of_text = automaton.is_accepting_S, automaton.next_SC[:, ~automaton.is_end_C]
    rows_NS, class_N = [is_open_S], automaton.class_V[list(pins)].tolist()
    for pin, of_pin in zip(reversed(pins), reversed(class_N), strict=True):
        if pin < 0:
            is_open_S = is_open_S[next_of_text].any(-1)
        elif of_pin < automaton.next_SC.shape[1]:
            is_open_S = is_open_S[automaton.next_SC[:, of_pin]]
        else:
            is_open_S = torch.zeros_like(is_open_S)
        rows_NS.append(is_open_S)
    return torch.stack(rows_NS)


def forced(automaton: TokenAutomaton, start: int, is_final_S: Tensor, pinned_L: Tensor, is_text_L: Tensor) -> Tensor:
    """Return the tokens common to all canvases from the start state to a final one, int64 [L]; -1 if there is a choice.

    pinned_L: int64, given tokens, -1 where none is given; is_text_L: positions at which the text cannot end.
    """
    K, L = automaton.successor_SK.shape[1], len(pinned_L)
    from_E, to_E, class_E = automaton.pair_E // K, automaton.successor_SK.flatten()[automaton.pair_E], automaton.class_E
    of_pin_L = automaton.class_V[pinned_L.clamp(min=0)].where(pinned_L >= 0, -1)
    can_stand_LE = (of_pin_L[:, None] < 0) | (of_pin_L[:, None] == class_E)
    can_stand_LE &= ~(is_text_L[:, None] & automaton.is_end_C[class_E])
    ahead = is_final_S
    for position in reversed(range(L)):
        can_stand_LE[position] &= ahead[to_E]
        ahead = torch.zeros_like(ahead).index_fill_(0, from_E[can_stand_LE[position]], True)
    reached = torch.zeros_like(ahead)
    reached[start] = True
    for position in range(L):
        can_stand_LE[position] &= reached[from_E]
        reached = torch.zeros_like(reached).index_fill_(0, to_E[can_stand_LE[position]], True)
    least_L = class_E.where(can_stand_LE, len(automaton.is_end_C)).amin(-1)
    most_L = class_E.where(can_stand_LE, -1).amax(-1)
    end_C = automaton.classes.end_C
    is_single_C = end_C.diff(prepend=end_C.new_zeros(1)) == 1
    only_L = most_L.clamp(min=0)
    is_forced_L = (least_L == most_L) & is_single_C[only_L] & (pinned_L < 0)
    return automaton.classes.token_M[end_C[only_L] - 1].where(is_forced_L, pinned_L)


def _paths(
    automaton: TokenAutomaton,
    kernels: Kernels,
    log_sum_BLC: Tensor,
    maximum_BLC: Tensor,
    start_B: Tensor,
    is_final_BS: Tensor,
    uniform_BL2: Tensor,
) -> Paths:
    successor_SK, pair_E = automaton.successor_SK, automaton.pair_E
    (S, K), (B, L, C) = successor_SK.shape, log_sum_BLC.shape
    of_edges = _chunks(L, B * len(pair_E))
    sum_BLP, best_BLP = log_sum_BLC.new_empty(B, L, S * K), maximum_BLC.new_empty(B, L, S * K)
    for some in of_edges:
        sum_BLP[:, some] = _of_pairs(log_sum_BLC[:, some], automaton, is_sum=True)
        best_BLP[:, some] = _of_pairs(maximum_BLC[:, some], automaton, is_sum=False)

    # Backward: what can follow each state, as a sum over all canvases and as the best of them.
    impossible = -torch.inf
    ahead = log_sum_BLC.new_zeros(2, B, S + 1).masked_fill_(~is_final_BS, impossible)
    ways_2LBSK = torch.stack((sum_BLP, best_BLP)).transpose(1, 2).reshape(2, L, B, S, K)
    choice_LBS, ahead = kernels.look_ahead(successor_SK, ways_2LBSK, ahead)
    is_possible_B = ahead[0].gather(-1, start_B[:, None]).squeeze(-1) > impossible

    # Where each state goes next: to the best successor, and to a drawn one.
    ways_LBSK = ways_2LBSK[0]
    share_LBSK = (ways_LBSK - ways_LBSK.logsumexp(-1, keepdim=True)).exp_().nan_to_num_(nan=0.0)
    uniform_LB2 = uniform_BL2.double().transpose(0, 1)
    running = share_LBSK.cumsum(-1)
    drawn_LBS = (running <= uniform_LB2[..., :1, None] * running[..., -1:]).sum(-1).clamp_(max=K - 1)
    both_LBS = torch.cat((choice_LBS, drawn_LBS), 1)
    best_pair, random_pair = _follow(both_LBS, successor_SK, start_B.repeat(2)).chunk(2)

    # Forward: how probable each state is at each position.
    at_BS = torch.zeros_like(ahead[0]).scatter_(1, start_B[:, None], 1.0)
    kernels.reach(successor_SK, share_LBSK, at_BS)

    best_BL, random_BL = start_B.new_empty(B, L), start_B.new_empty(B, L)
    share_BLC = log_sum_BLC.new_zeros(B, L, C)
    for some in of_edges:
        length = len(range(*some.indices(L)))
        edge_sum = log_sum_BLC[:, some, automaton.class_E]
        edge_best = maximum_BLC[:, some, automaton.class_E]
        is_best = pair_E == best_pair[:, some, None]
        best_BL[:, some] = automaton.class_E[edge_best.masked_fill_(~is_best, impossible).argmax(-1)]
        within = (edge_sum - sum_BLP[:, some][..., pair_E]).exp_().nan_to_num_(nan=0.0)
        running = within.masked_fill(pair_E != random_pair[:, some, None], 0.0).cumsum(-1)
        edge = (running <= uniform_BL2[:, some, 1:].double() * running[..., -1:]).sum(-1).clamp_(max=len(pair_E) - 1)
        random_BL[:, some] = automaton.class_E[edge]
        within *= share_LBSK[some].transpose(0, 1).reshape(B, length, S * K)[..., pair_E]
        share_BLC[:, some].scatter_add_(-1, automaton.class_E.expand(B, length, -1), within)
    return Paths(best_BL, random_BL, share_BLC, is_possible_B)


def _chunks(length: int, size: int) -> list[slice]:
    """Split positions into slices of about NUMBERS numbers, at `size` numbers per position."""
    some = max(1, NUMBERS // max(size, 1))
    return [slice(lo, min(lo + some, length)) for lo in range(0, length, some)]


def _of_pairs(of_classes_BLC: Tensor, automaton: TokenAutomaton, is_sum: bool) -> Tensor:
    """Reduce a value per class to one per pair of a state and its k-th successor, [B, l, S K].

    It is the log-sum (`is_sum`) or the maximum over the classes that lead from the state to the successor.
    """
    pair_E, size = automaton.pair_E, automaton.successor_SK.numel()
    of_edges = of_classes_BLC[..., automaton.class_E]
    index = pair_E.expand_as(of_edges)
    peak = of_edges.new_full((*of_edges.shape[:-1], size), -torch.inf).scatter_reduce_(-1, index, of_edges, "amax")
    if not is_sum:
        return peak
    shifted = (of_edges - peak.clamp(min=torch.finfo(peak.dtype).min)[..., pair_E]).exp_()
    return torch.zeros_like(peak).scatter_add_(-1, index, shifted).log_().add_(peak)


def _follow(choice_LBS: Tensor, successor_SK: Tensor, start_B: Tensor) -> Tensor:
    """Return the number of the pair at each position of the paths from the start states, int64 [B, L].

    choice_LBS: the successor that each state chooses. A position maps states to states; these maps are composed in
    log2(L) rounds (Hillis and Steele 1986) instead of one by one.
    """
    S, K = successor_SK.shape
    flat_LBS = torch.arange(S, device=start_B.device) * K + choice_LBS
    dead = torch.full_like(choice_LBS[..., :1], S)
    after_LBS = torch.cat((successor_SK.flatten()[flat_LBS], dead), -1)
    reach, L = 1, len(after_LBS)
    while reach < L:
        after_LBS = torch.cat((after_LBS[:reach], after_LBS[reach:].gather(-1, after_LBS[:-reach])))
        reach *= 2
    after_LB = after_LBS.gather(-1, start_B.expand(L, -1)[..., None]).squeeze(-1)
    before_LB = torch.cat((start_B[None], after_LB[:-1])).clamp_(max=S - 1)
    return flat_LBS.gather(-1, before_LB[..., None]).squeeze(-1).transpose(0, 1)
