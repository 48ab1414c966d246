"""PEFT's names for the tensors of an adapter, and its layout of their numbers.

PEFT adapts transformers' modules. Some weights belong to two of them (encoder and decoder): their adapters are written
as equal copies, and are read only if they are equal. Experts are PEFT's `target_parameters`: A of all experts is
stacked as [E r, in], B is laid out as [out, r E] with the expert as the fast index.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdiff.checkpoint.expert_adapters import stacked_experts
from blockdiff.checkpoint.files import DTYPES, Stored, read_blocks, tensors_in
from blockdiff.errors import CheckpointError
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import TOKEN_ROWS
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.names import Names
from blockdiff.tensor_pieces import Block

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
ROWS = ".token_adapter.trainable_tokens_delta"
_KEY = re.compile(re.escape(PREFIX) + r"(.+?)((?:\.base_layer)*)\.(lora_[AB])\.weight")


def hub_module(ours: str, model: BlockDiffusionModel) -> str:
    """Return transformers' name of the module that has our adapter parameter `ours`.

    If transformers fuses that module with others, this is the name that it would have alone.
    """
    names, module = model.config.names, ours.rpartition(".")[0]
    if module.rpartition(".")[2] == "experts":
        return names.to_module(str(names.to_hub(f"{module}.gate_up_proj")).removesuffix(".gate_up_proj"))
    return names.to_module(str(names.to_hub(f"{module}.weight")).removesuffix(".weight"))


def peft_names(ours: str, model: BlockDiffusionModel) -> tuple[list[str], Callable[[Tensor], Tensor]]:
    """Return PEFT's names for our adapter parameter `ours`, and a converter to PEFT's layout.

    There is a name for each copy of the module in transformers (`Names.copies`).
    """
    names = model.config.names
    if ours == TOKEN_ROWS:
        table = names.to_module(str(names.to_hub("vocabulary.table")).removesuffix(".weight"))
        return [name + ROWS for name in names.copies(table)], lambda x: x
    leaf, hub = ours.rpartition(".")[2], hub_module(ours, model)
    which = "lora_A" if leaf.endswith("A") else "lora_B"
    inner = ".base_layer" if leaf.startswith("gate_up") else ""
    keys = [f"{name}{inner}.{which}.weight" for name in names.copies(hub)]
    if not leaf.startswith(("gate_up", "down")):
        return keys, lambda x: x
    return keys, lambda x: x.flatten(0, 1) if which == "lora_A" else x.permute(1, 2, 0).flatten(1)


@dataclass(frozen=True)
class Part:
    """A tensor of an adapter: its shape, and a function that reads a block of it (None: all of it)."""

    shape: tuple[int, ...]
    read: Callable[[Block | None], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Part:
        """Return a tensor in memory as a part."""
        return cls(tuple(tensor.shape), lambda block: tensor if block is None else tensor[block.slices])

    @classmethod
    def zeros(cls, *shape: int) -> Part:
        """Return a part that is zero everywhere."""
        return cls(shape, lambda block: torch.zeros(shape if block is None else block.sizes))


def parts_in(directory: Path, model: BlockDiffusionModel) -> dict[str, Part]:
    """Return the tensors of an adapter by our names.

    Most tensors are read on use; only those of experts that are modules of their own, and B of modules that do not run
    here, are read now. Copies of a tensor are compared when it is read. Raises CheckpointError if the file cannot be
    read, if a tensor fits no module of the model, and if PEFT adapted only one of two modules over the same weight.
    """
    file, names = directory / WEIGHTS, model.config.names
    if not file.exists():
        raise CheckpointError(f"{directory}: no {WEIGHTS}, so the adapter is not whole")
    stored = tensors_in(file)
    keys: dict[str, list[str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, Part] = {}
    of_experts = [key for key in stored if _is_of_expert(key, names)]
    read = {
        key.removeprefix(PREFIX): tensor for key, _, tensor in read_blocks(stored, [(key, None) for key in of_experts])
    }
    parts |= {ours: Part.of(tensor) for ours, tensor in stacked_experts(read, names, file).items()}
    for key, in_file in sorted(stored.items()):
        if key in of_experts:
            continue
        is_adapters = ROWS in key or _KEY.fullmatch(key) is not None
        if is_adapters and (len(in_file.shape) != 2 or in_file.dtype not in DTYPES):
            raise CheckpointError(f"{file}: {key} is {in_file.dtype} {list(in_file.shape)}, and no matrix of floats")
        if _is_left_out(key, stored, model):
            continue
        if fused_parts := _of_whole(key, stored, model):
            parts |= fused_parts
            continue
        ours, shape = (TOKEN_ROWS, in_file.shape) if ROWS in key else _ours(key, in_file.shape, model, file)
        if shapes.setdefault(ours, shape) != shape:
            raise _differs(file, key)
        keys.setdefault(ours, []).append(key)
    for ours, copies in keys.items():
        if ours != TOKEN_ROWS and len(copies) < len(names.copies(hub_module(ours, model))):
            raise CheckpointError(
                f"{file}: {min(copies)} adapts one of two modules over the same weight; "
                "blockdiff adapts both alike, so it cannot take this one"
            )
    return parts | {
        ours: Part(shapes[ours], partial(_read, stored, copies, shapes[ours])) for ours, copies in keys.items()
    }


def _is_of_expert(key: str, names: Names) -> bool:
    """Return True if tensor `key` adapts a matrix of one expert that is a module of its own."""
    match = _KEY.fullmatch(key)
    return names.experts_apart and match is not None and names.piece(f"{names.of_module(match[1])}.weight") is not None


def adapts_images(directory: Path, model: BlockDiffusionModel) -> bool:
    """Return True if the adapter in `directory` changes the image side: some B there is not 0."""
    names, file = model.config.names, directory / WEIGHTS
    stored = tensors_in(file) if file.exists() else {}
    beginnings = tuple(PREFIX + names.to_module(hub) for _, hub in names.images)
    keys = [(key, None) for key in stored if key.startswith(beginnings) and ".lora_B." in key]
    return any(tensor.any() for _, _, tensor in read_blocks(stored, keys))


def _is_left_out(key: str, stored: Mapping[str, Stored], model: BlockDiffusionModel) -> bool:
    """Return True if tensor `key` can be ignored, because it adapts a module that does not run here.

    PEFT's `all-linear` adapts the image side as well; after training on texts alone its B is still 0. Raises
    CheckpointError if B is not 0.
    """
    names, match, has_images = model.config.names, _KEY.fullmatch(key), model.image_side is not None
    if match is None or not names.is_carried(f"{names.of_module(match[1])}.weight", has_images):
        return False
    if match[3] == "lora_B" and next(read_blocks(stored, [(key, None)]))[2].any():
        raise CheckpointError(
            f"{stored[key].file}: {key} adapts a module that is not run here; train an adapter without it"
        )
    return True


def _of_whole(key: str, stored: Mapping[str, Stored], model: BlockDiffusionModel) -> dict[str, Part]:
    """Split tensor `key` of a module in which transformers fuses several of our matrices.

    Returns each matrix's part by our name; {} if `key` belongs to no such module.
    """
    names, match = model.config.names, _KEY.fullmatch(key)
    places = [] if match is None else names.parts_of(names.of_module(match[1]))
    ours = [names.to_ours(f"{each}.weight") for each in places]
    if match is None or len(places) < 2 or None in ours:
        return {}
    which, shape = match[3], stored[key].shape
    if which == "lora_A":
        return {_adapter(each, which): Part(shape, partial(_read, stored, [key], shape)) for each in ours}
    rows = shape[0] // len(ours)
    sizes = rows, shape[1]

    def read(first: int, block: Block | None) -> Tensor:
        box = block or Block.whole(sizes)
        return _read(stored, [key], shape, Block((first + box.offsets[0], box.offsets[1]), box.sizes))

    return {_adapter(each, which): Part(sizes, partial(read, n * rows)) for n, each in enumerate(ours)}


def _adapter(weight: str | None, which: str) -> str:
    return f"{str(weight).removesuffix('.weight')}.{which}"


def _differs(file: Path, key: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: {key} differs from that of the other module over the same weight; "
        "blockdiff has one adapter for both, so it cannot take this one"
    )


def _read(stored: Mapping[str, Stored], copies: Sequence[str], shape: tuple[int, ...], block: Block | None) -> Tensor:
    """Read a block (None: all) of one of our tensors. copies: its keys in the file; CheckpointError if they differ.

    Of a stacked A only the rows of the block's experts are read. In B an expert's numbers are spread over all columns,
    so whole rows are read, for the block's outputs.
    """
    entry, box = stored[copies[0]], block or Block.whole(shape)
    in_file = block
    if len(shape) == 3 and block is not None:
        (first, row, column), (experts, _, columns) = box.offsets, box.sizes
        if copies[0].endswith("lora_A.weight"):
            in_file = Block((first * shape[1], column), (experts * shape[1], columns))
        else:
            in_file = Block((row, 0), (box.sizes[1], entry.shape[1]))
    whole: Tensor | None = None
    for key, _, tensor in read_blocks(stored, [(key, in_file) for key in copies]):
        if whole is not None and not torch.equal(whole, tensor):
            raise _differs(entry.file, key)
        whole = tensor
    assert whole is not None
    if len(shape) < 3:
        return whole
    if copies[0].endswith("lora_A.weight"):
        return whole.unflatten(0, (-1, shape[1]))[:, box.slices[1]].contiguous()
    return whole.unflatten(1, (-1, shape[0])).permute(2, 0, 1)[box.slices[0], :, box.slices[2]].contiguous()


def _ours(key: str, shape: tuple[int, ...], model: BlockDiffusionModel, file: Path) -> tuple[str, tuple[int, ...]]:
    """Return our name and our shape for tensor `key` of the file. Raises CheckpointError if it fits no module."""
    names = model.config.names
    match = _KEY.fullmatch(key)
    problem = f"{file}: {key} is no adapter of a module of this model"
    if match is None:
        raise CheckpointError(problem)
    module, _, which = match.groups()
    module = names.of_module(module)
    ours = names.to_ours(f"{module}.weight")
    if ours is not None:
        return f"{ours.removesuffix('.weight')}.{which}", shape
    ours = names.to_ours(f"{module}.gate_up_proj")
    if ours is None:
        raise CheckpointError(problem)
    ours = ours.removesuffix(".gate_up_proj")
    experts: Any = model.get_submodule(ours)
    E, D, F = (int(size) for size in experts.held("down_proj").shape)
    side = 1 if which == "lora_A" else 0
    widths = {"gate_up": (D, 2 * F)[1 - side], "down": (F, D)[1 - side]}
    # The two parameters of a module are nested in the order of its parameters: gate_up inside, down outside.
    is_inner = ".base_layer" in match[2]
    fitting = [name for name, width in widths.items() if shape[side] == width]
    if not fitting or shape[1 - side] % E:
        raise CheckpointError(f"{file}: {key} has the shape {list(shape)}, which fits no expert")
    name = fitting[0] if len(fitting) == 1 else ("gate_up" if is_inner else "down")
    if which == "lora_A":
        return f"{ours}.{name}_{which}", (E, shape[0] // E, shape[1])
    return f"{ours}.{name}_{which}", (E, shape[0], shape[1] // E)


# -- matrices that transformers has as one ---------------------------------------------------------------------------
# transformers fuses n of our matrices, stacked by rows, and adapts them by one B A. n adapters of rank r equal one of
# rank n r: the As stacked, the Bs on a block diagonal. Conversely, an adapter of the fused matrix gives each matrix the
# same A, and its rows of B.


def fused_rank(low_rank: LowRank, count: int) -> LowRank:
    """Return rank and alpha of `count` matrices that are fused: `count` times the rank, at the same scale."""
    return replace(low_rank, rank=low_rank.rank * count, alpha=low_rank.alpha * _growth(low_rank, count))


def fused(module: str, parts: Mapping[tuple[str, int], Tensor], count: int) -> dict[str, Tensor]:
    """Return A and B of the matrix in which `count` matrices are fused.

    parts: the A and B of each matrix, by ("lora_A" or "lora_B", index of the matrix). Raises CheckpointError if a
    matrix has no adapter, or if their ranks differ.
    """
    As, Bs = ([parts[leaf, n] for n in range(count) if (leaf, n) in parts] for leaf in ("lora_A", "lora_B"))
    if len(As) < count or len({x.shape for x in As}) > 1:
        raise CheckpointError(f"{module} is one matrix in transformers; give all parts of it adapters of one rank")
    return {"lora_A": torch.cat(As), "lora_B": torch.block_diag(*Bs)}


def apart(modules: dict[str, LowRank], parts: dict[str, Part], wholes: Mapping[str, list[str]]) -> None:
    """Reduce the adapters of fused matrices to the rank that each matrix needs, in place.

    This is possible if the fused B is block-diagonal; other adapters stay as they are. wholes: our names of the modules
    that are fused, in order, by the name of the fused module.
    """
    for names in wholes.values():
        count, low_rank = len(names), modules[names[0]]
        rank = low_rank.rank // count
        blocks = [slice(n * rank, (n + 1) * rank) for n in range(count)]
        Bs = [parts[f"{name}.lora_B"].read(None) for name in names]
        columns = [B[:, block] for B, block in zip(Bs, blocks, strict=True)]
        counts = [[int(x.count_nonzero()) for x in each] for each in (columns, Bs)]
        if low_rank.rank % count or counts[0] != counts[1]:
            continue
        alpha = round(low_rank.alpha / _growth(low_rank, count), 12)
        for name, block, B in zip(names, blocks, columns, strict=True):
            modules[name] = replace(low_rank, rank=rank, alpha=alpha)
            parts[f"{name}.lora_A"] = Part.of(parts[f"{name}.lora_A"].read(None)[block].clone())
            parts[f"{name}.lora_B"] = Part.of(B.contiguous())


def _growth(low_rank: LowRank, count: int) -> float:
    """Return the factor for alpha that keeps the scale when the rank is multiplied by `count`."""
    return count**0.5 if low_rank.rslora else count
