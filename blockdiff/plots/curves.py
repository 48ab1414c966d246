"""Curves of training runs as a PNG: one run with everything it measured, or several compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockdiff.plots.panels import LEVEL, Line, Panel, Run, named_apart, panels_comparing, panels_of, read_run


def draw_curves(metrics: str | Path, picture: str | Path, title: str | None = None) -> None:
    """Draw the metrics.jsonl of one run as a PNG: losses, held-out figures by noise level, samples, rates, speed.

    Training values are noisy: they stay faint behind their moving average. Nothing is drawn when the file has no
    records.
    """
    from blockdiff.metrics import read

    records = read(Path(metrics))
    if records:
        _draw(panels_of(Run(title or "", records)), picture, title=title)


def draw_comparison(directories: Sequence[str | Path], picture: str | Path) -> None:
    """Draw the runs in some directories into one PNG, each in a colour of its own; a single one as `draw_curves` does.

    Raises RunError naming a directory without a run.
    """
    runs = named_apart([read_run(directory) for directory in directories])
    if len(runs) == 1:
        _draw(panels_of(runs[0]), picture, title=runs[0].name)
    else:
        panels = panels_comparing(runs)
        _draw(panels, picture, names={line.label: line.colour for p in panels for line in p.lines if line.label})


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Centred moving average over `reach` values to each side; the window shrinks at the ends, so no lag."""
    result = []
    for i in range(len(values)):
        side = min(reach, i, len(values) - 1 - i)
        window = values[i - side : i + side + 1]
        result.append(sum(window) / len(window))
    return result


def _draw(
    panels: Sequence[Panel], picture: str | Path, title: str | None = None, names: dict[str, str] | None = None
) -> None:
    """Panels on a grid of three columns; one run's losses get four cells. `names`: the runs of one common legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    places, rows = _places(len(panels), has_large=names is None)
    figure = Figure(figsize=(11, 0.5 + (1.9 if rows == len(panels) - 1 else 2.5) * rows), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(rows, 3)
    for panel, (row, column) in zip(panels, places, strict=True):
        axes = figure.add_subplot(grid[row, column])
        _fill(axes, panel, has_legend=names is None)
    if names:
        handles = [Line2D([], [], color=colour, linewidth=2) for colour in names.values()]
        columns = max(1, min(len(names), 110 // (max(map(len, names)) + 8)))
        figure.legend(handles, list(names), loc="outside upper left", ncols=columns, frameon=False, fontsize=9)
    elif title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(str(picture))


def _places(count: int, has_large: bool) -> tuple[list[tuple[slice, slice]], int]:
    """A (rows, columns) place for every panel, and how many rows there are."""

    def cell(row: int, column: int) -> tuple[slice, slice]:
        return slice(row, row + 1), slice(column, column + 1)

    if not has_large:
        return [cell(*divmod(number, 3)) for number in range(count)], max(1, -(-count // 3))
    if count == 1:
        return [(slice(0, 2), slice(0, 3))], 2
    tall = max(2, count - 1) if count <= 4 else 2  # rows of the large one: few others stand beside it
    places = [(slice(0, tall), slice(0, 2))]
    beside = count - 1 if count <= 4 else 2
    places += [cell(row, 2) for row in range(beside)]
    below = count - 1 - beside
    places += [cell(tall + number // 3, number % 3) for number in range(below)]
    return places, tall + -(-below // 3)


def _fill(axes: Any, panel: Panel, has_legend: bool) -> None:
    for line in panel.lines:
        _line(axes, line)
    values = [value for line in panel.lines for value in line.points[1]]
    if panel.is_share:
        from matplotlib.ticker import PercentFormatter

        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif panel.is_loss and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    elif min(values) >= 0:
        axes.set_ylim(bottom=0)
    if panel.x == LEVEL:
        axes.set_xlim(0, 1)
    axes.set_title(panel.title, loc="left", fontsize=9.5)
    axes.set_xlabel(panel.x, fontsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    if has_legend and any(line.label for line in panel.lines) and len(panel.lines) > 1:
        axes.legend(frameon=False, fontsize=8)


def _line(axes: Any, line: Line) -> None:
    x, values = line.points
    dash = "--" if line.is_dashed else "-"
    if line.style == "dots":
        look = {"linestyle": dash, "marker": "o", "markersize": 3.5, "linewidth": 1.2}
        axes.plot(x, values, color=line.colour, label=line.label, **look)
        return
    if line.style == "noisy":
        axes.plot(x, values, color=line.colour, alpha=0.2, linewidth=0.8)
        values = smooth(values, len(values) // 40)
    axes.plot(x, values, color=line.colour, label=line.label, linewidth=1.7, linestyle=dash)
