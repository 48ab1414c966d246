"""The walks of a constraint over the places of canvases, backward and forward, in torch's own operations.

An automaton with S states, whose state s has K successors (S where there are fewer: a dead end), is given by
successor_SK. Numbers are fp64; nothing is read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor


def look_ahead(successor_SK: Tensor, ways_2LBSK: Tensor, ahead_2BS: Tensor) -> tuple[Tensor, Tensor]:
    """The best successor of each state, int64 [L, B, S], and what can follow it before the first place, [2, B, S + 1].

    ways_2LBSK: logarithms of what leads at a place from a state to its successor, as a sum over tokens and as the best
    of them; to those of the sum is added what can follow the successor. ahead_2BS: the same after the last place, of
    states and of the dead end, -inf.
    """
    _, L, B, S, _ = ways_2LBSK.shape
    choice_LBS, closed_2B1 = successor_SK.new_empty(L, B, S), ahead_2BS[..., -1:]
    for at in reversed(range(L)):
        both_2BSK = ways_2LBSK[:, at] + ahead_2BS[:, :, successor_SK]
        best_BS, choice_LBS[at] = both_2BSK[1].max(-1)
        ways_2LBSK[0, at] = both_2BSK[0]
        ahead_2BS = torch.cat((torch.stack((both_2BSK[0].logsumexp(-1), best_BS)), closed_2B1), -1)
    return choice_LBS, ahead_2BS


def reach(successor_SK: Tensor, share_LBSK: Tensor, at_BS: Tensor) -> None:
    """Multiply the shares of a state's successors at every place by the probability of being in that state there.

    at_BS: that before the first place, of states and of the dead end.
    """
    flat_BP = successor_SK.flatten().expand(len(at_BS), -1)
    for share_BSK in share_LBSK:
        share_BSK *= at_BS[:, :-1, None]
        at_BS = torch.zeros_like(at_BS).scatter_add_(1, flat_BP, share_BSK.flatten(1))
