"""Sudoku as a task that makes its own data: 4x4 and 9x9 puzzles with one solution, splits, a test of solutions.

No solved grid of one split equals a grid of another, not even after relabelling its digits. At 4x4 there are only 288
solved grids in 12 such classes, so each split gets classes of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, count, pairwise
from pathlib import Path

from blockdiff.errors import DataError
from blockdiff.files import write_text
from blockdiff.seeding import Stream, integers, permutation
from blockdiff.terminal import counted

Grid = tuple[int, ...]  # size * size digits 1..size, 0 for a blank

BOX = {4: 2, 9: 3}
# How many digits a puzzle shows: drawn uniformly; more if one less would allow two solutions.
GIVENS = {4: (4, 10), 9: (24, 40)}
CHUNK = 256  # puzzles whose random numbers are drawn together
MIN_CLASSES = 2  # a 4x4 split smaller than that would test a single pattern


def alphabet(size: int) -> str:
    """Return the characters of prompts and responses of this size."""
    return ".=" + "".join(str(digit) for digit in range(1, size + 1))


def to_row(puzzle: Grid, solution: Grid) -> dict[str, str]:
    """Return a training row: the prompt is the cells (`.` for a blank) and `=`, the response the solved cells."""
    return {
        "prompt": "".join(str(digit) if digit else "." for digit in puzzle) + "=",
        "response": "".join(map(str, solution)),
    }


def is_solved(prompt: str, text: str) -> bool:
    """Return whether `text` is exactly a solved grid that keeps every given of the puzzle in `prompt`.

    Raises DataError if the prompt is not a puzzle.
    """
    return keeps_givens(prompt, text) and is_valid(prompt, text)


def keeps_givens(prompt: str, text: str) -> bool:
    """Return whether `text` is a grid of the puzzle's size that keeps every given; DataError if it is no puzzle."""
    cells, _ = _cells(prompt)
    grid = _grid(prompt, text)
    return grid is not None and all(given in (".", digit) for given, digit in zip(cells, grid, strict=True))


def is_valid(prompt: str, text: str) -> bool:
    """Return whether `text` is a solved grid of the puzzle's size, perhaps of another puzzle.

    Raises DataError if the prompt is not a puzzle.
    """
    _, size = _cells(prompt)
    grid = _grid(prompt, text)
    return grid is not None and all(len({grid[cell] for cell in group}) == size for group in groups(size))


def _cells(prompt: str) -> tuple[str, int]:
    cells = prompt.strip().removesuffix("=")
    size = {16: 4, 81: 9}.get(len(cells))
    if size is None:
        raise DataError(f"not a sudoku prompt: {prompt!r:.100}; expected 16 or 81 cells and then '='")
    return cells, size


def _grid(prompt: str, text: str) -> str | None:
    """Return the text if it is a grid of digits of the puzzle's size, else None."""
    cells, size = _cells(prompt)
    text = text.strip()
    return text if len(text) == len(cells) and all(digit in alphabet(size)[2:] for digit in text) else None


@cache
def groups(size: int) -> tuple[tuple[int, ...], ...]:
    """Return the cells of every row, column and box: 3 * size groups of `size` cells."""
    houses = range(3 * size)
    return tuple(tuple(cell for cell, its in enumerate(_houses(size)) if house in its) for house in houses)


@cache
def _houses(size: int) -> tuple[tuple[int, int, int], ...]:
    """Return for every cell the indices of its row, column and box in `groups`."""
    box, side = BOX[size], range(size)
    return tuple((r, size + c, 2 * size + r // box * box + c // box) for r in side for c in side)


def relabelled(grid: Grid) -> Grid:
    """Rename the digits of a grid so that they first occur in rising order: equal for all grids of a class."""
    names: dict[int, int] = {}
    return tuple(names.setdefault(digit, len(names) + 1) for digit in grid)


def solutions(puzzle: Grid, order: Sequence[Sequence[int]] | None = None) -> Iterator[Grid]:
    """Yield every solution of a puzzle (0 = blank).

    The search fills the most constrained cell first, and tries digits as `order` lists them for the cell.
    """
    size = math.isqrt(len(puzzle))
    houses, every_digit = _houses(size), (1 << size + 1) - 2  # digits are bits 1 to size
    cells, blanks = list(puzzle), [cell for cell, digit in enumerate(puzzle) if not digit]
    used = [0] * (3 * size)  # the digits in each row, column and box

    def flip(cell: int, digit: int) -> None:
        for house in houses[cell]:
            used[house] ^= 1 << digit

    def search() -> Iterator[Grid]:
        best, best_free, fewest = -1, 0, size + 1
        for index, cell in enumerate(blanks):
            row, column, box = houses[cell]
            free = every_digit & ~(used[row] | used[column] | used[box])
            if free.bit_count() < fewest:
                best, best_free, fewest = index, free, free.bit_count()
                if fewest <= 1:
                    break
        if best < 0:
            yield tuple(cells)
            return
        cell, blanks[best] = blanks[best], blanks[-1]
        blanks.pop()
        for digit in order[cell] if order else range(1, size + 1):
            if best_free >> digit & 1:
                cells[cell] = digit
                flip(cell, digit)
                yield from search()
                flip(cell, digit)
        blanks.append(cell)
        blanks[best], blanks[-1] = cell, blanks[best]

    for cell, digit in enumerate(puzzle):
        if digit:
            flip(cell, digit)
    return search()


def dig(solution: Grid, order: Sequence[int], givens: int) -> Grid:
    """Blank cells in the given order, down to `givens` digits; a cell stays if without it there are other solutions."""
    cells, left, size = list(solution), len(solution), math.isqrt(len(solution))
    for cell in order:
        if left <= givens:
            break
        # The cell may become blank if no other digit in it can be completed to a solution.
        seen = {cells[other] for house in _houses(size)[cell] for other in groups(size)[house]}
        others = ((*cells[:cell], digit, *cells[cell + 1 :]) for digit in range(1, size + 1) if digit not in seen)
        if not any(next(solutions(other), None) for other in others):
            cells[cell] = 0
            left -= 1
    return tuple(cells)


@cache
def classes4() -> tuple[tuple[Grid, ...], ...]:
    """Return the 288 solved 4x4 grids as 12 classes of 24 grids that differ in the names of digits only."""
    classes: dict[Grid, list[Grid]] = {}
    for grid in solutions((0,) * 16):
        classes.setdefault(relabelled(grid), []).append(grid)
    return tuple(tuple(classes[name]) for name in sorted(classes))


def random_grid9(keys: list[int]) -> Grid:
    """Return a solved 9x9 grid, found by trying digits in random order; `keys` has 9 numbers per cell."""
    by_cell = (keys[9 * cell : 9 * cell + 9] for cell in range(81))
    order = [[place + 1 for place in sorted(range(9), key=of_cell.__getitem__)] for of_cell in by_cell]
    return next(solutions((0,) * 81, order))


def deal_classes(counts: Mapping[str, int], seed: int) -> dict[str, list[int]]:
    """Divide the 12 classes of 4x4 grids among the splits by size, at least two each; DataError for too many splits."""
    total = len(classes4())
    if len(counts) * MIN_CLASSES > total:
        raise DataError(f"at most {total // MIN_CLASSES} splits of 4x4 sudoku: there are {total} classes of grids")
    whole = sum(counts.values())
    shares = {name: max(MIN_CLASSES, total * number // whole) for name, number in counts.items()}
    largest = max(counts, key=lambda name: counts[name])
    while sum(shares.values()) > total:
        shares[max(shares, key=lambda name: shares[name])] -= 1
    shares[largest] += total - sum(shares.values())
    order = permutation(seed, Stream.DATA, (0, 4), total).tolist()
    bounds = accumulate(shares.values(), initial=0)
    return {name: sorted(order[a:b]) for name, (a, b) in zip(shares, pairwise(bounds), strict=True)}


def make_splits(size: int, counts: Mapping[str, int], seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """Return distinct puzzles with one solution for every split, by name; the same seed gives the same rows.

    Raises DataError for an unknown size, or if a 4x4 split asks for more puzzles than its classes have.
    """
    if size not in BOX:
        raise DataError(f"sudoku size {size} is not offered; choose one of {', '.join(map(str, BOX))}")
    for name, number in counts.items():
        if number < 1:
            raise DataError(f"split {name!r} asks for {number} puzzles; ask for at least 1")
    if not counts:
        raise DataError("no split was asked for; name at least one, such as train=1000")
    dealt = deal_classes(counts, seed) if size == 4 else {}
    taken: set[Grid] = set()  # 9x9: classes that some split already has
    splits = {}
    for index, (name, number) in enumerate(counts.items()):
        grids = [grid for label in dealt.get(name, []) for grid in classes4()[label]]
        rows: dict[str, dict[str, str]] = {}
        for attempts, keys in enumerate(_keys(size, seed, index + 1)):
            if size == 4:
                solution = grids[keys[-2] * len(grids) >> 31]
            else:
                solution = random_grid9(keys[81:810])
                if relabelled(solution) in taken:
                    continue
                taken.add(relabelled(solution))
            cells = size * size
            low, high = GIVENS[size]
            order = sorted(range(cells), key=keys.__getitem__)
            row = to_row(dig(solution, order, low + (keys[-1] * (high - low + 1) >> 31)), solution)
            rows.setdefault(row["prompt"], row)
            if len(rows) == number:
                break
            if attempts > 20 * number + 10_000:
                raise DataError(
                    f"split {name!r}: found only {len(rows)} distinct puzzles of {number} in the "
                    f"{len(grids)} grids of its classes; ask for fewer"
                )
        splits[name] = list(rows.values())
    return splits


def _keys(size: int, seed: int, split: int) -> Iterator[list[int]]:
    """Yield lists of random numbers below 2^31, one list per puzzle: cell order, digit order, two choices."""
    import torch

    width = size * size + (729 if size == 9 else 0) + 2
    for chunk in count():
        number = torch.arange(chunk * CHUNK, (chunk + 1) * CHUNK)
        yield from integers(seed, Stream.DATA, (split, size, number), width, 1 << 31).tolist()


def write_splits(directory: str | Path, size: int, counts: Mapping[str, int], seed: int = 0) -> list[str]:
    """Write NAME.jsonl for every split, and the character tokenizer into `directory`/tokenizer.

    Returns a line per split that describes its rows. Raises DataError as `make_splits` does.
    """
    from blockdiff.data.tokenizer import character_tokenizer, write_tokenizer

    splits = make_splits(size, counts, seed)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(character_tokenizer(alphabet(size)), directory / "tokenizer")
    lines = []
    for name, rows in splits.items():
        write_text(directory / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        grids = {tuple(map(int, row["response"])) for row in rows}
        givens = [sum(cell.isdigit() for cell in row["prompt"]) for row in rows]
        lines.append(
            f"{name}: {counted(len(rows), 'puzzle')} from {counted(len(grids), 'solved grid')} in "
            f"{counted(len(set(map(relabelled, grids))), 'class')} "
            f"(modulo relabelling), {min(givens)}-{max(givens)} givens, mean {sum(givens) / len(givens):.1f}"
        )
    return lines
