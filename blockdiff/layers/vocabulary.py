"""The vocabulary: the table of embeddings, the output head, and every op over [tokens, V]."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.kernels.autocast import upcast
from blockdiff.kernels.vocabulary import Classes, ClassStats, Penalty, Shaping, Stats, pack_allowed

LIKELIEST_ROWS = 32  # rows of logits that `likeliest` computes at once
_P = ParamSpec("_P")
_T = TypeVar("_T")
_V = TypeVar("_V", bound="Vocabulary")


def as_call(method: Callable[Concatenate[_V, _P], _T]) -> Callable[Concatenate[_V, _P], _T]:
    """Route a method through the module's `__call__`, so that FSDP2's hooks gather and shard the table around it."""

    @functools.wraps(method)
    def call(self: _V, *args: _P.args, **named: _P.kwargs) -> Any:
        return self(method, *args, **named)

    return call


@functools.cache
def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float32, device="cpu").to(dtype))


class Vocabulary(nn.Module):
    """The table of embeddings [V, D] and the ops over logits, which hold one chunk of logits at a time.

    scale: factor of embeddings (None: sqrt(D)). is_tied: whether the table also computes the logits; else a separate
    `head` [V, D] does. softcap: logits are softcap * tanh(logits / softcap) (None: uncapped). makes_signal: whether
    statistics include the soft embedding. token_rows: rows of the table that train as part of an adapter. split: the
    ops if each rank has some rows of the table (`parallel/tensor_vocabulary.py`).
    """

    token_rows: nn.Parameter | None
    head: nn.Parameter | None
    split: Any = None
    makes_signal = True

    def __init__(
        self,
        size: int,
        hidden: int,
        softcap: float | None,
        kernels: Kernels,
        scale: float | None = None,
        is_tied: bool = True,
    ):
        super().__init__()
        self.table = nn.Parameter(torch.empty(size, hidden))
        self.register_parameter("head", None if is_tied else nn.Parameter(torch.empty(size, hidden)))
        self.softcap, self.kernels = softcap, kernels
        self.root = hidden**0.5 if scale is None else scale
        self.token_ids: tuple[int, ...] = ()
        self._indices: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}
        self._all_but: dict[tuple[torch.device, int], Tensor] = {}
        # trained rows of an adapter, [len(token_ids), D], in place of the table's rows
        self.register_parameter("token_rows", None)

    def train_rows(self, token_ids: Sequence[int]) -> None:
        """Make the rows of some tokens trainable as `token_rows`, unfilled; the table stays frozen."""
        self.token_ids = tuple(token_ids)
        shape = len(self.token_ids), self.table.shape[1]
        self.token_rows = nn.Parameter(torch.empty(shape, device=self.table.device))

    @torch.no_grad()
    def merge_rows(self) -> None:
        """Write the trained rows into the table and remove `token_rows`."""
        if self.token_rows is not None:
            self.table = nn.Parameter(self.weights().detach(), requires_grad=False)
        self.token_ids, self.token_rows = (), None

    def weights(self) -> Tensor:
        """Return the table; if rows train, a copy with those rows replaced."""
        if self.token_rows is None:
            return self.table
        index = self.index_on(self.table.device, self.token_ids)
        return self.table.index_copy(0, index, self.token_rows.to(self.table.dtype))

    def index_on(self, device: torch.device, numbers: tuple[int, ...]) -> Tensor:
        """Return numbers as an int64 tensor on a device, cached: a copy would block the host and break CUDA graphs."""
        key = device, numbers
        if key not in self._indices:
            self._indices[key] = torch.tensor(numbers, dtype=torch.int64, device=device)
        return self._indices[key]

    def all_but(self, token: int, device: torch.device) -> Tensor:
        """Return the packed mask [1, W] of all tokens except one. Cached: captured graphs read it at its address."""
        if (device, token) not in self._all_but:
            tokens_V = torch.arange(self.table.shape[0], device=device)
            self._all_but[device, token] = pack_allowed((tokens_V != token)[None])
        return self._all_but[device, token]

    def least_of_ranks(self, count: int) -> int:
        """Return the minimum of a count over the ranks that share the table."""
        return count if self.split is None else self.split.least_of_ranks(self, count)

    def output_weights(self) -> Tensor:
        """Return the matrix [V, D] that computes the logits: the head, or the table if it is tied."""
        return self.weights() if self.head is None else self.head

    def _embedding(self) -> Tensor | None:
        """Return the embeddings if the head is separate, None if `output_weights` are the embeddings."""
        return None if self.head is None else self.weights()

    @property
    def signal_width(self) -> int:
        """The width of the soft embedding in statistics; 0 if the model reads none."""
        return self.table.shape[1] if self.makes_signal else 0

    def forward(self, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call `method`, or the method of `split` with that name if it has one; all `as_call` ops come through here."""
        return getattr(self.split, method.__name__, method)(self, *args, **named)

    def _scale(self, dtype: torch.dtype) -> float:
        """Return the factor of embeddings rounded to fp32, then to dtype: 53.0, not 53.066, for D = 2816 in bf16."""
        return _rounded(self.root, dtype)

    @as_call
    def embed(self, tokens: Tensor) -> Tensor:
        """Return the scaled embeddings [..., D] of int64 tokens."""
        x = F.embedding(tokens, self.weights())
        return x if self.root == 1.0 else x * self._scale(self.table.dtype)

    @as_call
    def logits(self, hidden: Tensor) -> Tensor:
        """Return soft-capped logits [..., V] in at least fp32; for a few tokens only, since they are not chunked."""
        return self.kernels.logits(hidden, self.output_weights(), self.softcap)

    @as_call
    def cross_entropy(
        self,
        hidden_ND: Tensor,
        targets_N: Tensor,
        observed_N: Tensor | None = None,
        bonus_N: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """Return the cross-entropy of every token in nats, [N] in at least fp32.

        temperature: divides the soft-capped logits. observed_N: int64 tokens; bonus_N (fp32, 0 to 40) is added to the
        soft-capped logit of each before the softmax. With the bonus log(1 + alpha V / (1 - alpha)) on the noisy token a
        model learns to predict each token from the others alone.
        """
        hidden_ND, softcap = self._tempered(hidden_ND, temperature)
        return self.kernels.linear_cross_entropy(
            hidden_ND, self.output_weights(), targets_N, softcap, observed_N, bonus_N
        )

    def _tempered(self, hidden_ND: Tensor, temperature: float) -> tuple[Tensor, float | None]:
        """Return hidden states and a cap whose capped logits are the original ones divided by the temperature.

        cap tanh(x / cap) / T = (cap / T) tanh((x / T) / (cap / T)), exactly except for the rounding of x / T.
        """
        if temperature == 1.0:
            return hidden_ND, self.softcap
        return hidden_ND / temperature, None if self.softcap is None else self.softcap / temperature

    @as_call
    def scores(
        self, hidden_ND: Tensor, targets_N: Tensor, observed_N: Tensor | None = None, bonus_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the `cross_entropy` [N] and the argmax of the same logits, int64 [N], without gradients."""
        return self.kernels.token_scores(hidden_ND, self.output_weights(), targets_N, self.softcap, observed_N, bonus_N)

    @as_call
    def divergence(self, hidden_ND: Tensor, given_ND: Tensor) -> Tensor:
        """Return KL(p || q) in nats [N]: q is predicted from `hidden_ND`, p, a constant, from `given_ND`."""
        return self.kernels.divergence(hidden_ND, given_ND, self.output_weights(), self.softcap)

    @as_call
    def likeliest(self, hidden_ND: Tensor, count: int) -> list[list[tuple[int, float]]]:
        """List the `count` likeliest tokens of each hidden state with log-probabilities in nats, likeliest first."""
        ranked = []
        for rows_ND in hidden_ND.split(LIKELIEST_ROWS):
            top = self.logits(rows_ND).log_softmax(-1).topk(min(count, self.table.shape[0]))
            ranked += [
                [*zip(*pair, strict=True)] for pair in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            ]
        return ranked

    @as_call
    def soft_embedding(self, hidden: Tensor, temperature: float = 1.0) -> Tensor:
        """Return the signal `softmax(z / T) E sqrt(D)` [..., D] of the logits z of hidden states [..., D].

        A gradient flows to the embeddings E, none through z.
        """
        flat = hidden.reshape(-1, hidden.shape[-1])
        soft = self.kernels.soft_embedding(flat, self.output_weights(), self.softcap, temperature, self._embedding())
        return soft.view(hidden.shape).mul_(self._scale(self.table.dtype))

    @as_call
    def soft_embedding_of(self, logits: Tensor) -> Tensor:
        """Return the signal `softmax(z) E sqrt(D)` [..., D] of logits z [..., V]."""
        table = self.weights()
        return upcast(logits).softmax(-1).to(table.dtype) @ table * self._scale(table.dtype)

    @as_call
    def stats(
        self,
        hidden_BLD: Tensor,
        temperature: Tensor | float,
        uniform_BL: Tensor,
        allowed_BLW: Tensor | None = None,
        shaping: Shaping | None = None,
    ) -> Stats:
        """Return the columns of `Stats` [B, L, ...] for the distribution softmax(z / T) at every position.

        temperature: one number, or one per row [B]. uniform_BL: numbers in [0, 1) that draw the samples. allowed_BLW:
        the tokens allowed at each position, int32, packed by `kernels.vocabulary.pack_allowed`. shaping: filters of the
        distribution, which apply to everything except the soft embedding.
        """
        B, L, D = hidden_BLD.shape
        if isinstance(temperature, Tensor):
            temperature = temperature[:, None].expand(B, L).reshape(-1)
        stats = self.kernels.token_stats(
            hidden_BLD.reshape(-1, D),
            self.output_weights(),
            self.softcap,
            temperature,
            uniform_BL.reshape(-1),
            None if allowed_BLW is None else allowed_BLW.flatten(0, 1),
            shaping,
            embedding_VD=self._embedding() if self.makes_signal else self.output_weights()[:, :0],
        )
        stats.soft_embedding.mul_(self._scale(self.table.dtype))
        return Stats(*(column.view(B, L, *column.shape[1:]) for column in stats))

    @as_call
    def class_stats(
        self,
        hidden_BLD: Tensor,
        temperature: Tensor | float,
        uniform_BL: Tensor,
        classes: Classes,
        penalty: Penalty | None = None,
        excluded: int | None = None,
    ) -> ClassStats:
        """Return the columns of `ClassStats` [B, L, C] for constraints: statistics of z / T in each class of tokens.

        temperature: one number, or one per row [B]. uniform_BL: numbers in [0, 1) that draw a sample within each class.
        excluded: a token of probability 0 everywhere. The soft embedding [B, L, D] depends on neither classes nor
        penalty.
        """
        B, L, D = hidden_BLD.shape
        if isinstance(temperature, Tensor):
            temperature = temperature[:, None].expand(B, L).reshape(-1)
        stats = self.kernels.class_stats(
            hidden_BLD.reshape(-1, D),
            self.output_weights(),
            self.softcap,
            temperature,
            uniform_BL.reshape(-1),
            classes,
            penalty,
            excluded,
            embedding_VD=self._embedding() if self.makes_signal else self.output_weights()[:, :0],
        )
        stats.soft_embedding.mul_(self._scale(self.table.dtype))
        return ClassStats(*(column.view(B, L, *column.shape[1:]) for column in stats))
