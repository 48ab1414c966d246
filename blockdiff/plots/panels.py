"""From the metrics of runs to panels of lines: what is drawn together. Drawing is in `curves`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from blockdiff.errors import RunError

Record = Mapping[str, Any]
Points = tuple[list[float], list[float]]

# Told apart by most eyes, also in grey (Okabe and Ito's palette, without its yellow).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d", "#7b3294")
STEP, LEVEL = "optimiser step", "t (0 = clean, 1 = all noise)"


@dataclass(frozen=True)
class Line:
    """Points and how they look: `noisy` ones stay faint behind their moving average, `dots` were measured there."""

    points: Points
    label: str | None
    colour: str
    style: Literal["noisy", "plain", "dots"] = "plain"
    is_dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Lines over one axis; `is_share`: from 0 to 100 %."""

    title: str
    lines: tuple[Line, ...]
    x: str = STEP
    is_share: bool = False
    is_loss: bool = False


@dataclass(frozen=True)
class Run:
    """The records of a run and what it is called in a picture."""

    name: str
    records: list[dict[str, Any]]


# A training key, its panel when runs are compared, its label and colour when one is drawn.
LOSSES = (
    ("canvas_loss", "canvas loss", "canvas", "#0072b2"),
    ("ar_loss", "next-token loss", "next token", "#d55e00"),
)
# Over steps: key, title, style, is_share.
OVER_STEPS: tuple[tuple[str, str, Literal["noisy", "plain", "dots"], bool], ...] = (
    ("heldout_canvas_accuracy", "held-out canvas tokens right", "dots", True),
    ("sample_accuracy", "sampled prompts right", "dots", True),
    ("sample_steps_per_canvas", "steps per canvas of sampled prompts", "dots", False),
    ("grad_norm", "gradient norm before clipping", "noisy", False),
    ("lr", "learning rate", "plain", False),
    ("tokens_per_second", "tokens per second", "noisy", False),
)
NOT_COMPARED = ("grad_norm", "lr")


def read_run(directory: str | Path) -> Run:
    """The run in a directory. Raises RunError, naming it, when none is there or it has logged nothing yet."""
    from blockdiff.metrics import FILE_NAME, read

    path = Path(directory)
    if not (path / FILE_NAME).is_file():
        what = f"no {FILE_NAME} in it" if path.is_dir() else "not a directory"
        raise RunError(f"{directory}: {what}; name the --output directory of a `blockdiff train`")
    records = read(path / FILE_NAME)
    if not records:
        raise RunError(f"{directory}: nothing is logged yet in {FILE_NAME}; wait for the first record")
    return Run(str(directory), records)


def named_apart(runs: Sequence[Run]) -> list[Run]:
    """Runs called by the last part of their directory, and by as many more as it takes to tell them apart."""
    parts = [Path(run.name).absolute().parts for run in runs]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            break
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def series(records: Sequence[Record], key: str) -> Points:
    """Optimiser steps and values of the records that have a finite `key`."""
    points = [(record["step"], float(record[key])) for record in records if _is_number(record.get(key))]
    return [step for step, _ in points], [value for _, value in points]


def by_level(records: Sequence[Record], key: str) -> Points:
    """Middles of the noise levels t and the values of `key` there, at the last evaluation that has levels."""
    levels: list[Record] = next(
        (record["heldout_levels"] for record in reversed(records) if record.get("heldout_levels")), []
    )
    found = [
        ((level["t_from"] + level["t_to"]) / 2, float(level[key])) for level in levels if _is_number(level.get(key))
    ]
    return [t for t, _ in found], [value for _, value in found]


def panels_of(run: Run) -> list[Panel]:
    """One run: losses first, then everything else that it measured; colours tell measures apart."""
    losses = []
    for key, _, label, colour in LOSSES:
        losses.append(Line(series(run.records, key), label, colour, "noisy"))
        losses.append(Line(series(run.records, f"heldout_{key}"), f"{label}, held out", colour, "dots", is_dashed=True))
    panels = [Panel("loss per token", tuple(losses), is_loss=True)]
    for measure in ("loss", "accuracy"):
        lines = []
        for part, colour in (("corrupted", "#d55e00"), ("kept", "#0072b2")):
            for end, words, is_dashed in (("", "", False), ("_no_signal", ", no signal", True)):
                points = by_level(run.records, f"{part}_{measure}{end}")
                lines.append(Line(points, f"{part}{words}", colour, "dots", is_dashed))
        panels.append(Panel(f"held-out {measure} by noise level", tuple(lines), LEVEL, is_share=measure == "accuracy"))
    for key, title, style, is_share in OVER_STEPS:
        panels.append(Panel(title, (Line(series(run.records, key), None, "#4d4d4d", style),), is_share=is_share))
    return _with_something(panels)


def panels_comparing(runs: Sequence[Run]) -> list[Panel]:
    """Several runs: colours tell runs apart; dashed with dots is held out, or what was kept by the noise."""
    coloured = [(run, COLOURS[number % len(COLOURS)]) for number, run in enumerate(runs)]
    panels = []
    for key, title, _, _ in LOSSES:
        lines = [Line(series(run.records, key), run.name, colour, "noisy") for run, colour in coloured]
        held = [(series(run.records, f"heldout_{key}"), colour) for run, colour in coloured]
        lines += [Line(points, None, colour, "dots", is_dashed=True) for points, colour in held]
        title += " (dashed: held out)" if any(steps for (steps, _), _ in held) else ""
        panels.append(Panel(title, tuple(lines), is_loss=True))
    for measure in ("loss", "accuracy"):
        lines = []
        for run, colour in coloured:
            lines.append(Line(by_level(run.records, f"corrupted_{measure}"), run.name, colour, "dots"))
            lines.append(Line(by_level(run.records, f"kept_{measure}"), None, colour, "dots", is_dashed=True))
        title = f"held-out {measure}, corrupted (dashed: kept)"
        panels.append(Panel(title, tuple(lines), LEVEL, is_share=measure == "accuracy"))
    for key, title, style, is_share in OVER_STEPS:
        if key not in NOT_COMPARED:
            lines = [Line(series(run.records, key), run.name, colour, style) for run, colour in coloured]
            panels.append(Panel(title, tuple(lines), is_share=is_share))
    return _with_something(panels)


def _with_something(panels: Sequence[Panel]) -> list[Panel]:
    """Panels and lines that have points; a loss that is 0 throughout has no weight in the recipe and is left out."""
    kept = []
    for panel in panels:
        lines = [line for line in panel.lines if line.points[1] and (any(line.points[1]) or not panel.is_loss)]
        if lines:
            kept.append(replace(panel, lines=tuple(lines)))
    return kept


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
