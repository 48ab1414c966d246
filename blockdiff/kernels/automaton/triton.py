"""A constraint's passes over canvases in Triton: registered ops without gradient, and the public functions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from blockdiff.kernels.automaton import kernels
from blockdiff.kernels.launch import launch, registered

SIZES = dict(STATES=64, WAYS=32, num_warps=8)  # states and successors that a program reads at a time

# -- launchers -------------------------------------------------------------------------------------------------


@registered("automaton_look_ahead", mutates=("ways",))
def _look_ahead(successor: Tensor, ways: Tensor, last: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the best successors, and `ahead` at every position [2, L + 1, B, S + 1]."""
    _, L, B, S, K = ways.shape
    choice, ahead = successor.new_empty(L, B, S), ways.new_empty(2, L + 1, B, S + 1)
    yield choice, ahead
    ahead[..., -1] = last[:, None, :, -1]
    ahead[:, -1] = last
    launch(kernels.automaton_look_ahead, (B,), successor.contiguous(), ways, ahead, choice, L, B, S, K, **SIZES)


@registered("automaton_reach", mutates=("share",))
def _reach(order: Tensor, end: Tensor, share: Tensor, at_first: Tensor) -> Iterator[Tensor]:
    """Return the probability of each state before every position and after the last, [L + 1, B, S + 1]."""
    L, B, S, K = share.shape
    reached = share.new_empty(L + 1, B, S + 1)
    yield reached
    reached[0] = at_first
    launch(kernels.automaton_reach, (B,), order, end, share, reached, L, B, S, K, **SIZES)


# -- the public functions: signatures and meaning as in torch.py ------------------------------------------------


def look_ahead(successor_SK: Tensor, ways_2LBSK: Tensor, ahead_2BS: Tensor) -> tuple[Tensor, Tensor]:
    """Pass backward over the positions; return the best successors and the log-weights of all continuations.

    Shapes are as in torch.py; ways_2LBSK is changed in place and must be contiguous.
    """
    choice_LBS, ahead = _look_ahead(successor_SK, ways_2LBSK, ahead_2BS)
    return choice_LBS, ahead[:, 0]


def reach(successor_SK: Tensor, share_LBSK: Tensor, at_BS: Tensor) -> None:
    """Pass forward over the positions: multiply the shares of a state's successors by the state's probability there.

    share_LBSK is changed in place and must be contiguous.
    """
    to_P, order_P = successor_SK.flatten().sort(stable=True)
    states_S = torch.arange(len(successor_SK), device=to_P.device)
    _reach(order_P, torch.searchsorted(to_P, states_S, right=True), share_LBSK, at_BS)
