"""Encoded sources on disk, found again by what they were made from; a temporary file where nobody wants them kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from blockdiff.data.chat import Encoder
from blockdiff.data.examples import Examples
from blockdiff.data.sources import Source
from blockdiff.data.statistics import Statistics
from blockdiff.errors import DataError

VERSION = 1  # of the files and of what rows become; raise it when either changes
TOKENS, FACTS = "tokens.arrow", "facts.json"
PARTIAL = ".partial-"
STALE = 24 * 3600.0  # seconds after which what a killed process left is removed

# Writes the examples of a source into a file and says what became of its rows.
Write = Callable[[IO[bytes]], Statistics]


def key_of(source: Source, encoder: Encoder) -> str:
    """A hash of the content of a source and of everything that turns it into examples, wherever it lies."""
    text = f"{VERSION} {source.fingerprint()} {encoder.fingerprint}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def temporary(write: Write, files: list[str], first_id: int) -> tuple[Examples, Statistics]:
    """What `write` writes, in a file without a name that is gone when the process is, however it ends."""
    with tempfile.TemporaryFile() as file:
        statistics = write(file)
        file.flush()
        return Examples(file, files, first_id), statistics


def cached(
    directory: Path, key: str, write: Write, files: list[str], first_id: int
) -> tuple[Examples, Statistics]:
    """What `directory`/`key` holds; if nothing, what `write` writes goes there first.

    It is written beside, synced and renamed, so an interrupted writing leaves nothing that looks complete.
    """
    found = _read(directory / key, files, first_id)
    if found is not None:
        return found
    try:
        _write(directory, key, write)
    except OSError as error:
        raise DataError(
            f"{error.filename or directory}: the token cache cannot be written ({error.strerror}); "
            "set data.cache to a directory, or to off"
        ) from None
    found = _read(directory / key, files, first_id)
    if found is None:
        raise DataError(f"{directory / key}: the token cache cannot be read back; remove it, or set data.cache to off")
    return found


def _read(entry: Path, files: list[str], first_id: int) -> tuple[Examples, Statistics] | None:
    """A complete entry, or None: its facts are written last, and know the size of the rest."""
    try:
        facts = json.loads((entry / FACTS).read_text(encoding="utf-8"))
        if (entry / TOKENS).stat().st_size != facts["bytes"]:
            return None
        with (entry / TOKENS).open("rb") as file:
            return Examples(file, files, first_id), Statistics(**facts["statistics"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(directory: Path, key: str, write: Write) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    _remove_stale(directory)
    partial = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{key}-", dir=directory))
    try:
        with (partial / TOKENS).open("wb") as file:
            statistics = write(file)
            size = file.tell()
            _sync(file)
        with (partial / FACTS).open("w", encoding="utf-8") as file:
            json.dump({"bytes": size, "statistics": statistics.counts()}, file, indent=1)
            _sync(file)
        if (directory / key).exists():  # damaged, or it would have been read; unless another process was quicker
            shutil.rmtree(directory / key, ignore_errors=True)
        try:
            partial.rename(directory / key)
        except OSError:
            if not (directory / key / FACTS).is_file():  # not there because another process was quicker
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(file: IO[bytes] | IO[str]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _remove_stale(directory: Path) -> None:
    """Remove what processes left that were killed a day ago or earlier; younger ones may still be at work."""
    for partial in directory.glob(f"{PARTIAL}*"):
        tokens = partial / TOKENS
        try:
            if time.time() - (tokens if tokens.exists() else partial).stat().st_mtime > STALE:
                shutil.rmtree(partial, ignore_errors=True)
        except OSError:  # its process is done with it
            continue
