"""Sources of rows: files, directories and patterns, data sets of the Hub, and rows in memory."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

from blockdiff.data.decision_rows import rows_to_learn
from blockdiff.data.formats import FORMATS, Skip, file_format, values
from blockdiff.data.rows import CONTENT_KEYS, KEYS, Row, check_row
from blockdiff.data.statistics import Statistics
from blockdiff.errors import DataError
from blockdiff.files import is_hub_id, is_pattern, matching

TRAIN = "train"
# Words in file names that mean a split.
SPLITS = {
    TRAIN: ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev", "heldout"),
}
MAX_NAMES = 5  # the largest number of files that a message names
SPLITS_STATE = "dataset_dict.json"  # in directories of splits that `datasets` saves
ARROW_STATE = "state.json"  # in directories of Arrow files that `datasets` saves


@dataclass(frozen=True)
class Source:
    """A source of rows: either `path`, a file, directory, pattern or hub id, or `rows` in memory.

    weight: its share of a mixture, relative to the other sources.
    name: its name in statistics.
    subset, split: the part of a data set on the Hub; `split` also chooses among the files of a directory.
    columns: the column of each of prompt, response, messages, tools, system, images and id.
    rows: a sequence of mappings, such as a `datasets.Dataset`; a `DatasetDict`, of which `split` is used; or an
        `IterableDataset`, which is read into memory.

    A `split` and `columns` of None are replaced by the recipe's, or else by "train" and {}.
    """

    path: str | None = None
    weight: float = 1.0
    name: str | None = None
    subset: str | None = None
    split: str | None = None
    columns: Mapping[str, str] | None = None
    rows: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.path is None) == (self.rows is None):
            raise DataError("a source needs either path or rows; set one of them")
        object.__setattr__(self, "rows", _of_datasets(self.rows, self.split))
        is_sequence = hasattr(self.rows, "__getitem__") and hasattr(self.rows, "__len__")
        if self.rows is not None and (not is_sequence or isinstance(self.rows, str | Mapping)):
            kind = type(self.rows).__name__
            raise DataError(f"rows is a {kind}; pass a sequence of mappings, such as a list or a datasets.Dataset")
        if not (0 < self.weight < math.inf):
            raise DataError(f"{self.title}: weight is {self.weight}; set a number above 0")
        columns = self.columns or {}
        unknown = [key for key in columns if key not in KEYS]
        if unknown:
            raise DataError(f"{self.title}: columns has the unknown key {unknown[0]!r}; its keys are {', '.join(KEYS)}")
        if {"prompt", "response"} & columns.keys() and "messages" in columns:
            raise DataError(f"{self.title}: columns names messages and prompt or response; choose one form of rows")

    @property
    def title(self) -> str:
        """The name of the source in messages."""
        return self.name or (Path(self.path).name or self.path if self.path is not None else "rows")

    def with_defaults(self, split: str, columns: Mapping[str, str]) -> Source:
        """Replace a split and columns of None by these."""
        return replace(self, split=self.split or split, columns=columns if self.columns is None else self.columns)

    def choose(self, names: list[str]) -> list[str]:
        """Return the columns of a file to read: all if expected ones are missing, so that an error can name them."""
        columns = set((self.columns or {}).values())
        if not columns <= set(names) or not (CONTENT_KEYS | columns) & set(names):
            return names
        return [name for name in names if name in CONTENT_KEYS | columns | set(KEYS)]


def _of_datasets(rows: Any, split: str | None) -> Any:
    """Turn splits or a stream of `datasets` into a sequence of rows. Other rows from Python stay."""
    if isinstance(rows, Mapping) and hasattr(rows, "column_names"):
        if (split or TRAIN) not in rows:
            raise DataError(f"rows has no split {split or TRAIN!r} (there are: {', '.join(rows)}); set split to one")
        rows = rows[split or TRAIN]
    if hasattr(rows, "column_names") and not hasattr(rows, "__len__"):
        return [_as_written(row, rows.features) for row in rows]
    return rows


def _as_written(value: Any, feature: Any) -> Any:
    """Remove the nulls that `datasets` adds to inner objects for the keys of other rows' objects.

    Values that are stored as JSON, and rows without features, stay as they are.
    """
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        is_row = hasattr(feature, "arrow_schema")
        present = {key: each for key, each in value.items() if is_row or each is not None}
        return {key: _as_written(each, feature.get(key)) for key, each in present.items()}
    inner = getattr(feature, "feature", None)
    return [_as_written(each, inner) for each in value] if inner is not None and isinstance(value, list) else value


def titles(sources: Sequence[Source]) -> list[str]:
    """The titles of sources: their names, or whole paths if names are not unique."""
    counts = Counter(source.title for source in sources)
    return [
        source.title if counts[source.title] == 1 else source.name or source.path or f"rows of source {number}"
        for number, source in enumerate(sources, start=1)
    ]


class OpenedSource(Protocol):
    """A source that exists. `where` of each of its rows begins with one of its `files`."""

    files: list[str]

    def rows(self, skip: Skip | None = None, counts: Statistics | None = None) -> Iterator[Row]:
        """Yield checked rows in order, after those to `skip`.

        Bad rows raise DataError "file:line: reason; what to do"; with `counts` they are counted there and left out.
        """
        ...

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield (where, row) with all columns, unchecked."""
        ...

    def fingerprint(self) -> str:
        """A hash of content and columns, independent of the files' paths."""
        ...


def open_source(source: Source, streaming: bool = False) -> OpenedSource:
    """Open a source: rows in memory, else local files, else a hub id. Raises DataError if there is none."""
    source = source.with_defaults(TRAIN, {})
    if source.path is None:
        return in_memory(source)
    files = local_files(source)
    if files is not None:
        return Files(source, files)
    if not is_hub_id(source.path):
        raise DataError(f"{source.path}: no such file; check the path")
    return on_hub(source, streaming)


def read_rows(source: Source) -> Iterator[Row]:
    """Yield the rows of a source in order. Raises DataError "file:line: reason; what to do" at the first bad one."""
    yield from open_source(source).rows()


def local_files(source: Source) -> list[Path] | None:
    """Return the files of a source's path, sorted by name; None if the path does not exist."""
    path = Path(source.path or "").expanduser()
    if path.is_dir():
        return _in_directory(path, source.split or TRAIN)
    files = matching(path)
    if not files and is_pattern(str(path)):
        raise DataError(f"{path}: no file matches the pattern; correct it")
    return files or None


def _in_directory(path: Path, split: str) -> list[Path]:
    """Return the files of a directory with the split in their names, or all files if no name has a split."""
    if (path / ARROW_STATE).is_file():  # saved by datasets.Dataset.save_to_disk
        return sorted(each for each in path.glob("*.arrow") if not each.name.startswith("."))
    if (path / SPLITS_STATE).is_file() and (path / split).is_dir():  # by datasets.DatasetDict.save_to_disk
        return _in_directory(path / split, split)
    visible = (each for each in path.iterdir() if not each.name.startswith("."))
    files = sorted(each for each in visible if each.is_file() and file_format(each) is not None)
    if not files:
        raise DataError(f"{path}: a directory without rows ({', '.join(FORMATS)}); name a file or a pattern in it")
    of_split = {each: _split_of(each) for each in files}
    wanted_split = next((name for name, words in SPLITS.items() if split in words), split)
    chosen = [each for each in files if of_split[each] == wanted_split]
    named = sorted({name for name in of_split.values() if name})
    if not chosen and named:
        raise DataError(f"{path}: has files for {', '.join(named)} but none for split {split!r}; name a file in it")
    nameless = [each.name for each in files if of_split[each] is None]
    if chosen and nameless:
        warnings.warn(
            f"{path}: only {_listed([each.name for each in chosen])} are read, which have {split} in their names, and "
            f"not {_listed(nameless)}; the pattern {path / '*'} reads all",
            stacklevel=2,
        )
    return chosen or files


def _listed(names: Sequence[str]) -> str:
    """Format the first names of a list and the number of the others."""
    more = len(names) - MAX_NAMES
    return ", ".join([*names[:MAX_NAMES], *[f"{more:,} more"] * (more > 0)])


def _split_of(path: Path) -> str | None:
    """Return the split in a file's name; None if it has none."""
    words = re.split(r"[^a-z]+", path.name.lower().partition(".")[0])
    return next((split for split, known in SPLITS.items() if set(words) & set(known)), None)


class Files:
    """Local files of rows, in order."""

    def __init__(self, source: Source, paths: list[Path]) -> None:
        self.source, self.paths = source, paths
        self.files = [str(path) for path in paths]

    def rows(self, skip: Skip | None = None, counts: Statistics | None = None) -> Iterator[Row]:
        """Yield checked rows in order, after those to `skip`. Raises DataError for a file without rows."""
        skip = skip or Skip()
        for path in self.paths:
            is_empty, before = True, skip.remaining
            for where, value in values(path, skip, partial(self._chosen, counts)):
                is_empty = False
                yield from _checked(value, f"{path}:{where}", self.source, counts)
            if is_empty and skip.remaining == before:
                raise DataError(f"{path}: has no rows; write one JSON object per line")

    def _chosen(self, counts: Statistics | None, names: list[str]) -> list[str]:
        chosen = self.source.choose(names)
        if counts is not None:
            counts.count_unread({*names} - {*chosen})
        return chosen

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield (where, row) with all columns, unchecked."""
        for path in self.paths:
            for where, value in values(path, Skip(), lambda names: names):
                yield f"{path}:{where}", value

    def fingerprint(self) -> str:
        """A hash of the bytes of the files, in order, and of the column names."""
        return _hash(self.source, map(_digest, self.paths))


def _checked(value: Any, where: str, source: Source, counts: Statistics | None) -> list[Row]:
    """Return the rows of a value: one, or several of a decision. A bad row is counted, or raises without `counts`."""
    try:
        if isinstance(value, Mapping) and "questions" in value and "answers" in value:
            return rows_to_learn(value, where)
        return [check_row(value, where, source.columns)]
    except DataError as error:
        if counts is None:
            raise
        counts.count_bad(error)
        return []


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return f"{file_format(path)} {hashlib.file_digest(file, 'blake2b').hexdigest()}"
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the file") from None


class Table:
    """Rows that are not in files: a data set of `datasets`, or a sequence of mappings.

    prefix: the beginning of `where` of its rows; their number, counted from 1, follows.
    content: the fingerprint of `datasets`; None: compare the rows.
    left_out: columns that are not read.
    """

    def __init__(
        self, source: Source, data: Any, prefix: str, content: str | None, left_out: Sequence[str] = ()
    ) -> None:
        self.source, self.data, self.prefix, self.content, self.left_out = source, data, prefix, content, left_out
        self.files = [prefix.rpartition(":")[0]]

    def rows(self, skip: Skip | None = None, counts: Statistics | None = None) -> Iterator[Row]:
        """Yield checked rows in order, after those to `skip`. Bad rows are handled as in `OpenedSource.rows`."""
        if counts is not None:
            counts.count_unread(self.left_out)
        skipped = skip.remaining if skip else 0
        values = self._values(skipped)
        first = next(values, None)
        if first is None:
            number = sum(1 for _ in self._values(0))  # the length of a stream is unknown
            if not number:
                raise DataError(f"{self.files[0]}: has no rows; choose another split or other rows")
            skipped = min(skipped, number)
        if skip:
            skip.remaining -= skipped
        for number, value in enumerate(chain([] if first is None else [first], values), start=skipped + 1):
            yield from _checked(value, f"{self.prefix}{number}", self.source, counts)

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield (where, row) with all columns, unchecked."""
        return ((f"{self.prefix}{number}", value) for number, value in enumerate(self._values(0), start=1))

    def _values(self, skip: int) -> Iterator[Any]:
        features = getattr(self.data, "features", None)
        try:
            if not hasattr(self.data, "skip"):
                yield from islice(self.data, skip, None)
            elif not hasattr(self.data, "__len__") or skip < len(self.data):
                rows = self.data.skip(skip) if skip else self.data
                yield from (_as_written(row, features) for row in rows)
        except Exception as error:  # whatever network and hub raise
            if self.source.path is None:
                raise
            raise DataError(f"{self.files[0]}: cannot be read ({_one_line(error)}); check the network") from None

    def fingerprint(self) -> str:
        """A hash of content and column names."""
        if self.content is not None:
            return _hash(self.source, [self.content])
        counts = Statistics(1)
        rows = (
            (row.prompt, row.response, row.messages, row.id, row.tools, row.images, row.is_text)
            for row in self.rows(counts=counts)
        )
        parts = [repr(row) for row in rows]
        return _hash(self.source, [*parts, *([f"{counts.bad} {counts.first_bad}"] if counts.bad else [])])


def in_memory(source: Source) -> Table:
    """Open the rows that Python passed as a source."""
    rows = source.rows.with_format(None) if hasattr(source.rows, "with_format") else source.rows
    return Table(source, rows, f"{source.title}:", None)


def on_hub(source: Source, streaming: bool) -> Table:
    """Open a split of a data set on the Hub. With `streaming`, rows are downloaded only when they are read."""
    import datasets

    split = source.split
    try:
        if streaming:
            builder = datasets.load_dataset_builder(source.path, source.subset)
            data: Any = builder.as_streaming_dataset(split=split)
            # A stream's fingerprint is random; the builder's hash is of the revision.
            content = repr((source.path, source.subset, split, builder.hash))
        else:
            data = datasets.load_dataset(source.path, source.subset, split=split)
            content = data._fingerprint
    except Exception as error:  # whatever network, hub and builders raise
        subset = f", subset {source.subset}" if source.subset else ""
        raise DataError(
            f"{source.path}: no such file, and as a data set of the hub (split {split}{subset}) it cannot be "
            f"loaded ({_one_line(error)}); correct the name, subset or split, or check the network"
        ) from None
    left_out: list[str] = []
    if data.column_names is not None:
        chosen = source.choose(list(data.column_names))
        left_out = [name for name in data.column_names if name not in chosen]
        data = data.select_columns(chosen)
    for name, feature in (data.features or {}).items():
        if isinstance(feature, datasets.Image):  # read the bytes of files; images are decoded when they are needed
            data = data.cast_column(name, datasets.Image(decode=False))
    return Table(source, data, f"{source.path}:{split}:row ", content, left_out)


def _hash(source: Source, parts: Iterable[str]) -> str:
    total = hashlib.blake2b(repr(sorted((source.columns or {}).items())).encode(), digest_size=16)
    for part in parts:
        total.update(part.encode())
    return total.hexdigest()


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
