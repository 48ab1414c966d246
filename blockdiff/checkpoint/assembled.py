"""Tensors that files divide in another way than a model: single experts, fused matrices, fewer bits (`file_forms.py`).

A tensor of the model is then assembled from several tensors of files, each read and decoded alone, or is a range of
rows of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from blockdiff.checkpoint import file_forms
from blockdiff.checkpoint.file_forms import WEIGHT, Part, Quantised, joined
from blockdiff.checkpoint.files import DTYPES, Stored, stored_tensors
from blockdiff.checkpoint.stream import TensorSource
from blockdiff.errors import CheckpointError
from blockdiff.kernels.stored import StoredMatrix
from blockdiff.layers.weights import Form
from blockdiff.models.names import Names
from blockdiff.tensor_pieces import Block


@dataclass(frozen=True)
class Assembled(Stored):
    """A tensor that is assembled from tensors of files: the name, the entry and the box in the whole of each part.

    form: the form in a model, if all parts are stored in it.
    """

    parts: tuple[tuple[str, Stored, Block], ...] = ()
    form: Form | None = None


def stored_apart(directory: Path, names: Names) -> dict[str, Stored]:
    """Return the entries of `stored_tensors` by the names of the family's table.

    If files of the family stack several matrices in one tensor, each matrix has an entry for its rows.
    """
    matrices: dict[str, Stored] = {}
    for name, tensor in stored_tensors(directory).items():
        hub = names.in_table(name)
        tensor = tensor if hub == name else replace(tensor, inside=(name, 0))
        module, weight, end = hub.rpartition(WEIGHT)
        parts = names.parts_of(module) if names.files_are_fused and weight else [module]
        if len(parts) == 1 or not tensor.shape or tensor.shape[0] % len(parts):
            matrices |= {part + weight + end: tensor for part in parts}
            continue
        rows = tensor.shape[0] // len(parts)
        for n, part in enumerate(parts):
            matrices[part + weight + end] = replace(
                tensor, shape=(rows, *tensor.shape[1:]), nbytes=tensor.nbytes // len(parts), inside=(hub, n * rows)
            )
    return matrices


def fused_in_files(sources: Mapping[str, TensorSource], names: Names) -> dict[str, TensorSource]:
    """Return tensors as files of the family have them: matrices that the files fuse are stacked by rows."""
    fused: dict[str, TensorSource] = {}
    wholes: dict[str, list[TensorSource]] = {}
    for hub in sorted(sources, key=lambda name: (names.fused_of(name.rpartition(WEIGHT)[0]) or ("", 0))[1]):
        module, weight, end = hub.rpartition(WEIGHT)
        whole = names.fused_of(module) if names.files_are_fused and weight else None
        if whole is None:
            fused[hub] = sources[hub]
        else:
            wholes.setdefault(whole[0] + weight + end, []).append(sources[hub])
    return fused | {
        hub: parts[0] if len(parts[0].shape) < 2 else TensorSource.joined(parts)  # one scale for the whole matrix
        for hub, parts in wholes.items()
    }


def assembled(stored: Mapping[str, Stored], names: Names) -> dict[str, Stored]:
    """Return the tensors of a checkpoint by the Hub names of the family's table, with pieces assembled.

    Raises CheckpointError if experts are missing or differ in shape.
    """
    tensors: dict[str, Stored] = {}
    pieces: dict[str, dict[tuple[int, int], tuple[str, Stored]]] = {}
    for hub, in_file in joined(stored).items():
        piece = names.piece(hub)
        if piece is not None:
            pieces.setdefault(piece[0], {})[piece[1:]] = hub, in_file
        else:
            tensors[hub] = (
                in_file if not isinstance(in_file, Quantised) else _assembled(in_file.shape, [(hub, in_file)])
            )
    return tensors | {hub: _stacked(hub, of_place) for hub, of_place in pieces.items()}


def _assembled(shape: tuple[int, ...], parts: Sequence[tuple[str, Stored]], boxes: Sequence[Block] = ()) -> Assembled:
    """Return the entry of a tensor with `shape` that consists of `parts` in `boxes` (without boxes: of one part)."""
    places = [in_file for _, in_file in parts]
    forms = {in_file.form if isinstance(in_file, Quantised) else None for in_file in places}
    dtypes = {in_file.dtype for in_file in places}
    kept_in = next(iter(forms)) if len(forms) == 1 else None
    dtype = places[0].dtype if len(dtypes) == 1 else "F32"
    boxed = zip(parts, boxes or [Block.whole(shape)], strict=True)
    return Assembled(
        places[0].file,
        shape,
        dtype,
        sum(in_file.nbytes for in_file in places),
        parts=tuple((name, in_file, box) for (name, in_file), box in boxed),
        form=None if kept_in is None else kept_in.form,
    )


def _stacked(hub: str, of_place: Mapping[tuple[int, int], tuple[str, Stored]]) -> Assembled:
    """Return the entry of the matrices of all experts: each expert's are stacked by rows, then the experts.

    of_place: the parts by (expert, matrix). Raises CheckpointError if one is missing or of another shape.
    """
    experts, matrices = (max(position[n] for position in of_place) + 1 for n in (0, 1))
    name, first = of_place[min(of_place)]
    if len(first.shape) != 2:
        raise CheckpointError(f"{first.file}: {name} has shape {list(first.shape)}; it is no matrix")
    rows, columns = first.shape
    parts, boxes = [], []
    for expert in range(experts):
        for matrix in range(matrices):
            part = of_place.get((expert, matrix))
            if part is None or part[1].shape != first.shape:
                which = f"matrix {matrix} of expert {expert}"
                raise CheckpointError(f"{first.file}: {hub}: {which} is missing or of another shape")
            parts.append(part)
            boxes.append(Block((expert, matrix * rows, 0), (1, rows, columns)))
    return _assembled((experts, matrices * rows, columns), parts, boxes)


def read_assembled(
    places: Mapping[str, Assembled], blocks: Iterable[tuple[str, Block | None]]
) -> Iterator[tuple[str, Block | None, Tensor]]:
    """Yield blocks (None: all) of assembled tensors; the host holds one block and one piece of it."""
    for hub, block in blocks:
        weight = places[hub]
        box = block or Block.whole(weight.shape)
        whole = torch.empty(box.sizes, dtype=DTYPES[weight.dtype])
        for name, stored, part in weight.parts:
            common = part.within(box)
            if common is None:
                continue
            values = stored.decoded() if isinstance(stored, Quantised) else file_forms.read_whole(name, stored)
            values = values.view(part.sizes)
            whole[common.seen_from(box.offsets).slices] = values[common.seen_from(part.offsets).slices]
        yield hub, block, whole


def read_whole(in_file: Stored, hub: str) -> Tensor:
    """Read a tensor of a checkpoint by its Hub name and its entry in `assembled`."""
    if isinstance(in_file, Assembled):
        return next(read_assembled({hub: in_file}, [(hub, None)]))[2]
    return file_forms.read_whole(hub, in_file)


def read_stored(weight: Assembled) -> StoredMatrix:
    """Read a weight in the form of fewer bits that its file has."""
    assert weight.form is not None
    whole: Any = weight.form.empty_like(torch.empty(()).expand(weight.shape))
    for _, stored, part in weight.parts:
        assert isinstance(stored, Quantised)
        rows = part.slices[:-1]
        for tensor, values in zip(whole, cast(Any, stored.matrix()), strict=True):
            tensor[rows] = values.view_as(tensor[rows])
    return cast(StoredMatrix, whole)


def file_tensors(hub: str, source: TensorSource, names: Names, part: Part | None = None) -> dict[str, TensorSource]:
    """Return a tensor as files have it: whole, or as matrices of single experts, for which it is read only once.

    part: the tensor's part of a matrix in fewer bits (None: a plain tensor).
    """
    patterns = names.pieces_of(hub, part is not None)
    end, in_file = ("", lambda each: each) if part is None else (part.end, part.source)
    if not patterns:
        return {hub + end: in_file(source)}
    experts, rows, columns = source.shape
    rows //= len(patterns)
    read = _read_once(source.read, experts * len(patterns))

    def of(expert: int, matrix: int) -> TensorSource:
        of_rows = slice(matrix * rows, (matrix + 1) * rows)
        return TensorSource((rows, columns), source.dtype, lambda: read()[expert, of_rows], (source,))

    return {
        pattern.replace("[]", str(expert)) + end: in_file(of(expert, matrix))
        for expert in range(experts)
        for matrix, pattern in enumerate(patterns)
    }


def _read_once(read: Callable[[], Tensor], times: int) -> Callable[[], Tensor]:
    """Wrap `read` so that it runs once for `times` calls; the last call drops the tensor."""
    cache: list[Tensor] = []
    calls_left = iter(range(times - 1, -1, -1))

    def once() -> Tensor:
        cache.extend([] if cache else [read()])
        return cache[0] if next(calls_left) else cache.pop()

    return once
