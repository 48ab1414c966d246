"""Tensor parallelism: the ranks of a group run every layer together, each with its part of the heads and matrices.

What a part of a family's model becomes stands in its `tensor_parts`; layers know nothing of it. Attention is split by
heads, with kv heads and index heads that are fewer than ranks held by several; a dense MLP by its inner width; experts
are split as whole ones; the table by tokens (`tensor_vocabulary.py`). Norms, routers and scalars are the same on all
ranks, as is the residual between the parts. Each part costs one all-reduce forward and one backward.

A parameter that is split becomes a DTensor, Shard; its local part is what the layer sees. All ranks need equal rows.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockdiff.errors import RunError
from blockdiff.layers.attention import Attention
from blockdiff.layers.experts import Experts, local_part
from blockdiff.layers.fp8 import SCALE, InFp8
from blockdiff.layers.mlp import MLP, SelfConditioning
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.models.family import family_of
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.parallel.reduce import copied, summed
from blockdiff.parallel.tensor_vocabulary import share_vocabulary
from blockdiff.tensor_pieces import keep_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Seen = Callable[[Tensor], Tensor]  # a rank's own tensor -> what the layer computes with


def tensor_parallel(model: BlockDiffusionModel, mesh: DeviceMesh) -> None:
    """Split a model, with weights or without memory, over the ranks of a mesh of one dimension, in place.

    Raises RunError as `refuse_uneven` does.
    """
    refuse_uneven(model, mesh.size())
    for _, module, kind in _parts(model):
        _SPLITS[kind](module, mesh)


def refuse_uneven(model: BlockDiffusionModel, ranks: int) -> None:
    """Raise RunError where so many ranks do not divide what `tensor_parallel` splits; the model needs no memory."""
    family = family_of(model.config)
    if not family.tensor_parts:
        raise RunError(f"parallel.tensor: models of {family.model_type} cannot be split; leave it at 1")
    for name, module, kind in _parts(model):
        uneven = _uneven(module, kind, ranks)
        if uneven is not None:
            raise RunError(f"parallel.tensor: {ranks} does not divide the {uneven} of {name}; choose another number")


def _parts(model: BlockDiffusionModel) -> list[tuple[str, Any, str]]:
    """The modules that are split: name, module, and the key of `_SPLITS`."""
    table = family_of(model.config).tensor_parts.items()
    named = list(model.named_modules())
    return [(name, module, kind) for name, module in named for part, kind in table if fnmatchcase(name, part)]


def _uneven(module: Any, kind: str, ranks: int) -> str | None:
    """The heads, channels, experts or tokens of a part that so many ranks do not divide, as number and noun."""
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
    for noun, count in counts.items():
        is_shared = noun in ("kv heads", "index heads") and ranks % count == 0  # several ranks hold the same one
        if count % ranks and not is_shared:
            return f"{count} {noun}"
    return None


def show_as(module: nn.Module, seen: dict[str, Seen]) -> None:
    """Let code that runs inside a part see a module's parameters as these functions of what the rank holds.

    From outside, for names, checkpoints and optimisers, they are the parameters that they are.
    """
    module.__class__ = _showing_class(type(module))
    module.__dict__["_seen"] = module.__dict__.get("_seen", {}) | seen


def run_together(part: nn.Module) -> None:
    """Have ranks run a module together: inside its calls its parameters are those that `show_as` named."""

    def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
        _RUNNING.parts += 1

    def leave(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        _RUNNING.parts -= 1

    part.register_forward_pre_hook(enter)
    part.register_forward_hook(leave, always_call=True)


class _Running(threading.local):
    parts = 0


def _showing_class(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _SHOWING_CLASSES:

        class WithShownParameters(kind):  # type: ignore[misc, valid-type]
            def __getattr__(self, name: str) -> Any:
                value = super().__getattr__(name)
                seen = self.__dict__["_seen"].get(name) if _RUNNING.parts else None
                return value if seen is None or value is None else seen(value)

        WithShownParameters.__name__ = WithShownParameters.__qualname__ = kind.__name__
        _SHOWING_CLASSES[kind] = WithShownParameters
    return _SHOWING_CLASSES[kind]


_RUNNING = _Running()
_SHOWING_CLASSES: dict[Any, type[nn.Module]] = {}


# -- parts -----------------------------------------------------------------------------------------------------


def _split_out(linear: nn.Linear, mesh: DeviceMesh) -> None:
    """Column-parallel: each rank makes some outputs of a linear layer, adapted or not."""
    linear.out_features //= mesh.size()
    keep_part(linear, "weight", mesh, 0)
    if linear.bias is not None:
        keep_part(linear, "bias", mesh, 0)
    if isinstance(linear, InFp8):  # one scale for each output
        keep_part(linear, "weight" + SCALE, mesh, 0)
    seen: dict[str, Seen] = {"weight": local_part, "bias": local_part}
    if hasattr(linear, "lora_B"):
        keep_part(linear, "lora_B", mesh, 0)
        seen |= {"lora_B": local_part, "lora_A": functools.partial(copied, group=mesh.get_group())}
    show_as(linear, seen)


def _split_in(linear: nn.Linear, mesh: DeviceMesh) -> None:
    """Row-parallel: each rank has some inputs of a linear layer, and makes its term of a sum."""
    linear.in_features //= mesh.size()
    keep_part(linear, "weight", mesh, 1)
    is_first, group = mesh.get_local_rank() == 0, mesh.get_group()  # whose term of the sum has the bias
    seen: dict[str, Seen] = {"weight": local_part, "bias": lambda bias: copied(bias, group) * is_first}
    if hasattr(linear, "lora_A"):
        keep_part(linear, "lora_A", mesh, 1)
        seen |= {"lora_A": local_part, "lora_B": functools.partial(copied, group=mesh.get_group())}
    show_as(linear, seen)


def split_attention(module: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank runs some heads with the kv heads that they read."""
    assert isinstance(module, Attention)
    size, place, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    run_together(module)
    _split_out(module.q_proj, mesh)
    kv_projections = [each for each in (module.k_proj, module.v_proj) if each is not None]
    if module.kv_heads % size == 0:
        for each in kv_projections:
            _split_out(each, mesh)
        module.kv_heads //= size
    else:
        head, width = place * module.kv_heads // size, module.head_dim

        def of_head(weight: Tensor) -> Tensor:
            return copied(weight, group)[head * width : (head + 1) * width]

        for each in kv_projections:
            seen: dict[str, Seen] = {"weight": of_head, "bias": of_head}
            if isinstance(each, InFp8):  # which stand still
                seen = dict.fromkeys(("weight", "weight" + SCALE), lambda x: x[head * width : (head + 1) * width])
            if hasattr(each, "lora_B"):
                seen |= {"lora_B": of_head, "lora_A": functools.partial(copied, group=group)}
            show_as(each, seen)
            each.out_features = width
        module.kv_heads = 1
    indexer = getattr(module, "indexer", None)
    if indexer is not None:
        _split_indexer(indexer, mesh)
    module.heads //= size
    for norm in (module.q_norm, module.k_norm):  # one weight for the heads of all ranks
        if norm is not None:
            show_as(norm, {"weight": functools.partial(copied, group=group)})
    _split_in(module.o_proj, mesh)
    module.register_forward_pre_hook(lambda _, args: (copied(args[0], group), *args[1:]))
    module.register_forward_hook(lambda _, args, out: (summed(out[0], group), *out[1:]))


def _split_indexer(indexer: Any, mesh: DeviceMesh) -> None:
    """Each rank has the index heads that select for its heads; several ranks one that selects for the heads of all.

    The index key is every rank's, and the selection has no gradient.
    """
    size, place = mesh.size(), mesh.get_local_rank()
    if indexer.heads % size == 0:
        _split_out(indexer.q_proj, mesh)
        indexer.heads //= size
    else:
        head, width = place * indexer.heads // size, indexer.head_dim
        show_as(indexer.q_proj, {"weight": lambda weight: weight[head * width : (head + 1) * width]})
        indexer.q_proj.out_features, indexer.heads = width, 1


def split_mlp(module: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank has part of the inner width; gate and up are matrices of their own, so each is cut by itself."""
    assert isinstance(module, MLP)
    group = mesh.get_group()
    run_together(module)
    for each in (module.gate_proj, module.up_proj):
        _split_out(each, mesh)
    _split_in(module.down_proj, mesh)
    if isinstance(module, SelfConditioning):  # adds what the MLP gives to what all ranks have
        module.pre_norm.register_forward_hook(lambda _, args, x: copied(x, group))
    else:
        module.register_forward_pre_hook(lambda _, args: (copied(args[0], group), *args[1:]))
    module.down_proj.register_forward_hook(lambda _, args, out: summed(out, group))


def split_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank has some whole experts, and runs them on all tokens: nothing is exchanged but the sum."""
    assert isinstance(module, Experts)
    held = module.gate_up_proj.shape[0] // mesh.size()
    for leaf in [*module._parameters, *module._buffers]:
        keep_part(module, leaf, mesh, 0)
    module.exchange = AllHere(mesh.get_group(), held)


@dataclass(frozen=True, eq=False)
class AllHere:
    """The exchange of `Experts` where all ranks have all tokens: each runs its experts, and the results add up.

    held: how many experts a rank has.
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
        """See `exchange.Exchange`."""
        index_Nk = index_Nk - self.group.rank() * self.held
        index_Nk = torch.where((index_Nk >= 0) & (index_Nk < self.held), index_Nk, self.held)
        return summed(compute(copied(x_ND, self.group), index_Nk, copied(weight_Nk, self.group)), self.group)


def split_vocabulary(module: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank has the rows of some tokens."""
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
