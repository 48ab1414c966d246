"""The identities of a row's tokens: pages are shared by rows whose tokens have the same.

A token is its own identity. A placeholder sees the images of its whole run of adjacent placeholders, so its identity
is a negative number that follows from these images and from its place in the run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import shake_256

from blockdiff.images import PlacedImage, runs_of


def identities(tokens: Sequence[int], images: Sequence[PlacedImage]) -> list[int]:
    """The identities of tokens, in which the runs of these images lie whole; columns are counted from the first."""
    found, placed = list(tokens), sorted(images, key=lambda each: each.column)
    for first, end in runs_of(placed):
        pictures = b"".join(each.image.digest for each in placed if first <= each.column < end)
        numbers = array("Q", shake_256(pictures).digest(8 * (end - first)))
        found[first:end] = [-1 - (number >> 1) for number in numbers]
    return found


def is_in_run(identities: Sequence[int], column: int) -> bool:
    """True where a beginning of so many tokens ends within a run of placeholders, or might."""
    return identities[column - 1] < 0 and (column == len(identities) or identities[column] < 0)


def packed_identities(identities: Sequence[int]) -> bytes:
    """Identities as bytes, a key of published links."""
    return array("q", identities).tobytes()


def unpacked_identities(key: bytes) -> list[int]:
    """The identities of `packed_identities`."""
    return array("q", key).tolist()
