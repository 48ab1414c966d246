"""Countdown as a task that makes its own data: reach a target with all of some numbers, each used once.

A prompt is `86,28,13,31:96=`, a response an expression such as `86+28-(31-13)`. Most problems have several solutions;
`is_solved` accepts any. No two problems, within a split or across splits, have the same numbers.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import count
from pathlib import Path

from blockdiff.errors import DataError
from blockdiff.files import write_text
from blockdiff.seeding import Stream, integers
from blockdiff.terminal import counted

ALPHABET = "0123456789+-*/(),:="
LARGEST, HIGHEST = 99, 999  # number, and result of any step
NUMBERS = (3, 6)  # how many a problem has
CHUNK = 256  # problems whose random numbers are drawn together
ADDRESS = 100  # n + ADDRESS keys the draws for n numbers; different from the addresses of sudoku's sizes
PROMPT = re.compile(r"\s*([0-9]+(?:,[0-9]+)+):([0-9]+)=?\s*", re.ASCII)
TOKEN = re.compile(r"[0-9]+|[-+*/()]", re.ASCII)
DIGITS = 20  # a longer number cannot be one of the problem's

OPERATIONS: dict[str, tuple[int, Callable[[Fraction, Fraction], Fraction]]] = {
    "+": (1, lambda a, b: a + b),
    "-": (1, lambda a, b: a - b),
    "*": (2, lambda a, b: a * b),
    "/": (2, lambda a, b: a / b),
}


def problem(prompt: str) -> tuple[list[int], int]:
    """Return the numbers and the target of a prompt; DataError if it is not a problem."""
    found = PROMPT.fullmatch(prompt)
    numbers = found[1].split(",") if found else []
    if found is None or any(len(number) > DIGITS for number in (*numbers, found[2])):
        raise DataError(f"not a countdown prompt: {prompt!r:.80}; expected numbers and a target, as in '3,5,7:22='")
    return list(map(int, numbers)), int(found[2])


def is_solved(prompt: str, text: str) -> bool:
    """Return whether `text` is an expression that reaches the target with the prompt's numbers.

    Any expression of +, -, *, / and parentheses that uses every number exactly once is right, whatever its intermediate
    results (also negative numbers and fractions); numbers have no signs. Raises DataError if the prompt is not a
    problem.
    """
    numbers, target = problem(prompt)
    return value(text, numbers) == target


def value(text: str, numbers: Sequence[int]) -> Fraction | None:
    """Return the exact value of an expression; None unless it uses each of the numbers exactly once."""
    if re.search(r"[0-9]\s+[0-9]", text):
        return None
    text = re.sub(r"\s", "", text)
    tokens = TOKEN.findall(text)
    used = [token for token in tokens if token.isdigit()]
    if "".join(tokens) != text or any(len(token) > DIGITS for token in used):
        return None
    return _evaluated(tokens) if Counter(map(int, used)) == Counter(numbers) else None


def _evaluated(tokens: Sequence[str]) -> Fraction | None:
    """Evaluate an expression with two stacks (Dijkstra's shunting yard); None if it is malformed or divides by 0."""
    values: list[Fraction] = []
    waiting: list[str] = []
    wants_operand = True

    def apply() -> None:
        b, a = values.pop(), values.pop()
        values.append(OPERATIONS[waiting.pop()][1](a, b))

    try:
        for token in tokens:
            if wants_operand != (token == "(" or token.isdigit()):
                return None
            if token.isdigit():
                values.append(Fraction(int(token)))
                wants_operand = False
            elif token == "(":
                waiting.append(token)
            elif token == ")":
                while waiting[-1] != "(":
                    apply()
                waiting.pop()
            else:
                while waiting and waiting[-1] != "(" and OPERATIONS[waiting[-1]][0] >= OPERATIONS[token][0]:
                    apply()
                waiting.append(token)
                wants_operand = True
        while waiting:
            apply()
    except (IndexError, KeyError, ZeroDivisionError):  # an unmatched parenthesis, or a division by 0
        return None
    return values[0] if len(values) == 1 and not wants_operand else None


def make_splits(size: int, counts: Mapping[str, int], seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """Return problems of `size` numbers for every split, by name; the same seed gives the same rows.

    Numbers are 1 to 99; the target and all intermediate results are 1 to 999. Raises DataError for an unknown size, or
    if a split asks for more problems than can be found.
    """
    if not NUMBERS[0] <= size <= NUMBERS[1]:
        raise DataError(f"countdown of {size} numbers is not offered; choose {NUMBERS[0]} to {NUMBERS[1]}")
    if not counts:
        raise DataError("no split was asked for; name at least one, such as train=1000")
    asked, most = sum(counts.values()), math.comb(LARGEST + size - 1, size)
    if asked > most:
        raise DataError(f"{asked:,} problems, but there are {most:,} sets of {size} numbers; ask for fewer")
    taken: set[tuple[int, ...]] = set()
    splits: dict[str, list[dict[str, str]]] = {}
    for index, (name, number) in enumerate(counts.items()):
        rows: list[dict[str, str]] = []
        for attempts, keys in enumerate(_keys(size, seed, index + 1)):
            if len(rows) == number:
                break
            numbers = [1 + (key * LARGEST >> 31) for key in keys[:size]]
            if tuple(sorted(numbers)) not in taken:
                taken.add(tuple(sorted(numbers)))
                rows.append(to_row(numbers, *_combined(numbers, keys[size:])))
            if attempts > 20 * number + 10_000:
                raise DataError(
                    f"split {name!r}: found only {len(rows)} problems of {number} with numbers of their own; "
                    "ask for fewer"
                )
        splits[name] = rows
    return splits


def to_row(numbers: Sequence[int], target: int, expression: str) -> dict[str, str]:
    """Return a training row."""
    return {"prompt": f"{','.join(map(str, numbers))}:{target}=", "response": expression}


def _combined(numbers: Sequence[int], keys: Sequence[int]) -> tuple[int, str]:
    """Return a target and an expression for it. Three of `keys` per step choose two parts and how to join them."""
    parts = [(number, str(number), 3) for number in numbers]  # value, text, how tightly its last operation binds
    for step in range(len(numbers) - 1):
        first, second, choice = keys[3 * step : 3 * step + 3]
        (a, left, left_binds), (b, right, right_binds) = (parts.pop(key * len(parts) >> 31) for key in (first, second))
        if a < b:
            (a, left, left_binds), (b, right, right_binds) = (b, right, right_binds), (a, left, left_binds)
        results = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if a % b == 0 else 0}
        # Every step changes the number and stays within bounds; one of the four operations always fits.
        fitting = [sign for sign, made in results.items() if 0 < made <= HIGHEST and not (sign in "*/" and b == 1)]
        sign = fitting[choice * len(fitting) >> 31]
        binds = OPERATIONS[sign][0]
        left = f"({left})" if left_binds < binds else left
        # a-(b-c) and a/(b*c) need their parentheses, a+(b-c) and a*(b/c) do not
        right = f"({right})" if right_binds < binds or (right_binds == binds and sign in "-/") else right
        parts.append((results[sign], f"{left}{sign}{right}", binds))
    ((target, expression, _),) = parts
    return target, expression


def _keys(size: int, seed: int, split: int) -> Iterator[list[int]]:
    """Yield lists of random numbers below 2^31, one list per problem: the numbers, then three for each step."""
    import torch

    for chunk in count():
        number = torch.arange(chunk * CHUNK, (chunk + 1) * CHUNK)
        address = (split, ADDRESS + size, number)
        yield from integers(seed, Stream.DATA, address, size + 3 * (size - 1), 1 << 31).tolist()


def write_splits(directory: str | Path, size: int, counts: Mapping[str, int], seed: int = 0) -> list[str]:
    """Write NAME.jsonl for every split, and the character tokenizer into `directory`/tokenizer.

    Returns a line per split that describes its rows. Raises DataError as `make_splits` does.
    """
    from blockdiff.data.tokenizer import character_tokenizer, write_tokenizer

    splits = make_splits(size, counts, seed)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(character_tokenizer(ALPHABET), directory / "tokenizer")
    lines = []
    for name, rows in splits.items():
        write_text(directory / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        targets = [problem(row["prompt"])[1] for row in rows]
        longest = max(len(row["response"]) for row in rows)
        lines.append(
            f"{name}: {counted(len(rows), 'problem')} of {size} numbers, targets {min(targets)}-{max(targets)}, "
            f"responses of at most {longest} characters"
        )
    return lines
