"""Digests of the weights of any checkpoint, and `digests.json` beside the files of an exported one.

The digests in the file are computed from the data to be written, so they also reveal what a disk lost.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdiff.checkpoint.files import ADDED, read_json, read_tensors, require_regular, stored_tensors, tensors_in
from blockdiff.errors import CheckpointError
from blockdiff.files import WORKERS, piecewise_digest, seal, write_json

DIGESTS = "digests.json"
NAMES = re.compile(r"[\w.-]{1,200}", re.ASCII)  # allowed names of files with digests


def write_digests(directory: Path, digests: Mapping[str, str]) -> None:
    """Write `digests.json`: the digest of each file with tensors, by file name."""
    write_json(directory / DIGESTS, digests)


def has_digests(directory: Path) -> bool:
    """Return True if `directory` has a `digests.json`, even one that cannot be read."""
    return os.path.lexists(directory / DIGESTS)


def read_back(directory: Path) -> Path:
    """Read the written files in `directory` and compare them with its digests; returns the directory.

    Raises CheckpointError, naming the file, if one is missing or differs, and if the digests are not those of exactly
    the files with weights.
    """
    if not (directory / DIGESTS).is_file():
        raise CheckpointError(f"{directory / DIGESTS}: is no file with digests; write the directory again")
    digests = read_json(directory / DIGESTS)
    for name, digest in digests.items():
        if not NAMES.fullmatch(name) or not isinstance(digest, str):
            raise CheckpointError(f"{directory / DIGESTS}: {name!r:.80} is no file of the directory with its digest")
    if missing := sorted({file.name for file in directory.glob("*.safetensors")} - digests.keys()):
        raise CheckpointError(
            f"{directory / DIGESTS}: has no digest of {missing[0]}; write the directory again, "
            f"or remove {DIGESTS} if the file was added on purpose"
        )
    for name, digest in digests.items():
        require_regular(directory / name)
        try:
            is_same = piecewise_digest(directory / name) == digest
        except OSError as error:
            raise CheckpointError(f"{directory / name}: cannot be read ({error.strerror}); write it again") from error
        if not is_same:
            raise CheckpointError(
                f"{directory / name}: is not as it was written ({DIGESTS}); write it again, "
                f"or remove {DIGESTS} if it was changed on purpose"
            )
    return directory


def compare(directories: Iterable[Path | None]) -> bool:
    """Compare the weights in `directories` with their digests; returns False if no directory has digests.

    A directory that is None or has no digests is skipped. Raises CheckpointError if a file is missing or differs
    (`read_back`).
    """
    return bool([read_back(each) for each in directories if each is not None and has_digests(each)])


def weights_digest(directory: Path) -> str:
    """Return a digest of a checkpoint's weights: shape, dtype and every number of all tensors, in whatever files.

    Several threads hash one tensor each. All files are read once, so loading finds them in the system's cache. Raises
    CheckpointError.
    """
    stored = stored_tensors(directory) | (tensors_in(directory / ADDED) if (directory / ADDED).is_file() else {})
    digests: dict[str, str] = {}
    waiting: deque[tuple[str, Future[str]]] = deque()
    with ThreadPoolExecutor(WORKERS) as pool:
        for name, tensor in read_tensors(stored, stored):
            if len(waiting) == 2 * WORKERS:
                first, hashed = waiting.popleft()
                digests[first] = hashed.result()
            waiting.append((name, pool.submit(_digest, tensor)))
        digests |= {name: hashed.result() for name, hashed in waiting}
    return seal([[name, stored[name].shape, stored[name].dtype, digests[name]] for name in sorted(stored)])


def _digest(tensor: Tensor) -> str:
    numbers: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(numbers).hexdigest()
