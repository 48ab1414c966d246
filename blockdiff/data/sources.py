"""The places rows come from: files, directories and patterns here, data sets of the hub in `hub`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from blockdiff.data.formats import FORMATS, Skip, format_of, values
from blockdiff.data.rows import CONVERSATION_KEYS, KEYS, Row, check_row
from blockdiff.errors import DataError
from blockdiff.files import is_hub_id, is_pattern, matching

# Words by which file names say what part of a data set they hold.
SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev", "heldout"),
}
ARROW_STATE = "state.json"  # beside the Arrow files that `datasets` saves


@dataclass(frozen=True)
class SourceSpec:
    """One source of rows: a file, a directory, a pattern or a hub id.

    `weight` is its part of a mixture, `name` what statistics call it, `subset` and `split` choose within a hub
    data set (`split` also among the files of a directory), `columns` maps prompt, response, messages, system or id
    to the column that holds it.
    """

    path: str
    weight: float = 1.0
    name: str | None = None
    subset: str | None = None
    split: str = "train"
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [key for key in self.columns if key not in KEYS]
        if unknown:
            raise DataError(f"{self.path}: columns has {unknown[0]!r}; it can say where {', '.join(KEYS)} are")
        if {"prompt", "response"} & self.columns.keys() and "messages" in self.columns:
            raise DataError(f"{self.path}: columns names messages and prompt or response; choose one form of rows")

    @property
    def title(self) -> str:
        """What to call it."""
        return self.name or Path(self.path).name or self.path

    def kept(self, names: list[str]) -> list[str]:
        """Of the columns of a file those that are read: all where the rows are missing, so that an error names them."""
        content = {"prompt", "response", *CONVERSATION_KEYS, *self.columns.values()} & set(names)
        if not content or not set(self.columns.values()) <= set(names):
            return names
        return [name for name in names if name in {*KEYS, *CONVERSATION_KEYS, *self.columns.values()}]


class Source(Protocol):
    """A source that has been found; its rows name the file they come from as one of `files`."""

    files: list[str]

    def rows(self, skip: Skip | None = None) -> Iterator[Row]:
        """Its rows in order but those that `skip` takes; DataError "file:line: reason; what to do" for a bad one."""
        ...

    def fingerprint(self) -> str:
        """A hash of its content and of how columns are read, the same wherever the files lie."""
        ...


def open_source(spec: SourceSpec, streaming: bool = False) -> Source:
    """Find a source: local files first, then a hub id. Raises DataError for neither."""
    files = local_files(spec)
    if files is not None:
        return Files(spec, files)
    if not is_hub_id(spec.path):
        raise DataError(f"{spec.path}: no such file; check the path")
    from blockdiff.data.hub import HubSource

    return HubSource(spec, streaming)


def rows_of(spec: SourceSpec) -> Iterator[Row]:
    """The rows of a source in order; raises DataError "file:line: reason; what to do" at the first bad one."""
    yield from open_source(spec).rows()


def local_files(spec: SourceSpec) -> list[Path] | None:
    """The files a spec means, sorted by name; None if it names nothing here."""
    path = Path(spec.path).expanduser()
    if path.is_dir():
        return _in_directory(path, spec.split)
    found = matching(path)
    if not found and is_pattern(spec.path):
        raise DataError(f"{spec.path}: no file matches the pattern; correct it")
    return found or None


def _in_directory(path: Path, split: str) -> list[Path]:
    """The files of a directory: those whose names say the split, or all where no name says any."""
    if (path / ARROW_STATE).is_file():  # saved by datasets.Dataset.save_to_disk
        return sorted(path.glob("*.arrow"))
    files = sorted(each for each in path.iterdir() if each.is_file() and format_of(each) is not None)
    if not files:
        raise DataError(f"{path}: a directory without rows ({', '.join(FORMATS)}); name a file or a pattern in it")
    of_split = {each: split_of(each) for each in files}
    asked = next((name for name, words in SPLITS.items() if split in words), split)
    chosen = [each for each in files if of_split[each] == asked]
    named = sorted({name for name in of_split.values() if name})
    if not chosen and named:
        raise DataError(f"{path}: has files for {', '.join(named)} but none for split {split!r}; name a file in it")
    return chosen or files


def split_of(path: Path) -> str | None:
    """The split that a file's name says it is part of."""
    words = re.split(r"[^a-z]+", path.name.lower().partition(".")[0])
    return next((split for split, known in SPLITS.items() if set(words) & set(known)), None)


class Files:
    """Local files of rows, one after the other."""

    def __init__(self, spec: SourceSpec, paths: list[Path]) -> None:
        self.spec, self.paths = spec, paths
        self.files = [str(path) for path in paths]

    def rows(self, skip: Skip | None = None) -> Iterator[Row]:
        """Their rows in order but those that `skip` takes; a file without any row is refused."""
        skip = skip or Skip()
        for path in self.paths:
            is_empty, before = True, skip.left
            for place, value in values(path, skip, self.spec.kept):
                is_empty = False
                yield check_row(value, f"{path}:{place}", self.spec.columns)
            if is_empty and skip.left == before:
                raise DataError(f"{path}: has no rows; write one JSON object per line")

    def fingerprint(self) -> str:
        """A hash of the bytes of the files, in order, and of the column names."""
        total = hashlib.blake2b(repr(sorted(self.spec.columns.items())).encode(), digest_size=16)
        for path in self.paths:
            try:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "blake2b").hexdigest()
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error.strerror}); check the file") from None
            total.update(f"{format_of(path)} {digest}".encode())
        return total.hexdigest()
