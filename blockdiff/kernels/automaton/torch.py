"""A constraint's backward and forward passes over the positions of canvases, in plain torch.

successor_SK lists up to K successors of each of S states of an automaton; unused entries are S, a dead end. Numbers are
fp64; nothing is read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor


def look_ahead(successor_SK: Tensor, ways_2LBSK: Tensor, ahead_2BS: Tensor) -> tuple[Tensor, Tensor]:
    """Pass backward over the positions: return the best successors and the log-weights of all continuations.

    Returns the best successor of each state at each position, int64 [L, B, S], and the log-weights of what can follow
    each state at the first position, [2, B, S + 1]: [0] summed over all continuations, [1] of the best one.

    ways_2LBSK: log-weights of the tokens that lead from a state to a successor at a position: [0] their sum, to which
    the sum over continuations of the successor is added in place, [1] the best token. ahead_2BS: log-weights after the
    last position, of the states and the dead end (-inf).
    """
    _, L, B, S, _ = ways_2LBSK.shape
    choice_LBS, closed_2B1 = successor_SK.new_empty(L, B, S), ahead_2BS[..., -1:]
    for position in reversed(range(L)):
        both_2BSK = ways_2LBSK[:, position] + ahead_2BS[:, :, successor_SK]
        best_BS, choice_LBS[position] = both_2BSK[1].max(-1)
        ways_2LBSK[0, position] = both_2BSK[0]
        ahead_2BS = torch.cat((torch.stack((both_2BSK[0].logsumexp(-1), best_BS)), closed_2B1), -1)
    return choice_LBS, ahead_2BS


def reach(successor_SK: Tensor, share_LBSK: Tensor, at_BS: Tensor) -> None:
    """Pass forward over the positions: multiply the shares of a state's successors by the state's probability there.

    share_LBSK is changed in place. at_BS: probability of each state, and of the dead end, before the first position.
    """
    flat_BP = successor_SK.flatten().expand(len(at_BS), -1)
    for share_BSK in share_LBSK:
        share_BSK *= at_BS[:, :-1, None]
        at_BS = torch.zeros_like(at_BS).scatter_add_(1, flat_BP, share_BSK.flatten(1))
