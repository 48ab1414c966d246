"""The vocabulary over the ranks of tensor parallelism: each has the rows of some tokens, and no logits are gathered.

Every rank runs the same ops on its rows as if they were all rows. The ranks exchange a few numbers per position: given
the log-sums of the parts, a softmax over all tokens is each part's softmax times its share. One uniform number still
draws a sample: by the shares it selects the rank, and its remainder selects the token there, so any number of ranks
draws the same tokens. Filters of a whole distribution (top-k and others, constraints, penalties) are computed equally
on every rank, with all rows of the table, which are gathered for that call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from blockdiff.kernels.autocast import upcast
from blockdiff.kernels.vocabulary import Classes, ClassStats, Penalty, Shaping, Stats
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.layers.weights import local_part
from blockdiff.parallel.reduce import copied, merged_log_sum, stacked, summed


def share_vocabulary(vocabulary: Vocabulary, group: dist.ProcessGroup) -> None:
    """Let the ranks of a group share a vocabulary whose table is split along the tokens, in place."""
    each = -(-vocabulary.table.shape[0] // group.size())
    vocabulary.split = SharedRows(group, group.rank() * each)


@dataclass(frozen=True, eq=False)
class SharedRows:
    """The `split` of a vocabulary: its ops over the ranks of a group, each of which has some rows of the table.

    All ranks make the same calls with equal arguments and get equal results. first: the token of this rank's first row.
    """

    group: dist.ProcessGroup
    first: int

    def rows(self, vocabulary: Vocabulary) -> Tensor:
        """Return this rank's rows of the table, with an adapter's trained rows in place."""
        table = local_part(vocabulary.table)
        if vocabulary.token_rows is None:
            return table
        rows = copied(vocabulary.token_rows, self.group).to(table.dtype)
        ours = [n for n, token in enumerate(vocabulary.token_ids) if 0 <= token - self.first < len(table)]
        if not ours:
            return table + 0 * rows.sum()  # every rank takes part in the sum of gradients
        places = tuple(vocabulary.token_ids[n] - self.first for n in ours)
        which, index = (vocabulary.index_on(table.device, numbers) for numbers in (tuple(ours), places))
        return table.index_copy(0, index, rows.index_select(0, which))

    def output_rows(self, vocabulary: Vocabulary) -> Tensor:
        """Return this rank's rows of the matrix that computes the logits."""
        return self.rows(vocabulary) if vocabulary.head is None else local_part(vocabulary.head)

    def least_of_ranks(self, vocabulary: Vocabulary, count: int) -> int:
        """Return the minimum of a count over the ranks."""
        least = torch.tensor(count, device=local_part(vocabulary.table).device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.group)
        return int(least)

    def embed(self, vocabulary: Vocabulary, tokens: Tensor) -> Tensor:
        """Return the scaled embeddings [..., D] of int64 tokens."""
        table = self.rows(vocabulary)
        row, is_here = self._here(tokens, table)
        x = summed(F.embedding(row, table) * is_here[..., None], self.group)
        return x if vocabulary.root == 1.0 else x * vocabulary._scale(table.dtype)

    def logits(self, vocabulary: Vocabulary, hidden: Tensor) -> Tensor:
        """Return soft-capped logits [..., V] in at least fp32, gathered, for a few tokens only; without gradients."""
        part = vocabulary.kernels.logits(hidden, self.output_rows(vocabulary), vocabulary.softcap).detach()
        each = -(-vocabulary.table.shape[0] // self.group.size())
        padded = F.pad(part, (0, each - part.shape[-1]))
        return torch.cat(list(stacked(padded, self.group)), -1)[..., : vocabulary.table.shape[0]]

    def cross_entropy(
        self,
        vocabulary: Vocabulary,
        hidden_ND: Tensor,
        targets_N: Tensor,
        observed_N: Tensor | None = None,
        bonus_N: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """Return the cross-entropy of every token in nats, [N] in at least fp32 (see `Vocabulary.cross_entropy`)."""
        hidden_ND, softcap = vocabulary._tempered(hidden_ND, temperature)
        table, hidden_ND = self.output_rows(vocabulary), copied(hidden_ND, self.group)
        favoured = self._favoured(observed_N, bonus_N, table)
        log_sum_N = vocabulary.kernels.linear_cross_entropy(hidden_ND, table, None, softcap, *favoured)
        place_N, is_here_N = self._here(targets_N, table)
        z_N = (hidden_ND * table[place_N]).sum(-1).to(log_sum_N.dtype)
        if softcap is not None:
            z_N = softcap * torch.tanh(z_N / softcap)
        of_target_N = summed(z_N * is_here_N, self.group)
        if observed_N is not None and bonus_N is not None:
            of_target_N = of_target_N + bonus_N * (observed_N == targets_N)
        return merged_log_sum(log_sum_N, self.group) - of_target_N

    @torch.no_grad()
    def scores(
        self,
        vocabulary: Vocabulary,
        hidden_ND: Tensor,
        targets_N: Tensor,
        observed_N: Tensor | None = None,
        bonus_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the `cross_entropy` [N] and the argmax of the same logits, int64 [N], without gradients."""
        table = self.output_rows(vocabulary)
        place_N, is_here_N = self._here(targets_N, table)
        favoured = self._favoured(observed_N, bonus_N, table)
        log_sum_N = vocabulary.kernels.linear_cross_entropy(hidden_ND, table, None, vocabulary.softcap, *favoured)
        loss_N, argmax_N = vocabulary.kernels.token_scores(hidden_ND, table, place_N, vocabulary.softcap, *favoured)
        least_N, _ = vocabulary.kernels.token_scores(hidden_ND, table, argmax_N, vocabulary.softcap, *favoured)
        columns = (log_sum_N, log_sum_N - least_N, (log_sum_N - loss_N) * is_here_N, argmax_N + self.first)
        log_sum_RN, peak_RN, target_RN, argmax_RN = _gathered_columns(columns, self.group)
        best_N = peak_RN.argmax(0)
        loss_N = (log_sum_RN.logsumexp(0) - target_RN.sum(0)).to(loss_N.dtype)
        return loss_N, argmax_RN.gather(0, best_N[None])[0].long()

    def divergence(self, vocabulary: Vocabulary, hidden_ND: Tensor, given_ND: Tensor) -> Tensor:
        """Return KL(p || q) in nats [N], as `Vocabulary.divergence` does; the table is gathered for it."""
        return self._of_all(vocabulary).divergence(hidden_ND, given_ND)

    def soft_embedding(self, vocabulary: Vocabulary, hidden: Tensor, temperature: float = 1.0) -> Tensor:
        """Return the signal `softmax(z / T) E sqrt(D)` [..., D]; a gradient flows to E, none through the logits z."""
        rows, flat = self.output_rows(vocabulary), hidden.reshape(-1, hidden.shape[-1]).detach()
        log_sum_N, _ = vocabulary.kernels.log_sums(flat, rows.detach(), vocabulary.softcap, temperature)
        share_N = (log_sum_N - stacked(log_sum_N, self.group).logsumexp(0)).exp()
        part = vocabulary.kernels.soft_embedding(
            flat, rows, vocabulary.softcap, temperature, embedding_VD=self._embedding(vocabulary)
        )
        soft = summed(part * share_N[:, None], self.group).to(rows.dtype).view(hidden.shape)
        return soft * vocabulary._scale(rows.dtype)

    def soft_embedding_of(self, vocabulary: Vocabulary, logits: Tensor) -> Tensor:
        """Return the signal `softmax(z) E sqrt(D)` [..., D] of logits z [..., V]."""
        table = self.rows(vocabulary)
        p = upcast(logits).softmax(-1).to(table.dtype)[..., self.first : self.first + len(table)]
        return summed(p @ table, self.group) * vocabulary._scale(table.dtype)

    @torch.no_grad()
    def stats(
        self,
        vocabulary: Vocabulary,
        hidden_BLD: Tensor,
        temperature: Tensor | float,
        uniform_BL: Tensor,
        allowed_BLW: Tensor | None = None,
        shaping: Shaping | None = None,
    ) -> Stats:
        """Return the columns of `Stats`, as `Vocabulary.stats` does; for `shaping` the table is gathered."""
        if shaping is not None:
            return self._of_all(vocabulary).stats(hidden_BLD, temperature, uniform_BL, allowed_BLW, shaping)
        B, L, D = hidden_BLD.shape
        table, hidden_ND, uniform_N = self.output_rows(vocabulary), hidden_BLD.reshape(-1, D), uniform_BL.reshape(-1)
        if isinstance(temperature, Tensor):
            temperature = temperature[:, None].expand(B, L).reshape(-1)
        allowed_NW = None if allowed_BLW is None else words_from(allowed_BLW.flatten(0, 1), self.first, len(table))
        log_sum_N, peak_N = vocabulary.kernels.log_sums(hidden_ND, table, vocabulary.softcap, temperature, allowed_NW)
        log_sum_RN, peak_RN = _gathered_columns((log_sum_N, peak_N), self.group)
        log_share_RN = log_sum_RN - log_sum_RN.logsumexp(0)
        chosen_N, own_N = _rank_of(uniform_N, log_share_RN.exp(), self.group.rank())

        if allowed_NW is not None:  # if none of a rank's tokens is allowed, its statistics have weight 0
            allowed_NW = torch.where((allowed_NW != 0).any(-1, keepdim=True), allowed_NW, -1)
        stats = vocabulary.kernels.token_stats(
            hidden_ND,
            table,
            vocabulary.softcap,
            temperature,
            own_N.to(uniform_N.dtype),
            allowed_NW,
            embedding_VD=self._embedding(vocabulary) if vocabulary.makes_signal else table[:, :0],
        )
        log_share_N = log_share_RN[self.group.rank()]
        share_N = log_share_N.exp()
        weighed = (share_N * (stats.entropy - log_share_N)).masked_fill(share_N == 0, 0.0)
        is_sampled_N = chosen_N == self.group.rank()
        columns = (
            weighed,
            stats.argmax + self.first,
            stats.sample + self.first,
            torch.where(is_sampled_N, stats.log_probability + log_share_N, 0.0),
            stats.best_log_probability,
        )
        weighed_RN, argmax_RN, sample_RN, log_probability_RN, of_part_RN = _gathered_columns(columns, self.group)
        own_RN = peak_RN * temperature  # of each rank's best token, by the model's own logits
        best_N = (own_RN.amax(0) - (own_RN - of_part_RN).logsumexp(0)).to(stats.entropy.dtype)
        argmax_N = argmax_RN.gather(0, peak_RN.argmax(0)[None])[0].long()
        sample_N = sample_RN.gather(0, chosen_N[None])[0].long()
        soft_ND = summed(stats.soft_embedding * share_N[:, None], self.group).to(table.dtype) * vocabulary._scale(
            table.dtype
        )
        entropy_N, log_probability_N = (x.sum(0).to(stats.entropy.dtype) for x in (weighed_RN, log_probability_RN))
        all_ = Stats(entropy_N, argmax_N, sample_N, soft_ND, log_probability_N, argmax_N, best_N)
        return Stats(*(column.view(B, L, *column.shape[1:]) for column in all_))

    def class_stats(
        self,
        vocabulary: Vocabulary,
        hidden_BLD: Tensor,
        temperature: Tensor | float,
        uniform_BL: Tensor,
        classes: Classes,
        penalty: Penalty | None = None,
        excluded: int | None = None,
    ) -> ClassStats:
        """Return the columns of `ClassStats`, as `Vocabulary.class_stats` does; the table is gathered for it."""
        return self._of_all(vocabulary).class_stats(hidden_BLD, temperature, uniform_BL, classes, penalty, excluded)

    def _embedding(self, vocabulary: Vocabulary) -> Tensor | None:
        """Return this rank's rows of the table if the head is separate, None if the table also computes the logits."""
        return None if vocabulary.head is None else self.rows(vocabulary)

    # -- parts -------------------------------------------------------------------------------------------------

    def _of_all(self, vocabulary: Vocabulary) -> Vocabulary:
        """Gather the rows of all ranks into a temporary vocabulary; all ranks must call it."""
        tokens, width = vocabulary.table.shape
        with torch.device("meta"):
            one = Vocabulary(
                tokens, width, vocabulary.softcap, vocabulary.kernels, vocabulary.root, vocabulary.head is None
            )
        one.table = nn.Parameter(self._rows_of_all(vocabulary, self.rows(vocabulary)), requires_grad=False)
        if vocabulary.head is not None:
            one.head = nn.Parameter(self._rows_of_all(vocabulary, local_part(vocabulary.head)), requires_grad=False)
        one.makes_signal = vocabulary.makes_signal
        return one

    def _rows_of_all(self, vocabulary: Vocabulary, rows: Tensor) -> Tensor:
        """Gather the rows of all ranks; the last rank may have fewer."""
        each = -(-vocabulary.table.shape[0] // self.group.size())
        padded = F.pad(rows.detach(), (0, 0, 0, each - len(rows)))
        return stacked(padded, self.group).flatten(0, 1)[: vocabulary.table.shape[0]]

    def _here(self, tokens: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of tokens in this rank's rows (0 for tokens of other ranks), and which are here."""
        row = tokens - self.first
        is_here = (row >= 0) & (row < len(table))
        return torch.where(is_here, row, 0), is_here

    def _favoured(
        self, observed_N: Tensor | None, bonus_N: Tensor | None, table: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return observed tokens as indices in this rank's rows, and their bonus, 0 for tokens of other ranks."""
        if observed_N is None or bonus_N is None:
            return None, None
        place_N, is_here_N = self._here(observed_N, table)
        return place_N, bonus_N * is_here_N


def words_from(allowed_NW: Tensor, first: int, count: int) -> Tensor:
    """Return the packed mask of `count` tokens from `first` on, cut out of a packed mask of all tokens."""
    word, bit = divmod(first, 32)
    words = -(-count // 32)
    wide = F.pad(allowed_NW.long() & 0xFFFFFFFF, (0, max(0, word + words + 1 - allowed_NW.shape[1])))
    low, high = wide[:, word : word + words], wide[:, word + 1 : word + words + 1]
    cut = ((low >> bit) | (high << (32 - bit))) & 0xFFFFFFFF
    if count % 32:
        cut[:, -1] &= (1 << count % 32) - 1
    return torch.where(cut >> 31 > 0, cut - (1 << 32), cut).int()


def _rank_of(uniform_N: Tensor, share_RN: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the rank that each uniform number selects by the shares, and its remainder in [0, 1) for `rank`."""
    share_RN, uniform_N = share_RN.double(), uniform_N.double()
    end_RN = share_RN.cumsum(0)
    threshold_N = uniform_N * end_RN[-1]
    last_N = (share_RN > 0).long().cumsum(0).argmax(0)
    chosen_N = torch.minimum((end_RN <= threshold_N).sum(0), last_N)
    rest_N = (threshold_N - (end_RN[rank] - share_RN[rank])) / share_RN[rank].clamp(min=1e-300)
    return chosen_N, rest_N.clamp(0.0, 1.0 - 2**-24)


def _gathered_columns(columns: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Gather columns [N] in one exchange; return each as [ranks, N] in fp64, in which token ids are exact."""
    return list(stacked(torch.stack([column.double() for column in columns]), group).unbind(1))
