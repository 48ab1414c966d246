"""The page of a denoising: canvases fill in step by step, in one self-contained HTML file.

`trace_moments` chooses what is shown, `player.js` draws it. The page's data are compressed JSON of at most `LIMIT`
bytes. Longer traces lose first the texts of the noise, then the prompts' pictures, steps, requests, and canvases.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdiff.data.image_file import decoded
from blockdiff.files import write_text
from blockdiff.plots.trace_moments import (
    Cell,
    Decode,
    Moment,
    canvas_moments,
    grid_moments,
    grid_side,
    most_entropy,
    prompt_text,
    step_moments,
    thinned,
    unfinished,
    visible,
)
from blockdiff.terminal import printable

if TYPE_CHECKING:
    from blockdiff.sampling.trace import Trace

    Pictures = Mapping[str | int, Sequence[bytes]]

LIMIT = 4 * 2**20  # bytes of a page's data
LONGEST = 20_000  # characters of a prompt or a response on a page
WIDEST = 256  # pixels of a side of a picture on a page
STATES = ("noise", "guess", "committed", "given")  # player.js repeats these, and the bits of `_flags`


def draw_page(
    traces: Sequence[Trace], path: str | Path, decode: Decode, title: str, pictures: Pictures | None = None
) -> None:
    """Write traces as one HTML page; `decode` turns one token id into its text.

    pictures: by request id, the image files of its prompt; the page shows them beside the canvas, reduced to `WIDEST`
    pixels a side.
    """
    write_text(path, page(traces, decode, title, pictures=pictures))


def page(
    traces: Sequence[Trace], decode: Decode, title: str, limit: int = LIMIT, pictures: Pictures | None = None
) -> str:
    """Return the HTML text of a page with at most `limit` bytes of data.

    pictures: by request id, the pictures of its prompt.
    """
    data = packed(traces, decode, limit, pictures or {})
    without_script = "\n".join(
        f"<h2>{_escaped(f'request {trace.id}')}</h2><pre>{_escaped(prompt_text(trace))}</pre>"
        f"<pre>{_escaped(trace.text)}</pre>"
        for trace in traces
    )
    values = {"title": _escaped(title), "data": data, "without_script": without_script}
    parts = {name: part(f"{name}.html") for name in ("player", "legend")}
    script = part("player.js") + part("denoising.js")
    return filled(part("denoising.html"), {**values, **parts, "style": part("denoising.css"), "script": script})


def part(name: str) -> str:
    """Read one of the html, css and js files beside this module."""
    return (files("blockdiff.plots") / name).read_text(encoding="utf-8")


def filled(template: str, values: Mapping[str, str]) -> str:
    """Fill each {{name}} of a template with its value; {{name}} within a value stays as it is."""
    text, *rest = template.split("{{")
    for piece in rest:
        name, _, after = piece.partition("}}")
        text += values[name] + after
    return text


def packed(traces: Sequence[Trace], decode: Decode, limit: int, pictures: Pictures) -> str:
    """Return the data of a page: JSON, compressed by zlib, as base64 of at most `limit` bytes.

    If even the lowest level of detail is longer, that level is returned.
    """
    drawn = [trace for trace in traces if trace.canvases or trace.steps]
    requests = [_Request.of(trace, decode, pictures.get(trace.id, ())) for trace in drawn]
    most = round(most_entropy(traces), 3)
    for level in _levels(requests):
        texts: dict[str, int] = {}
        shown = [request.document(level, texts) for request in requests[: level.requests]]
        document = {"most": most, "left_out": level.left_out(requests), "texts": list(texts), "requests": shown}
        data = base64.b64encode(zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 6)).decode()
        if len(data) <= limit:
            break
    return data


@dataclass(frozen=True)
class _Request:
    """A trace as a page shows it: moments canvas by canvas; a sudoku has a view of squares before these."""

    trace: Trace
    views: list[tuple[dict[str, Any], list[Moment]]]  # facts, moments
    canvases: int
    pictures: list[str]

    @classmethod
    def of(cls, trace: Trace, decode: Decode, pictures: Sequence[bytes]) -> _Request:
        side = grid_side(trace)
        views = [({"name": "grid", "side": side}, grid_moments(trace, side, decode))] if side and trace.canvases else []
        for canvas in trace.canvases:
            facts = {"name": f"canvas {canvas.canvas + 1}", "steps": canvas.steps, "limit": canvas.max_steps}
            views.append((facts, canvas_moments(trace, canvas, decode)))
        for number in unfinished(trace):
            steps = len(trace.steps_of(number))
            facts = {"name": f"canvas {number + 1}, not finished", "steps": steps, "limit": None}
            views.append((facts, step_moments(trace, number, decode)))
        return cls(trace, views, len(views) - bool(side and trace.canvases), [_as_uri(picture) for picture in pictures])

    def document(self, level: _Level, texts: dict[str, int]) -> dict[str, Any]:
        trace, others = self.trace, len(self.views) - self.canvases
        views = [
            facts | {"moments": [_moment(each, texts, level.has_noise) for each in thinned(moments, level.stride)]}
            for facts, moments in self.views[: others + level.canvases]
        ]
        finish = trace.canvases[-1].finish_reason if trace.canvases else None
        strings = {"prompt": prompt_text(trace), "text": trace.text, "control": trace.control}
        clipped = {key: _clipped(value) for key, value in strings.items()}
        pictures = {"pictures": self.pictures} if self.pictures and level.has_pictures else {}
        return {"id": printable(str(trace.id)), "views": views, "finish": finish, **clipped, **pictures}


@dataclass(frozen=True)
class _Level:
    """The level of detail of a page.

    requests, canvases: the largest number shown; has_noise: with the texts of the noise; has_pictures: with the
    prompts' pictures; stride: only every `stride`-th step is shown.
    """

    requests: int
    canvases: int
    has_noise: bool = True
    has_pictures: bool = True
    stride: int = 1

    def left_out(self, requests: Sequence[_Request]) -> str:
        """Return in words the parts that are not shown; empty if everything is."""
        words = ["the texts of the noise"] * (not self.has_noise)
        words += ["the pictures"] * (not self.has_pictures)
        words += [f"all steps but one of every {self.stride}"] * (self.stride > 1)
        words += [f"requests after the first {self.requests}"] * (self.requests < len(requests))
        has_more = any(request.canvases > self.canvases for request in requests[: self.requests])
        return ", ".join(words + [f"canvases after the first {self.canvases}"] * has_more)


def _levels(requests: Sequence[_Request]) -> Iterator[_Level]:
    """Yield levels of detail, from everything to little, so that the first one that fits can be taken."""
    level = _Level(len(requests), max([1, *(request.canvases for request in requests)]))
    yield level
    yield (level := replace(level, has_noise=False))
    if any(request.pictures for request in requests):
        yield (level := replace(level, has_pictures=False))
    while level.stride < 64:
        yield (level := replace(level, stride=2 * level.stride))
    while level.requests > 1:
        yield (level := replace(level, requests=(level.requests + 1) // 2))
    while level.canvases > 1:
        yield (level := replace(level, canvases=(level.canvases + 1) // 2))


def _moment(moment: Moment, texts: dict[str, int], has_noise: bool) -> dict[str, Any]:
    """Return a moment as numbers: indices of texts, entropies in thousandths of a nat, flags; -1 for nothing.

    texts: the index of each text on the page, extended here.
    """

    def index(text: str | None) -> int:
        return -1 if text is None else texts.setdefault(visible(text) if text else "", len(texts))

    def is_left_out(cell: Cell) -> bool:
        return not has_noise and cell.state == "noise" and moment.name == "noise"

    cells = moment.cells
    columns = {
        "text": [-1 if is_left_out(cell) else index(cell.text) for cell in cells],
        "entropy": [-1 if cell.entropy is None else round(1000 * cell.entropy) for cell in cells],
        "flags": [_flags(cell) for cell in cells],
        "seen": [index(cell.seen) for cell in cells] if has_noise else [],
        "sample": [index(cell.sample) for cell in cells],
    }
    some = {key: values for key, values in columns.items() if any(value != -1 for value in values)}
    return {"name": moment.name, "detail": moment.detail, **some}


def _flags(cell: Cell) -> int:
    flags = [cell.is_accepted, cell.is_changed, cell.is_wrong, cell.is_pinned, cell.stays, cell.is_renewed]
    flags += [cell.verdict == verdict for verdict in ("accepted", "rejected", "own")]
    return STATES.index(cell.state) + sum(4 << bit for bit, is_set in enumerate(flags) if is_set)


def _as_uri(picture: bytes) -> str:
    """Return a picture as the data URI of an upright JPEG of at most `WIDEST` pixels a side: some 50 KB."""
    small = decoded(picture, "a picture").convert("RGB")
    small.thumbnail((WIDEST, WIDEST))
    file = BytesIO()
    small.save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _clipped(text: str) -> str:
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} […] {text[-LONGEST // 2 :]}"
    return printable(text)


def _escaped(text: str) -> str:
    return html.escape(_clipped(text), quote=True)
