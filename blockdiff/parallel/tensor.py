"""Tensor parallelism: the ranks of a group run every layer together, each with its part of the heads and matrices.

A family's `tensor_parts` map the parts of its model to the way they are split. Attention is split by heads; kv heads
and index heads fewer than the ranks are on several ranks. A fused projection of queries, keys and values is whole on
every rank, which multiplies by the rows of its heads. A dense MLP is split by its inner width, experts by number, the
table by tokens (`tensor_vocabulary.py`). Norms, routers, scalars and the residual between parts are equal on all ranks.
Each part costs one all-reduce in the forward and one in the backward.

A split parameter becomes a DTensor, Shard. The `split` of its module selects the part that a rank computes with, and
does the reductions. All ranks need equal rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockdiff.errors import RunError
from blockdiff.layers.attention import Attention
from blockdiff.layers.experts import Experts
from blockdiff.layers.linear import Linear
from blockdiff.layers.mlp import MLP
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.layers.weights import local_part
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.parallel.reduce import copied, summed
from blockdiff.parallel.tensor_vocabulary import share_vocabulary
from blockdiff.tensor_pieces import keep_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def tensor_parallel(model: BlockDiffusionModel, mesh: DeviceMesh) -> None:
    """Split a model, also on the meta device, over the ranks of a mesh of one dimension, in place.

    Raises RunError as `refuse_uneven` does.
    """
    refuse_uneven(model, mesh.size())
    for _, module, kind in _parts(model):
        _SPLITS[kind](module, mesh)


def refuse_uneven(model: BlockDiffusionModel, ranks: int) -> None:
    """Raise RunError if a part of a model cannot be split evenly over `ranks` ranks; it may be on the meta device."""
    config = model.config
    if not config.tensor_parts:
        raise RunError(f"parallel.tensor: models of {config.model_type} cannot be split; leave it at 1")
    for name, module, kind in _parts(model):
        uneven = _uneven(module, kind, ranks)
        if uneven is not None:
            raise RunError(f"parallel.tensor: {ranks} does not divide the {uneven} of {name}; choose another number")


def _parts(model: BlockDiffusionModel) -> list[tuple[str, Any, str]]:
    """List the modules to split: name, module, and key of `_SPLITS`."""
    table = model.config.tensor_parts.items()
    named = list(model.named_modules())
    return [(name, module, kind) for name, module in named for part, kind in table if fnmatchcase(name, part)]


def _uneven(module: Any, kind: str, ranks: int) -> str | None:
    """Return the count in a part that `ranks` does not divide, with its noun ("3 kv heads"); None if there is none."""
    if kind == "vocabulary":
        tokens = module.table.shape[0]
        return f"{tokens} tokens" if -(-tokens // ranks) * (ranks - 1) >= tokens else None  # the last would have none
    if kind == "mlp":
        counts = {"channels": module.down_proj.in_features}
    elif kind == "experts":
        counts = {"experts": module.gate_up_proj.shape[0]}
    else:
        indexer = getattr(module, "indexer", None)
        counts = {"heads": module.heads, "kv heads": module.kv_heads, "index heads": getattr(indexer, "heads", ranks)}
    cut = {"mlp": "down_proj", "attention": "o_proj"}.get(kind)  # along its inputs
    linear = None if cut is None else getattr(module, cut)
    if linear is not None and linear.stored is not None and linear.in_features % (ranks * linear.stored.BLOCK):
        return f"{linear.in_features} inputs, in blocks of {linear.stored.BLOCK}, of {cut}"
    for noun, count in counts.items():
        is_shared = noun in ("kv heads", "index heads") and ranks % count == 0  # several ranks hold the same one
        if count % ranks and not is_shared:
            return f"{count} {noun}"
    return None


# -- a rank's part of a linear layer -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Outputs:
    """Column-parallel: each rank computes some outputs of a linear layer."""

    group: dist.ProcessGroup

    def weight(self, held: Any) -> Any:
        """Return this rank's rows."""
        return part_of(held, local_part)

    def bias(self, bias: Tensor) -> Tensor:
        """Return this rank's part."""
        return local_part(bias)

    def low_rank(self, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        """Return A, which is whole on all ranks, and this rank's rows of B."""
        return copied(A, self.group), local_part(B)

    def entering(self, x: Tensor) -> Tensor:
        """Return x; in the backward its gradient is summed over ranks."""
        return copied(x, self.group)

    def leaving(self, out: Tensor) -> Tensor:
        """Return this rank's outputs unchanged."""
        return out


@dataclass(frozen=True, eq=False)
class SharedRows(Outputs):
    """Column-parallel over a layer that is whole on all ranks, for heads that several ranks share or fused projections.

    ranges: the output rows that this rank computes.
    """

    ranges: tuple[slice, ...]

    def weight(self, held: Any) -> Any:
        """Return the rows that this rank multiplies by; in the backward their gradients are summed over ranks."""
        if isinstance(held, Tensor):
            return self._rows(copied(held, self.group))
        if len(self.ranges) == 1:
            return held.part(self.ranges[0])
        device = held[0].device
        return held.part(torch.cat([torch.arange(rows.start, rows.stop, device=device) for rows in self.ranges]))

    def bias(self, bias: Tensor) -> Tensor:
        """Return the bias of these rows."""
        return self._rows(copied(bias, self.group))

    def low_rank(self, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        """Return A and these rows of B."""
        return copied(A, self.group), self._rows(copied(B, self.group))

    def _rows(self, whole: Tensor) -> Tensor:
        parts = [whole[rows] for rows in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Row-parallel: each rank has some inputs of a linear layer and computes one term of its output."""

    group: dist.ProcessGroup
    is_first: bool  # whether this rank's term has the bias

    def weight(self, held: Any) -> Any:
        """Return this rank's columns."""
        return part_of(held, local_part)

    def bias(self, bias: Tensor) -> Tensor:
        """Return the bias on the first rank, zeros on the others."""
        return copied(bias, self.group) * self.is_first

    def low_rank(self, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's columns of A, and B, which is whole on all ranks."""
        return local_part(A), copied(B, self.group)

    def entering(self, x: Tensor) -> Tensor:
        """Return this rank's inputs unchanged."""
        return x

    def leaving(self, out: Tensor) -> Tensor:
        """Return the sum of the ranks' terms."""
        return summed(out, self.group)


def part_of(held: Any, cut: Callable[[Tensor], Tensor]) -> Any:
    """Apply `cut` to a weight, or to each tensor of a stored weight."""
    return cut(held) if isinstance(held, Tensor) else type(held)(*map(cut, held))


def _keep_parts(linear: Linear, mesh: DeviceMesh, dim: int) -> None:
    """Shard a linear layer's weight, and keep this rank's outputs (dim 0) or inputs (dim 1)."""
    held = linear.held("weight")
    tensors = [("weight", held)] if linear.stored is None else linear.named_parts("weight", held)
    for name, tensor in tensors:
        if tensor.dim() > dim and tensor.shape[dim] > 1:  # a scale for all inputs, or for all, is on every rank
            keep_part(linear, name, mesh, dim)


# -- parts -----------------------------------------------------------------------------------------------------


def _split_out(linear: Linear, mesh: DeviceMesh) -> None:
    """Split a linear layer, adapted or not, by outputs."""
    linear.out_features //= mesh.size()
    _keep_parts(linear, mesh, 0)
    for leaf in ("bias", "lora_B"):
        if linear._parameters.get(leaf) is not None:
            keep_part(linear, leaf, mesh, 0)
    linear.split = Outputs(mesh.get_group())


def _split_in(linear: Linear, mesh: DeviceMesh) -> None:
    """Split a linear layer, adapted or not, by inputs."""
    linear.in_features //= mesh.size()
    _keep_parts(linear, mesh, 1)
    if linear.low_rank is not None:
        keep_part(linear, "lora_A", mesh, 1)
    linear.split = Inputs(mesh.get_group(), mesh.get_local_rank() == 0)


def _share(linear: Linear, mesh: DeviceMesh, heads: Sequence[int], width: int) -> None:
    """Let each rank compute the outputs of some heads of each range; fewer heads than ranks are shared by several.

    heads: the number of heads in each range. width: the outputs of a head.
    """
    rank, ranges, first = mesh.get_local_rank(), [], 0
    for count in heads:
        start, local_heads = first + rank * count // mesh.size(), max(1, count // mesh.size())
        ranges.append(slice(start * width, (start + local_heads) * width))
        first += count
    linear.split = SharedRows(mesh.get_group(), tuple(ranges))
    linear.out_features = sum(each.stop - each.start for each in ranges)


def split_attention(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split attention by heads; each rank also gets the kv heads that its heads read."""
    assert isinstance(module, Attention)
    size, group = mesh.size(), mesh.get_group()
    if module.qkv_proj is not None:
        _share(module.qkv_proj, mesh, (module.heads, module.kv_heads, module.kv_heads), module.head_dim)
    else:
        _split_out(module.q_proj, mesh)
        for each in (module.k_proj, module.v_proj):
            if each is not None and module.kv_heads % size == 0:
                _split_out(each, mesh)
            elif each is not None:
                _share(each, mesh, (module.kv_heads,), module.head_dim)
    module.kv_heads = max(1, module.kv_heads // size)
    indexer = getattr(module, "indexer", None)
    if indexer is not None:
        _split_indexer(indexer, mesh)
    module.heads //= size
    for norm in (module.q_norm, module.k_norm):  # one weight for the heads of all ranks
        if norm is not None:
            norm.split = functools.partial(copied, group=group)
    _split_in(module.o_proj, mesh)


def _split_indexer(indexer: Any, mesh: DeviceMesh) -> None:
    """Split an indexer: each rank gets the index heads that select for its heads; several ranks may share one.

    The index key is whole on every rank, and the selection has no gradient.
    """
    if indexer.heads % mesh.size() == 0:
        _split_out(indexer.q_proj, mesh)
    else:
        _share(indexer.q_proj, mesh, (indexer.heads,), indexer.head_dim)
    indexer.heads = max(1, indexer.heads // mesh.size())


def split_mlp(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split a dense MLP by its inner width."""
    assert isinstance(module, MLP)
    for each in (module.gate_proj, module.up_proj):
        _split_out(each, mesh)
    _split_in(module.down_proj, mesh)


def split_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split experts by number: each rank runs its experts on all tokens, and only the sum is exchanged."""
    assert isinstance(module, Experts)
    held = module.gate_up_proj.shape[0] // mesh.size()
    for leaf in [*module._parameters, *module._buffers]:
        keep_part(module, leaf, mesh, 0)
    module.split = AllHere(mesh.get_group(), held)


@dataclass(frozen=True, eq=False)
class AllHere:
    """The `split` of `Experts` if all ranks have all tokens: each runs its experts, and the results are summed.

    held: the number of experts of a rank.
    """

    group: dist.ProcessGroup
    held: int

    def __call__(
        self,
        x_ND: Tensor,
        index_Nk: Tensor,
        weight_Nk: Tensor,
        experts: int,
        compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return the weighted sum over each token's experts; arguments as of `exchange.Exchange`."""
        index_Nk = index_Nk - self.group.rank() * self.held
        index_Nk = torch.where((index_Nk >= 0) & (index_Nk < self.held), index_Nk, self.held)
        return summed(compute(copied(x_ND, self.group), index_Nk, copied(weight_Nk, self.group)), self.group)


def split_vocabulary(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split a vocabulary by tokens: each rank gets some rows of the table and the head."""
    assert isinstance(module, Vocabulary)
    for leaf in ("table",) if module.head is None else ("table", "head"):
        keep_part(module, leaf, mesh, 0)
    share_vocabulary(module, mesh.get_group())


_SPLITS: dict[str, Callable[[nn.Module, DeviceMesh], None]] = {
    "attention": split_attention,
    "mlp": split_mlp,
    "experts": split_experts,
    "vocabulary": split_vocabulary,
}
