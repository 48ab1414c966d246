"""From our names of tensors to the Hub's and back, by a literal two-column table that each family has."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

_LAYER = re.compile(r"(?<![^.])layers\.(\d+)\.")


@dataclass(frozen=True)
class Names:
    """A family's names.

    table: rows of our name and the Hub's, `{}` is the layer number; carried: how the Hub names of tensors begin that
    are kept and written back but not run; ties: how the Hub name of a copy begins, and that of what it is a copy of.
    Some writers save both ends of a tie; a tensor of the table that a file lacks is read from the other end. twice: how
    the Hub names of modules begin that transformers has as two modules over one weight, and that of the second one;
    PEFT gives each an adapter of its own.
    """

    table: tuple[tuple[str, str], ...]
    carried: tuple[str, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    twice: tuple[tuple[str, str], ...] = ()

    @cached_property
    def _hub(self) -> dict[str, str]:
        return dict(self.table)

    @cached_property
    def _ours(self) -> dict[str, str]:
        return {hub: ours for ours, hub in self.table}

    def to_hub(self, ours: str) -> str | None:
        """The Hub's name of one of our parameters or buffers; None where the table has no such row."""
        return _translated(ours, self._hub)

    def copies(self, hub: str) -> list[str]:
        """A Hub name and those of the modules that transformers has beside it over the same weight."""
        return [hub, *(second + hub.removeprefix(first) for first, second in self.twice if hub.startswith(first))]

    def to_ours(self, hub: str) -> str | None:
        """Our name of a tensor of the Hub, itself or what it is a tied copy of; None where the table has neither."""
        tied = self.tied_to(hub)
        return _translated(hub, self._ours) or (None if tied is None else _translated(tied, self._ours))

    def ours_among(self, hub: str, there: Container[str]) -> str | None:
        """`to_ours`, but a name of ours that is not `there` does not count: a head may stand alone or be tied."""
        tied = self.tied_to(hub)
        candidates = _translated(hub, self._ours), None if tied is None else _translated(tied, self._ours)
        return next((name for name in candidates if name is not None and name in there), None)

    def hub_to_ours(self, names: Iterable[str]) -> dict[str, str]:
        """Hub name -> our name, for those of our `names` that the table has."""
        return {hub: name for name in names if (hub := self.to_hub(name)) is not None}

    def is_carried(self, hub: str) -> bool:
        """True for tensors that we keep and write back but do not run."""
        return hub.startswith(self.carried)

    def tied_to(self, hub: str) -> str | None:
        """The tensor that one of this Hub name would be a copy of, None if of none."""
        return next((end + hub.removeprefix(start) for start, end in self.ties if hub.startswith(start)), None)


def _translated(name: str, table: Mapping[str, str]) -> str | None:
    layer = _LAYER.search(name)
    if layer is None:
        return table.get(name)
    row = table.get(f"{name[: layer.start(1)]}{{}}{name[layer.end(1) :]}")
    return None if row is None else row.format(layer[1])
