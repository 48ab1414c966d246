"""Identities of a row's tokens: rows share pages whose tokens have equal identities.

A token is its own identity. A placeholder of an image sees all images of its run of adjacent placeholders, so its
identity is a negative number, a hash of these images and of its index in the run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import shake_256

from blockdiff.images import PlacedImage, runs_of


def identities(tokens: Sequence[int], images: Sequence[PlacedImage]) -> list[int]:
    """Return the identities of tokens.

    images: the images among the tokens, in complete runs; column 0 is the first token.
    """
    numbers_of, placed = list(tokens), sorted(images, key=lambda each: each.column)
    for first, end in runs_of(placed):
        pictures = b"".join(each.image.digest for each in placed if first <= each.column < end)
        numbers = array("Q", shake_256(pictures).digest(8 * (end - first)))
        numbers_of[first:end] = [-1 - (number >> 1) for number in numbers]
    return numbers_of


def is_in_run(identities: Sequence[int], column: int) -> bool:
    """Whether the first `column` tokens end within a run of placeholders.

    Also True if they are all tokens and the last is a placeholder, since its run may continue.
    """
    return identities[column - 1] < 0 and (column == len(identities) or identities[column] < 0)


def packed_identities(identities: Sequence[int]) -> bytes:
    """Return identities as bytes, the key of a published page."""
    return array("q", identities).tobytes()


def unpacked_identities(key: bytes) -> list[int]:
    """Return the identities in a key of `packed_identities`."""
    return array("q", key).tolist()
