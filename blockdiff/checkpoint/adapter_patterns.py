"""Regular expressions in the config of an adapter, matched in bounded time because a stranger may have written them.

Python's `re` tries one path through a pattern after the other, and `(.+)+!` has exponentially many. Here all paths are
followed at once: a set of positions in a name, held as the bits of an integer, moves through the pattern as parsed by
`re`.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from blockdiff.errors import CheckpointError

SECONDS = 10.0  # for all names of a model together, which take milliseconds
LONGEST = 20_000  # characters of a pattern
_parser: Any = importlib.import_module("re._parser")  # the parser of `re` itself
_LITERAL = _parser.LITERAL
_CATEGORIES: dict[str, Callable[[int], bool]] = {
    "CATEGORY_DIGIT": lambda code: chr(code).isdecimal(),
    "CATEGORY_SPACE": lambda code: chr(code).isspace(),
    "CATEGORY_WORD": lambda code: chr(code).isalnum() or code == ord("_"),
}


class NamePatterns:
    """The patterns of one file. A pattern is parsed once; matching takes at most `SECONDS` for all names together."""

    def __init__(self, file: Path):
        self._file, self._seconds_left = file, SECONDS
        self._parsed: dict[str, Sequence[Any]] = {}

    def matches(self, key: str, pattern: str, name: str) -> bool:
        """Return True if `pattern` matches the whole `name`.

        Raises CheckpointError, naming `key`, if the pattern cannot be read or the time is used up.
        """
        began = time.monotonic()
        try:
            if pattern not in self._parsed:
                self._parsed[pattern] = _parsed(pattern)
            ends = _Match(name, began + self._seconds_left).through(self._parsed[pattern], 1)
            return bool(ends >> len(name))
        except TimeoutError:
            reason = f"takes more than {SECONDS:g} seconds"
        except (re.error, RecursionError, ValueError) as error:
            reason = str(error) or "is nested too deeply"
        finally:
            self._seconds_left -= time.monotonic() - began
        raise CheckpointError(f"{self._file}: {key}: the pattern {pattern!r:.80} cannot be read: {reason}; simplify it")


def _parsed(pattern: str) -> Sequence[Any]:
    if len(pattern) > LONGEST:
        raise ValueError(f"it has {len(pattern):,} characters, and at most {LONGEST:,} are read")
    tree = _parser.parse(pattern)
    if tree.state.flags & ~re.UNICODE:
        raise ValueError("flags are not read")
    return list(tree)


class _Match:
    """One name, and sets of positions in it: bit n of an integer is the position before character n."""

    def __init__(self, name: str, until: float):
        self.name, self.until = name, until
        self.all = (1 << len(name) + 1) - 1
        self.before: dict[int, int] = {}  # by code of a character: the positions before it
        for n, character in enumerate(name):
            self.before[ord(character)] = self.before.get(ord(character), 0) | 1 << n
        self.seen: dict[int, int] = {}  # positions at which an assertion holds, by id of its items

    def through(self, items: Sequence[Any], places: int) -> int:
        """Return the positions reached from `places` through all parsed `items` in order.

        Raises TimeoutError after the time `until`.
        """
        if time.monotonic() > self.until:
            raise TimeoutError
        for operation, argument in items:
            if operation is _LITERAL:
                places = (places & self.before.get(argument, 0)) << 1
            else:
                places = self.step(operation.name, argument, places)
            if not places:
                break
        return places

    def step(self, operation: str, argument: Any, places: int) -> int:
        """Return the positions reached from `places` through one parsed item; ValueError if it is not supported."""
        if operation in ("NOT_LITERAL", "ANY", "IN"):
            return (places & self.where(lambda code: _is_in(operation, argument, code))) << 1
        if operation == "SUBPATTERN":
            return self.through(argument[-1], places)
        if operation == "BRANCH":
            reached = 0
            for branch in argument[1]:
                reached |= self.through(branch, places)
            return reached
        if operation in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, repeated = argument
            return self.repeated(least, most, repeated, places)
        if operation in ("ASSERT", "ASSERT_NOT"):
            holds = self.asserted(*argument)
            return places & (holds if operation == "ASSERT" else ~holds)
        if operation == "AT":
            return places & self.at(argument.name)
        raise ValueError(f"{operation.lower().replace('_', ' ')} is not read")

    def where(self, is_one: Callable[[int], bool]) -> int:
        """Return the positions before characters for whose code `is_one` is True."""
        return sum(places for code, places in self.before.items() if is_one(code))

    def repeated(self, least: int, most: int, items: Sequence[Any], places: int) -> int:
        """Return the positions reached from `places` by `least` to `most` passes through `items`.

        There are at most len(name) + 1 positions, so more passes than that reach nothing new.
        """
        for _ in range(min(least, len(self.name) + 1)):
            places = self.through(items, places)
        reached = new = places
        for _ in range(min(int(most) - least, len(self.name) + 1)):
            new = self.through(items, new) & ~reached
            if not new:
                break
            reached |= new
        return reached

    def asserted(self, direction: int, items: Sequence[Any]) -> int:
        """Return the positions at which a lookahead or, with direction -1, a lookbehind for `items` matches."""
        if id(items) not in self.seen:
            reached = [self.through(items, 1 << n) for n in range(len(self.name) + 1)]
            ahead = sum(1 << n for n, ends in enumerate(reached) if ends)
            behind = sum(1 << n for n in range(len(reached)) if any(ends >> n & 1 for ends in reached))
            self.seen[id(items)] = ahead if direction > 0 else behind
        return self.seen[id(items)]

    def at(self, kind: str) -> int:
        """Return the positions that an anchor matches: `^`, `$`, `\\b`, `\\B` and such; names have no line break."""
        if kind.startswith("AT_BEGINNING"):
            return 1
        if kind.startswith("AT_END"):
            return 1 << len(self.name)
        word = self.where(_CATEGORIES["CATEGORY_WORD"])
        boundaries = (word ^ word << 1) & self.all
        return boundaries if kind == "AT_BOUNDARY" else self.all & ~boundaries


def _is_in(operation: str, argument: Any, code: int) -> bool:
    """Return True if a parsed item that stands for one character matches the character `code`."""
    if operation == "ANY":
        return True
    if operation == "LITERAL":
        return bool(code == argument)
    if operation == "NOT_LITERAL":
        return bool(code != argument)
    if operation == "RANGE":
        return bool(argument[0] <= code <= argument[1])
    if operation == "CATEGORY":
        kind = argument.name.replace("_NOT_", "_")
        return _CATEGORIES[kind](code) == (kind == argument.name)
    is_negated = argument[0][0].name == "NEGATE"
    return any(_is_in(kind.name, each, code) for kind, each in argument[is_negated:]) != is_negated
