"""Sudoku as a task that makes its own data: 4x4 and 9x9 puzzles with one solution, their splits, the checker.

No solved grid of one split equals a grid of another, not even after relabelling its digits. At 4x4 there are
only 288 solved grids in 12 such classes, so the classes themselves are dealt out to the splits.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count, pairwise
from pathlib import Path

from blockdiff.errors import DataError
from blockdiff.seeding import Stream, integers, permutation

Grid = tuple[int, ...]  # size * size digits 1..size, 0 where the puzzle is blank

BOX = {4: 2, 9: 3}
# How many digits a puzzle shows: drawn uniformly; more where one less would allow two solutions.
GIVENS = {4: (4, 10), 9: (24, 40)}
CHUNK = 256  # puzzles whose random numbers are drawn together
MIN_CLASSES = 2  # a 4x4 split smaller than that would test a single pattern


def alphabet(size: int) -> str:
    """The characters that prompts and responses of this size are written in."""
    return ".=" + "".join(str(digit) for digit in range(1, size + 1))


def to_row(puzzle: Grid, solution: Grid) -> dict[str, str]:
    """A training row: the prompt is the cells (`.` for a blank) and `=`, the response the solved cells."""
    return {
        "prompt": "".join(str(digit) if digit else "." for digit in puzzle) + "=",
        "response": "".join(map(str, solution)),
    }


def is_solved(prompt: str, text: str) -> bool:
    """Whether `text` is exactly a solved grid that keeps every given of the puzzle in `prompt`.

    Raises DataError for a prompt that is no puzzle.
    """
    cells = prompt.strip().removesuffix("=")
    size = {16: 4, 81: 9}.get(len(cells))
    if size is None:
        raise DataError(f"not a sudoku prompt: {prompt!r}; expected 16 or 81 cells and then '='")
    text = text.strip()
    if len(text) != len(cells) or any(digit not in alphabet(size)[2:] for digit in text):
        return False
    if any(given not in (".", digit) for given, digit in zip(cells, text, strict=True)):
        return False
    return all(len({text[cell] for cell in group}) == size for group in groups(size))


@cache
def groups(size: int) -> tuple[tuple[int, ...], ...]:
    """The cells of every row, column and box: 3 * size groups of `size` cells."""
    box, side = BOX[size], range(size)
    rows = [tuple(size * r + c for c in side) for r in side]
    columns = [tuple(size * r + c for r in side) for c in side]
    boxes = [
        tuple(size * (box * (b // box) + i // box) + box * (b % box) + i % box for i in side) for b in side
    ]
    return (*rows, *columns, *boxes)


@cache
def _houses(size: int) -> tuple[tuple[int, int, int], ...]:
    """For every cell the index of its row, column and box in `groups`."""
    members = [
        [index for index, group in enumerate(groups(size)) if cell in group] for cell in range(size**2)
    ]
    return tuple((row, column, box) for row, column, box in members)


def relabelled(grid: Grid) -> Grid:
    """The grid with its digits renamed so that they first occur in rising order: equal for a whole class."""
    names: dict[int, int] = {}
    return tuple(names.setdefault(digit, len(names) + 1) for digit in grid)


class _Board:
    """The digits already used in each row, column and box as bit masks, and the cells still open."""

    def __init__(self, puzzle: Grid | list[int], size: int):
        self.size = size
        self.full = (1 << size) - 1
        self.cells = list(puzzle)
        self.used = [0] * (3 * size)
        self.open = []
        for cell, digit in enumerate(puzzle):
            if digit:
                self.put(cell, digit)
            else:
                self.open.append(cell)

    def put(self, cell: int, digit: int) -> None:
        self.cells[cell] = digit
        bit = 1 << (digit - 1)
        for house in _houses(self.size)[cell]:
            self.used[house] ^= bit

    def take(self, cell: int) -> None:
        self.put(cell, self.cells[cell])
        self.cells[cell] = 0

    def candidates(self, cell: int) -> int:
        row, column, box = _houses(self.size)[cell]
        return self.full & ~(self.used[row] | self.used[column] | self.used[box])

    def solutions(self, order: list[list[int]] | None = None) -> Iterator[Grid]:
        """Every way to fill the open cells, the most constrained cell first, digits in the cell's `order`."""
        best, best_mask, best_count = -1, 0, self.size + 1
        used, houses, full = self.used, _houses(self.size), self.full
        for index, cell in enumerate(self.open):
            row, column, box = houses[cell]
            mask = full & ~(used[row] | used[column] | used[box])
            options = mask.bit_count()
            if options < best_count:
                best, best_mask, best_count = index, mask, options
                if options <= 1:
                    break
        if best < 0:
            yield tuple(self.cells)
            return
        cell = self.open[best]
        self.open[best] = self.open[-1]
        self.open.pop()
        for digit in order[cell] if order else range(1, self.size + 1):
            if best_mask >> (digit - 1) & 1:
                self.put(cell, digit)
                yield from self.solutions(order)
                self.take(cell)
        self.open.append(cell)
        self.open[best], self.open[-1] = self.open[-1], self.open[best]


def solutions(puzzle: Grid) -> Iterator[Grid]:
    """Every solution of a puzzle (0 = blank), most constrained cell first."""
    size = {16: 4, 81: 9}[len(puzzle)]
    return _Board(puzzle, size).solutions()


def dig(solution: Grid, order: list[int], givens: int) -> Grid:
    """Blank cells in the given order while the solution stays the only one, down to `givens` digits."""
    size = {16: 4, 81: 9}[len(solution)]
    board = _Board(solution, size)
    left = len(solution)
    for cell in order:
        if left <= givens:
            break
        digit = board.cells[cell]
        board.take(cell)
        # The cell is free to go if no other digit in it can be completed to a solution.
        if _another_fits(board, cell, digit):
            board.put(cell, digit)
        else:
            board.open.append(cell)
            left -= 1
    return tuple(board.cells)


def _another_fits(board: _Board, cell: int, digit: int) -> bool:
    others = board.candidates(cell) & ~(1 << (digit - 1))
    for other in range(1, board.size + 1):
        if others >> (other - 1) & 1:
            trial = _Board(board.cells, board.size)
            trial.open.remove(cell)
            trial.put(cell, other)
            if next(trial.solutions(), None) is not None:
                return True
    return False


@cache
def classes4() -> tuple[tuple[Grid, ...], ...]:
    """The 288 solved 4x4 grids in their 12 classes modulo relabelling, each of 24 grids."""
    classes: dict[Grid, list[Grid]] = {}
    for grid in _Board([0] * 16, 4).solutions():
        classes.setdefault(relabelled(grid), []).append(grid)
    return tuple(tuple(classes[name]) for name in sorted(classes))


def random_grid9(keys: list[int]) -> Grid:
    """A solved 9x9 grid: a search that tries digits in random order, given by 9 `keys` per cell."""
    by_cell = (keys[9 * cell : 9 * cell + 9] for cell in range(81))
    order = [[place + 1 for place in sorted(range(9), key=of_cell.__getitem__)] for of_cell in by_cell]
    return next(_Board([0] * 81, 9).solutions(order))


@dataclass(frozen=True)
class Split:
    """What one written split holds; `str` gives the line to print."""

    name: str
    puzzles: int
    grids: int
    classes: int
    givens: Mapping[int, int]  # number of givens -> puzzles

    def __str__(self) -> str:
        mean = sum(number * times for number, times in self.givens.items()) / max(self.puzzles, 1)
        return (
            f"{self.name}: {self.puzzles} puzzles from {self.grids} solved grids in {self.classes} classes "
            f"(modulo relabelling), {min(self.givens)}-{max(self.givens)} givens, mean {mean:.1f}"
        )


def deal_classes(counts: Mapping[str, int], seed: int) -> dict[str, list[int]]:
    """Deal the 12 classes of 4x4 grids out to the splits by size, at least two to each; DataError for too many."""
    total = len(classes4())
    if len(counts) * MIN_CLASSES > total:
        raise DataError(
            f"at most {total // MIN_CLASSES} splits of 4x4 sudoku: there are {total} classes of grids"
        )
    whole = sum(counts.values())
    shares = {name: max(MIN_CLASSES, total * number // whole) for name, number in counts.items()}
    largest = max(counts, key=lambda name: counts[name])
    while sum(shares.values()) > total:
        shares[max(shares, key=lambda name: shares[name])] -= 1
    shares[largest] += total - sum(shares.values())
    order = permutation(seed, Stream.DATA, (0, 4), total).tolist()
    bounds = [0]
    for share in shares.values():
        bounds.append(bounds[-1] + share)
    return {name: sorted(order[a:b]) for name, (a, b) in zip(shares, pairwise(bounds), strict=True)}


def make_splits(size: int, counts: Mapping[str, int], seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """Distinct puzzles with one solution for every split: name -> rows. The same seed gives the same rows.

    Raises DataError when a size is unknown or a 4x4 split asks for more puzzles than its classes give.
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
        attempts = 0
        for keys in _keys(size, seed, index + 1):
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
            attempts += 1
            if attempts > 20 * number + 10_000:
                raise DataError(
                    f"split {name!r}: found only {len(rows)} distinct puzzles of {number} in the "
                    f"{len(grids)} grids of its classes; ask for fewer"
                )
        splits[name] = list(rows.values())
    return splits


def _keys(size: int, seed: int, split: int) -> Iterator[list[int]]:
    """Random numbers below 2^31, one list per puzzle: cell order, digit order, two choices."""
    import torch

    width = size * size + (729 if size == 9 else 0) + 2
    for chunk in count():
        number = torch.arange(chunk * CHUNK, (chunk + 1) * CHUNK)
        yield from integers(seed, Stream.DATA, (split, size, number), width, 1 << 31).tolist()


def write_splits(directory: str | Path, size: int, counts: Mapping[str, int], seed: int = 0) -> list[Split]:
    """Write NAME.jsonl for every split and the character tokenizer into `directory`/tokenizer.

    Returns what each split holds, in order. Raises DataError as `make_splits`.
    """
    from blockdiff.data.tokenizer import character_tokenizer

    splits = make_splits(size, counts, seed)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    character_tokenizer(alphabet(size)).save_pretrained(directory / "tokenizer")
    written = []
    for name, rows in splits.items():
        with (directory / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        solved = {tuple(map(int, row["response"])) for row in rows}
        givens = Counter(sum(cell.isdigit() for cell in row["prompt"]) for row in rows)
        written.append(Split(name, len(rows), len(solved), len(set(map(relabelled, solved))), givens))
    return written
