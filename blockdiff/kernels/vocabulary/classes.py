"""Statistics of classes of tokens at every position, for constraints.

Tokens that an automaton treats alike form a class, so the dynamic program over (position, state) of a constraint reads
[N, C] numbers instead of [N, V]. Plain torch in chunks of logit rows; `triton_classes.py` computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Classes:
    """Disjoint, non-empty classes of token ids. Tokens in no class are not allowed."""

    token_M: Tensor  # int64, the tokens in classes, sorted by class, then by id
    class_M: Tensor  # int64, their classes, ascending
    end_C: Tensor  # int64, the end of each class in token_M

    @classmethod
    def of(cls, class_V: Tensor, count: int) -> Classes:
        """Build the classes from the class of every token, int64 [V]: 0 to count - 1, or `count` for no class."""
        ascending_V, token_V = class_V.sort(stable=True)
        end_C = torch.searchsorted(ascending_V, torch.arange(count, device=class_V.device), right=True)
        used = int(end_C[-1])
        return cls(token_V[:used].contiguous(), ascending_V[:used].contiguous(), end_C)

    def to(self, device: torch.device) -> Classes:
        """Copy the tensors to a device."""
        return Classes(self.token_M.to(device), self.class_M.to(device), self.end_C.to(device))


class ClassStats(NamedTuple):
    """Statistics of each of C classes of tokens at every position, of logits z / T after a repetition penalty."""

    log_sum: Tensor  # fp64 [..., C]: log of the sum of exp(z / T)
    maximum: Tensor  # fp64 [..., C]
    argmax: Tensor  # int64 [..., C], ties to the lower id
    sample: Tensor  # int64 [..., C]: drawn within the class by inverse CDF
    entropy: Tensor  # fp64 [..., C], nats, of the distribution within the class
    log_probability: Tensor  # fp64 [..., C], of the sample within the class
    soft_embedding: Tensor  # [..., D], over all tokens, of z / T without the penalty


class Penalty(NamedTuple):
    """A repetition penalty: tokens that occurred before become less likely.

    Their negative logits are multiplied by the factor, the others divided by it. Source: transformers,
    RepetitionPenaltyLogitsProcessor.
    """

    seen_RV: Tensor  # bool: the tokens to penalise
    factor_R: Tensor  # fp32, above 0; 1 changes nothing
    row_N: Tensor  # int64: the row, of R, that each position belongs to


def of_logits(z: Tensor, uniform_N: Tensor, classes: Classes) -> tuple[Tensor, ...]:
    """Return the columns of `ClassStats` except the soft embedding, of tempered logits z [N, V].

    A class's sum is the difference of a running fp64 sum over the tokens sorted by class. Logits are shifted by the
    maximum of their class, so each class sums to at least 1 and the difference keeps eleven digits.
    """
    token_M, class_M, end_C, N = classes.token_M, classes.class_M, classes.end_C, len(z)
    start_C = torch.cat((end_C.new_zeros(1), end_C[:-1]))
    z = z[:, token_M]
    peak_NC = z.new_full((N, len(end_C)), -torch.inf).scatter_reduce_(1, class_M.expand(N, -1), z, "amax")
    # If all tokens of a class have z = -inf, there is no finite maximum to shift by.
    peak_NC.clamp_(min=torch.finfo(z.dtype).min)
    z.sub_(peak_NC[:, class_M])
    e = z.exp()
    running = e.cumsum(-1, dtype=torch.float64)
    before_NC = _before(running, start_C)
    total_NC = running[:, end_C - 1] - before_NC
    drawn = torch.searchsorted(running, before_NC + uniform_N[:, None].double() * total_NC, right=True)
    drawn = drawn.clamp_(min=start_C).clamp_(max=end_C - 1)
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
        token_M[drawn],
        entropy_NC.clamp_(min=0.0),
        z.gather(1, drawn).double() - log_total_NC,
    )


def _before(running: Tensor, start_C: Tensor) -> Tensor:
    """Return a running sum's value before the first token of each class, [N, C]."""
    return torch.where(start_C > 0, running[:, (start_C - 1).clamp(min=0)], 0)


def penalised(z: Tensor, penalty: Penalty, rows: slice) -> Tensor:
    """Apply a penalty to logits z [n, V] of the positions in `rows`."""
    row_n = penalty.row_N[rows]
    factor = penalty.factor_R[row_n, None]
    return torch.where(penalty.seen_RV[row_n], torch.where(z < 0, z * factor, z / factor), z)
