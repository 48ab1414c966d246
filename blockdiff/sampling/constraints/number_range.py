"""Regular expressions of the numbers between two bounds, as JSON writes them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class NumberRange:
    """The numbers from `least` to `most`; `over` leaves out the least one and `under` the most.

    Bounds are whole numbers, or infinite where there is none.
    """

    least: float = -math.inf
    most: float = math.inf
    over: bool = False
    under: bool = False

    def integers(self) -> str | None:
        """An expression of the integers; None where there is none."""
        least, most = self.least + self.over, self.most - self.under
        below = _upto(-most, -least, 1) and f"-(?:{_upto(-most, -least, 1)})"
        return _any(below, _upto(least, most, 0))

    def numbers(self) -> str | None:
        """An expression of the numbers without exponents; None where there is none."""
        below = NumberRange(-self.most, -self.least, self.under, self.over)._from_zero()
        return _any(below and f"-(?:{below})", self._from_zero())

    def _from_zero(self) -> str | None:
        """An expression of those of at least 0; None where there is none."""
        is_over = self.over and self.least >= 0
        least = max(self.least, 0)
        if self.most < least:
            return None
        whole = _upto(least + is_over, self.most - 1, 0)  # with any digits after the point
        first = rf"{int(least)}\.[0-9]*[1-9][0-9]*" if is_over and least < self.most else None
        is_last = math.isfinite(self.most) and not self.under and not (is_over and self.most == least)
        last = rf"{int(self.most)}(?:\.0+)?" if is_last else None
        return _any(whole and rf"(?:{whole})(?:\.[0-9]+)?", first, last)


def _any(*ways: str | None) -> str | None:
    return "|".join(way for way in ways if way) or None


def _upto(least: float, most: float, smallest: int) -> str | None:
    """The integers of at least `smallest`, 0 or 1, between two bounds; None where there is none."""
    low = int(max(least, smallest))
    if low > most:
        return None
    ways, length = [], len(str(low))
    if math.isinf(most):
        ways.append(rf"[1-9][0-9]{{{length},}}")
        most = 10**length - 1
    high = int(most)
    while low <= high:  # as many digits as the lowest has, then one more
        end = min(high, 10 ** len(str(low)) - 1)
        ways.append(_of_equal_length(str(low), str(end)))
        low = end + 1
    return "|".join(ways)


def _of_equal_length(low: str, high: str) -> str:
    """The numbers of as many digits between two."""
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
