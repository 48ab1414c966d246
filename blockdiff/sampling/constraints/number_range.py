"""Numbers between bounds, and multiples of a number, in JSON's notation."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, reduce

from blockdiff.sampling.constraints.byte_automaton import ByteAutomaton
from blockdiff.sampling.constraints.byte_nfa import ByteNfa
from blockdiff.sampling.constraints.ecma import expression_automaton

INTEGER = "-?(?:0|[1-9][0-9]*)"
NUMBER = rf"{INTEGER}(?:\.[0-9]+)?(?:[eE][+-][0-9]+)?"
DIGITS = 15  # decimal digits that a double distinguishes
PLACES = 9  # the most digits behind the point of a number with bounds
LARGEST = 10**30  # larger bounds are reduced to it
MOST_LISTED = 2_000  # numbers that are written one by one
MOST_REMAINDERS = 2_000


@dataclass(frozen=True)
class Numbers:
    """The numbers from `least` to `most` (None: no bound); `over` excludes `least`, and `under` excludes `most`.

    factor: the numbers are multiples of it.
    """

    least: int | float | None = None
    most: int | float | None = None
    over: bool = False
    under: bool = False
    factor: int | float | None = None

    def automaton(self, is_integer: bool) -> ByteAutomaton | None:
        """Make the automaton of these numbers, or of the integers among them; None if `factor` is not supported.

        With bounds numbers have no exponent. Raises NoText if there are no such numbers.
        """
        return _automaton(self, is_integer)

    def _compile(self, is_integer: bool) -> ByteAutomaton | None:
        if self.factor is not None and (listed := self._listed(is_integer)) is not None:
            return listed
        expressions = []
        if self.least is not None:
            expressions.append(_above(_exact(self.least), self.over))
        if self.most is not None:
            expressions.append(_below(_exact(self.most), self.under))
        if is_integer or not expressions:
            expressions.append(INTEGER if is_integer else NUMBER)
        parts = [expression_automaton(each) for each in expressions]
        if self.factor is not None:
            multiples = _multiples(self.factor)
            if multiples is None:
                return None
            parts.append(multiples)
        return reduce(ByteAutomaton.both, parts)

    def _listed(self, is_integer: bool) -> ByteAutomaton | None:
        """Make the automaton from a list of the multiples of `factor`; None without both bounds or for a long list."""
        assert self.factor is not None
        if self.least is None or self.most is None:
            return None
        factor, least, most = Fraction(_exact(self.factor)), _exact(self.least), _exact(self.most)
        first, last = -(-Fraction(least) // factor), Fraction(most) // factor
        if last - first >= MOST_LISTED:
            return None
        texts = []
        for count in range(int(first), int(last) + 1):
            value = count * factor
            if (self.over and value == Fraction(least)) or (self.under and value == Fraction(most)):
                continue
            whole = value.denominator == 1
            text = str(int(value)) if whole else f"{Decimal(value.numerator) / Decimal(value.denominator):f}"
            # Validators divide doubles, and may find a remainder where exact division leaves none.
            number = int(value) if whole else float(text)
            is_exact = isinstance(self.factor, int) or (number / self.factor).is_integer()
            if is_exact and (whole or not is_integer):
                texts.append(text)
        nfa = ByteNfa()
        end = nfa.state()
        for text in texts:
            nfa.join(nfa.text(0, text), end)
        return nfa.automaton(end)


@lru_cache(maxsize=32)
def _automaton(numbers: Numbers, is_integer: bool) -> ByteAutomaton | None:
    return numbers._compile(is_integer)


@lru_cache(maxsize=32)
def _multiples(factor: int | float) -> ByteAutomaton | None:
    """Make the automaton of a factor's multiples; None for too many remainders or an inexact factor."""
    places = 0
    exact = Fraction(factor)
    while (exact * 10**places).denominator > 1 and places < 6:
        places += 1
    divisor = exact * 10**places
    if divisor.denominator > 1 or divisor > MOST_REMAINDERS:
        return None
    count = int(divisor)
    nfa = ByteNfa()
    end, start = nfa.state(), nfa.join(0, nfa.state())
    nfa.join(nfa.text(0, "-"), start)
    # states by the number of digits behind the point, and by the remainder of all digits so far
    states = [[nfa.state() for _ in range(count)] for _ in range(places + 1)]
    for behind, of_remainder in enumerate(states):
        for remainder, state in enumerate(of_remainder):
            if remainder * 10 ** (places - behind) % count == 0:
                nfa.join(state, end)
            following = states[0] if behind == 0 else states[behind + 1] if behind < places else None
            if behind == 0 and places:
                _digits(nfa, nfa.text(state, "."), remainder, states[1])
            if following is not None:
                _digits(nfa, state, remainder, following)
    zero = nfa.text(start, "0")
    nfa.join(zero, end)
    if places:
        _digits(nfa, nfa.text(zero, "."), 0, states[1])
    _digits(nfa, start, 0, states[0], first=1)
    return nfa.automaton(end)


def _digits(nfa: ByteNfa, state: int, remainder: int, following: list[int], first: int = 0) -> None:
    for digit in range(first, 10):
        byte = ord("0") + digit
        nfa.edges[state].append((byte, byte, following[(remainder * 10 + digit) % len(following)]))


def _exact(bound: int | float) -> Decimal:
    """Return a bound as its written digits; from 10**DIGITS on as an exact integer, reduced to LARGEST.

    Thus large bounds compare with integers as a validator compares them.
    """
    if abs(bound) < 10**DIGITS:
        return Decimal(repr(bound))
    return Decimal(max(-LARGEST, min(LARGEST, int(bound))))


def _above(bound: Decimal, is_strict: bool) -> str:
    """Return an expression for the numbers from a bound upwards."""
    if bound >= 0:
        return _at_least(bound, is_strict)
    return rf"(?:0|[1-9][0-9]*)(?:\.[0-9]+)?|-(?:{_at_most(-bound, is_strict)})"


def _below(bound: Decimal, is_strict: bool) -> str:
    """Return an expression for the numbers from a bound downwards."""
    if bound < 0 or (bound == 0 and is_strict):
        return f"-(?:{_at_least(-bound, is_strict)})"
    return rf"-(?:0|[1-9][0-9]*)(?:\.[0-9]+)?|{_at_most(bound, is_strict)}"


def _at_least(bound: Decimal, is_strict: bool) -> str:
    """Return an expression for the numbers without sign that are at least a bound (above it if `is_strict`)."""
    whole, part, places = _parts(bound)
    any_part = rf"(?:\.[0-9]{{1,{places}}})?" if places else ""
    ways = [f"(?:{_upto(int(whole) + 1, None)}){any_part}"]
    if not part:
        ways += [] if is_strict else [whole + any_part]
        ways += [rf"{whole}\.[0-9]{{0,{places - 1}}}[1-9]"] if is_strict and places else []
        return "|".join(ways)
    ways += [
        rf"{whole}\.{part[:index]}[{int(part[index]) + 1}-9][0-9]{{0,{places}}}"
        for index in range(len(part))
        if part[index] < "9"
    ]
    ways.append(rf"{whole}\.{part}" + (f"[0-9]{{0,{places}}}[1-9]" if is_strict else f"[0-9]{{0,{places}}}"))
    return "|".join(ways)


def _at_most(bound: Decimal, is_strict: bool) -> str:
    """Return an expression for the numbers without sign that are at most a bound (below it if `is_strict`).

    The bound is more than 0, or not strict.
    """
    whole, part, places = _parts(bound)
    ways = (
        [rf"(?:{_upto(0, int(whole) - 1)})" + (rf"(?:\.[0-9]{{1,{places}}})?" if places else "")] if int(whole) else []
    )
    if not part:
        ways += [] if is_strict else [whole + (rf"(?:\.0{{1,{places}}})?" if places else "")]
        return "|".join(ways)
    ways.append(rf"{whole}(?:\.0)?")
    ways += [
        rf"{whole}\.{part[:index]}[0-{int(part[index]) - 1}][0-9]{{0,{places}}}"
        for index in range(len(part))
        if part[index] > "0"
    ]
    ways += [rf"{whole}\.{part[:index]}" for index in range(1, len(part))]
    ways += [] if is_strict else [rf"{whole}\.{part}0{{0,{places}}}"]
    return "|".join(ways)


def _parts(bound: Decimal) -> tuple[str, str, int]:
    """Return the digits before and after the point, and the number of further decimal places allowed."""
    whole, _, part = f"{bound:f}".partition(".")
    part = part.rstrip("0")
    return whole, part, max(0, min(PLACES, DIGITS - len(whole) - len(part)))


def _upto(low: int, most: int | None) -> str:
    """Return an expression for the integers from `low` to `most` (None: no end); there must be at least one."""
    ways, length = [], len(str(low))
    if most is None:
        ways.append(rf"[1-9][0-9]{{{length},}}")
    high = 10**length - 1 if most is None else most
    while low <= high:  # as many digits as the lowest has, then one more
        end = min(high, 10 ** len(str(low)) - 1)
        ways.append(_of_equal_length(str(low), str(end)))
        low = end + 1
    return "|".join(ways)


def _of_equal_length(low: str, high: str) -> str:
    """Return an expression for the integers between two with the same number of digits."""
    if not low:
        return ""
    rest = len(low) - 1
    any_rest = f"[0-9]{{{rest}}}" if rest else ""
    if low[0] == high[0]:
        return low[0] + _group(_of_equal_length(low[1:], high[1:]))
    ways, first, last = [], int(low[0]), int(high[0])
    if int(low[1:] or 0):
        ways.append(low[0] + _group(_of_equal_length(low[1:], "9" * rest)))
        first += 1
    if high[1:] != "9" * rest:
        ways.append(high[0] + _group(_of_equal_length("0" * rest, high[1:])))
        last -= 1
    if first <= last:
        ways.append(f"[{first}-{last}]{any_rest}")
    return "|".join(ways)


def _group(regex: str) -> str:
    return f"(?:{regex})" if "|" in regex else regex
