"""Curves of training runs as a PNG: one run with everything that it measured, or several compared."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from blockdiff.errors import RunError
from blockdiff.files import room_remedy
from blockdiff.metrics import read
from blockdiff.plots.panels import GREY, LEVEL, TOKENS, Line, NamedRun, Panel, make_panels, named_apart, read_run
from blockdiff.plots.picture import drawable

LEVEL_WORDS = (
    "corrupted: tokens that the noise replaced; kept: the others; "
    "signal: the model's last prediction, fed back into the canvas"
)
SHARES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)  # ticks of an axis that stretches 95 to 100 %
SMOOTHED = 40  # for each `SMOOTHED` values of a line, its moving average spans one value more to each side
LEAST_WRONG = 0.005  # the share of wrong tokens at which such an axis ends


def draw_curves(metrics: str | Path, picture: str | Path, title: str | None = None) -> None:
    """Draw the metrics.jsonl of one run as a PNG: losses, held-out figures by noise level, samples, rates, speed.

    Training values are noisy: they are drawn faint behind their moving average. Draws nothing if the file has no
    metrics.
    """
    _draw([NamedRun(title or "", read(Path(metrics)))], picture)


def draw_comparison(directories: Sequence[str | Path], picture: str | Path) -> None:
    """Draw the runs of several directories into one PNG, each in its own colour; a single run as `draw_curves` does.

    Raises RunError, which names the directory, if one has no run.
    """
    _draw(named_apart([read_run(directory) for directory in directories]), picture)


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Return the centred moving average over `reach` values to each side.

    The window shrinks at both ends, so there is no lag.
    """
    result = []
    for i in range(len(values)):
        side = min(reach, i, len(values) - 1 - i)
        window = values[i - side : i + side + 1]
        result.append(sum(window) / len(window))
    return result


def _draw(runs: Sequence[NamedRun], picture: str | Path) -> None:
    """Draw the panels on a grid of three columns. The losses of one run get four cells; a legend names several runs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels, is_alone = make_panels(runs), len(runs) == 1
    if not panels:
        return
    places = _places(len(panels), has_large=is_alone)
    height = 1.9 if len(places) == len(panels) - 1 else 2.5
    figure = Figure(figsize=(11, 0.5 + height * len(places)), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic(places, empty_sentinel=-1)
    last = max((x for panel in panels if panel.x != LEVEL for line in panel.lines for x in line.points[0]), default=0)
    for number, panel in enumerate(panels):
        columns = (4 if number == 0 else 2) if is_alone else 2 * bool(panel.solid)
        _fill(axes[number], panel, last, columns)
    if is_alone:
        figure.suptitle(drawable(runs[0].name), x=0.01, ha="left", fontsize=11)
    else:
        names = {line.label: line.colour for panel in panels for line in panel.lines if line.label}
        handles = [Line2D([], [], color=colour, linewidth=2) for colour in names.values()]
        columns = max(1, min(len(names), 110 // (max(map(len, names)) + 8)))
        figure.legend(
            handles, list(map(drawable, names)), loc="outside upper left", ncols=columns, frameon=False, fontsize=9
        )
    if any(panel.x == LEVEL for panel in panels):
        figure.supxlabel(LEVEL_WORDS, x=0.01, ha="left", fontsize=8.5)
    png = BytesIO()
    figure.savefig(png, format="png")
    try:
        Path(picture).write_bytes(png.getvalue())
    except OSError as error:
        Path(picture).unlink(missing_ok=True)
        raise RunError(f"{picture}: cannot be written ({error.strerror}); {room_remedy(error)}") from None


def _places(count: int, has_large: bool) -> list[list[int]]:
    """Return the panel number of each cell of the grid, by rows; -1: an empty cell.

    has_large: panel 0 takes two columns and two rows, with other panels beside and below it.
    """
    small, rows = list(range(count)), []
    if has_large:
        beside = small[1:] if count <= 4 else small[1:3]
        small = small[1 + len(beside) :]
        right = beside or [0]  # alone it has the whole width
        rows = [[0, 0, number] for number in right + [-1 if beside else 0] * (2 - len(right))]
    padded = small + [-1] * (-len(small) % 3)
    return rows + [padded[start : start + 3] for start in range(0, len(padded), 3)]


def _fill(axes: Any, panel: Panel, last: float, legend_columns: int = 0) -> None:
    """Draw a panel. last: the largest step or token count of any panel; legend_columns: 0 draws no legend.

    A legend is above the axes, clear of the lines.
    """
    for line in panel.lines:
        _line(axes, line)
    values = [value for line in panel.lines for value in line.points[1]]
    if panel.is_share:
        from matplotlib.ticker import PercentFormatter

        axes.set_ylim(-0.02, 1.02)
        if max(values) > 0.8:  # stretch the last percents
            axes.set_yscale("function", functions=(_bent, _straight))
            axes.set_ylim(_straight(_bent(min(values)) - 0.2), _straight(_bent(1.0) + 0.1))
            axes.set_yticks([share for share in SHARES if share >= min(values) - 0.1])
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    elif panel.has_losses and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    elif min(values) >= 0 and not (panel.has_losses and 2 * min(values) > max(values)):  # losses would look flat from 0
        axes.set_ylim(bottom=0)
    if panel.x == LEVEL:
        axes.set_xlim(0, 1)
    else:
        from matplotlib.ticker import EngFormatter, MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        if panel.x == TOKENS:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlim(-0.03 * last, 1.03 * last + (last == 0))
    shown = _legend(panel) if legend_columns else {}
    legend_rows = -(-len(shown) // max(1, legend_columns))
    is_smoothed = any(line.style == "noisy" and len(line.points[1]) >= SMOOTHED for line in panel.lines)
    axes.set_title(
        panel.title + " (faint: as logged)" * is_smoothed, loc="left", fontsize=9.5, pad=6 + 12 * legend_rows
    )
    axes.set_xlabel(panel.x, fontsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    if legend_rows:
        position = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "borderpad": 0.0, "borderaxespad": 0.3}
        look = {"frameon": False, "fontsize": 8, "labelspacing": 0.2, "columnspacing": 1.2}
        axes.legend(list(shown.values()), list(shown), **position, ncols=legend_columns, **look)


def _legend(panel: Panel) -> dict[str, Any]:
    """Return the words of a panel's legend, each with a line of the look that it explains.

    If the panel has words for solid and dashed lines, these are explained, in grey; else each line by its label.
    """
    from matplotlib.lines import Line2D

    shown = dict[str, Any]()
    for line in panel.lines:
        word = (panel.dashed if line.is_dashed else panel.solid) if panel.solid else line.label
        colour, dash = GREY if panel.solid else line.colour, "--" if line.is_dashed else "-"
        if word:
            shown[word] = Line2D([], [], color=colour, linestyle=dash, linewidth=1.7)
    return shown


def _bent(share: Any) -> Any:
    """Return the height of a share: minus the logarithm of the wrong share.

    So 98 % is as far from 90 % as 90 % is from 50 %.
    """
    import numpy as np

    return -np.log(np.maximum(1 + LEAST_WRONG - np.asarray(share), LEAST_WRONG / 2))


def _straight(height: Any) -> Any:
    """Return the share at a height: the inverse of `_bent`."""
    import numpy as np

    return 1 + LEAST_WRONG - np.exp(-np.asarray(height))


def _line(axes: Any, line: Line) -> None:
    x, values = line.points
    dash = "--" if line.is_dashed else "-"
    if line.style == "dots":
        look = {"linestyle": dash, "marker": "o", "markersize": 3.5, "linewidth": 1.2}
        axes.plot(x, values, color=line.colour, label=line.label, **look)
        return
    if line.style == "noisy":
        axes.plot(x, values, color=line.colour, alpha=0.2, linewidth=0.8)
        values = smooth(values, len(values) // SMOOTHED)
    marker = "o" if len(x) == 1 else ""  # a line of one point is invisible
    axes.plot(x, values, color=line.colour, label=line.label, linewidth=1.7, linestyle=dash, marker=marker)
