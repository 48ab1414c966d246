"""Translate names of tensors between ours and the Hub's, by a two-column table that each family has."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

_LAYER = re.compile(r"(?<![^.])layers\.(\d+)\.")


@dataclass(frozen=True)
class Names:
    """A family's names.

    table: pairs of our name and the Hub's; `{}` is the layer number.
    images: pairs of the beginnings of our names and the Hub's, for the tensors of the image side, if any.
    carried: beginnings of the Hub names of tensors that are kept and written back but not run, including the
    image side's.
    ties: pairs of the beginnings of a copy's Hub name and its original's. Some writers save both; a tensor of the
    table that a file lacks is read from the other one.
    twice: pairs of Hub names' beginnings, for modules that transformers has as two modules over one weight. PEFT gives
    each an adapter of its own.
    pieces: the end of the Hub name of a tensor that files store in pieces, and the ends of the pieces' names. A piece
    is a matrix of one expert, whose number is `[]`; they are stacked.
    modules: pairs of a part of Hub names and its replacement in transformers' names of modules.
    fused: the last name of a module of transformers that stacks several of our matrices, and their last names.
    quantised_pieces: as `pieces`, for tensors that files have in pieces only if they are stored in fewer bits.
    respelt: pairs of a part of Hub names in the spelling of some writers and in the spelling of the table.
    files_are_fused: whether files, too, have the matrix of a fused module instead of our matrices.
    optional: Hub names of tensors that a file may lack; the model then lacks them, too.
    experts_apart: whether the class that loads the files also has the `pieces` as separate modules.
    """

    table: tuple[tuple[str, str], ...]
    images: tuple[tuple[str, str], ...] = ()
    carried: tuple[str, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    twice: tuple[tuple[str, str], ...] = ()
    pieces: tuple[tuple[str, tuple[str, ...]], ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    quantised_pieces: tuple[tuple[str, tuple[str, ...]], ...] = ()
    respelt: tuple[tuple[str, str], ...] = ()
    files_are_fused: bool = False
    optional: tuple[str, ...] = ()
    experts_apart: bool = False

    @cached_property
    def _hub(self) -> dict[str, str]:
        return dict(self.table)

    @cached_property
    def _ours(self) -> dict[str, str]:
        return {hub: ours for ours, hub in self.table}

    def to_hub(self, ours: str) -> str | None:
        """Return the Hub's name of one of our parameters or buffers, None if the table lacks it."""
        return _translated(ours, self._hub) or _begun(ours, self.images)

    def in_table(self, hub: str) -> str:
        """Return a tensor's name in a file in the spelling of the table."""
        for other, ours in self.respelt:
            hub = hub.replace(other, ours)
        return hub

    def copies(self, hub: str) -> list[str]:
        """Return a Hub name and the names of other modules that transformers has over the same weight."""
        return [hub, *(second + hub.removeprefix(first) for first, second in self.twice if hub.startswith(first))]

    def to_module(self, hub: str) -> str:
        """Return transformers' name of the module or parameter of a Hub name, before fusing (`fused_of`)."""
        for of_hub, of_module in self.modules:
            hub = hub.replace(of_hub, of_module)
        return hub

    def of_module(self, module: str) -> str:
        """Return the Hub's name of a module of transformers."""
        for of_hub, of_module in self.modules:
            module = module.replace(of_module, of_hub)
        return module

    def fused_of(self, module: str) -> tuple[str, int, int] | None:
        """Return the module that fuses a matrix, the index of the matrix and the number of parts; None if none does."""
        owner, _, leaf = module.rpartition(".")
        for whole, leaves in self.fused:
            if leaf in leaves:
                return f"{owner}.{whole}", leaves.index(leaf), len(leaves)
        return None

    def parts_of(self, module: str) -> list[str]:
        """List the modules that a module of transformers fuses, in order; only itself if it fuses none."""
        owner, _, leaf = module.rpartition(".")
        wholes = {whole: [f"{owner}.{each}" for each in leaves] for whole, leaves in self.fused}
        return wholes.get(leaf, [module])

    def to_ours(self, hub: str) -> str | None:
        """Return our name of a tensor of the Hub, or of the tensor it is a tied copy of; None if there is neither."""
        return next(self._named(hub), None)

    def ours_among(self, hub: str, there: Container[str]) -> str | None:
        """Return our name of a tensor as `to_ours` does, among the names in `there`: a head may be separate or tied."""
        return next((name for name in self._named(hub) if name in there), None)

    def _named(self, hub: str) -> Iterator[str]:
        """Yield our names of a tensor of the Hub: its own, and the name of the tensor that it is a tied copy of."""
        tied = self.tied_to(hub)
        candidates = (
            _translated(hub, self._ours),
            _begun(hub, tuple((theirs, ours) for ours, theirs in self.images)),
            None if tied is None else _translated(tied, self._ours),
        )
        return (name for name in candidates if name is not None)

    def piece(self, hub: str) -> tuple[str, int, int] | None:
        """Return the Hub name of the tensor that a stored piece belongs to, the number of its expert and of its matrix.

        None if `hub` names no piece.
        """
        for whole, patterns in (*self.pieces, *self.quantised_pieces):
            for matrix, pattern in enumerate(patterns):
                match = re.fullmatch(r"(.*)" + re.escape(pattern).replace(r"\[\]", r"(\d+)"), hub)
                if match is not None:
                    return match[1] + whole, int(match[2]), matrix
        return None

    def pieces_of(self, hub: str, is_quantised: bool = False) -> list[str]:
        """List the names of a tensor's pieces in files, with `[]` for the expert; empty if files have it whole."""
        rows = (*self.pieces, *(self.quantised_pieces if is_quantised else ()))
        row = next((row for row in rows if hub.endswith(row[0])), None)
        return [] if row is None else [hub.removesuffix(row[0]) + pattern for pattern in row[1]]

    def hub_to_ours(self, names: Iterable[str]) -> dict[str, str]:
        """Map Hub names to our names, for each of `names` (ours) that has a Hub name."""
        return {hub: name for name in names if (hub := self.to_hub(name)) is not None}

    def is_carried(self, hub: str, has_images: bool = False) -> bool:
        """Whether a tensor is kept and written back but not run; has_images: whether the image side is run."""
        return hub.startswith(self.carried) and not (has_images and hub.startswith(tuple(x for _, x in self.images)))

    def tied_to(self, hub: str) -> str | None:
        """Return the Hub name of the tensor whose tied copy this name would be, None if it would be no copy."""
        return next((end + hub.removeprefix(start) for start, end in self.ties if hub.startswith(start)), None)


def _begun(name: str, beginnings: tuple[tuple[str, str], ...]) -> str | None:
    """Replace a name's prefix by pairs (old, new); None if it has none of the old ones."""
    return next((new + name.removeprefix(old) for old, new in beginnings if name.startswith(old)), None)


def _translated(name: str, table: Mapping[str, str]) -> str | None:
    layer = _LAYER.search(name)
    if layer is None or name in table:
        return table.get(name)
    row = table.get(f"{name[: layer.start(1)]}{{}}{name[layer.end(1) :]}")
    return None if row is None else row.format(layer[1])
