"""What a rank holds of a model whose weights are spread over the ranks as a recipe says, and how it runs its experts.

Only for plans: tensors have no memory here, and nothing is exchanged. `blockdiff.parallel` does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from blockdiff.errors import RecipeError
from blockdiff.layers.experts import Experts
from blockdiff.layers.fp8 import is_scale
from blockdiff.models.adapters import is_adapter
from blockdiff.models.family import BlockDiffusionModel, family_of
from blockdiff.training.optimiser import matrices_of
from blockdiff.training.plan.work import Work
from blockdiff.training.recipe import Recipe


class Spread:
    """A rank's part of a model without memory."""

    def __init__(self, recipe: Recipe, model: BlockDiffusionModel, ranks: int) -> None:
        self.recipe, self.model, self.ranks = recipe, model, ranks
        self.is_sharded = recipe.parallel.shard == "full"
        self.splits = recipe.parallel.experts
        if ranks % self.splits:
            raise RecipeError(f"parallel.experts: {self.splits} does not divide the {ranks} processes")

    def split_experts(self, work: Work) -> None:
        """Leave the model the experts that the rank has, in place; what they exchange is added to `work`."""
        for module in self.model.modules():
            if isinstance(module, Experts) and self.splits > 1:
                self._split(module, work)

    def units(self) -> list[tuple[nn.Module, int]]:
        """The modules whose weights are gathered together, inner ones first, and how many ranks share them."""
        units = family_of(self.model.config).units(self.model)
        return [(unit, self.ranks // self.splits if isinstance(unit, Experts) else self.ranks) for unit in units]

    def replicated(self, trained: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Those of the parameters that train whose gradients ranks exchange; none with one rank."""
        split = {id(x) for module in self.model.modules() if isinstance(module, Experts) for x in module.parameters()}
        apart = split if self.splits > 1 else set()
        return [x for x in trained if self.ranks > 1 and id(x) not in apart]

    def parts(self, objective: nn.Module, stored: torch.dtype, computed: torch.dtype) -> dict[str, int]:
        """Bytes that a rank keeps all the time, by what they hold; `objective` still has all experts.

        stored: the dtype of its weights; computed: the one they run in. Adapters have fp32 at least.
        """
        of_experts = {id(x) for module in self.model.modules() if isinstance(module, Experts) for x in module.buffers()}
        buffers = [(_size(name, x, stored), id(x) in of_experts) for name, x in objective.named_buffers()]
        parts = {"weights": sum(size // self.splits if is_split else size for size, is_split in buffers)}
        optim, wide = self.recipe.optim, torch.promote_types(stored, torch.float32)
        for name, parameter, count in self._pieces(objective):
            is_ours = is_adapter(name)
            dtype = wide if is_ours else stored
            masters = parameter.requires_grad and dtype != computed and not is_ours
            kept = {"adapters" if is_ours else "masters" if masters else "weights": count * dtype.itemsize}
            if parameter.requires_grad:
                one_moment = optim.name == "muon" and matrices_of(name, parameter) > 0
                moments = (1 if one_moment else 2) * (1 if optim.name == "adamw_8bit" else dtype.itemsize)
                kept |= {"gradients": count * dtype.itemsize, "optimiser": count * moments}
                kept |= {"average": count * 4} if optim.ema is not None else {}
            for part, more in kept.items():
                parts[part] = parts.get(part, 0) + more
        order = ("weights", "masters", "adapters", "gradients", "optimiser", "average")
        return {part: parts[part] for part in order if parts.get(part)}

    def _pieces(self, objective: nn.Module) -> Iterator[tuple[str, nn.Parameter, int]]:
        """Every parameter by its name in the model, and how many of its numbers a rank has."""
        ranks = {id(x): 1 for x in objective.parameters()}
        if self.is_sharded:
            for unit, count in reversed(self.units()):
                ranks |= {id(x): count for x in unit.parameters()}
        experts = {id(x) for module in self.model.modules() if isinstance(module, Experts) for x in module.parameters()}
        for name, x in objective.named_parameters():
            rows = x.shape[0] if x.dim() else 1
            if self.splits > 1 and id(x) in experts:  # whole experts, of which a dimension after theirs is sharded
                count = -(-x.numel() // self.splits // ranks[id(x)])
            else:
                count = -(-rows // ranks[id(x)]) * (x.numel() // max(1, rows))
            yield name.removeprefix("model."), x, count

    def _split(self, experts: Experts, work: Work) -> None:
        """Leave a rank its share of the experts, which run the tokens that other ranks send."""
        whole = experts.gate_up_proj.shape[0]
        if whole % self.splits:
            raise RecipeError(f"parallel.experts: {self.splits} does not divide the {whole} experts of a layer")
        for name, x in [*experts.named_parameters(recurse=False), *experts.named_buffers(recurse=False)]:
            piece = torch.empty(whole // self.splits, *x.shape[1:], dtype=x.dtype, device=x.device)
            setattr(experts, name, nn.Parameter(piece, x.requires_grad) if isinstance(x, nn.Parameter) else piece)
        experts.exchange = partial(self._exchanged, work)

    def _exchanged(
        self, work: Work, x_ND: Tensor, index_Nk: Tensor, weight_Nk: Tensor, experts: int,
        compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        """The experts' results of tokens that travel as in `parallel/exchange.py`: as many come as go."""
        (N, k), D = index_Nk.shape, x_ND.shape[1]
        distinct = self.splits * (1 - (1 - 1 / self.splits) ** k)  # ranks that a token's experts lie on
        M = min(N * self.splits, math.ceil(N * distinct))
        token = torch.arange(M) % N
        x_MD = x_ND.index_select(0, token).clone()  # what goes, and what comes
        weight_Mk = weight_Nk.index_select(0, token).clone()
        slot = torch.arange(M * k)
        index_Mk = torch.where(slot < N * k, slot % experts, experts).view(M, k)
        y_MD = compute(x_MD, index_Mk, weight_Mk).clone()
        directions = 4 if torch.is_grad_enabled() else 2
        work.exchanged += directions * y_MD.nbytes * (self.splits - 1) / self.splits
        total = x_ND.new_zeros(N, D, dtype=torch.promote_types(y_MD.dtype, torch.float32))
        return total.index_add(0, token, y_MD.to(total.dtype)).to(y_MD.dtype)


def _size(name: str, x: Tensor, dtype: torch.dtype) -> int:
    """Bytes of a buffer kept in a dtype; tensors in fp8 and their scales have their own."""
    return x.nbytes if not x.is_floating_point() or is_scale(name) else x.numel() * dtype.itemsize
