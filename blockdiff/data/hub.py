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
            subset = f", subset {spec.subset}" if spec.subset else ""
            raise DataError(
                f"{spec.path}: no such file, and as a data set of the hub (split {spec.split}{subset}) it cannot be "
                f"loaded ({_reason(error)}); correct the name, subset or split, or see to the network"
            ) from None
        names = found.column_names
        self.data = found if names is None else found.select_columns(spec.kept(list(names)))
        self._content = [spec.path, spec.subset, spec.split, str(found.info.version)]
        if not streaming:  # a stream has a random one
            self._content = [found._fingerprint]

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
        is_past_the_end = hasattr(self.data, "__len__") and skip >= len(self.data)
        try:
            yield from () if is_past_the_end else self.data.skip(skip) if skip else self.data
        except Exception as error:
            raise DataError(f"{self.files[0]}: cannot be read ({_reason(error)}); see to the network") from None

    def fingerprint(self) -> str:
        """A hash of what `datasets` knows the content by, and of the column names."""
        text = repr((self._content, sorted(self.spec.columns.items())))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
