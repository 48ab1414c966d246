"""How canvases fill in, as one HTML page that needs nothing from outside: no script, font or picture.

One row per denoising step, one column per canvas position, cells coloured by entropy. A sudoku is drawn as
small grids side by side as well, because that is how a person reads it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from blockdiff.plots.moments import (
    Cell,
    Decode,
    Moment,
    grid_moments,
    grid_side,
    moments_of,
    most_entropy,
    prompt_of,
    visible,
)

if TYPE_CHECKING:
    from blockdiff.sampling.trace import Trace


def draw_page(traces: Sequence[Trace], path: str | Path, decode: Decode, title: str) -> None:
    """Write traces as one HTML page; `decode` turns one token id into its text."""
    Path(path).write_text(page(traces, decode, title), encoding="utf-8")


def page(traces: Sequence[Trace], decode: Decode, title: str) -> str:
    """The HTML text of a page."""
    most, has_grid = most_entropy(traces), any(grid_side(trace) for trace in traces)
    sections = "\n".join(_section(trace, decode, most) for trace in traces)
    style = (files("blockdiff.plots") / "denoising.css").read_text(encoding="utf-8").strip()
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head>\n<body><h1>{_text(title)}</h1>\n{_legend(most, has_grid)}\n"
        f"{sections}\n</body></html>\n"
    )


def _section(trace: Trace, decode: Decode, most: float) -> str:
    """One request: its prompt, the squares of a sudoku, every canvas step by step, and the text."""
    parts = [f"<section><h2>{_text(f'request {trace.id}')}</h2>"]
    if prompt := prompt_of(trace):
        parts.append(f"<pre>{_text(prompt)}</pre>")
    if side := grid_side(trace):
        parts.append(_grids(grid_moments(trace, side, decode), side, most))
        parts.append("<details><summary>every position, step by step</summary>")
    for canvas in trace.canvases:
        title = f"canvas {canvas.canvas + 1}: {canvas.steps} step{'s' * (canvas.steps != 1)}"
        parts.append(f"<h3>{_text(title)}</h3>{_table(moments_of(trace, canvas, decode), most)}")
    if side:
        parts.append("</details>")
    return "\n".join([*parts, f"<h3>text</h3><pre>{_text(trace.text)}</pre></section>"])


def _legend(most: float, has_grid: bool) -> str:
    puzzle = (
        '<span><span class="c given">1</span>given by the puzzle</span>'
        '<span><span class="c wrong">1</span>contradicts a given</span>'
    )
    return (
        "<p>A canvas starts as random tokens. At every denoising step the model guesses all positions at "
        "once; what it is surest of is kept, the rest becomes new noise and is guessed again.</p>"
        '<div class="legend">'
        f'<span>sure <span class="scale"></span> unsure (entropy 0 to {most:.2f} nats)</span>'
        '<span><span class="c noise">a</span>noise</span>'
        '<span><span class="c kept">a</span>kept at this step</span>'
        '<span><span class="c new">a</span>guess changed since the step before</span>'
        '<span><span class="c done">a</span>committed</span>' + puzzle * has_grid + "</div>"
    )


def _table(moments: Sequence[Moment], most: float) -> str:
    width = max((len(moment.cells) for moment in moments), default=0)
    head = "".join(f"<th>{i if i % 5 == 0 else ''}</th>" for i in range(width))
    rows = [f"<thead><tr><th></th>{head}</tr></thead>"]
    for moment in moments:
        cells = "".join(_cell(cell, most, "td") for cell in moment.cells)
        rows.append(f"<tr><th>{_caption(moment)}</th>{cells}</tr>")
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _grids(moments: Sequence[Moment], side: int, most: float) -> str:
    box = math.isqrt(side)
    ends = set(range(box - 1, side - 1, box))  # the last row or column of a box, but of the outer one
    figures = []
    for moment in moments:
        cells = []
        for place, cell in enumerate(moment.cells):
            row, column = divmod(place, side)
            edges = " right" * (column in ends) + " below" * (row in ends)
            cells.append(_cell(cell, most, "span", edges))
        figures.append(
            f'<figure><div class="grid" style="grid-template-columns: repeat({side}, max-content)">'
            f"{''.join(cells)}</div><figcaption>{_caption(moment)}</figcaption></figure>"
        )
    return f'<div class="grids">{"".join(figures)}</div>'


def _caption(moment: Moment) -> str:
    return f"{_text(moment.name)}<small>{_text(moment.detail)}</small>"


def _cell(cell: Cell, most: float, tag: str, edges: str = "") -> str:
    kinds = "c" + edges + {"given": " given", "noise": " noise", "committed": " done", "guess": ""}[cell.state]
    kinds += " kept" * cell.is_accepted + " new" * cell.is_changed + " wrong" * cell.is_wrong
    kinds += " long" * (len(visible(cell.text)) > 1)
    heat = f' style="--h:{min(1.0, cell.entropy / most):.3f}"' if cell.entropy is not None else ""
    note = f' title="{_text(cell.note)}"' if cell.note else ""
    return f'<{tag} class="{kinds}"{heat}{note}>{_text(visible(cell.text) if cell.text else "")}</{tag}>'


def _text(text: str) -> str:
    return html.escape(text, quote=True)
