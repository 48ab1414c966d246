"""An automaton that is built from pieces of JSON documents, with an optional space between their parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blockdiff.sampling.constraints.byte_nfa import ByteNfa
from blockdiff.sampling.constraints.json_strings import any_string

Write = Callable[[int], "int | None"]  # adds a piece after a state and returns its end; None if it has no text


class JsonNfa(ByteNfa):
    """An automaton of JSON texts. most_items: the size to which a larger maximum of arrays and objects is reduced.

    Methods append a piece after state `start` and return the state at its end; None if the piece has no text.
    """

    def __init__(self, most_items: int):
        super().__init__()
        self.most_items = most_items

    def any_string(self, start: int) -> int:
        """Add any string, with its quotes."""
        return self.text(any_string(self, self.text(start, '"')), '"')

    def joined(self, ends: Sequence[int | None]) -> int | None:
        """Join the ends of alternatives into one state, without the None ones; None if all are None."""
        states = [end for end in ends if end is not None]
        if len(states) < 2:
            return states[0] if states else None
        end = self.state()
        for each in states:
            self.join(each, end)
        return end

    def value(self, start: int, value: Any) -> int:
        """Add one fixed value."""
        if isinstance(value, Mapping):
            state = self.text(start, "{")
            for number, (key, inner) in enumerate(value.items()):
                state = self.space(self.text(state, ",")) if number else self.space(state)
                state = self.value(self.space(self.text(self.space(self.value(state, key)), ":")), inner)
            return self.text(self.space(state), "}")
        if isinstance(value, list):
            state = self.text(start, "[")
            for number, inner in enumerate(value):
                state = self.space(self.text(self.space(state), ",")) if number else self.space(state)
                state = self.value(state, inner)
            return self.text(self.space(state), "]")
        return self.text(start, json.dumps(value, ensure_ascii=False))

    def in_order(
        self, start: int, signs: str, entries: Sequence[tuple[Write, bool]], least: int, most: int | None
    ) -> int | None:
        """Add entries in a fixed order between the two `signs`; entries that are not required may be left out.

        entries: how each entry is written, and whether it is required. least, most: bounds on the number of entries
        (most None: no maximum). Returns None if they cannot be satisfied.
        """
        count = len(entries)
        needed = [number for number, (_, is_required) in enumerate(entries) if is_required]
        most = None if most is None or most >= count else most
        if max(least, len(needed)) > (count if most is None else most):
            return None
        counted = max(least if least > max(1, len(needed)) else 0, most or 0)  # counting further makes no difference
        end = self.state()
        first = self.text(start, signs[0])
        if not needed and least == 0:
            self.join(self.text(self.space(first), signs[1]), end)
        # the state before the choice of an entry, by the number of entries that are written
        choose = [[self.state() for _ in range(count + 1)] for _ in range(counted + 1)]
        self.join(self.space(first), choose[0][0])
        is_written = False
        for written in range(counted + 1):
            following = min(written + 1, counted)
            for number, (write, is_required) in enumerate(entries):
                if not is_required:
                    self.join(choose[written][number], choose[written][number + 1])
                if written > number or (most is not None and written == most):
                    continue
                after = write(choose[written][number])
                if after is None:
                    if is_required:
                        return None
                    continue
                after = self.space(after)
                if not any(each > number for each in needed) and (counted == 0 or following >= least):
                    self.join(self.text(after, signs[1]), end)
                    is_written = True
                if number + 1 < count and (most is None or following < most):
                    self.join(self.space(self.text(after, ",")), choose[following][number + 1])
        return end if is_written or (not needed and least == 0) else None

    def entries(
        self, start: int, ways: Sequence[tuple[Write, Write]], least: int = 0, most: int | None = None
    ) -> int | None:
        """Add an object of `least` to `most` entries (None: any number), each written by one of the pairs in `ways`.

        Returns the state after the object, or None if no such object can be written.
        """

        def entry(state: int) -> int | None:
            ends = list[int | None]()
            for key, value in ways:
                after = key(state)
                if after is not None:
                    after = self.space(self.text(self.space(after), ":"))
                    ends.append(value(after))
            return self.joined(ends)

        return self.repeated(start, "{}", entry, least, most)

    def sequence(
        self, start: int, writes: Sequence[Write], rest: Write | None, least: int, most: int | None
    ) -> int | None:
        """Add an array of one item for each of `writes`, in order, and further items that `rest` writes (None: none).

        least, most: bounds on the number of all items (most None: no maximum).
        """
        end = self.state()
        state = self.text(start, "[")
        for number, write in enumerate(writes):
            state = self.space(self.text(state, ",")) if number else self.space(state)
            after = write(state)
            if after is None:
                return None
            state = self.space(after)
        if least <= len(writes):
            self.join(self.text(state, "]"), end)
        elif rest is None:
            return None
        if rest is not None:
            most_rest = None if most is None else most - len(writes)
            needed = max(0, least - len(writes))
            before = self.space(self.text(state, ",")) if writes else self.space(state)
            behind = self.items(before, rest, max(1, needed), most_rest)
            if behind is not None:
                self.join(self.text(behind, "]"), end)
            elif needed:
                return None
        return end

    def repeated(self, start: int, signs: str, item: Write, least: int = 0, most: int | None = None) -> int | None:
        """Add `least` to `most` items (None: any number) between the two `signs`."""
        end = self.state()
        first = self.space(self.text(start, signs[0]))
        if least == 0:
            self.join(self.text(first, signs[1]), end)
        behind = None if most == 0 else self.items(first, item, max(1, least), most)
        if behind is None:
            return end if least == 0 else None
        self.join(self.text(behind, signs[1]), end)
        return end

    def items(self, start: int, item: Write, least: int, most: int | None) -> int | None:
        """Add `least` (from 1) to `most` items (None: any number), with commas between and an optional space after."""
        last = self.state()
        most = None if most is None else max(least, min(most, self.most_items))
        state = start
        for number in range(least if most is None else most):
            loop = self.join(state, self.state())
            after = item(loop)
            if after is None:
                return None
            after = self.space(after)
            if number + 1 >= least:
                self.join(after, last)
            state = self.space(self.text(after, ","))
        if most is None:
            self.join(state, loop)
        return last
