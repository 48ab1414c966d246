"""What a denoising picture shows: a sampling trace turned into requests, canvases, moments and cells.

A moment is one row of the picture: the first noise, a denoising step, or the commit. Drawing is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockdiff.sampling.trace import CommittedCanvas, Step, Trace

Decode = Callable[[int], str]


@dataclass(frozen=True)
class Cell:
    """One position at one moment: its text, how sure the model is, and what happened to it."""

    text: str
    entropy: float | None = None  # nats; None = the model has not spoken (noise, or a given of the puzzle)
    is_accepted: bool = False
    is_changed: bool = False
    is_noise: bool = False
    is_wrong: bool = False  # contradicts a given of the puzzle
    note: str = ""


@dataclass(frozen=True)
class Moment:
    """One row of the picture: a name, a line of numbers, and the cells of the canvas."""

    name: str
    detail: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class CanvasPicture:
    """The moments of one canvas, from noise to commit."""

    title: str
    moments: tuple[Moment, ...]


@dataclass(frozen=True)
class RequestPicture:
    """One request: its prompt, its canvases, and what came out."""

    title: str
    prompt: str
    canvases: tuple[CanvasPicture, ...]
    text: str


def visible(text: str) -> str:
    """A token as something one can see in a cell: white space gets signs, special tokens lose their <>."""
    if text == "":
        return "∅"
    if text.startswith("<") and text.endswith(">") and len(text) > 2:
        return text.strip("<|>") or text
    return text.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍").replace(" ", "·")


def pictures(traces: Sequence[Trace], decode: Decode) -> list[RequestPicture]:
    """What a page shows of each traced request; `decode` turns one token id into its text."""
    return [
        RequestPicture(
            title=f"request {trace.id}",
            prompt=trace.prompt.removeprefix("<bos>"),
            canvases=tuple(_canvas(trace.steps_of(canvas.canvas), canvas, decode) for canvas in trace.canvases),
            text=trace.text,
        )
        for trace in traces
    ]


def _canvas(steps: Sequence[Step], canvas: CommittedCanvas, decode: Decode) -> CanvasPicture:
    moments = []
    if steps:
        noise = tuple(Cell(decode(token), is_noise=True, note="noise") for token in steps[0].tokens)
        moments.append(Moment("noise", "random tokens", noise))
    before: Sequence[int] | None = None
    for number, step in enumerate(steps, 1):
        cells = []
        for place, token in enumerate(step.argmax):
            note = f"position {place}: guess {decode(token)!r}, entropy {step.entropy[place]:.3f} nats"
            note += f", saw {decode(step.tokens[place])!r}"
            if step.is_accepted[place]:
                note += f", kept {decode(step.sample[place])!r}"
            is_changed = before is not None and before[place] != token
            kept = step.is_accepted[place]
            cells.append(Cell(decode(token), step.entropy[place], kept, is_changed, note=note))
        mean = sum(step.entropy) / max(1, len(step.entropy))
        detail = f"entropy {mean:.2f} · kept {sum(step.is_accepted)}/{len(step.argmax)} · T {step.temperature:.2f}"
        moments.append(Moment(f"step {number}", detail, tuple(cells)))
        before = step.argmax
    committed = tuple(
        Cell(decode(token), is_noise=place >= canvas.kept, note="" if place < canvas.kept else "after the end")
        for place, token in enumerate(canvas.tokens)
    )
    ending = {"eos": ", the response ends", "length": ", no room for more"}.get(canvas.finish_reason or "", "")
    moments.append(Moment("committed", f"{canvas.kept} tokens{ending}", committed))
    word = "step" if canvas.steps == 1 else "steps"
    return CanvasPicture(f"canvas {canvas.canvas + 1}: {canvas.steps} {word}", tuple(moments))


def grid_side(picture: RequestPicture) -> int | None:
    """4 or 9 where the prompt is a sudoku of that size (as `blockdiff data sudoku` writes it), else None."""
    cells = picture.prompt.strip().removesuffix("=")
    for side in (4, 9):
        if len(cells) == side * side and all(c == "." or c in "123456789"[:side] for c in cells):
            return side
    return None


def most_entropy(requests: Sequence[RequestPicture]) -> float:
    """The upper end of the colour scale: the largest entropy drawn, in nats, and at least 0.5."""
    values = [
        cell.entropy
        for request in requests
        for canvas in request.canvases
        for moment in canvas.moments
        for cell in moment.cells
        if cell.entropy is not None
    ]
    return max(values, default=0.5) if max(values, default=0.0) > 0.5 else 0.5


def grid_moments(picture: RequestPicture, side: int) -> list[Moment]:
    """The moments of all canvases as squares: the puzzle's givens, what is committed, what is guessed."""
    given = picture.prompt.strip().removesuffix("=")
    count, moments = side * side, []
    done: list[Cell] = []
    for canvas in picture.canvases:
        if len(done) >= count:
            break
        for moment in canvas.moments:
            cells = [*done, *moment.cells][:count]
            cells += [Cell("", is_noise=True)] * (count - len(cells))
            moments.append(replace(moment, cells=tuple(_given(c, g) for c, g in zip(cells, given, strict=True))))
        done += canvas.moments[-1].cells
    return moments


def _given(cell: Cell, given: str) -> Cell:
    """A given of the puzzle stands through the noise; a guess that contradicts it is shown as wrong."""
    if given == ".":
        return cell
    if not cell.is_noise and cell.text != given:
        return replace(cell, is_wrong=True)
    return Cell(given, note="given")
