"""Atomic writes of files and directories, their digests, and the test for names on the Hub."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PIECE = 1 << 22  # bytes of the pieces of a large file that are hashed separately
_READ = 1 << 20  # bytes that are read at a time
WORKERS = min(8, os.cpu_count() or 1)  # threads that hash
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PATTERN = re.compile(r"[*?\[]")
# A name with one of these suffixes is a file's, even if it could be the id of a repository.
_FILE = re.compile(r"\.(jsonl?|ndjson|csv|tsv|parquet|arrow|gz|txt|ya?ml|safetensors)$", re.IGNORECASE)


def is_hub_id(name: str) -> bool:
    """Return True if a name may be `owner/name` on the Hub. Look for a path of that name first."""
    return bool(_HUB_ID.fullmatch(name)) and not _FILE.search(name)


def is_pattern(name: str) -> bool:
    """Return True if a name has wildcards. Look for a path of that name first."""
    return bool(_PATTERN.search(name))


def matching(name: str | Path) -> list[Path]:
    """The files of a pattern, sorted by name; a path that exists is returned itself."""
    path = Path(name).expanduser()
    if path.exists():
        return [path]
    names = glob.glob(str(path), recursive=True) if is_pattern(str(path)) else []
    return sorted(each for each in map(Path, names) if each.is_file())


def read_text(path: Path, most: int) -> str:
    """Read a UTF-8 file of at most `most` bytes. Raises OSError if it is longer or cannot be read."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is longer than {most:,} bytes", str(path))
    return content.decode("utf-8")


def write_text(path: str | Path, text: str) -> None:
    """Write a temporary file, sync it and rename it to `path`: a kill leaves the old file or the new one.

    Raises OSError with `path` as its filename.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        sync(beside)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: str | Path, values: Mapping[str, Any]) -> None:
    """Write an object as JSON with `write_text`."""
    write_text(path, json.dumps(dict(values), indent=2, sort_keys=True) + "\n")


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """Yield a new directory, which is synced and renamed to `target` if the block ends without an error.

    An existing `target` is then removed; after an error it stays. A kill can leave hidden directories next to it, which
    `remove_leftovers` removes. Raises OSError, with a filename, also if another process has written to `target` at the
    same time.
    """
    fresh = hidden_directory(target)
    try:
        yield fresh
        for path in fresh.rglob("*"):
            sync(path)
        written = _sizes(fresh)
        publish(fresh, target)
        if _sizes(target) != written:
            raise OSError(errno.EBUSY, "another process writes there", str(target))
    except OSError as error:
        raise error if error.filename else OSError(error.errno, error.strerror or str(error), str(target)) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def hidden_directory(target: Path) -> Path:
    """Make a hidden directory next to `target`, for `publish`. `remove_leftovers` removes unpublished ones."""
    fresh = _hidden(target)
    fresh.mkdir(parents=True)
    return fresh


def publish(fresh: Path, target: Path) -> None:
    """Rename a directory whose files are on the disk to `target`, and remove the previous `target`.

    After an OSError the previous `target` is still there.
    """
    sync(fresh)
    old, is_replaced = _hidden(target), os.path.lexists(target)
    if is_replaced:
        target.rename(old)
    try:
        fresh.rename(target)
    except OSError:
        if is_replaced:
            old.rename(target)
        raise
    sync(target.parent)
    if is_replaced:
        _remove(old)


def json_digest(value: Any) -> str:
    """The digest of a value's JSON."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def digest(path: Path, size: int | None = None) -> str:
    """The hash of a small file, or of its first `size` bytes. Raises OSError with a filename."""
    try:
        with path.open("rb") as file:
            if size is None:
                return hashlib.file_digest(file, "blake2b").hexdigest()[:32]
            return hashlib.blake2b(file.read(size)).hexdigest()[:32]
    except OSError as error:  # a disk that gives no more bytes names no file
        raise OSError(error.errno, error.strerror, str(path)) from error


class PiecewiseDigest:
    """A hash of a large file whose pieces are hashed by several threads, while they are written or read.

    It is the hash of the pieces' hashes, in their order, after the size of a piece: `4194304:...`.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(WORKERS)
        self._whole = hashlib.blake2b()
        self._waiting: deque[Future[bytes]] = deque()
        self._lent: list[Future[bytes]] = []  # of pieces that lie in the caller's memory
        self._rest = bytearray()  # bytes that do not fill a piece yet

    def __enter__(self) -> PiecewiseDigest:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def update(self, content: memoryview) -> None:
        """Add the next bytes, which must not change before `settle`."""
        start = min(-len(self._rest) % PIECE, len(content))
        self._rest += content[:start]
        end = start + (len(content) - start) // PIECE * PIECE
        if len(self._rest) == PIECE:
            self.submit(_hash, self._rest)
            self._rest = bytearray()
        for offset in range(start, end, PIECE):
            self._lent.append(self.submit(_hash, content[offset : offset + PIECE]))
        self._rest += content[end:]

    def submit(self, work: Callable[..., bytes], *arguments: Any) -> Future[bytes]:
        """Hash the next piece in a thread. Waits if many pieces are waiting already."""
        if len(self._waiting) > 2 * WORKERS:
            self._whole.update(self._waiting.popleft().result())
        self._waiting.append(self._pool.submit(work, *arguments))
        return self._waiting[-1]

    def settle(self) -> None:
        """Wait until all bytes that were added are hashed, so that they may change."""
        wait(self._lent)
        self._lent.clear()

    def hexdigest(self) -> str:
        """The digest of all bytes that were added."""
        if self._rest:
            self.submit(_hash, self._rest)
        while self._waiting:
            self._whole.update(self._waiting.popleft().result())
        return f"{PIECE}:{self._whole.hexdigest()[:32]}"


def piecewise_digest(path: Path) -> str:
    """The `PiecewiseDigest` of a file. Raises OSError with a filename."""
    try:
        with path.open("rb", buffering=0) as file, PiecewiseDigest() as hashing:
            size = os.fstat(file.fileno()).st_size
            for start in range(0, size, PIECE):
                hashing.submit(_hash_of_file, file.fileno(), start, min(PIECE, size - start))
            return hashing.hexdigest()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _hash(content: bytes | bytearray | memoryview) -> bytes:
    return hashlib.blake2b(content).digest()


def _hash_of_file(handle: int, start: int, size: int) -> bytes:
    hashed, buffer = hashlib.blake2b(), memoryview(bytearray(min(_READ, size)))
    while size > 0:
        count = os.preadv(handle, [buffer[:size]], start)
        if not count:
            break  # the file has become shorter
        hashed.update(buffer[:count])
        start, size = start + count, size - count
    return hashed.digest()


def seal(values: Any) -> str:
    """The hash of JSON values, the same after they are written and read back."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def unwritten(path: Path, error: Exception, needed: int) -> str:
    """Explain in one line why a directory could not be written, with the needed bytes if the disk may be full."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    reason = (error.strerror if isinstance(error, OSError) else None) or text
    existing = next((parent for parent in path.absolute().parents if parent.is_dir()), Path("/"))
    free = shutil.disk_usage(existing).free
    room = f"; it needs {needed:,} bytes, {free:,} are free" if free < needed or "space" in reason else ""
    return f"{path}: cannot be written ({reason}{room})"


def room_remedy(error: Exception) -> str:
    """Return the remedy for a failed write: more room, or other permissions of the path."""
    is_place = isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
    return "see to the permissions of the place" if is_place else "make room"


def remove_directory(path: Path) -> None:
    """Remove a directory. It is renamed first, so that a kill leaves nothing that looks complete.

    A link to a directory is removed without its target.
    """
    _remove(path.rename(_hidden(path)))


def remove_leftovers(directory: Path, name: str = "*", seconds: float = 0.0) -> None:
    """Remove temporary files and directories of `directory`/`name` (a pattern) that nobody wrote to for `seconds`."""
    for leftover in directory.glob(f".{name}.*.tmp"):
        with suppress(OSError):  # its writer has just finished
            written = max(path.lstat().st_mtime for path in (leftover, *leftover.rglob("*")))
            if not seconds or time.time() - written > seconds:
                _remove(leftover)


def _sizes(directory: Path) -> dict[str, int]:
    """The sizes of the files in a directory, by their relative paths."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def _remove(path: Path) -> None:
    """Remove a directory with its content, a file, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a directory, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
