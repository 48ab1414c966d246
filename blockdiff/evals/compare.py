"""Two models on the same rows: who solves which, whether the difference can be chance, and what each one costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from blockdiff.evals.summary import CALLS, forwards_of

OWN = ("id", "prompt", "reference")  # keys of the row, not of an answer


def compare(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Compare two reports of `evaluate` over the same rows.

    - `both`, `only_first`, `only_second`, `neither`: the number of rows solved by these;
    - `p_value`: McNemar's exact test of whether the two solve equally often;
    - `forwards`: compares the model calls per row, all kinds together, over rows without an error. It has `difference`
      (second - first, mean), the numbers of rows `fewer_in_second`, `more_in_second` and `equal`, and the `p_value` of
      a sign test;
    - `records`: for each row, the question once and both answers.

    Raises ValueError if the rows differ.
    """
    pairs = list(zip(first["records"], second["records"], strict=True))
    if any(_asked(a[name]) != _asked(b[name]) for a, b in pairs for name in OWN):
        raise ValueError("the two reports are not of the same rows")
    solved = [(bool(a["is_solved"]), bool(b["is_solved"])) for a, b in pairs]
    only_first, only_second = solved.count((True, False)), solved.count((False, True))
    # A row that one of the two could not answer says nothing about its cost.
    answered = [(a, b) for a, b in pairs if "error" not in a and "error" not in b]
    differences = [_forwards(b) - _forwards(a) for a, b in answered]
    fewer, more = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
    return {
        "both": solved.count((True, True)),
        "only_first": only_first,
        "only_second": only_second,
        "neither": solved.count((False, False)),
        "p_value": binomial_test(only_first, only_second),
        "forwards": {
            "difference": sum(differences) / max(1, len(differences)),
            "fewer_in_second": fewer,
            "more_in_second": more,
            "equal": len(differences) - fewer - more,
            "p_value": binomial_test(fewer, more),
        },
        "records": [{**{name: a[name] for name in OWN}, "first": _answer(a), "second": _answer(b)} for a, b in pairs],
    }


def _asked(value: Any) -> Any:
    """Return a value of a record for comparison: a lone user message as its text, anything else unchanged.

    One model may be asked in raw text, and the other by a user's message.
    """
    is_question = isinstance(value, list) and [message["role"] for message in value] == ["user"]
    return value[0]["content"] if is_question else value


def binomial_test(one: int, other: int) -> float:
    """Return the two-sided p-value of the counts `one` and `other` under even chances; 1 if both are 0.

    For counts of discordant pairs this is McNemar's exact test, for counts of signs the sign test.
    """
    total, least = one + other, min(one, other)
    ways = sum(math.comb(total, k) for k in range(least + 1))
    return min(1.0, 2 * ways / 2**total)


def lines(first: dict[str, Any], second: dict[str, Any], comparison: dict[str, Any]) -> list[str]:
    """Return both reports side by side and then the tests, as lines for a person.

    `first["model"]` and `second["model"]` are the names of the models.
    """
    forwards = comparison["forwards"]
    rows = [
        ("", "first", "second"),
        ("model", str(first["model"]), str(second["model"])),
        ("solved", _share(first), _share(second)),
        ("steps per canvas", f"{first['steps_per_canvas']:.2f}", f"{second['steps_per_canvas']:.2f}"),
        ("forwards per row", forwards_of(first), forwards_of(second)),
        ("tokens per forward", f"{first['tokens_per_forward']:.2f}", f"{second['tokens_per_forward']:.2f}"),
        ("time", f"{first['seconds']:.1f} s", f"{second['seconds']:.1f} s"),
        ("empty, errors", f"{first['empty']}, {first['errors']}", f"{second['empty']}, {second['errors']}"),
        ("solved by it alone", str(comparison["only_first"]), str(comparison["only_second"])),
        ("fewer forwards", str(forwards["more_in_second"]), str(forwards["fewer_in_second"])),
    ]
    told = _aligned(rows)
    told.append(f"solved by both {comparison['both']}, by neither {comparison['neither']}")
    told.append(f"equally often solved: p = {comparison['p_value']:.3g} (McNemar's test, exact)")
    told.append(
        f"forwards of a row, second - first: {forwards['difference']:+.2f} on average; equally often fewer: "
        f"p = {forwards['p_value']:.3g} (sign test, exact)"
    )
    return told


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{c:<{width}}" for c, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _share(report: dict[str, Any]) -> str:
    return f"{report['solved']} of {report['count']} ({report['solved_share']:.1%})"


def _forwards(record: dict[str, Any]) -> int:
    return sum(record["forwards"].get(kind, 0) for kind in CALLS)


def _answer(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in OWN}
