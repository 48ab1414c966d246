"""How one request's canvases fill in, as a PNG for a README; the page in `denoising` shows more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdiff.plots.moments import Cell, Decode, Moment, grid_moments, grid_side, moments_of, most_entropy, visible

if TYPE_CHECKING:
    from blockdiff.sampling.trace import Trace

WIDEST = 48  # positions of a canvas that fit a picture
INK, SOFT, WRONG = "#1f2328", "#8b929b", "#b91c1c"
SURE, GIVEN, EMPTY = "#0f9d76", "#e2e5ea", "#f7f8fa"


def draw_picture(trace: Trace, path: str | Path, decode: Decode) -> None:
    """Draw a trace as PNG: rows = moments, columns = positions; a sudoku as squares side by side.

    Canvases wider than 48 positions are cut; of several canvases the rows show the first.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    most = most_entropy([trace])
    if side := grid_side(trace):
        moments = grid_moments(trace, side, decode)
        figure = Figure(figsize=(1.75 * len(moments), 2.25), dpi=150)
        panels = figure.subplots(1, len(moments), squeeze=False)[0]
        for moment, axes in zip(moments, panels, strict=True):
            _square(axes, moment, side, most)
        figure.subplots_adjust(left=0.01, right=0.99, bottom=0.2, top=0.98, wspace=0.12)
    else:
        moments = moments_of(trace, trace.canvases[0], decode) if trace.canvases else []
        width = min(WIDEST, max((len(moment.cells) for moment in moments), default=1))
        figure = Figure(figsize=(1.6 + 0.42 * width, 0.4 + 0.4 * len(moments)), dpi=150, layout="constrained")
        _rows(figure.add_subplot(), moments, width, most)
    FigureCanvasAgg(figure)
    figure.savefig(str(path), facecolor="white")


def heat(entropy: float | None, most: float) -> tuple[float, float, float]:
    """The colour of a cell: from near white (sure) to orange (the largest entropy drawn)."""
    share = 0.0 if entropy is None else min(1.0, entropy / most)
    cold, hot = (0.969, 0.973, 0.980), (0.918, 0.345, 0.047)
    red, green, blue = (a + (b - a) * share for a, b in zip(cold, hot, strict=True))
    return red, green, blue


def _square(axes: Any, moment: Moment, side: int, most: float) -> None:
    for place, cell in enumerate(moment.cells):
        row, column = divmod(place, side)
        _draw_cell(axes, column, row, cell, most, size=15 if side == 4 else 8)
    box = math.isqrt(side)
    for edge in range(box, side, box):
        axes.plot([edge, edge], [0, side], color=INK, linewidth=1.2)
        axes.plot([0, side], [edge, edge], color=INK, linewidth=1.2)
    axes.set(xlim=(-0.05, side + 0.05), ylim=(side + 0.05, -0.05), aspect="equal")
    axes.axis("off")
    detail = moment.detail.split(" · ")
    caption = "\n".join([moment.name, " · ".join(detail[:2])])
    axes.text(side / 2, side + 0.15, caption, ha="center", va="top", fontsize=8, color=INK, linespacing=1.5)


def _rows(axes: Any, moments: Sequence[Moment], width: int, most: float) -> None:
    for row, moment in enumerate(moments):
        axes.text(-0.3, row + 0.5, moment.name, ha="right", va="center", fontsize=8, color=INK)
        for column, cell in enumerate(moment.cells[:width]):
            _draw_cell(axes, column, row, cell, most, size=7)
    axes.set(xlim=(-3.2, width + 0.1), ylim=(len(moments) + 0.1, -0.1), aspect="auto")
    axes.axis("off")


def _draw_cell(axes: Any, x: float, y: float, cell: Cell, most: float, size: float) -> None:
    from matplotlib.patches import Polygon, Rectangle

    is_sure = cell.is_accepted or cell.state == "committed"
    colour = {"given": GIVEN, "noise": EMPTY}.get(cell.state) or heat(cell.entropy, most)
    edge = SURE if is_sure else "white"
    axes.add_patch(Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, facecolor=colour, edgecolor=edge, linewidth=1.3))
    if cell.is_changed:
        corner = [(x + 0.96, y + 0.04), (x + 0.66, y + 0.04), (x + 0.96, y + 0.34)]
        axes.add_patch(Polygon(corner, facecolor="#2563eb", edgecolor="none"))
    text = visible(cell.text)[:5] if cell.text else ""
    look = {
        "fontsize": max(4.0, size * min(1.0, 2 / max(1, len(text)))),
        "color": SOFT if cell.state == "noise" else WRONG if cell.is_wrong else INK,
        "fontstyle": "italic" if cell.state == "noise" else "normal",
        "fontweight": "bold" if is_sure or cell.state == "given" else "normal",
    }
    axes.text(x + 0.5, y + 0.54, text.replace("$", r"\$"), ha="center", va="center", **look)
