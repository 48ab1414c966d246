"""The two routers of mixture-of-experts layers, and the routed experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdiff.kernels import IN_TORCH, Kernels
from blockdiff.kernels.autocast import upcast, without_autocast
from blockdiff.kernels.expert_mlp import Slots
from blockdiff.kernels.stored import StoredMatrix
from blockdiff.layers.linear import Linear
from blockdiff.layers.weights import HasWeights, local_part

# (tokens [N, D], index [N, k], weight [N, k], number of experts, function that computes the local experts) -> the
# weighted sums [N, D] over the experts of all ranks.
Exchange = Callable[[Tensor, Tensor, Tensor, int, Callable[[Tensor, Tensor, Tensor], Tensor]], Tensor]


class Router(nn.Module):
    """Top-k routing of normed tokens: scale, project in the model's dtype, softmax in fp32, renormalise the top k."""

    def __init__(self, hidden: int, experts: int, top_k: int, kernels: Kernels = IN_TORCH):
        super().__init__()
        self.proj = Linear(hidden, experts, bias=False)
        self.scale = nn.Parameter(torch.ones(hidden))
        self.per_expert_scale = nn.Parameter(torch.ones(experts))
        self.top_k, self.kernels = top_k, kernels
        self.root = hidden**-0.5

    def forward(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Return expert index int64 [N, k] and weight [N, k] of N tokens [..., D], which were normed without weight.

        The weights include the scale per expert.
        """
        weight: Tensor = self.proj.weight
        if self.proj.low_rank is not None:  # from an adapter that PEFT has trained
            weight = (weight + self.proj.low_rank.scale * (self.proj.lora_B @ self.proj.lora_A)).to(weight.dtype)
        return self.kernels.routed_tokens(normed, self.scale, self.root, weight, self.per_expert_scale, self.top_k)


class SigmoidRouter(nn.Module):
    """Top-k routing by sigmoid scores: experts are chosen by score plus bias, weighted by score, renormalised, scaled.

    groups, top_groups: experts form `groups` groups of neighbours, and a token chooses among the `top_groups` groups
    whose two best experts have the largest sums. is_wide: whether the projection is computed in at least fp32. The bias
    has at least fp32 in a model of any dtype (see `layers.weights.is_wide`).
    """

    bias: Tensor

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        scale: float,
        groups: int = 1,
        top_groups: int = 1,
        is_wide: bool = False,
    ):
        super().__init__()
        self.proj = Linear(hidden, experts, bias=False)
        self.register_buffer("bias", torch.zeros(experts))
        self.top_k, self.factor, self.is_wide = top_k, scale, is_wide
        self.groups, self.top_groups = groups, top_groups

    def forward(self, normed_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return expert index int64 [N, k] and weight [N, k] in at least fp32; no gradient flows through the choice."""
        scores = self._logits(normed_ND).sigmoid()
        index = self._mask_groups(scores.detach() + self.bias).topk(self.top_k, dim=-1).indices
        weight = scores.gather(-1, index)
        return index, weight / weight.sum(-1, keepdim=True) * self.factor

    def _logits(self, normed_ND: Tensor) -> Tensor:
        if not self.is_wide:
            return upcast(self.proj(normed_ND))
        with without_autocast(normed_ND):
            weight = upcast(self.proj.weight)
            if self.proj.low_rank is not None:  # from an adapter that PEFT has trained
                weight = weight + self.proj.low_rank.scale * (self.proj.lora_B @ self.proj.lora_A)
            return F.linear(upcast(normed_ND), weight)

    def _mask_groups(self, choice_NE: Tensor) -> Tensor:
        """Set the scores of experts outside each token's best groups to -inf."""
        if self.top_groups == self.groups:
            return choice_NE
        choice_NGe = choice_NE.unflatten(-1, (self.groups, -1))
        best_NG = choice_NGe.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1).indices
        is_out_NG = torch.ones_like(choice_NGe[..., 0], dtype=torch.bool).scatter(-1, best_NG, False)
        return choice_NGe.masked_fill(is_out_NG[..., None], float("-inf")).flatten(-2)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Cast and move the module, but never cast the bias below fp32."""
        old = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype.itemsize < 4:
            self.bias = upcast(self.bias if old.device.type == "meta" else old).to(self.bias.device)
        return self


class Experts(HasWeights):
    """The weights of all experts in the Hub's layout: gate_up [E, 2F, D] with gate rows first, down [E, D, F].

    Each expert has its own adapter on gate_up and on down, computed as grouped low-rank products. split: the exchange
    of tokens between ranks if each has some of the experts (`parallel/exchange.py`); the weights are DTensors then.
    """

    WEIGHTS: ClassVar = {"gate_up_proj": "gate_up_", "down_proj": "down_"}
    split: Exchange | None = None
    gate_up_lora_A: nn.Parameter
    gate_up_lora_B: nn.Parameter
    down_lora_A: nn.Parameter
    down_lora_B: nn.Parameter

    def __init__(self, experts: int, hidden: int, intermediate: int, kernels: Kernels, activation: str = "gelu_tanh"):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate))
        self.kernels, self.activation = kernels, activation

    def forward(
        self,
        x: Tensor,
        index_Nk: Tensor,
        weight_Nk: Tensor,
        padding_N: Tensor | None = None,
        is_noisy: bool | Tensor = False,
        as_slots: bool = False,
    ) -> Any:
        """Return the weighted sum [N, D] over each token's experts, of N tokens [..., D]; 0 for padding tokens.

        is_noisy: as in `Linear.forward`. as_slots: return `Slots`, where the sum may be left to `Kernels.layer_end`.
        """
        experts, x_ND = self.gate_up_proj.shape[0], x.flatten(0, -2)
        index_Nk = without_padding(index_Nk, padding_N, experts)
        adapts = self.adapts(is_noisy)
        if as_slots and self.split is None and not self._adapts_some(is_noisy):
            gate_up, down = self.matrices()
            low_rank = self.low_rank_matrices() if adapts else ()
            return self.kernels.expert_slots(x, gate_up, down, index_Nk, weight_Nk, self.activation, low_rank)
        if self._adapts_some(is_noisy):  # clean tokens run without adapters, noisy tokens with them
            assert isinstance(is_noisy, Tensor)
            is_noisy_N = is_noisy.flatten()
            clean_Nk, noisy_Nk = (without_padding(index_Nk, each, experts) for each in (is_noisy_N, ~is_noisy_N))
            summed_ND = self._summed(x_ND, clean_Nk, weight_Nk, False) + self._summed(x_ND, noisy_Nk, weight_Nk, True)
        else:
            summed_ND = self._summed(x_ND, index_Nk, weight_Nk, adapts)
        return Slots(summed_ND.unsqueeze(1), None, 0) if as_slots else summed_ND

    def _adapts_some(self, is_noisy: bool | Tensor) -> bool:
        """Whether the adapters may act on some tokens of a call and not on others."""
        return isinstance(is_noisy, Tensor) and self.low_rank is not None and self.low_rank.noisy_only

    def _summed(self, x_ND: Tensor, index_Nk: Tensor, weight_Nk: Tensor, adapts: bool) -> Tensor:
        """Return the weighted sum [N, D] over the experts of all ranks."""
        compute = partial(self.computed, adapts=adapts)
        if self.split is None:
            return compute(x_ND, index_Nk, weight_Nk)
        return self.split(x_ND, index_Nk, weight_Nk, self.gate_up_proj.shape[0], compute)

    def slots(
        self,
        x: Tensor,
        index_Nk: Tensor,
        weight_Nk: Tensor,
        padding_N: Tensor | None = None,
        is_noisy: bool | Tensor = False,
    ) -> Slots:
        """Return `forward` as `Slots`; it calls the module, so that hooks gather sharded weights."""
        slots: Slots = self(x, index_Nk, weight_Nk, padding_N, is_noisy, True)
        return slots

    def computed(self, x_ND: Tensor, index_Nk: Tensor, weight_Nk: Tensor, adapts: bool) -> Tensor:
        """Return the weighted sum [N, D] over this rank's experts, index 0 being the first of them.

        adapts: whether the adapters take part.
        """
        gate_up, down = self.matrices()
        low_rank = self.low_rank_matrices() if adapts else ()
        return self.kernels.expert_mlp(x_ND, gate_up, down, index_Nk, weight_Nk, self.activation, low_rank)

    def matrices(self) -> tuple[Tensor | StoredMatrix, Tensor | StoredMatrix]:
        """Return gate_up and down of this rank's experts."""
        return self.held_here("gate_up_proj"), self.held_here("down_proj")

    def low_rank_matrices(self) -> Sequence[Tensor]:
        """Return A and B of gate_up and A and B of down of this rank's experts, the B scaled; () without an adapter.

        They are in the dtype of the weights; if those are stored, the expert op casts them.
        """
        if self.low_rank is None:
            return ()
        scale, dtype = self.low_rank.scale, self.down_lora_B.dtype if self.stored else self.down_proj.dtype
        return (
            local_part(self.gate_up_lora_A).to(dtype),
            (local_part(self.gate_up_lora_B) * scale).to(dtype),
            local_part(self.down_lora_A).to(dtype),
            (local_part(self.down_lora_B) * scale).to(dtype),
        )


def without_padding(index_Nk: Tensor, padding_N: Tensor | None, experts: int) -> Tensor:
    """Replace the experts of padding tokens by `experts`, which means no expert."""
    return index_Nk if padding_N is None else index_Nk.masked_fill(padding_N[:, None], experts)
