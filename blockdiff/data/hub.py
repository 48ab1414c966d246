"""Data sets of the hub as sources of rows, through `datasets`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from blockdiff.data.formats import Skip
from blockdiff.data.rows import Row, check_row
from blockdiff.errors import DataError

if TYPE_CHECKING:
    from blockdiff.data.sources import SourceSpec


class HubSource:
    """One split of a data set of the hub; with `streaming` nothing is downloaded before it is read."""

    def __init__(self, spec: SourceSpec, streaming: bool) -> None:
        import datasets

        self.spec = spec
        self.files = [f"{spec.path}:{spec.split}"]
        try:
            found: Any = datasets.load_dataset(spec.path, spec.subset, split=spec.split, streaming=streaming)
        except Exception as error:  # whatever network, hub and builders raise
            raise self._refused("cannot be loaded", error) from None
        names = found.column_names
        self.data = found if names is None else found.select_columns(spec.kept(list(names)))
        # A stream has no fingerprint of its content.
        self._fingerprint, self._version = getattr(found, "_fingerprint", None), str(found.info.version)

    def rows(self, skip: Skip | None = None) -> Iterator[Row]:
        """Its rows in order but those that `skip` takes; DataError "owner/name:split:row N: reason; what to do"."""
        number, asked = 0, skip.left if skip else 0
        rows = self._values(asked)
        first = next(rows, None)
        if skip is not None and asked:
            # A stream does not say how long it is: only where nothing is left after skipping are its rows counted.
            skip.left -= asked if first is not None else min(asked, sum(1 for _ in self._values(0)))
            number = asked
        for value in chain([] if first is None else [first], rows):
            number += 1
            yield check_row(value, f"{self.files[0]}:row {number}", self.spec.columns)
        if not number:
            raise DataError(f"{self.files[0]}: has no rows; choose another split")

    def _values(self, skip: int) -> Iterator[Any]:
        try:
            yield from self.data.skip(skip) if skip else self.data
        except Exception as error:
            raise self._refused("cannot be read", error) from None

    def fingerprint(self, is_quick: bool = False) -> str:
        """A hash of what `datasets` knows the content by, and of the column names."""
        content = self._fingerprint or (self.spec.path, self.spec.subset, self.spec.split, self._version)
        text = repr((content, sorted(self.spec.columns.items())))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _refused(self, what: str, error: Exception) -> DataError:
        subset = f", subset {self.spec.subset}" if self.spec.subset else ""
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return DataError(
            f"{self.spec.path}: no such file, and as a data set of the hub (split {self.spec.split}{subset}) it {what} "
            f"({reason}); correct the name, subset or split, or see to the network"
        )
