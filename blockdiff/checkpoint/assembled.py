"""Tensors that a file has in another form than a model: the matrices of single experts, several matrices as one, and
matrices in fewer bits (`file_forms.py`).

A model's tensor is then made of several stored ones, each read and decoded alone, or is some rows of one.
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
    """A tensor that is made of stored ones: name and place of each, and which box of the whole it is.

    form: the one that a model keeps it in, if all of it is stored so.
    """

    parts: tuple[tuple[str, Stored, Block], ...] = ()
    form: Form | None = None


def stored_apart(directory: Path, names: Names) -> dict[str, Stored]:
    """Return `stored_tensors` by the names of the family's table.

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
    return found | {
        hub: parts[0] if len(parts[0].shape) < 2 else TensorSource.joined(parts)  # the number of a matrix in fewer bits
        for hub, parts in wholes.items()
    }


def assembled(stored: Mapping[str, Stored], names: Names) -> dict[str, Stored]:
    """The tensors of a checkpoint by the Hub names of the family's table; stored pieces are assembled to whole ones.

    Raises CheckpointError for experts of which some are missing or differ in shape.
    """
    found: dict[str, Stored] = {}
    pieces: dict[str, dict[tuple[int, int], tuple[str, Stored]]] = {}
    for hub, place in joined(stored).items():
        piece = names.piece(hub)
        if piece is not None:
            pieces.setdefault(piece[0], {})[piece[1:]] = hub, place
        else:
            found[hub] = place if not isinstance(place, Quantised) else _assembled(place.shape, [(hub, place)])
    return found | {hub: _stacked(hub, of_place) for hub, of_place in pieces.items()}


def _assembled(shape: tuple[int, ...], parts: Sequence[tuple[str, Stored]], boxes: Sequence[Block] = ()) -> Assembled:
    """A tensor of parts in these boxes, or of one."""
    places = [place for _, place in parts]
    forms = {place.form if isinstance(place, Quantised) else None for place in places}
    dtypes = {place.dtype for place in places}
    kept_in = next(iter(forms)) if len(forms) == 1 else None
    dtype = places[0].dtype if len(dtypes) == 1 else "F32"
    boxed = zip(parts, boxes or [Block.whole(shape)], strict=True)
    return Assembled(
        places[0].file,
        shape,
        dtype,
        sum(place.nbytes for place in places),
        parts=tuple((name, place, box) for (name, place), box in boxed),
        form=None if kept_in is None else kept_in.form,
    )


def _stacked(hub: str, of_place: Mapping[tuple[int, int], tuple[str, Stored]]) -> Assembled:
    """The matrices of all experts: an expert's one under the other, the experts side by side."""
    experts, matrices = (max(place[n] for place in of_place) + 1 for n in (0, 1))
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
    places: Mapping[str, Assembled], wanted: Iterable[tuple[str, Block | None]]
) -> Iterator[tuple[str, Block | None, Tensor]]:
    """The wanted blocks (None: all) of tensors that are made of stored ones; the host holds one and a piece of it."""
    for hub, block in wanted:
        place = places[hub]
        box = block or Block.whole(place.shape)
        whole = torch.empty(box.sizes, dtype=DTYPES[place.dtype])
        for name, stored, part in place.parts:
            common = part.within(box)
            if common is None:
                continue
            values = stored.decoded() if isinstance(stored, Quantised) else file_forms.read_whole(name, stored)
            values = values.view(part.sizes)
            whole[common.seen_from(box.offsets).slices] = values[common.seen_from(part.offsets).slices]
        yield hub, block, whole


def read_whole(place: Stored, hub: str) -> Tensor:
    """A tensor of a checkpoint by its Hub name, where `assembled` has placed it."""
    if isinstance(place, Assembled):
        return next(read_assembled({hub: place}, [(hub, None)]))[2]
    return file_forms.read_whole(hub, place)


def read_stored(place: Assembled) -> StoredMatrix:
    """A weight that a file has in a form of fewer bits, as it is there."""
    assert place.form is not None
    whole: Any = place.form.empty_like(torch.empty(()).expand(place.shape))
    for _, stored, part in place.parts:
        assert isinstance(stored, Quantised)
        rows = part.slices[:-1]
        for tensor, values in zip(whole, cast(Any, stored.matrix()), strict=True):
            tensor[rows] = values.view_as(tensor[rows])
    return cast(StoredMatrix, whole)


def file_tensors(hub: str, source: TensorSource, names: Names, part: Part | None = None) -> dict[str, TensorSource]:
    """A tensor as a file has it: itself, or the matrices of single experts, for all of which it is read once.

    part: what it is of a matrix in fewer bits.
    """
    found = names.pieces_of(hub, part is not None)
    end, in_file = ("", lambda each: each) if part is None else (part.end, part.source)
    if not found:
        return {hub + end: in_file(source)}
    experts, rows, columns = source.shape
    rows //= len(found)
    read = _read_once(source.read, experts * len(found))

    def of(expert: int, matrix: int) -> TensorSource:
        of_rows = slice(matrix * rows, (matrix + 1) * rows)
        return TensorSource((rows, columns), source.dtype, lambda: read()[expert, of_rows], (source,))

    return {
        pattern.replace("[]", str(expert)) + end: in_file(of(expert, matrix))
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
