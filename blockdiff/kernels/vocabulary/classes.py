"""Statistics of classes of tokens, for constraints: what a dynamic program over an automaton needs of every position.

Tokens that an automaton treats alike form a class, so a program over (position, state) reads [N, C] numbers instead of
[N, V]. Plain torch in chunks of logit rows; `triton_classes.py` computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Classes:
    """Disjoint classes of token ids, none of them empty; tokens of no class are not allowed."""

    token_M: Tensor  # int64, the tokens that have a class: by class, then by id
    class_M: Tensor  # int64, their classes, ascending
    end_C: Tensor  # int64, where each class ends in token_M

    @classmethod
    def of(cls, class_V: Tensor, count: int) -> Classes:
        """Classes from the class of every token, int64 [V]: 0 to count - 1, or count for a token of none."""
        ascending_V, token_V = class_V.sort(stable=True)
        end_C = torch.searchsorted(ascending_V, torch.arange(count, device=class_V.device), right=True)
        used = int(end_C[-1])
        return cls(token_V[:used].contiguous(), ascending_V[:used].contiguous(), end_C)

    def to(self, device: torch.device) -> Classes:
        """The same on another device."""
        return Classes(self.token_M.to(device), self.class_M.to(device), self.end_C.to(device))


class ClassStats(NamedTuple):
    """Statistics of each class C of tokens at every position, of logits z / T under a penalty of repetitions."""

    log_sum: Tensor  # fp64 [..., C]: log of the sum of exp(z / T)
    maximum: Tensor  # fp64 [..., C]
    argmax: Tensor  # int64 [..., C], ties to the lower id
    sample: Tensor  # int64 [..., C]: drawn within the class by inverse CDF
    entropy: Tensor  # fp64 [..., C], nats, of the distribution within the class
    log_probability: Tensor  # fp64 [..., C], of the sample within the class
    soft_embedding: Tensor  # [..., D], of the model's own z / T: no class and no penalty changes it


class Penalty(NamedTuple):
    """Tokens that were there already are made less likely, as by transformers' RepetitionPenaltyLogitsProcessor.

    Their logits are multiplied by the factor where negative and divided by it where not.
    """

    seen_RV: Tensor  # bool: the tokens that are penalised
    factor_R: Tensor  # fp32, more than 0; 1 changes nothing
    row_N: Tensor  # int64: which of the R rows each position belongs to


def of_logits(z: Tensor, uniform_N: Tensor, classes: Classes) -> tuple[Tensor, ...]:
    """The columns of `ClassStats` but the soft embedding, of logits [N, V] that the temperature has divided.

    Sums are differences of one running sum in fp64 over the tokens in the order of their classes. Each class is shifted
    by its own maximum, so it sums to at least 1, and the difference keeps eleven digits.
    """
    token_M, class_M, end_C, N = classes.token_M, classes.class_M, classes.end_C, len(z)
    start_C = torch.cat((end_C.new_zeros(1), end_C[:-1]))
    z = z[:, token_M]
    peak_NC = z.new_full((N, len(end_C)), -torch.inf).scatter_reduce_(1, class_M.expand(N, -1), z, "amax")
    # A class of tokens that are all impossible has no finite maximum to shift it by.
    peak_NC.clamp_(min=torch.finfo(z.dtype).min)
    z.sub_(peak_NC[:, class_M])
    e = z.exp()
    running = e.cumsum(-1, dtype=torch.float64)
    before_NC = _before(running, start_C)
    total_NC = running[:, end_C - 1] - before_NC
    place = torch.searchsorted(running, before_NC + uniform_N[:, None].double() * total_NC, right=True)
    place = place.clamp_(min=start_C).clamp_(max=end_C - 1)
    log_total_NC = total_NC.log()
    weighted = e.mul_(z.clamp(min=-1e4)).cumsum(-1, dtype=torch.float64)
    entropy_NC = log_total_NC - (weighted[:, end_C - 1] - _before(weighted, start_C)) / total_NC
    peaks = (z == 0).cumsum(-1, dtype=torch.int32)
    first = torch.searchsorted(peaks, _before(peaks, start_C), right=True).clamp_(min=start_C).clamp_(max=end_C - 1)
    peak_NC = peak_NC.double()
    return (
        log_total_NC + peak_NC,
        peak_NC,
        token_M[first],
        token_M[place],
        entropy_NC.clamp_(min=0.0),
        z.gather(1, place).double() - log_total_NC,
    )


def _before(running: Tensor, start_C: Tensor) -> Tensor:
    """The value of a running sum before each class, [N, C]."""
    return torch.where(start_C > 0, running[:, (start_C - 1).clamp(min=0)], 0)


def penalised(z: Tensor, penalty: Penalty, rows: slice) -> Tensor:
    """Logits [n, V] of some positions, with those of the tokens seen made less likely."""
    row_n = penalty.row_N[rows]
    factor = penalty.factor_R[row_n, None]
    return torch.where(penalty.seen_RV[row_n], torch.where(z < 0, z * factor, z / factor), z)
