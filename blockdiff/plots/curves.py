"""Loss curves of a training run, drawn from its metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# What is drawn together: a panel's title, and the (key, label, colour) of each line in it.
PANELS = (
    (
        "loss per token",
        (
            ("canvas_loss", "canvas", "#2563eb"),
            ("ar_loss", "next token", "#d97706"),
            ("heldout_canvas_loss", "canvas, held out", "#1e3a8a"),
            ("heldout_ar_loss", "next token, held out", "#92400e"),
        ),
    ),
    ("gradient norm", (("grad_norm", "before clipping", "#7c3aed"),)),
    ("learning rate", (("lr", "lr", "#059669"),)),
    ("tokens per second", (("tokens_per_second", "tokens/s", "#475569"),)),
)


def series(records: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Optimiser steps and values of the records that have a finite `key`."""
    points = [
        (record["step"], float(record[key]))
        for record in records
        if isinstance(record.get(key), (int, float)) and math.isfinite(record[key])
    ]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Centred moving average over `reach` values to each side; the window shrinks at the ends, so no lag."""
    result = []
    for i in range(len(values)):
        side = min(reach, i, len(values) - 1 - i)
        window = values[i - side : i + side + 1]
        result.append(sum(window) / len(window))
    return result


def draw_curves(metrics: str | Path, picture: str | Path, title: str | None = None) -> None:
    """Draw metrics.jsonl as a PNG: losses (also held out), gradient norm, learning rate, speed.

    Training values are noisy: they stay faint behind their moving average. Held-out values are dots.
    Nothing is drawn when the file has no records.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from blockdiff.training.metrics import read

    records = read(Path(metrics))
    if not records:
        return
    panels = [
        (name, drawn)
        for name, lines in PANELS
        if (drawn := [(*line, *series(records, line[0])) for line in lines if series(records, line[0])[0]])
    ]
    figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    rows = max(len(panels) - 1, 1)
    grid = figure.add_gridspec(rows, 3)
    for number, (name, lines) in enumerate(panels):
        place = grid[:, :2] if number == 0 and len(panels) > 1 else grid[max(number - 1, 0), -1]
        axes = figure.add_subplot(place if len(panels) > 1 else grid[:, :])
        for key, label, colour, steps, values in lines:
            if key.startswith("heldout_"):
                axes.plot(steps, values, "o-", color=colour, label=label, linewidth=1.2, markersize=4)
                continue
            reach = 0 if key == "lr" else len(values) // 40  # the learning rate is no noisy measurement
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(steps, smooth(values, reach), color=colour, label=label, linewidth=1.8)
        axes.set_title(name, loc="left", fontsize=10)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        values_drawn = [value for line in lines for value in line[4]]
        if number == 0 and min(values_drawn) > 0 and max(values_drawn) > 20 * min(values_drawn):
            axes.set_yscale("log")
        elif min(values_drawn) >= 0:
            axes.set_ylim(bottom=0)
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=8)
        if number in (0, len(panels) - 1):
            axes.set_xlabel("optimiser step", fontsize=8)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(str(picture))
