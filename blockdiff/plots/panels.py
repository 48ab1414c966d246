"""Panels of lines made from the metrics of runs: which metrics share a panel. `curves` draws them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from blockdiff.errors import RunError
from blockdiff.metrics import FILE_NAME, Record, measured, metric, read, unlisted_keys

Points = tuple[list[float], list[float]]

# Told apart by most eyes, also in grey (Okabe and Ito's palette, without its yellow).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d", "#7b3294")
BLUE, ORANGE, GREY = COLOURS[0], COLOURS[1], COLOURS[6]
STEP, TOKENS, LEVEL = "optimiser step", "tokens trained on", "t (0 = clean, 1 = all noise)"


@dataclass(frozen=True)
class Line:
    """A metric and its look; `points` are set when it is drawn for a run."""

    key: str
    label: str | None = None
    colour: str = GREY
    is_dashed: bool = False
    points: Points = ([], [])

    @property
    def style(self) -> Literal["noisy", "plain", "dots"]:
        """The look of a line: "noisy" (faint behind its moving average), "plain", or "dots" for evaluations."""
        if metric(self.key).kind != "train":
            return "dots"
        return "plain" if self.key == "lr" else "noisy"


@dataclass(frozen=True)
class Panel:
    """Lines over one axis.

    has_losses: the scale may be logarithmic; solid, dashed: in a comparison of runs, what solid and dashed lines show.
    """

    title: str
    lines: tuple[Line, ...]
    x: str = STEP
    has_losses: bool = False
    solid: str = ""
    dashed: str = ""

    @property
    def is_share(self) -> bool:
        """True if the axis goes from 0 to 100 %."""
        return metric(self.lines[0].key).format.endswith("%")


def _with_heldout(key: str, label: str, colour: str) -> tuple[Line, Line]:
    return Line(key, label, colour), Line(f"heldout_{key}", f"{label}, held out", colour, is_dashed=True)


def _by_signal(part: str, measure: str, colour: str) -> tuple[Line, Line]:
    key = f"heldout_{part}_{measure}"
    return Line(key, part, colour), Line(f"{key}_no_signal", f"{part}, no signal", colour, is_dashed=True)


def _by_part(measure: str) -> tuple[Line, Line]:
    return Line(f"heldout_corrupted_{measure}"), Line(f"heldout_kept_{measure}", is_dashed=True)


def _over_steps(*keys: str) -> list[Panel]:
    return [Panel(metric(key).label, (Line(key),)) for key in keys]


CANVAS, NEXT = _with_heldout("canvas_loss", "canvas", BLUE), _with_heldout("ar_loss", "next token", ORANGE)
REWARD = Line("reward", "rollouts", BLUE), Line("sample_reward", "held-out prompts", ORANGE, is_dashed=True)
RESPONSE, WHOLE = "heldout_response_accuracy", "heldout_canvas_accuracy"
ALONE = [  # one run: losses first, then everything else that it measured; colours tell measures apart
    Panel("loss per token", (*CANVAS, *NEXT), has_losses=True),
    *(
        Panel(
            f"held-out {m} by noise level", (*_by_signal("corrupted", m, ORANGE), *_by_signal("kept", m, BLUE)), LEVEL
        )
        for m in ("loss", "accuracy")
    ),
    Panel("held-out tokens right", (Line(RESPONSE, "without fill", ORANGE), Line(WHOLE, "with fill", BLUE))),
    *_over_steps("draft_loss", "heldout_accepted_length", "heldout_draft_accuracy"),
    Panel(metric("reward").label, REWARD),
    *_over_steps("rollout_steps_per_canvas", "groups_without_spread", "entropy"),
    *_over_steps("sample_accuracy", "sample_steps_per_canvas"),
    *_over_steps("grad_norm", "lr", "tokens_per_second"),
]
COMPARED = [  # several runs: colours tell runs apart
    Panel(metric("canvas_loss").label, CANVAS, has_losses=True, solid="training", dashed="held out"),
    Panel(metric("ar_loss").label, NEXT, has_losses=True, solid="training", dashed="held out"),
    *(
        Panel(f"held-out {m} by noise level", _by_part(m), LEVEL, solid="corrupted", dashed="kept")
        for m in ("loss", "accuracy")
    ),
    Panel(
        "held-out tokens right", (Line(RESPONSE), Line(WHOLE, is_dashed=True)), solid="without fill", dashed="with fill"
    ),
    *_over_steps("draft_loss", "heldout_accepted_length"),
    Panel(metric("reward").label, REWARD, solid="rollouts", dashed="held-out prompts"),
    *_over_steps("sample_accuracy", "sample_steps_per_canvas", "tokens_per_second"),
]


@dataclass(frozen=True)
class NamedRun:
    """The records of a run and its name in a picture."""

    name: str
    records: list[Record]


def read_run(directory: str | Path) -> NamedRun:
    """Read the run in a directory. Raises RunError if there is none or its log is empty."""
    path = Path(directory)
    if not (path / FILE_NAME).is_file():
        what = f"no {FILE_NAME} in it" if path.is_dir() else "not a directory"
        raise RunError(f"{directory}: {what}; name the --output directory of a `blockdiff train`")
    records = read(path / FILE_NAME)
    if not records:
        raise RunError(f"{directory}: nothing is logged yet in {FILE_NAME}; wait for the first record")
    return NamedRun(str(directory), records)


def named_apart(runs: Sequence[NamedRun]) -> list[NamedRun]:
    """Return the runs named by the last parts of their directories: as many parts as make all names differ."""
    parts = [Path(run.name).absolute().parts for run in runs]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            break
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def series(records: Sequence[Record], key: str) -> Points:
    """Return the optimiser steps and values of the records that have this metric."""
    points = [(record["step"], value) for record in records if (value := measured(record, key)) is not None]
    return [step for step, _ in points], [value for _, value in points]


def tokens_at(records: Sequence[Record]) -> Callable[[float], float] | None:
    """Return a function from an optimiser step to the number of tokens trained on; None if the log has no speeds."""
    trained = [record for record in records if {"tokens_per_second", "seconds"} <= record.keys()]
    if not trained:
        return None
    points = [(0, 0.0)]
    for before, record in pairwise([{"seconds": 0.0}, *trained]):
        tokens = record["tokens_per_second"] * (record["seconds"] - before["seconds"])
        points.append((record["step"], points[-1][1] + tokens))

    def tokens_of(step: float) -> float:
        for (first, few), (last, many) in pairwise(points):
            if step <= last:
                return few + (many - few) * (step - first) / max(1, last - first)
        return points[-1][1]

    return tokens_of


def by_level(records: Sequence[Record], key: str) -> Points:
    """Return noise levels t and the held-out metric at each, from the last evaluation that has levels."""
    levels: list[Mapping[str, Any]] = next(
        (record["heldout_levels"] for record in reversed(records) if record.get("heldout_levels")), []
    )
    inner = key.removeprefix("heldout_")
    measurements = [((level["t_from"] + level["t_to"]) / 2, measured(level, inner)) for level in levels]
    points = [(t, value) for t, value in measurements if value is not None]
    return [t for t, _ in points], [value for _, value in points]


def make_panels(runs: Sequence[NamedRun]) -> list[Panel]:
    """Return the panels and lines for which at least one run has points.

    The last panels are metrics that no table here lists. Several runs are drawn over trained tokens if all have logged
    their speeds, else over optimiser steps.
    """
    panels = []
    counts = [tokens_at(run.records) for run in runs] if len(runs) > 1 else [None]
    is_by_tokens = None not in counts
    unlisted_panels = _over_steps(*unlisted_keys(record for run in runs for record in run.records))
    for panel in (*(ALONE if len(runs) == 1 else COMPARED), *unlisted_panels):
        lines = []
        for line in panel.lines:
            for number, (run, tokens_of) in enumerate(zip(runs, counts, strict=True)):
                points = (by_level if panel.x == LEVEL else series)(run.records, line.key)
                if is_by_tokens and tokens_of is not None and panel.x == STEP:
                    points = [tokens_of(step) for step in points[0]], points[1]
                if points[1] and len(runs) > 1:
                    label, colour = None if line.is_dashed else run.name, COLOURS[number % len(COLOURS)]
                    lines.append(replace(line, points=points, label=label, colour=colour))
                elif points[1]:
                    lines.append(replace(line, points=points))
        if lines:
            x = TOKENS if is_by_tokens and panel.x == STEP else panel.x
            panels.append(replace(panel, lines=tuple(lines), x=x))
    return panels
