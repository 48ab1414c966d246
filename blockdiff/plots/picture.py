"""Pictures of one request's denoising: a PNG for a README, or an animated GIF; the page in `denoising` shows more.

Both draw the same cells. A PNG has all moments of a canvas side by side, a GIF has a frame for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdiff.plots.trace_moments import (
    Cell,
    Decode,
    Moment,
    canvas_moments,
    grid_moments,
    grid_side,
    most_entropy,
    step_moments,
    thinned,
    visible,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from blockdiff.sampling.trace import Trace

WIDEST = 48  # positions of a canvas that fit a PNG
COLUMNS = 16  # cells in a line of a frame
FRAMES = 150  # most frames of a GIF; if there are more moments, some are left out
MILLISECONDS, LAST_MILLISECONDS = 600, 2500  # for which a frame is shown
Colour = tuple[int, int, int]
INK, SOFT, WRONG, PAGE = (31, 35, 40), (107, 114, 128), (185, 28, 28), (255, 255, 255)
SURE, MARK, GIVEN, EMPTY, HOT = (15, 157, 118), (37, 99, 235), (226, 229, 234), (247, 248, 250), (234, 88, 12)
LEGEND = (
    (Cell("a", "guess", entropy=math.inf), "unsure"),
    (Cell("a", "guess", entropy=0.0, is_accepted=True), "kept"),
    (Cell("a", "guess", entropy=0.0, is_changed=True), "changed"),
    (Cell("a", "noise"), "noise"),
    (Cell("a", "given"), "given"),
)
UNIT = 2  # pixels of a point: pictures are sharp on dense screens


def draw_picture(trace: Trace, path: str | Path, decode: Decode) -> None:
    """Draw a trace as an animated GIF if `path` ends in .gif, with a frame per moment; else as a still PNG.

    A sudoku is drawn as squares. For other texts, a still has a row per moment of the first canvas, and at most its
    first 48 positions; a drafter's rounds are added as rows. A GIF shows all canvases, in about 150 frames at most.
    """
    most, side = most_entropy([trace]), grid_side(trace)
    if side:
        panels = [_square(moment, side, most) for moment in grid_moments(trace, side, decode)]
    is_moving = Path(path).suffix == ".gif"
    if is_moving and not side:
        named = [(canvas, moment) for canvas in trace.canvases for moment in canvas_moments(trace, canvas, decode)]
        panels = [_lines(moment, f"canvas {canvas.canvas + 1}, ", most) for canvas, moment in named]
    elif not side:
        moments = _before_fill(canvas_moments(trace, trace.canvases[0], decode) if trace.canvases else [])
        if not trace.steps:
            rounds = [moment for canvas in trace.canvases for moment in step_moments(trace, canvas.canvas, decode)]
            moments += [replace(moment, name=f"round {number}") for number, moment in enumerate(rounds, 1)]
        panels = [_rows(moments, most, trace.prompt)]
    if is_moving:
        _save_moving([_framed([panel], most) for panel in thinned(panels, -(-len(panels) // FRAMES))], path)
    else:
        _framed(panels, most).save(str(path), format="PNG")


def heat(entropy: float | None, most: float) -> Colour:
    """Return the colour of a cell, from near white (sure) to orange (entropy `most` or more)."""
    share = 0.0 if entropy is None else min(1.0, entropy / most)
    red, green, blue = (round(cold + (hot - cold) * share) for cold, hot in zip(EMPTY, HOT, strict=True))
    return red, green, blue


def drawable(text: str, style: str = "") -> str:
    """Replace characters that the font lacks by their code points, such as `4F60 597D`."""
    glyphs = _glyphs(style)
    pieces = (character if ord(character) in glyphs else f" {ord(character):04X} " for character in text)
    return " ".join("".join(pieces).split())  # spaces of the text itself are already signs (`visible`)


class Board:
    """A white picture on which cells and words are drawn; all measures are in points."""

    def __init__(self, width: float, height: float):
        from PIL import Image, ImageDraw

        self.image = Image.new("RGB", (max(1, math.ceil(width * UNIT)), max(1, math.ceil(height * UNIT))), PAGE)
        self._pen = ImageDraw.Draw(self.image)

    def words(
        self, x: float, y: float, text: str, size: float = 8, colour: Colour = INK, style: str = "", anchor: str = "lm"
    ) -> None:
        """Write one line of text; `anchor` is Pillow's (lm: the left end of its middle)."""
        self._pen.text((x * UNIT, y * UNIT), text, fill=colour, font=_font(style, size), anchor=anchor)

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw a line, such as between the boxes of a sudoku."""
        self._pen.line([x1 * UNIT, y1 * UNIT, x2 * UNIT, y2 * UNIT], fill=INK, width=UNIT)

    def cell(self, x: float, y: float, width: float, height: float, cell: Cell, most: float, size: float) -> None:
        """Draw one position: the less sure, the more orange; framed if kept (green) or pinned (black).

        A corner marks a changed guess. most: the entropy of the strongest colour; size: of the text.
        """
        is_sure = cell.is_accepted or cell.state == "committed" or cell.verdict in ("accepted", "own")
        fill = {"given": GIVEN, "noise": EMPTY}.get(cell.state) or heat(cell.entropy, most)
        box = [v * UNIT for v in (x + 1, y + 1, x + width - 1, y + height - 1)]
        edge = INK if cell.is_pinned else SURE if is_sure else fill
        self._pen.rectangle(box, fill=GIVEN if cell.is_pinned else fill, outline=edge, width=round(1.25 * UNIT))
        if cell.is_changed:
            corner = min(width, height) * 0.3 * UNIT
            self._pen.polygon([(box[2] - corner, box[1]), (box[2], box[1]), (box[2], box[1] + corner)], fill=MARK)
        text = visible(cell.text) if cell.text else ""
        if text:
            style = "Bold" if is_sure or cell.is_pinned or cell.state == "given" else ""
            style = "Oblique" if cell.state == "noise" and not cell.is_pinned else style
            shown = drawable(text, style)
            room = int((width - 4) / (0.6 * size * 0.7))  # characters, of a size that may shrink a little
            shown = shown if len(shown) <= room else shown[: max(1, room - 1)] + "…"
            size = min(size, (width - 4) / (0.6 * max(1, len(shown))))
            colour = (
                SOFT
                if cell.state == "noise" and not cell.is_pinned
                else WRONG
                if cell.is_wrong or cell.verdict == "rejected"
                else INK
            )
            self.words(x + width / 2, y + height / 2, shown, size, colour, style, anchor="mm")


def _square(moment: Moment, side: int, most: float) -> Image:
    """Draw the sudoku at one moment, with the moment's name and numbers below it.

    side: the cells of a row. most: the entropy drawn in the strongest colour.
    """
    size = 26 if side == 4 else 18
    width = side * size
    under = width + (20 if moment.end else 0)
    board = Board(width + 8, under + 34)
    for index, cell in enumerate(moment.cells):
        row, column = divmod(index, side)
        board.cell(4 + column * size, 4 + row * size, size, size, cell, most, 15 if side == 4 else 10)
    box = math.isqrt(side)
    for edge in range(box, side, box):
        board.line(4 + edge * size, 4, 4 + edge * size, 4 + width)
        board.line(4, 4 + edge * size, 4 + width, 4 + edge * size)
    if moment.end:
        board.cell(4, width + 7, 26, 16, moment.end, most, 8)
        board.words(34, width + 15, f"token {side * side + 1}: the end", 7, SOFT)
    detail = " · ".join(moment.detail.split(" · ")[:2])
    board.words(4 + width / 2, under + 14, moment.name, 8, style="Bold", anchor="mm")
    board.words(4 + width / 2, under + 25, detail, min(7, 1.6 * width / max(1, len(detail))), SOFT, anchor="mm")
    return board.image


def _before_fill(moments: Sequence[Moment]) -> list[Moment]:
    """Cut moments after the last position that was committed; without any, keep all positions."""
    last = moments[-1].cells if moments else ()
    count = max((number for number, cell in enumerate(last, start=1) if cell.state == "committed"), default=len(last))
    return [replace(moment, cells=moment.cells[:count]) for moment in moments]


def _rows(moments: Sequence[Moment], most: float, prompt: str) -> Image:
    """Draw a row per moment and a column per position, with the end of the prompt below.

    most: the entropy drawn in the strongest colour.
    """
    length = max((len(moment.cells) for moment in moments), default=0)
    width, size = min(WIDEST, length), 28
    board = Board(66 + width * size + 34 * (length > width), 26 + 22 * max(1, len(moments)))
    text, room = drawable(visible(prompt)), max(8, width * size // 5)  # characters of about five points
    text = text if len(text) <= room else "…" + text[1 - room :]
    board.words(60, 17 + 22 * max(1, len(moments)), "prompt", 8, SOFT, anchor="rm")
    board.words(64, 17 + 22 * max(1, len(moments)), text, 8)
    for row, moment in enumerate(moments):
        board.words(60, 15 + 22 * row, moment.name, 8, anchor="rm")
        for column, cell in enumerate(moment.cells[:width]):
            board.cell(64 + column * size, 4 + 22 * row, size, 22, cell, most, 8)
        if length > width:
            board.words(66 + width * size, 15 + 22 * row, f"+{length - width}", 8, SOFT)
    return board.image


def _lines(moment: Moment, before: str, most: float) -> Image:
    """Draw a frame of a GIF: the canvas at one moment, broken into lines. before: precedes the moment's name."""
    size, count = 46, len(moment.cells)
    columns = min(COLUMNS, count)
    width = 8 + max(columns * size, 360)
    board = Board(width, 26 + 24 * math.ceil(count / max(1, columns)))
    board.words(4, 11, before + moment.name, 9, style="Bold")
    board.words(width - 4, 11, moment.detail, 8, SOFT, anchor="rm")
    for index, cell in enumerate(moment.cells):
        row, column = divmod(index, columns)
        board.cell(4 + column * size, 22 + 24 * row, size, 24, cell, most, 8.5)
    return board.image


def _framed(panels: Sequence[Image], most: float) -> Image:
    """Join panels side by side, with a legend of colours and frames below."""
    width = sum(panel.width for panel in panels) / UNIT
    height = max(panel.height for panel in panels) / UNIT
    words = [(cell, f"{word} ({most:.2f} nats)" if word == "unsure" else word) for cell, word in LEGEND]
    steps = [34 + 5.0 * len(word) for _, word in words]
    columns, line = [[0.0, 0.0]], 0.0
    for step in steps[:-1]:
        x = columns[-1][0] + step
        line += 17 * (x + step > width)
        columns.append([0.0 if x + step > width else x, line])
    board = Board(max(width, max(steps)), height + line + 22)
    offset = 0
    for panel in panels:
        board.image.paste(panel, (offset, 0))
        offset += panel.width
    for (cell, word), (x, y) in zip(words, columns, strict=True):
        board.cell(6 + x, height + y + 3, 15, 15, cell, most, 7)
        board.words(24 + x, height + y + 10.5, word, 7, SOFT)
    return board.image


def _save_moving(frames: Sequence[Image], path: str | Path) -> None:
    """Write frames as an endless GIF; the last one is shown longer."""
    from PIL import Image

    width, height = max(f.width for f in frames), max(f.height for f in frames)
    equal = [Image.new("RGB", (width, height), PAGE) for _ in frames]
    for whole, frame in zip(equal, frames, strict=True):
        whole.paste(frame, (0, 0))
    lasting = [MILLISECONDS] * (len(frames) - 1) + [LAST_MILLISECONDS]
    equal[0].save(str(path), format="GIF", save_all=True, append_images=equal[1:], duration=lasting, loop=0)


def _file(style: str) -> str:
    """Return the path of matplotlib's monospaced font, which has many signs. style: "", "Bold" or "Oblique"."""
    import matplotlib

    name = f"DejaVuSansMono{'-' * bool(style)}{style}.ttf"
    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name)


@cache
def _font(style: str, size: float) -> Any:
    from PIL import ImageFont

    return ImageFont.truetype(_file(style), size * UNIT)


@cache
def _glyphs(style: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(_file(style)).get_charmap())
