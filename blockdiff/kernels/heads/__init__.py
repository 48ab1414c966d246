"""The op attention_heads: norms and RoPE of attention heads after the projections of tokens."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Norm(Protocol):
    """A norm of attention heads.

    form: how kernels apply the weight. "direct": multiply in fp32. "cast": round the normed heads to their dtype, then
    multiply. "centred": multiply by 1 + weight. Any other form is a custom norm, which is called. gain: the weight that
    this rank multiplies by.
    """

    form: str
    eps: float

    @property
    def gain(self) -> Tensor: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class HeadNorms(NamedTuple):
    """The norms of heads of size d: of queries and of keys before RoPE (None: no norm), and of values, unweighted."""

    d: int
    q_norm: Norm | None
    k_norm: Norm | None
    norms_values: bool
    eps: float
