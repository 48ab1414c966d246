"""Packing: the examples of a global batch that share a row, and the rows that each rank runs."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of at most `capacity` tokens: the indices of `lengths` in each, ascending.

    Best fit decreasing (Johnson 1973): from the longest on, each example goes into the fullest row with room for it,
    a new one where there is none. At most 11/9 of the fewest possible rows, plus one. An example longer than
    `capacity` has a row of its own.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, row), ascending; of equally full rows the first is taken
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(rooms, (lengths[index], -1))
        if place < len(rooms):
            room, row = rooms.pop(place)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        insort(rooms, (room - lengths[index], row))
    return [sorted(row) for row in rows]


def deal(work: Sequence[int], world: int) -> list[list[int]]:
    """Items dealt to `world` ranks so that each has about the same work: the indices of each rank's.

    From the largest on, each goes to the rank with the least work so far (Graham 1969): the most loaded rank has at
    most 4/3 of the best possible. A rank gets none where there are fewer items than ranks.
    """
    ranks: list[list[int]] = [[] for _ in range(world)]
    loads = [0] * world
    for index in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        least = loads.index(min(loads))
        ranks[least].append(index)
        loads[least] += work[index]
    return ranks
