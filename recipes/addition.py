"""Addition as a task that makes its own data: two numbers column by column, with every carry written out.

The prompt of 283 + 795 is `a35b89c27=`: column a has the ones, b the tens. The response is the working,
`a3+5+0=08;b8+9+0=17;c2+7+1=10;`: the digits of a column, the carry into it and their sum, whose first digit is the next
carry. No other response is right, so the task `exact` tests it. Columns have letters because a small model finds a
letter sooner than a position.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from blockdiff.errors import DataError
from blockdiff.files import write_text
from blockdiff.seeding import Stream, integers

COLUMNS = "abcdefghijkl"
FEWEST = 6  # columns of a row; at most all of COLUMNS
ALPHABET = "0123456789+=;" + COLUMNS
CHUNK = 256  # rows whose random numbers are drawn together
ADDRESS = 200  # keys the draws; different from the addresses of sudoku's and countdown's sizes


def to_row(pairs: list[tuple[int, int]]) -> dict[str, str]:
    """Return a training row; pairs: the two digits of every column, starting with the ones."""
    prompt = response = ""
    carry = 0
    for name, (first, second) in zip(COLUMNS, pairs, strict=False):
        total = first + second + carry
        prompt += f"{name}{first}{second}"
        response += f"{name}{first}+{second}+{carry}={total:02};"
        carry = total // 10
    return {"prompt": f"{prompt}=", "response": response}


def make_splits(counts: Mapping[str, int], seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """Return distinct additions for every split, by name; the same seed gives the same rows.

    Raises DataError if there is no split.
    """
    import torch

    if not counts:
        raise DataError("no split was asked for; name at least one, such as train=1000")
    splits: dict[str, list[dict[str, str]]] = {}
    taken: set[str] = set()
    for index, (name, number) in enumerate(counts.items()):
        rows: list[dict[str, str]] = []
        for chunk in count():
            places = torch.arange(chunk * CHUNK, (chunk + 1) * CHUNK)
            address = (index + 1, ADDRESS, places)
            for columns, *digits in integers(seed, Stream.DATA, address, 1 + 2 * len(COLUMNS), 1 << 31).tolist():
                width = FEWEST + (columns * (len(COLUMNS) - FEWEST + 1) >> 31)
                pairs = [(a * 10 >> 31, b * 10 >> 31) for a, b in zip(digits[::2], digits[1::2], strict=True)]
                row = to_row(pairs[:width])
                if row["prompt"] not in taken:
                    taken.add(row["prompt"])
                    rows.append(row)
            if len(rows) >= number:
                break
        splits[name] = rows[:number]
    return splits


def write_splits(directory: str | Path, counts: Mapping[str, int], seed: int = 0) -> list[str]:
    """Write NAME.jsonl for every split, and the character tokenizer into `directory`/tokenizer.

    Returns a line per split with its number of rows. Raises DataError as `make_splits` does.
    """
    from blockdiff.data.tokenizer import character_tokenizer, write_tokenizer

    splits = make_splits(counts, seed)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(character_tokenizer(ALPHABET), directory / "tokenizer")
    for name, rows in splits.items():
        write_text(directory / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return [f"{name}: {len(rows)} additions of {FEWEST} to {len(COLUMNS)} columns" for name, rows in splits.items()]
