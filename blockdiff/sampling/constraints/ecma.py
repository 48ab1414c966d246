"""Patterns of JSON schemas: expressions of ECMA-262 as automata over the texts between the quotes of a JSON string.

A pattern matches the whole string. `\\d` and `\\w` match ASCII only. `\\s` matches only the space: other white space
needs escapes in JSON, or is white space only to some validators. `\\S` matches no character that is white space in
ECMA-262, Unicode or Python. Control characters cannot be matched.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache

from blockdiff.errors import NoText, RequestError
from blockdiff.sampling.constraints.byte_automaton import ByteAutomaton
from blockdiff.sampling.constraints.byte_nfa import EVERY, ByteNfa, Ranges

Item = tuple["Ranges | Alternatives | str", int, "int | None"]  # the repeated atom, and its least and most repetitions
Alternatives = list[list[Item]]
CONTROL: Ranges = ((0x00, 0x1F), (0x7F, 0x9F))
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
DIGIT: Ranges = ((0x30, 0x39),)
# White space of ECMA-262, of Unicode or of Python
SPACES: Ranges = ((0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A))
SPACES += ((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF))
NEW_LINES: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_LETTERS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0x00}
_PIECE = re.compile(r"\\u\{[0-9A-Fa-f]+\}|\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|\\c[A-Za-z]|\\.|.", re.DOTALL)
_COUNT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_GROUP = re.compile(r"\?(?::|<[A-Za-z_$][\w$]*>)")
MOST_REPEATED = 10_000


class _Parser:
    """Parses a pattern from index `at` on; RequestError for syntax that an automaton cannot follow.

    is_loose: a class has the characters that it has in any validator; else only the ones that it has in all.
    """

    def __init__(self, pattern: str, at: int = 0, is_loose: bool = False):
        self.pattern, self.at, self.is_loose = pattern, at, is_loose

    def alternatives(self) -> Alternatives:
        """Parse alternatives up to the end of the group or of the pattern."""
        ways: Alternatives = [[]]
        while self.at < len(self.pattern) and self.pattern[self.at] != ")":
            if self.pattern[self.at] == "|":
                self.at += 1
                ways.append([])
            else:
                ways[-1].append(self._repeated(self._atom()))
        return ways

    def _atom(self) -> Ranges | Alternatives | str:
        """Parse one character, set, group or anchor."""
        sign = self.pattern[self.at]
        if sign == "(":
            self.at += 1
            if self.pattern.startswith("?", self.at):
                match = _GROUP.match(self.pattern, self.at)
                if match is None:
                    raise self.error("look-around")
                self.at = match.end()
            inner = self.alternatives()
            if not self.pattern.startswith(")", self.at):
                raise self.error("a group that is not closed")
            self.at += 1
            return inner
        if sign in "*+?" or _COUNT.match(self.pattern, self.at):
            raise self.error("a repetition of nothing")
        if sign == "[":
            return self._set()
        if sign == ".":
            self.at += 1
            return without(EVERY, NEW_LINES)
        if sign in "^$":
            self.at += 1
            return sign
        return self._character(in_set=False)

    def _character(self, in_set: bool, is_negated: bool = False) -> Ranges:
        """Parse one character, or a character class written as an escape; is_negated: the set excludes it."""
        match = _PIECE.match(self.pattern, self.at)
        assert match is not None
        piece = match[0]
        if piece == "\\":
            raise self.error("a backslash at its end")
        self.at = match.end()
        if piece[0] != "\\":
            return ((ord(piece), ord(piece)),)
        letter = piece[1]
        if letter in "dDwWsS":
            # a class includes only the space, but excludes all white space; if `is_loose`, the other way round
            is_small = (letter == "s") != (is_negated != self.is_loose)
            spaces = ((0x20, 0x20),) if is_small else SPACES
            ranges = {"d": DIGIT, "w": WORD, "s": spaces}[letter.lower()]
            return ranges if letter.islower() else without(EVERY, ranges)
        if letter == "b" and in_set:
            return ((0x08, 0x08),)
        if letter in "bBpPk" or letter in "123456789":
            raise self.error("a word boundary, a back reference or a class of Unicode", len(piece))
        if letter in "ux" and len(piece) > 2:
            code = int(piece[2:].strip("{}"), 16)
        else:
            code = ord(piece[2]) % 32 if letter == "c" and len(piece) > 2 else _LETTERS.get(letter, ord(letter))
        if code > 0x10FFFF:
            raise self.error("a character that is none", len(piece))
        return ((code, code),)

    def _set(self) -> Ranges:
        """Parse the characters of a bracket expression."""
        first = self.at
        self.at += 1
        is_negated = self.pattern.startswith("^", self.at)
        self.at += is_negated
        members = list[tuple[int, int]]()
        while not self.pattern.startswith("]", self.at):
            if self.at >= len(self.pattern):
                self.at = first
                raise self.error("a set that is not closed")
            ranges = self._character(in_set=True, is_negated=is_negated)
            is_range = self.pattern.startswith("-", self.at) and self.pattern[self.at + 1 : self.at + 2] not in (
                "]",
                "",
            )
            if is_range and len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
                self.at += 1
                last = self._character(in_set=True, is_negated=is_negated)
                if len(last) > 1 or last[0][0] != last[0][1]:
                    members += [*ranges, (0x2D, 0x2D), *last]
                elif last[0][0] < ranges[0][0]:
                    raise self.error("a range whose end is before its beginning")
                else:
                    members.append((ranges[0][0], last[0][0]))
                continue
            members += ranges
        self.at += 1
        outside = without(EVERY, tuple(members))  # which merges overlapping ranges
        return outside if is_negated else without(EVERY, outside)

    def _repeated(self, atom: Ranges | Alternatives | str) -> Item:
        """Parse the repetition after an atom, if there is one."""
        sign = self.pattern[self.at : self.at + 1]
        least: int
        most: int | None
        count = _COUNT.match(self.pattern, self.at)
        if count is not None:
            least = int(count[1])
            most = least if count[2] is None else int(count[3]) if count[3] else None
            if max(least, most or 0) > MOST_REPEATED or (most is not None and most < least):
                raise self.error("a repetition that is too long, or ends before it begins")
            self.at = count.end()
        elif sign and sign in "*+?":
            least, most = (1 if sign == "+" else 0), (1 if sign == "?" else None)
            self.at += 1
        else:
            return atom, 1, 1
        if self.pattern.startswith("?", self.at):  # a lazy repetition matches the same texts
            self.at += 1
        return atom, least, most

    def error(self, what: str, back: int = 0) -> RequestError:
        """Return the error for the part of the pattern that begins `back` characters before the current index."""
        index = self.at - back
        return RequestError(f"has {what} at character {index} ({self.pattern[index : index + 12]!r})")


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Return `ranges` without the characters of `others`."""
    remaining, left_out = list[tuple[int, int]](), sorted(others)
    for low, high in ranges:
        for first, last in left_out:
            if last < low or first > high:
                continue
            if first > low:
                remaining.append((low, first - 1))
            low = last + 1
        if low <= high:
            remaining.append((low, high))
    return tuple(remaining)


def _inner(ways: Alternatives, is_first: bool, is_last: bool, is_loose: bool) -> Alternatives:
    """Remove `^` at the beginning and `$` at the end of alternatives, and drop alternatives that need them elsewhere.

    is_first, is_last: whether the alternatives begin and end the pattern. is_loose: raise RequestError instead of
    dropping alternatives.
    """
    alternatives: Alternatives = []
    for way in ways:
        items, is_possible = list[Item](), True
        while way and way[0][0] == "^" and is_first:
            way = way[1:]
        while way and way[-1][0] == "$" and is_last:
            way = way[:-1]
        for index, (atom, least, most) in enumerate(way):
            if isinstance(atom, str):
                if is_loose:
                    raise RequestError("has `^` or `$` in its middle")
                is_possible = is_possible and least == 0
                continue
            if isinstance(atom, list):
                is_once = most == 1
                is_last_part = is_last and is_once and index == len(way) - 1
                atom = _inner(atom, is_first and is_once and index == 0, is_last_part, is_loose)
                if not atom and least:
                    is_possible = False
            items.append((atom, least, most))
        if is_possible:
            alternatives.append(items)
    return alternatives


def _write(nfa: ByteNfa, start: int, ways: Alternatives) -> int:
    """Add the texts of alternatives after a state, and return the state at their end."""
    end = nfa.state()
    for way in ways:
        state = start
        for atom, least, most in way:
            for _ in range(least):
                state = _once(nfa, state, atom)
            if most is None:
                loop = nfa.join(state, nfa.state())
                nfa.join(_once(nfa, loop, atom), loop)
                state = nfa.join(loop, nfa.state())
            elif most > least:
                last = nfa.state()
                for _ in range(most - least):
                    nfa.join(state, last)
                    state = _once(nfa, state, atom)
                state = nfa.join(state, last)
        nfa.join(state, end)
    return end


def _once(nfa: ByteNfa, start: int, atom: Ranges | Alternatives | str) -> int:
    """Add the texts of an atom after a state, and return the state at their end."""
    if isinstance(atom, list):
        return _write(nfa, nfa.join(start, nfa.state()), atom)
    assert not isinstance(atom, str)
    end = nfa.character(start, without(atom, (*CONTROL, (0x22, 0x22), (0x5C, 0x5C))))
    for sign in '"\\':
        if any(low <= ord(sign) <= high for low, high in atom):
            nfa.join(nfa.text(start, "\\" + sign), end)
    return end


@lru_cache(maxsize=64)
def expression_automaton(
    regex: str, is_open: bool = False, is_anywhere: bool = False, is_loose: bool = False
) -> ByteAutomaton:
    """Make the automaton of the texts that a whole expression matches, as they are written in a JSON string.

    is_open: anything may follow an expression without `$` at its end; is_anywhere: anything may precede one without `^`
    at its beginning. is_loose: the automaton has every text that matches in some validator. Raises RequestError for an
    expression that an automaton cannot follow, and names the part; NoText for one that matches nothing.
    """
    if regex.startswith("^(?!"):  # a look-ahead at the beginning: exclude the texts that match it
        parser = _Parser(regex, at=4, is_loose=True)
        ways = [[("^", 1, 1), *way] for way in parser.alternatives()]
        texts = expression_automaton(f"^{regex[parser.at + 1 :]}", is_open, is_anywhere, is_loose)
        return texts if is_loose else texts.without(_automaton(ways, is_open=True, is_anywhere=True, is_loose=True))
    parser = _Parser(regex, is_loose=is_loose)
    ways = parser.alternatives()
    if parser.at < len(regex):
        raise parser.error("a parenthesis that nothing opens")
    return _automaton(ways, is_open or is_anywhere, is_anywhere, is_loose)


def _automaton(ways: Alternatives, is_open: bool, is_anywhere: bool, is_loose: bool) -> ByteAutomaton:
    rest: Item = (without(EVERY, CONTROL), 0, None)
    if is_open:
        ways = [way if way and way[-1][0] == "$" else [*way, rest] for way in ways]
    if is_anywhere:
        ways = [way if way and way[0][0] == "^" else [rest, *way] for way in ways]
    nfa = ByteNfa()
    inner = _inner(ways, True, True, is_loose)
    try:
        return nfa.automaton(_write(nfa, 0, inner))
    except NoText:
        raise NoText("matches no text that a JSON string can have") from None


def is_in(text: str, pattern: str) -> bool:
    """True if a pattern matches somewhere in a text; RequestError if validators may differ about that."""
    written = json.dumps(text, ensure_ascii=False)[1:-1].encode()
    try:
        if not expression_automaton(pattern, is_anywhere=True, is_loose=True).accepts(written):
            return False
        if expression_automaton(pattern, is_anywhere=True).accepts(written):
            return True
    except NoText:
        return False
    except RequestError as error:
        raise RequestError(f"the JSON schema's pattern {pattern!r:.60} {error}") from None
    raise RequestError(f"the JSON schema's pattern {pattern!r:.60} matches {text!r:.40} to some validators only")
