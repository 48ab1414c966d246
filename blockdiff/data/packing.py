"""Packing: which examples of a global batch share a row, and which rows each rank runs."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack examples into rows of at most `capacity` tokens. Returns the indices of `lengths` in each row, ascending.

    Best fit decreasing (Johnson 1973): from the longest to the shortest, each example is put into the fullest row with
    room for it, or into a new row. There are at most 11/9 of the fewest possible rows, plus one. An example longer than
    `capacity` is alone in its row.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, row), ascending; of equally full rows the first is chosen
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fullest = bisect_left(rooms, (lengths[index], -1))
        if fullest < len(rooms):
            room, row = rooms.pop(fullest)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        insort(rooms, (room - lengths[index], row))
    return [sorted(row) for row in rows]


def deal(work: Sequence[int], world: int) -> list[list[int]]:
    """Divide items among `world` ranks so that each has about the same work. Returns the indices of each rank's items.

    From the largest to the smallest, each item goes to the rank with the least work so far (Graham 1969). The rank with
    the most work has at most 4/3 of the optimum. If there are fewer items than ranks, some ranks get none.
    """
    ranks: list[list[int]] = [[] for _ in range(world)]
    loads = [0] * world
    for index in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        least = loads.index(min(loads))
        ranks[least].append(index)
        loads[least] += work[index]
    return ranks
