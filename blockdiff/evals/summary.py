"""Sums over the records of an evaluation, as numbers and as lines for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from blockdiff.metrics import at_limit

OWN_NUMBERS = ("id", "length", "score", "draw")  # numbers in the record of every task: not facts
CALLS = ("denoise", "draft", "encode", "verify")  # the kinds of model calls


def summary(records: Sequence[dict[str, Any]], group: str | None = None) -> dict[str, Any]:
    """Return accuracy, costs and endings.

    - `count`, `solved`, `solved_share`, `errors` (rows without an answer), `empty` (answers without a text);
    - `endings`: the number of rows by finish_reason;
    - `steps_per_canvas` (mean over canvases), `steps_histogram` (steps: canvases);
    - `forwards_per_row`: mean model calls of a row's answer: `total`, and each kind named as in
      `blockdiff.sampling.Forwards`; `tokens_per_forward`: tokens up to eos, per model call;
    - `tokens_per_round`, if drafts were verified: tokens per verification; `accepted_by_place`, with a drafter: the
      share of its tokens that were accepted, for each place in the draft;
    - `facts`: for each boolean fact of the task, the number of answers for which it is True; `means`: the mean of each
      numeric fact;
    - `groups`, with `group`: counts of the rows for each value of that fact.
    """
    report = {**_counts(records), **costs(records), "facts": _facts(records), "means": _means(records)}
    if group is not None:
        values = sorted({record[group] for record in records})
        grouped = {value: [record for record in records if record[group] == value] for value in values}
        report["groups"] = [{group: value, **_counts(rows)} for value, rows in grouped.items()]
    return report


def costs(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the costs and endings of answers, as `summary` describes.

    Records need `text`, `steps`, `forwards`, `length` and `finish_reason`; `places` is optional.
    """
    steps = [count for record in records for count in record["steps"]]
    calls = {kind: sum(record["forwards"].get(kind, 0) for record in records) for kind in CALLS}
    total, rows = sum(calls.values()), max(1, len(records))
    tokens = sum(record["length"] for record in records)
    return {
        "errors": sum(record["finish_reason"] == "error" for record in records),
        "empty": sum(record["finish_reason"] != "error" and not record["text"].strip() for record in records),
        "endings": dict(sorted(Counter(record["finish_reason"] for record in records).items())),
        "steps_per_canvas": sum(steps) / max(1, len(steps)),
        "steps_histogram": {str(count): canvases for count, canvases in sorted(Counter(steps).items())},
        "forwards_per_row": {
            "total": total / rows,
            **{kind: count / rows for kind, count in calls.items()},
        },
        "tokens_per_forward": tokens / max(1, total),
        **({"tokens_per_round": tokens / calls["verify"]} if calls["verify"] else {}),
        **accepted_by_place([record.get("places", ()) for record in records]),
    }


def accepted_by_place(places: Sequence[Sequence[tuple[int, int]]]) -> dict[str, list[float]]:
    """Return `accepted_by_place`: the share of a drafter's tokens that were accepted, for each place in the draft.

    places: for each result, (drafted, accepted) of each place. Returns {} if no result has any.
    """
    pairs = zip_longest(*places, fillvalue=(0, 0))
    sums = [tuple(map(sum, zip(*of_place, strict=True))) for of_place in pairs]
    return {"accepted_by_place": [stood / max(1, drafted) for drafted, stood in sums]} if sums else {}


def lines(report: dict[str, Any]) -> list[str]:
    """Return the report of `evaluate` as lines for a person: one figure a line, then a table of any groups."""
    count, facts = report["count"], report["facts"]
    wait = report["first_canvas_seconds"]
    rows_per_second = count / max(report["seconds"], 1e-9)
    told = [
        ("solved", f"{report['solved']} of {count} ({report['solved_share']:.1%})"),
        *((_words(name), f"{number} of {count} ({number / count:.1%})") for name, number in facts.items()),
        *((_words(name), f"{mean:.4g} (mean)") for name, mean in report["means"].items()),
        *_costs(report),
        ("time", f"{report['seconds']:.1f} s, {rows_per_second:.1f} rows/s, {report['batch_size']} at a time"),
        ("first canvas", "-" if wait is None else f"after {wait:.2f} s (median of the rows)"),
    ]
    return [*_aligned(told), *_table(report.get("groups", []))]


def cost_lines(costs: dict[str, Any]) -> list[str]:
    """Return the figures of `costs` as lines for a person; `costs` must also have `max_steps`."""
    return _aligned(_costs(costs))


def forwards_of(report: dict[str, Any]) -> str:
    """Return the model calls of a row in words: the total, and each kind that occurs."""
    calls = report["forwards_per_row"]
    kinds = ", ".join(f"{calls[kind]:.2f} {kind}" for kind in CALLS if calls[kind])
    return f"{calls['total']:.2f} ({kinds})"


def _costs(report: dict[str, Any]) -> list[tuple[str, str]]:
    limit = at_limit(report["steps_per_canvas"], report["max_steps"])
    endings = ", ".join(f"{name} {number}" for name, number in report["endings"].items())
    shares = " ".join(f"{share:.0%}" for share in report.get("accepted_by_place", ()))
    steps, per_round = f"{report['steps_per_canvas']:.2f} (at most {report['max_steps']}){limit}", "tokens_per_round"
    return [
        *((("steps per canvas", steps),) if report["forwards_per_row"]["denoise"] else ()),
        ("forwards per row", forwards_of(report)),
        ("tokens per forward", f"{report['tokens_per_forward']:.2f}"),
        *((("tokens a round", f"{report[per_round]:.2f}"),) if per_round in report else ()),
        *((("accepted by place", shares),) if shares else ()),
        ("ended by", f"{endings}; {report['empty']} empty"),
    ]


def _aligned(told: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in told) + 2
    return [f"{name:<{width}}{value}" for name, value in told]


def _table(groups: Sequence[dict[str, Any]]) -> list[str]:
    if not groups:
        return []
    names = list(groups[0])
    heads = [_words(names[0]), "rows", "solved", "share", "steps"]
    cells = [
        [str(row[names[0]]), str(row["count"]), str(row["solved"]), f"{row['solved_share']:.1%}", _steps(row)]
        for row in groups
    ]
    widths = [max(len(row[column]) for row in [heads, *cells]) for column in range(len(heads))]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in [heads, *cells]]


def _counts(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    solved = sum(bool(record["is_solved"]) for record in records)
    steps = [count for record in records for count in record["steps"]]
    return {
        "count": len(records),
        "solved": solved,
        "solved_share": solved / len(records),
        "steps_per_canvas": sum(steps) / max(1, len(steps)),
    }


def _facts(records: Sequence[dict[str, Any]]) -> dict[str, int]:
    names = [name for name, value in records[0].items() if isinstance(value, bool) and name != "is_solved"]
    return {name: sum(record[name] for record in records) for name in names}


def _means(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of each numeric fact over the answers that have it."""
    numbers: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and name not in OWN_NUMBERS:
                numbers.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in numbers.items()}


def _steps(row: dict[str, Any]) -> str:
    return f"{row['steps_per_canvas']:.2f}"


def _words(name: str) -> str:
    """Return a fact's name in words."""
    return name.removeprefix("is_").replace("_", " ")
