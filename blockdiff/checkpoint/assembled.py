"""Tensors that a file has in another form than a model: the matrices of single experts, several matrices as one, and
values in fp8.

A model's tensor is then made of several stored ones, each read and dequantised alone, or is some rows of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from blockdiff.checkpoint.files import DTYPES, Stored, read_tensors, stored_tensors
from blockdiff.checkpoint.stream import TensorSource
from blockdiff.errors import CheckpointError
from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.stored import StoredMatrix
from blockdiff.layers.weights import Form
from blockdiff.models.names import Names
from blockdiff.tensor_pieces import Block

SCALE = "_scale_inv"  # follows the name of a tensor in MXFP8
CHANNELS = "_scale"  # follows that of one in e4m3 with a scale for each output channel (compressed-tensors)
SCALED = 32  # numbers along the input dimension that share a scale
WEIGHT = ".weight"  # ends the names of matrices; of one in fp8 its scales' names go on
SCALE_DTYPES = ("U8", "F8_E8M0")


@dataclass(frozen=True)
class Assembled(Stored):
    """A tensor that is made of stored ones: the name of each, and which box of the whole it is."""

    parts: tuple[tuple[str, Block], ...] = ()
    form: Form | None = None  # the one that all of it is stored in


def stored_apart(directory: Path, names: Names) -> dict[str, Stored]:
    """`stored_tensors`, with the matrices apart that files of the family have as one."""
    stored = stored_tensors(directory)
    found: dict[str, Stored] = {}
    for hub, place in stored.items():
        module, weight, end = hub.rpartition(WEIGHT)
        parts = names.parts_of(module) if names.files_are_fused and weight else [module]
        if len(parts) == 1 or not place.shape or place.shape[0] % len(parts):
            found |= {part + weight + end: place for part in parts}
            continue
        rows = place.shape[0] // len(parts)
        for n, part in enumerate(parts):
            found[part + weight + end] = replace(
                place, shape=(rows, *place.shape[1:]), nbytes=place.nbytes // len(parts), inside=(hub, n * rows)
            )
    return found


def fused_in_files(sources: Mapping[str, TensorSource], names: Names) -> dict[str, TensorSource]:
    """Tensors as files of the family have them: where those have several matrices as one, one under the other."""
    found: dict[str, TensorSource] = {}
    wholes: dict[str, list[TensorSource]] = {}
    for hub in sorted(sources, key=lambda name: (names.fused_of(name.rpartition(WEIGHT)[0]) or ("", 0))[1]):
        module, weight, end = hub.rpartition(WEIGHT)
        whole = names.fused_of(module) if names.files_are_fused and weight else None
        if whole is None:
            found[hub] = sources[hub]
        else:
            wholes.setdefault(whole[0] + weight + end, []).append(sources[hub])
    return found | {hub: TensorSource.joined(parts) for hub, parts in wholes.items()}


def assembled(stored: Mapping[str, Stored], names: Names) -> dict[str, Stored]:
    """The tensors of a checkpoint by the Hub names of the family's table; stored pieces are assembled to whole ones.

    Raises CheckpointError for experts of which some are missing or differ in shape.
    """
    found: dict[str, Stored] = {}
    pieces: dict[str, dict[tuple[int, int], str]] = {}
    for hub, place in stored.items():
        if any(hub.endswith(end) and hub.removesuffix(end) in stored for end in (SCALE, CHANNELS)):
            continue
        piece = names.piece(hub)
        if piece is not None:
            pieces.setdefault(piece[0], {})[piece[1:]] = hub
        elif hub + SCALE in stored:
            whole = ((hub, Block.whole(place.shape)),)
            found[hub] = Assembled(place.file, place.shape, "BF16", place.nbytes * 2, parts=whole)
        elif hub + CHANNELS in stored:
            whole = ((hub, Block.whole(place.shape)),)
            found[hub] = Assembled(place.file, place.shape, "F32", place.nbytes * 4, parts=whole, form=Fp8)
        else:
            found[hub] = place
    for hub, of_place in pieces.items():
        found[hub] = _stacked(hub, of_place, stored)
    return found


def _stacked(hub: str, of_place: Mapping[tuple[int, int], str], stored: Mapping[str, Stored]) -> Stored:
    """The matrices of all experts: an expert's one under the other, the experts side by side."""
    experts, matrices = (max(place[n] for place in of_place) + 1 for n in (0, 1))
    first = stored[of_place[min(of_place)]]
    if len(first.shape) != 2:
        raise CheckpointError(f"{first.file}: {of_place[min(of_place)]} has shape {list(first.shape)}; it is no matrix")
    rows, columns = first.shape
    parts = []
    for expert in range(experts):
        for matrix in range(matrices):
            name = of_place.get((expert, matrix))
            if name is None or stored[name].shape != first.shape:
                which = f"matrix {matrix} of expert {expert}"
                raise CheckpointError(f"{first.file}: {hub}: {which} is missing or of another shape")
            parts.append((name, Block((expert, matrix * rows, 0), (1, rows, columns))))
    has_channels = [name + CHANNELS in stored for name, _ in parts]
    dtype = "BF16" if of_place[min(of_place)] + SCALE in stored else "F32" if any(has_channels) else first.dtype
    shape, nbytes = (experts, matrices * rows, columns), sum(stored[name].nbytes for name, _ in parts)
    form = Fp8 if all(has_channels) else None
    return Assembled(first.file, shape, dtype, nbytes, parts=tuple(parts), form=form)


def read_assembled(
    stored: Mapping[str, Stored], places: Mapping[str, Assembled], wanted: Iterable[tuple[str, Block | None]]
) -> Iterator[tuple[str, Block | None, Tensor]]:
    """The wanted blocks (None: all) of tensors that are made of stored ones; the host holds one and a piece of it."""
    for hub, block in wanted:
        place = places[hub]
        box = block or Block.whole(place.shape)
        whole = torch.empty(box.sizes, dtype=DTYPES[place.dtype])
        for name, part in place.parts:
            common = part.within(box)
            if common is None:
                continue
            values = _values(stored, name).view(part.sizes)
            whole[common.seen_from(box.offsets).slices] = values[common.seen_from(part.offsets).slices]
        yield hub, block, whole


def read_whole(stored: Mapping[str, Stored], place: Stored, hub: str) -> Tensor:
    """A tensor of a checkpoint by its Hub name, where `assembled` has placed it."""
    if isinstance(place, Assembled):
        return next(read_assembled(stored, {hub: place}, [(hub, None)]))[2]
    return next(read_tensors({hub: place}, [hub]))[1]


def _values(stored: Mapping[str, Stored], name: str) -> Tensor:
    """A stored tensor, dequantised where it has scales: a power of two for each 32 along the input, or channels'."""
    if name + CHANNELS in stored:
        return _in_fp8(stored, name).decoded(torch.float32)
    scale_name = name + SCALE
    if scale_name not in stored:
        return next(read_tensors(stored, [name]))[1]
    place, scale_place = stored[name], stored[scale_name]
    expected = (*place.shape[:-1], -(-place.shape[-1] // SCALED))
    if place.dtype != "F8_E4M3" or scale_place.dtype not in SCALE_DTYPES or scale_place.shape != expected:
        raise CheckpointError(
            f"{place.file}: {name} is {place.dtype} with scales {scale_place.dtype} {list(scale_place.shape)}; of "
            f"quantised weights only MXFP8 is read, e4m3 with e8m0 scales {list(expected)}"
        )
    values, scale = (next(read_tensors(stored, [each]))[1] for each in (name, scale_name))
    return dequantised(values, scale.view(torch.uint8))


def read_stored(stored: Mapping[str, Stored], place: Assembled) -> StoredMatrix:
    """A weight that a file has in a form of fewer bits, as it is there."""
    assert place.form is not None
    whole: Any = place.form.empty_like(torch.empty(()).expand(place.shape))
    for name, part in place.parts:
        rows = part.slices[:-1]
        for tensor, values in zip(whole, READERS[place.form](stored, name), strict=True):
            tensor[rows] = values.view_as(tensor[rows])
    return cast(StoredMatrix, whole)


def _in_fp8(stored: Mapping[str, Stored], name: str) -> Fp8:
    """A stored tensor and its scales, one for each channel or one for all; those of a channel with a NaN are NaN."""
    place, scales = stored[name], stored[name + CHANNELS]
    sizes = {(*place.shape[:-1], 1), place.shape[:-1], (1,), ()}
    if place.dtype != "F8_E4M3" or scales.dtype not in DTYPES or scales.shape not in sizes:
        raise CheckpointError(
            f"{place.file}: {name} is {place.dtype} with scales {scales.dtype} {list(scales.shape)}; beside MXFP8 only "
            f"e4m3 with a scale for each output channel is read, {[*place.shape[:-1], 1]}"
        )
    values, scale = (next(read_tensors(stored, [each]))[1] for each in (name, name + CHANNELS))
    codes, scale = values.view(torch.uint8), scale.float()
    scale = (scale.expand(place.shape[:-1]) if scale.numel() == 1 else scale).reshape(*place.shape[:-1], 1)
    return Fp8(codes, torch.where(((codes & 127) == 127).any(-1, keepdim=True), float("nan"), scale))


# What reads a stored matrix of each form.
READERS: dict[Form, Callable[[Mapping[str, Stored], str], Any]] = {Fp8: _in_fp8}


def dequantised(values: Tensor, scale: Tensor) -> Tensor:
    """MXFP8 as bf16 (which holds every such number exactly): e4m3 values [out, in], exponents uint8 [out, in / 32]."""
    factor = torch.ldexp(torch.ones(scale.shape), scale.int() - 127)
    factor = factor.repeat_interleave(SCALED, -1)[..., : values.shape[-1]]
    return (values.float() * factor).to(torch.bfloat16)


def file_tensors(hub: str, source: TensorSource, names: Names, in_fp8: bool = False) -> dict[str, TensorSource]:
    """A tensor as a file has it: itself, or the matrices of single experts, for all of which it is read once."""
    found = names.pieces_of(hub, in_fp8)
    if not found:
        return {hub: source}
    experts, rows, columns = source.shape
    rows //= len(found)
    read = _read_once(source.read, experts * len(found))

    def of(expert: int, matrix: int) -> TensorSource:
        of_rows = slice(matrix * rows, (matrix + 1) * rows)
        return TensorSource((rows, columns), source.dtype, lambda: read()[expert, of_rows], (source,))

    return {
        pattern.replace("[]", str(expert)): of(expert, matrix)
        for expert in range(experts)
        for matrix, pattern in enumerate(found)
    }


def _read_once(read: Callable[[], Tensor], times: int) -> Callable[[], Tensor]:
    """`read` for so many calls: it runs once, and what it gave is dropped after the last of them."""
    kept: list[Tensor] = []
    left = iter(range(times - 1, -1, -1))

    def once() -> Tensor:
        kept.extend([] if kept else [read()])
        return kept[0] if next(left) else kept.pop()

    return once
