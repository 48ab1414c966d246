"""Reliability diagrams: the accuracy of answers over their confidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw_reliability(report: dict[str, Any], output: Path) -> None:
    """Write a PNG with a panel for each part of a report on decisions.

    The area of a point is its share of the answers.
    """
    parts = list(report["parts"].items())
    figure = Figure(figsize=(3.2 * len(parts), 3.4), layout="constrained")
    for column, (name, part) in enumerate(parts, 1):
        axes = figure.add_subplot(1, len(parts), column)
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        counts, confidences, accuracies = zip(*part["reliability"], strict=True)
        axes.scatter(confidences, accuracies, [300 * count / part["count"] for count in counts], alpha=0.7)
        error, floor = part["calibration_error"], part["calibration_floor"]
        axes.set_title(f"{name}\nECE {error:.3f}, by chance {floor:.3f}", fontsize=9)
        axes.set_xlabel("probability of the likeliest option")
        axes.set_ylabel("share that is right")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
    figure.savefig(output, dpi=150)
