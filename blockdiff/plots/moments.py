"""What a denoising picture shows: a trace turned into moments, and the cells of each. Drawing is elsewhere.

A moment is one row of the picture: the first noise, a denoising step, or the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from blockdiff.terminal import printable

if TYPE_CHECKING:
    from blockdiff.sampling.trace import CommittedCanvas, Trace

Decode = Callable[[int], str]


@dataclass(frozen=True)
class Cell:
    """One position at one moment: its text, how sure the model is, and what happened to it.

    state: noise (also after the end of the response), the model's guess, committed, or given by the puzzle; entropy
    of a guess in nats; is_wrong: the guess contradicts a given.
    """

    text: str
    state: Literal["noise", "guess", "committed", "given"]
    entropy: float | None = None
    is_accepted: bool = False
    is_changed: bool = False
    is_wrong: bool = False
    note: str = ""


@dataclass(frozen=True)
class Moment:
    """One row of the picture: a name, a line of numbers, and the cells of the canvas."""

    name: str
    detail: str
    cells: tuple[Cell, ...]


def visible(text: str) -> str:
    """A token as something one can see in a cell: white space gets signs, special tokens lose their <>."""
    if text == "":
        return "∅"
    if text.startswith("<") and text.endswith(">") and len(text) > 2:
        return printable(text.strip("<|>") or text)
    return printable(text.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍").replace(" ", "·"))


def prompt_of(trace: Trace) -> str:
    """The prompt as a reader wants it."""
    return trace.prompt.removeprefix("<bos>")


def moments_of(trace: Trace, canvas: CommittedCanvas, decode: Decode) -> list[Moment]:
    """The moments of one canvas, from noise to commit; `decode` turns one token id into its text."""
    steps = trace.steps_of(canvas.canvas)
    moments = []
    if steps:
        noise = tuple(Cell(decode(token), "noise", note="noise") for token in steps[0].tokens)
        moments.append(Moment("noise", "random tokens", noise))
    for number, step in enumerate(steps, 1):
        before = steps[number - 2].argmax if number > 1 else step.argmax
        columns = zip(step.argmax, before, step.tokens, step.sample, step.entropy, step.is_accepted, strict=True)
        cells = []
        for place, (token, earlier, seen, sample, entropy, is_accepted) in enumerate(columns):
            note = f"position {place}: guess {decode(token)!r}, entropy {entropy:.3f} nats, saw {decode(seen)!r}"
            note += f", kept {decode(sample)!r}" if is_accepted else ""
            cells.append(Cell(decode(token), "guess", entropy, is_accepted, token != earlier, note=note))
        mean, kept = sum(step.entropy) / max(1, len(step.entropy)), sum(step.is_accepted)
        detail = f"entropy {mean:.2f} · kept {kept}/{len(step.argmax)} · T {step.temperature:.2f}"
        moments.append(Moment(f"step {number}", detail, tuple(cells)))
    texts = [decode(token) for token in canvas.tokens]
    committed = [Cell(text, "committed") for text in texts[: canvas.kept]]
    after = [Cell(text, "noise", note="after the end") for text in texts[canvas.kept :]]
    ending = {"eos": ", the response ends", "length": ", no room for more"}.get(canvas.finish_reason or "", "")
    moments.append(Moment("committed", f"{canvas.kept} tokens{ending}", (*committed, *after)))
    return moments


def grid_side(trace: Trace) -> int | None:
    """4 or 9 where the prompt is a sudoku of that size (as `blockdiff data sudoku` writes it), else None."""
    cells = _puzzle(trace)
    for side in (4, 9):
        if len(cells) == side * side and all(c == "." or c in "123456789"[:side] for c in cells):
            return side
    return None


def most_entropy(traces: Sequence[Trace]) -> float:
    """The upper end of the colour scale: the largest entropy of any step, in nats, and at least 0.5."""
    return max([0.5, *(entropy for trace in traces for step in trace.steps for entropy in step.entropy)])


def grid_moments(trace: Trace, side: int, decode: Decode) -> list[Moment]:
    """The moments of all canvases as squares: the puzzle's givens, what is committed, what is guessed."""
    count, moments = side * side, []
    committed: list[Cell] = []
    for canvas in trace.canvases:
        if len(committed) >= count:
            break
        of_canvas = moments_of(trace, canvas, decode)
        for moment in of_canvas:
            cells = [*committed, *moment.cells, *[Cell("", "noise")] * count][:count]
            together = zip(cells, _puzzle(trace), strict=True)
            moments.append(replace(moment, cells=tuple(_with_given(cell, given) for cell, given in together)))
        committed += of_canvas[-1].cells
    return moments


def _puzzle(trace: Trace) -> str:
    return prompt_of(trace).strip().removesuffix("=")


def _with_given(cell: Cell, given: str) -> Cell:
    """A given of the puzzle stands through the noise; a guess that contradicts it is shown as wrong."""
    if given == ".":
        return cell
    if cell.state != "noise" and cell.text != given:
        return replace(cell, is_wrong=True)
    return Cell(given, "given", note="given")
