"""How canvases fill in, as one HTML page that needs nothing from outside: no script, font or picture.

One row per denoising step, one column per canvas position, cells coloured by entropy. A sudoku is drawn as
small grids side by side as well, because that is how a person reads it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blockdiff.plots.moments import (
    Cell,
    Decode,
    Moment,
    RequestPicture,
    grid_moments,
    grid_side,
    most_entropy,
    pictures,
    visible,
)

if TYPE_CHECKING:
    from blockdiff.sampling.trace import Trace

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1f2328; --soft: #6b7280; --line: #d7dbe0;
  --cell: #f5f6f8; --hot: 234, 88, 12; --sure: #0f9d76; --mark: #2563eb; --given: #e2e5ea;
  --wrong: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --page: #14171c; --ink: #e6e8eb; --soft: #9aa3ad;
  --line: #343a43; --cell: #1d2128; --hot: 249, 115, 22; --sure: #34d399; --mark: #60a5fa;
  --given: #3a414c; --wrong: #fca5a5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 1500px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .3rem; }
h3 { font-size: .95rem; margin: 1.1rem 0 .4rem; font-weight: 600; color: var(--soft); }
pre { margin: .2rem 0 .6rem; padding: .5rem .7rem; background: var(--cell); border-radius: 6px;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; max-height: 14rem; overflow: auto; }
.legend { display: flex; flex-wrap: wrap; gap: .4rem 1.4rem; align-items: center; color: var(--soft);
  font-size: .85rem; margin: .6rem 0; }
.legend .c { display: inline-block; min-width: 1.7rem; margin-right: .4rem; color: var(--ink); }
.scale { display: inline-block; width: 8rem; height: .8rem; border-radius: 3px; vertical-align: middle;
  margin: 0 .4rem; background: linear-gradient(90deg, var(--cell), rgb(var(--hot)));
  border: 1px solid var(--line); }
.scroll { overflow-x: auto; padding-bottom: .4rem; }
table { border-collapse: separate; border-spacing: 2px; font: 12.5px/1.2 ui-monospace, monospace; }
th { font: 12.5px/1.2 system-ui, sans-serif; font-weight: 600; text-align: left; white-space: nowrap;
  padding: 2px 10px 2px 0; position: sticky; left: 0; background: var(--page); z-index: 1; }
th small { display: block; font-weight: 400; color: var(--soft); }
thead th { color: var(--soft); font-weight: 400; text-align: center; padding: 0; position: static; }
.c { position: relative; padding: 4px 5px; text-align: center; white-space: pre; border-radius: 3px;
  min-width: 1.5rem; border: 1px solid transparent; border-bottom: 2px solid transparent;
  background: linear-gradient(rgba(var(--hot), var(--h, 0)), rgba(var(--hot), var(--h, 0))) var(--cell);
  font-family: ui-monospace, monospace; }
.noise { color: var(--soft); opacity: .55; font-style: italic; }
.kept { border-bottom-color: var(--sure); font-weight: 700; }
.new::after { content: ""; position: absolute; top: 0; right: 0; border: 4px solid var(--mark);
  border-left-color: transparent; border-bottom-color: transparent; border-top-right-radius: 3px; }
.done { border-color: var(--sure); font-weight: 700; }
.given { background: var(--given); font-weight: 700; }
.wrong { color: var(--wrong); text-decoration: line-through; }
.grids { display: flex; flex-wrap: wrap; gap: 1.1rem 1.4rem; align-items: flex-start; }
.grids figure { margin: 0; } figcaption { font-size: .85rem; font-weight: 600; margin-top: .3rem; }
figcaption small { display: block; font-weight: 400; color: var(--soft); }
.grid { display: inline-grid; gap: 2px; padding: 3px; border: 1px solid var(--line); border-radius: 6px; }
.grid .c { width: 2rem; height: 2rem; padding: 0; line-height: 1.75rem; font-size: 1rem; }
.grid .right { margin-right: 4px; } .grid .below { margin-bottom: 4px; } .grid .long { font-size: .7rem; }
""".strip()


def draw_page(
    traces: Sequence[Trace],
    path: str | Path,
    decode: Decode,
    title: str = "denoising",
    grid: int | None = None,
) -> None:
    """Write traces as one HTML page that needs nothing else: no script, font, style or picture from outside.

    `grid` draws the responses as squares of that side; None = where the prompt is a sudoku, 0 = never.
    """
    Path(path).write_text(page(pictures(traces, decode), title, grid), encoding="utf-8")


def page(requests: Sequence[RequestPicture], title: str, grid: int | None = None) -> str:
    """The HTML text of a page."""
    most = most_entropy(requests)
    body = []
    sides = [grid_side(request) if grid is None else grid for request in requests]
    has_grid = any(sides)
    for request, side in zip(requests, sides, strict=True):
        body.append(f"<section><h2>{_text(request.title)}</h2>")
        body.append(f"<pre>{_text(request.prompt)}</pre>" if request.prompt else "")
        if side:
            body.append(_grids(grid_moments(request, side), side, most))
            body.append("<details><summary>every position, step by step</summary>")
        body += [f"<h3>{_text(canvas.title)}</h3>{_table(canvas.moments, most)}" for canvas in request.canvases]
        body.append("</details>" if side else "")
        body.append(f"<h3>text</h3><pre>{_text(request.text)}</pre></section>")
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body><h1>{_text(title)}</h1>\n{_legend(most, has_grid)}\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


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
        cells = "".join(_cell(cell, most, "td", is_last=moment is moments[-1]) for cell in moment.cells)
        rows.append(f"<tr><th>{_text(moment.name)}<small>{_text(moment.detail)}</small></th>{cells}</tr>")
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _grids(moments: Sequence[Moment], side: int, most: float) -> str:
    box = math.isqrt(side)
    figures = []
    for moment in moments:
        cells = []
        for i, cell in enumerate(moment.cells):
            row, column = divmod(i, side)
            edges = " right" if (column + 1) % box == 0 and column + 1 < side else ""
            edges += " below" if (row + 1) % box == 0 and row + 1 < side else ""
            cells.append(_cell(cell, most, "span", is_last=moment is moments[-1], more=edges))
        figures.append(
            f'<figure><div class="grid" style="grid-template-columns: repeat({side}, max-content)">'
            f"{''.join(cells)}</div>"
            f"<figcaption>{_text(moment.name)}<small>{_text(moment.detail)}</small></figcaption></figure>"
        )
    return f'<div class="grids">{"".join(figures)}</div>'


def _cell(cell: Cell, most: float, tag: str, is_last: bool, more: str = "") -> str:
    kinds = "c" + more
    if cell.note == "given":
        kinds += " given"
    elif cell.is_noise:
        kinds += " noise"
    elif is_last and cell.entropy is None:
        kinds += " done"
    kinds += " kept" * cell.is_accepted + " new" * cell.is_changed + " wrong" * cell.is_wrong
    kinds += " long" * (len(visible(cell.text)) > 1)
    heat = f' style="--h:{min(1.0, cell.entropy / most):.3f}"' if cell.entropy is not None else ""
    note = f' title="{_text(cell.note)}"' if cell.note else ""
    return f'<{tag} class="{kinds}"{heat}{note}>{_text(visible(cell.text) if cell.text else "")}</{tag}>'


def _text(text: str) -> str:
    return html.escape(text, quote=True)
