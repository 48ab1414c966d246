"""The one source of randomness: draws with an address (seed, stream, index, position), no state.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") in int64 arithmetic, so the
CPU, a GPU and a kernel produce the same numbers, and no draw depends on batch neighbours or on a restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10

Integer = int | Tensor


class Stream(IntEnum):
    """The purposes of draws. Their numbers are part of every result, so they never change."""

    CORRUPT_WHERE = 1
    CORRUPT_TOKEN = 2
    COIN = 3
    TIME = 4
    CANVAS_CHOICE = 5
    ORDER = 6
    SAMPLE = 8
    WEIGHTS = 10
    DATA = 11
    TIME_ROTATION = 12
    MIXTURE = 13
    WINDOW = 14
    DECIDE = 15
    CONSTRAINT = 16
    START = 17
    ROLLOUT = 19
    DROPOUT = 20
    ANSWER = 21


def uniform(
    seed: Integer, stream: int, index: Sequence[Integer], n: int, device: torch.device | str | None = None
) -> Tensor:
    """Return uniform float32 numbers in [0, 1), multiples of 2^-24: [*, n].

    seed, index: up to three indices; ints or int64 tensors of shapes that broadcast to [*]. Indices count modulo 2^32.
    device: None is the device of these tensors. The first m of n numbers do not depend on n.
    """
    return to_uniform(words(seed, stream, index, n, device))


def integers(
    seed: Integer,
    stream: int,
    index: Sequence[Integer],
    n: int,
    high: int,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return uniform int64 numbers in [0, high): [*, n], keyed as in `uniform`; high <= 2^31.

    The probabilities of two values differ by 2^-32 at most.
    """
    return to_integers(words(seed, stream, index, n, device), high)


def words(
    seed: Integer, stream: int, index: Sequence[Integer], n: int, device: torch.device | str | None = None
) -> Tensor:
    """Return random 32-bit words as int64 [*, n], keyed as in `uniform`. All other draws are made of them.

    Word i is word i % 4 of Philox at counter (i // 4, *index). Raises ValueError for more than three indices.
    """
    if len(index) > 3:
        raise ValueError(f"an address has at most three index entries, got {len(index)}")
    address = (seed, *index, *(0,) * (3 - len(index)))
    tensors = [entry for entry in address if isinstance(entry, Tensor)]
    if device is None:
        device = tensors[0].device if tensors else "cpu"
    # `torch.broadcast_shapes` would import sympy
    shape = torch.broadcast_tensors(*tensors)[0].shape if tensors else torch.Size()
    blocks = (n + 3) // 4

    mixed = _splitmix64(seed)
    mixed = _splitmix64(mixed + int(stream))
    counter = torch.empty((4, *shape, blocks), dtype=torch.int64, device=device)
    counter[0] = torch.arange(blocks, device=device)
    for number, entry in enumerate(address[1:], start=1):
        word = entry & MASK32
        if isinstance(word, Tensor):
            counter[number] = word.to(device).unsqueeze(-1)
        else:
            counter[number].fill_(word)  # a CUDA graph can record this, but no copy from the host
    if isinstance(mixed, Tensor):
        key = torch.stack((mixed & MASK32, (mixed >> 32) & MASK32)).to(device)
        key = key.view(2, *(1,) * (len(shape) - mixed.dim()), *mixed.shape, 1)
    else:
        key = torch.tensor([mixed & MASK32, mixed >> 32], device=device).view(2, *(1,) * (len(shape) + 1))
    return philox(counter, key).movedim(0, -1).flatten(-2)[..., :n]


def to_uniform(words: Tensor) -> Tensor:
    """Convert 32-bit words to float32 in [0, 1) by their upper 24 bits."""
    return (words >> 8).to(torch.float32).mul_(2.0**-24)


def to_integers(words: Tensor, high: int) -> Tensor:
    """Convert 32-bit words to int64 in [0, high): word * high // 2^32. ValueError unless 0 < high <= 2^31."""
    if not 0 < high <= 1 << 31:
        raise ValueError(f"high must be in 1..2^31, got {high}")
    return (words * high).bitwise_right_shift_(32)


def permutation(
    seed: Integer, stream: int, index: Sequence[Integer], n: int, device: torch.device | str | None = None
) -> Tensor:
    """Return a uniform random order of 0..n-1: int64 [*, n], keyed as in `uniform`."""
    drawn = words(seed, stream, index, 2 * n, device)
    keys = (drawn[..., :n] << 31) | (drawn[..., n:] >> 1)
    return torch.argsort(keys, dim=-1, stable=True)


def child_seed(seed: int, name: str | int) -> int:
    """Derive a seed of 63 bits for the part of a run called `name`. It differs for every (seed, name)."""
    digest = hashlib.blake2b(f"{type(name).__name__}:{name}".encode(), digest_size=8).digest()
    return _splitmix64(_splitmix64(seed) ^ int.from_bytes(digest, "little")) >> 1


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Return Philox4x32-10 of 32-bit words in int64: counter [4, *] and key [2, *] give [4, *]."""
    device = counter.device
    column = (2,) + (1,) * (counter.dim() - 1)
    multipliers, weyl = (_pair(*both, device).view(column) for both in (PHILOX_MULTIPLIERS, PHILOX_WEYL))
    rounds = torch.arange(PHILOX_ROUNDS, device=device).view(-1, *(1,) * counter.dim())
    keys = (key + rounds * weyl) & MASK32
    # The two multiplications of a round run as one. Products wrap modulo 2^64, which keeps the bits of the
    # unsigned product; `odd` only ever meets an xor, so its upper half is cleared once, at the end.
    even, odd = counter[0::2], counter[1::2]
    for round_key in keys.unbind():
        product = (even * multipliers).flip(0)
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(round_key).bitwise_and_(MASK32)
        odd = product
    return torch.stack((even, odd & MASK32), dim=1).flatten(0, 1)


def _pair(first: int, second: int, device: torch.device) -> Tensor:
    """Make an int64 tensor [2] of two numbers without a copy from the host, for which the device would wait."""
    return torch.arange(first, 2 * second - first, second - first, device=device)


def _splitmix64(x: Any) -> Any:
    """Return the output of SplitMix64 (Steele et al. 2014) for state x, an unsigned int or an int64 with its bits."""
    if isinstance(x, Tensor):
        bits = x.to(torch.int64) + _signed(0x9E3779B97F4A7C15)
        bits = (bits ^ _shift(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
        bits = (bits ^ _shift(bits, 27)) * _signed(0x94D049BB133111EB)
        return bits ^ _shift(bits, 31)
    z = (int(x) + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shift(z: Tensor, places: int) -> Tensor:
    """Shift right without copying the sign bit."""
    return (z >> places) & ((1 << (64 - places)) - 1)


def signed(seed: int) -> int:
    """Return the int64 that has the 64 bits of a seed."""
    return (seed + 2**63) % 2**64 - 2**63
