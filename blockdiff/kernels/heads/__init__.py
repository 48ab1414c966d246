"""The heads of attention: their norms and RoPE, and attention over them from the products of tokens on."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Norm(Protocol):
    """A norm of heads.

    form: how its weight counts, as kernels have it: "direct" multiplies in fp32, "cast" multiplies what was rounded
    before, "centred" is added to 1, anything else is a norm of one's own, which is called. gain: the weight as this
    rank multiplies by it.
    """

    form: str
    eps: float

    @property
    def gain(self) -> Tensor: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class HeadNorms(NamedTuple):
    """Norms of heads of d numbers: of queries and of keys before RoPE (None: none), and of values, without weight."""

    d: int
    q_norm: Norm | None
    k_norm: Norm | None
    norms_values: bool
    eps: float
