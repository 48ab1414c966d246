"""The token cache: encoded sources on disk, by a hash of everything they were made from, or in a temporary file."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

import pyarrow as pa

from blockdiff.data.chat import Encoder
from blockdiff.data.examples import SCHEMA, read_table
from blockdiff.data.sources import OpenedSource
from blockdiff.data.statistics import Statistics
from blockdiff.errors import DataError
from blockdiff.files import digest, remove_directory, remove_leftovers, seal, whole_directory

VERSION = 8  # of examples and statistics; raise it when either changes
TOKENS, FACTS = "tokens.arrow", "facts.json"
STALE = 24 * 3600.0  # seconds after which unfinished entries are removed

# Writes the examples of a source into a file and returns statistics of its rows.
Write = Callable[[IO[bytes]], Statistics]


def cache_key(source: OpenedSource, encoder: Encoder) -> str:
    """A hash of a source's content and of everything that turns it into examples, independent of its path."""
    text = f"{VERSION} {SCHEMA} {source.fingerprint()} {encoder.fingerprint}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def temporary(write: Write) -> tuple[pa.Table, Statistics]:
    """Return the table that `write` writes, in an unnamed file that disappears with the process."""
    with tempfile.TemporaryFile() as file:
        statistics = write(file)
        file.flush()
        return read_table(file), statistics


def cached(directory: Path, key: str, write: Write) -> tuple[pa.Table, Statistics]:
    """Return the table in `directory`/`key`, after writing it with `write` if there is none.

    Entries are written atomically and never removed by readers, since other processes may read them. An entry that has
    changed is written again, with a warning. Raises DataError if it cannot be written.
    """
    entry = directory / key
    if (content := _read(entry)) is not None:
        return content
    where, reason = str(entry), "it cannot be read back"
    try:
        if entry.exists():
            warnings.warn(f"{entry}: has changed since it was written; the rows are encoded again", stacklevel=2)
            with suppress(FileNotFoundError):  # another process has removed it
                remove_directory(entry)
        remove_leftovers(directory, seconds=STALE)
        with whole_directory(entry) as fresh:
            with (fresh / TOKENS).open("wb") as file:
                statistics = write(file)
            facts = {"digest": digest(fresh / TOKENS), "statistics": asdict(statistics)}
            facts["seal"] = seal(facts)
            (fresh / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
            if entry.exists():  # another process was quicker; its entry is equal
                raise FileExistsError(errno.EEXIST, "another process writes there", str(entry))
    except OSError as error:
        where, reason = str(error.filename or directory), str(error.strerror)
    if (content := _read(entry)) is None:
        raise DataError(
            f"{where}: the token cache cannot be written ({reason}); set data.cache to a directory, or to off"
        )
    return content


def _read(entry: Path) -> tuple[pa.Table, Statistics] | None:
    """Read an entry; None if there is none or it is damaged.

    Comparing its hash takes about a second per GB; BLOCKDIFF_CACHE_TRUSTED=1 skips it.
    """
    try:
        facts = json.loads((entry / FACTS).read_text(encoding="utf-8"))
        if facts.pop("seal") != seal(facts):
            return None
        if os.environ.get("BLOCKDIFF_CACHE_TRUSTED") != "1" and digest(entry / TOKENS) != facts["digest"]:
            return None
        with (entry / TOKENS).open("rb") as file:
            return read_table(file), Statistics(**facts["statistics"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
