"""The vocabulary: the table of embeddings, the head that may be the same, and every op that touches [tokens, V]."""

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

LIKELIEST_ROWS = 32  # whose logits `likeliest` holds at once
_P = ParamSpec("_P")
_T = TypeVar("_T")
_V = TypeVar("_V", bound="Vocabulary")


def as_call(method: Callable[Concatenate[_V, _P], _T]) -> Callable[Concatenate[_V, _P], _T]:
    """Run a method as a call of the module, around which FSDP2 gathers and shards the table."""

    @functools.wraps(method)
    def call(self: _V, *args: _P.args, **named: _P.kwargs) -> Any:
        return self(method, *args, **named)

    return call


@functools.cache
def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float32, device="cpu").to(dtype))


class Vocabulary(nn.Module):
    """Table [V, D] of embeddings and (soft-capped) logits; holds one chunk of logits at a time.

    split: how ranks share the rows, each with some of them (`parallel/tensor_vocabulary.py`); token_rows: its adapter.
    scale: what embeddings are multiplied by (None: sqrt(D)); is_tied: whether the table makes the logits, too; else
    that is a `head` [V, D] of its own. makes_signal: whether statistics have the soft embedding, which has the width
    `signal_width`.
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
        # of an adapter: [len(token_ids), D], which stand for rows of the table
        self.register_parameter("token_rows", None)

    def train_rows(self, token_ids: Sequence[int]) -> None:
        """Let rows of the table train while the others stand still; they have no values yet."""
        self.token_ids = tuple(token_ids)
        shape = len(self.token_ids), self.table.shape[1]
        self.token_rows = nn.Parameter(torch.empty(shape, device=self.table.device))

    @torch.no_grad()
    def merge_rows(self) -> None:
        """Write the rows that trained into the table."""
        if self.token_rows is not None:
            self.table = nn.Parameter(self.weights().detach(), requires_grad=False)
        self.token_ids, self.token_rows = (), None

    def weights(self) -> Tensor:
        """The table that counts: with the rows that train, a copy of it with them."""
        if self.token_rows is None:
            return self.table
        index = self.index_on(self.table.device, self.token_ids)
        return self.table.index_copy(0, index, self.token_rows.to(self.table.dtype))

    def index_on(self, device: torch.device, numbers: tuple[int, ...]) -> Tensor:
        """Numbers as int64 on a device, copied there once: the host would wait for a copy, and no graph can hold it."""
        key = device, numbers
        if key not in self._indices:
            self._indices[key] = torch.tensor(numbers, dtype=torch.int64, device=device)
        return self._indices[key]

    def all_but(self, token: int, device: torch.device) -> Tensor:
        """The packed set [1, W] of all tokens but one, made once: captured graphs read it at its address."""
        if (device, token) not in self._all_but:
            tokens_V = torch.arange(self.table.shape[0], device=device)
            self._all_but[device, token] = pack_allowed((tokens_V != token)[None])
        return self._all_but[device, token]

    def least_of_ranks(self, count: int) -> int:
        """The least of a count over the ranks that share the table."""
        return count if self.split is None else self.split.least_of_ranks(self, count)

    def output_weights(self) -> Tensor:
        """The weights that make the logits: the head, or the table where it is tied."""
        return self.weights() if self.head is None else self.head

    def _embedding(self) -> Tensor | None:
        """The embeddings, where they are not the rows that make the logits."""
        return None if self.head is None else self.weights()

    @property
    def signal_width(self) -> int:
        """The width of the soft embedding that statistics have: 0 if the model reads none."""
        return self.table.shape[1] if self.makes_signal else 0

    def forward(self, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Every op of this module passes through here, and with `split` on to its op of that name, if it has one."""
        return getattr(self.split, method.__name__, method)(self, *args, **named)

    def _scale(self, dtype: torch.dtype) -> float:
        """sqrt(D) rounded to fp32 and then to the table's dtype: 53.0, not 53.066, for D = 2816 in bf16."""
        return _rounded(self.root, dtype)

    @as_call
    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., D] of int64 tokens."""
        x = F.embedding(tokens, self.weights())
        return x if self.root == 1.0 else x * self._scale(self.table.dtype)

    @as_call
    def logits(self, hidden: Tensor) -> Tensor:
        """Soft-capped logits [..., V], in fp32 at least: a convenience for few tokens."""
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
        """Cross-entropy of every token in nats, [N] in fp32 at least.

        temperature: what the soft-capped logits are divided by. observed_N: int64 tokens whose soft-capped logit gets
        bonus_N (fp32, 0 to 40) before the softmax. A model that predicts each token from the others alone learns with
        bonus log(1 + alpha V / (1 - alpha)) on the noisy token.
        """
        hidden_ND, softcap = self._tempered(hidden_ND, temperature)
        return self.kernels.linear_cross_entropy(
            hidden_ND, self.output_weights(), targets_N, softcap, observed_N, bonus_N
        )

    def _tempered(self, hidden_ND: Tensor, temperature: float) -> tuple[Tensor, float | None]:
        """Hidden states and a cap whose capped logits are those of the given ones over the temperature.

        cap tanh(x / cap) / T = (cap / T) tanh((x / T) / (cap / T)), to the last bit but for the rounding of x / T.
        """
        if temperature == 1.0:
            return hidden_ND, self.softcap
        return hidden_ND / temperature, None if self.softcap is None else self.softcap / temperature

    @as_call
    def scores(
        self, hidden_ND: Tensor, targets_N: Tensor, observed_N: Tensor | None = None, bonus_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The losses of `cross_entropy` [N] and the argmax of the same logits, int64 [N]; no gradients."""
        return self.kernels.token_scores(hidden_ND, self.output_weights(), targets_N, self.softcap, observed_N, bonus_N)

    @as_call
    def divergence(
        self, hidden_ND: Tensor, given_ND: Tensor, given_by: Vocabulary | None = None, top: int | None = None
    ) -> Tensor:
        """KL(p || q) in nats [N] of the predictions q from hidden states and p from given ones, which are constants.

        given_by: the vocabulary that predicts p (None: this one); top: the number of tokens that p has (None: all).
        """
        head = None if given_by is None else (given_by.output_weights(), given_by.softcap)
        return self.kernels.divergence(hidden_ND, given_ND, self.output_weights(), self.softcap, head, top)

    @as_call
    def likeliest(self, hidden_ND: Tensor, count: int) -> list[list[tuple[int, float]]]:
        """The most probable tokens of each hidden state with their log-probabilities in nats, the likeliest first."""
        found = []
        for some_ND in hidden_ND.split(LIKELIEST_ROWS):
            top = self.logits(some_ND).log_softmax(-1).topk(min(count, self.table.shape[0]))
            found += [
                [*zip(*pair, strict=True)] for pair in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            ]
        return found

    @as_call
    def soft_embedding(self, hidden: Tensor, temperature: float = 1.0) -> Tensor:
        """`softmax(z / T) E sqrt(D)` [..., D] of the logits z of hidden states [..., D].

        A gradient flows to E, none through z: the signal is given, how it is embedded is learnt.
        """
        flat = hidden.reshape(-1, hidden.shape[-1])
        given = self.output_weights(), self.softcap, temperature, self._embedding()
        soft = self.kernels.soft_embedding(flat, *given)
        return soft.view(hidden.shape).mul_(self._scale(self.table.dtype))

    @as_call
    def soft_embedding_of(self, logits: Tensor) -> Tensor:
        """`softmax(z) E sqrt(D)` [..., D] of given logits [..., V]."""
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
        """Entropy, argmax, sample with its log-probability and soft embedding of z / T at every position, in one sweep.

        temperature: one number, or one per row [B]; uniform_BL: numbers in [0, 1) that pick the samples; allowed_BLW:
        the tokens allowed at each position, int32, packed by `kernels.vocabulary.pack_allowed`; shaping: the filters of
        the distribution that all but the soft embedding are of.
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
        """For constraints: statistics of every class of tokens of z / T at every position, each [B, L, C].

        temperature: one number, or one per row [B]; uniform_BL: numbers in [0, 1) that pick a sample within each class;
        excluded: a token that no distribution has. The soft embedding [B, L, D] is the model's own.
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
