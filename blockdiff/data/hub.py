"""Data sets of the hub as sources of rows, through `datasets`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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
        self._fingerprint = getattr(found, "_fingerprint", None)

    def rows(self, skip: int = 0) -> Iterator[Row]:
        """Its rows in order but the first `skip`; DataError "owner/name:split:row N: reason; what to do"."""
        number = skip
        rows = iter(self.data.skip(skip) if skip else self.data)
        while True:
            try:
                value = next(rows)
            except StopIteration:
                break
            except Exception as error:
                raise self._refused(f"cannot be read after row {number}", error) from None
            number += 1
            yield check_row(value, f"{self.files[0]}:row {number}", self.spec.columns)
        if not number:
            raise DataError(f"{self.files[0]}: has no rows; choose another split")

    def fingerprint(self) -> str:
        """A hash of what `datasets` knows the content by, and of the column names."""
        text = repr((self._fingerprint, sorted(self.spec.columns.items())))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _refused(self, what: str, error: Exception) -> DataError:
        subset = f", subset {self.spec.subset}" if self.spec.subset else ""
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return DataError(
            f"{self.spec.path}: no such file, and as a data set of the hub (split {self.spec.split}{subset}) it {what} "
            f"({reason}); correct the name, subset or split, or see to the network"
        )
