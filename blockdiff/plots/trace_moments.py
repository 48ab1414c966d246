"""Moments of a denoising: a trace as rows of a picture, and the cells of each row. Other modules draw them.

A moment is one row: the first noise, a denoising step, a verification, or the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal

from blockdiff.terminal import printable

if TYPE_CHECKING:
    from blockdiff.sampling.trace import CommittedCanvas, Step, Trace, Verification

Decode = Callable[[int], str]


@dataclass(frozen=True)
class Cell:
    """One position at one moment: its text, the model's certainty, and what happened to it.

    state: noise (also after the end of the response), the model's likeliest token ("guess"), committed, or given by the
    puzzle. entropy: of the guess, in nats; seen: the text that the step saw here; sample: the accepted text if it is
    not the guess; is_wrong: contradicts a given. verdict: the result of a verification; "own" is the head's token in
    place of the drafted one, which is `seen`.
    """

    text: str
    state: Literal["noise", "guess", "committed", "given"]
    entropy: float | None = None
    is_accepted: bool = False
    is_changed: bool = False
    is_wrong: bool = False
    is_pinned: bool = False
    stays: bool = False
    seen: str | None = None
    sample: str | None = None
    verdict: Literal["accepted", "rejected", "own"] | None = None

    @property
    def is_renewed(self) -> bool:
        """True if new noise replaces the guess at the next step."""
        return self.state == "guess" and not (self.is_accepted or self.is_pinned or self.stays or self.verdict)


@dataclass(frozen=True)
class Moment:
    """One row of the picture: a name, a line of numbers, and the cells of the canvas.

    end: for a sudoku, the cell after its last square, where the response ends.
    """

    name: str
    detail: str
    cells: tuple[Cell, ...]
    end: Cell | None = None


def visible(text: str) -> str:
    """Return a token as visible text: white space becomes signs, special tokens lose their <>, "" becomes ∅."""
    if text == "":
        return "∅"
    if text.startswith("<") and text.endswith(">") and len(text) > 2:
        return printable(text.strip("<|>") or text)
    return printable(text.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍").replace(" ", "·"))


def prompt_text(trace: Trace) -> str:
    """Return the prompt without a `<bos>` at its start."""
    return trace.prompt.removeprefix("<bos>")


def canvas_moments(trace: Trace, canvas: CommittedCanvas, decode: Decode) -> list[Moment]:
    """Return the moments of one canvas, from noise to commit; `decode` turns one token id into its text."""
    return [*step_moments(trace, canvas.canvas, decode), _commit(trace, canvas, decode)]


def unfinished(trace: Trace) -> list[int]:
    """Return the numbers of canvases that were denoised but not committed, for example of a cancelled request."""
    committed = {canvas.canvas for canvas in trace.canvases}
    return sorted({step.canvas for step in trace.steps} - committed)


def step_moments(trace: Trace, canvas: int, decode: Decode) -> list[Moment]:
    """Return the first noise, the steps and the verifications of canvas number `canvas`."""
    moments, steps = list[Moment](), trace.steps_of(canvas)
    verified = {each.step: each for each in trace.verifications if each.canvas == canvas}
    if steps:
        moments.append(Moment("noise", "random tokens", tuple(_first_cells(steps[0], decode))))
    before = steps[0].argmax if steps else []
    for number, step in enumerate(steps, 1):
        mean, accepted = sum(step.entropy) / max(1, len(step.entropy)), sum(step.is_accepted)
        detail = f"entropy {mean:.2f} · kept {accepted}/{len(step.argmax)} · T {step.temperature:.2f}"
        moments.append(Moment(f"step {number}", detail, tuple(_step_cells(step, before, decode))))
        before = step.argmax
        if step.step in verified:
            moments.append(_verification(verified[step.step], decode))
    if not steps:  # a drafter's block
        moments += [_verification(each, decode) for each in verified.values()]
    return moments


def _verification(verification: Verification, decode: Decode) -> Moment:
    draft, pinned, accepted = verification.draft, verification.given, verification.accepted
    head_id = None if accepted == len(draft) else verification.own
    cells = []
    for column, token in enumerate(draft):
        cell = Cell(decode(token), "guess", seen=decode(token), is_pinned=column < pinned)
        if column == accepted and head_id is not None:
            cell = replace(cell, text=decode(head_id), verdict="own")
        elif column >= pinned:
            cell = replace(cell, verdict="accepted" if column < accepted else "rejected")
        cells.append(cell)
    detail = f"drafted {len(draft) - pinned}, accepted {accepted - pinned}, rejected {len(draft) - accepted}"
    return Moment("verified", detail + ", of which the head wrote the first anew" * (head_id is not None), tuple(cells))


def _commit(trace: Trace, canvas: CommittedCanvas, decode: Decode) -> Moment:
    steps = trace.steps_of(canvas.canvas)
    pinned = steps[-1].is_pinned if steps and not trace.verifications else None
    texts = zip(canvas.tokens, pinned or [False] * len(canvas.tokens), strict=True)
    cells = [
        Cell(decode(token), "committed" if column < canvas.kept else "noise", is_pinned=is_pinned)
        for column, (token, is_pinned) in enumerate(texts)
    ]
    ending = {"eos": ", the response ends", "length": ", no room for more"}.get(canvas.finish_reason or "", "")
    return Moment("committed", f"{canvas.kept} tokens{ending}", tuple(cells))


def _first_cells(step: Step, decode: Decode) -> Iterator[Cell]:
    """Yield the canvas before the first step: noise, except for pinned positions."""
    for token, is_pinned in zip(step.tokens, step.is_pinned or repeat(False), strict=False):
        yield Cell(decode(token), "noise", is_pinned=is_pinned)


def _step_cells(step: Step, before: Sequence[int], decode: Decode) -> Iterator[Cell]:
    """Yield the cells of a step's guesses. before: the guesses of the previous step, to mark what changed."""
    nothing: Iterator[Any] = repeat(None)
    optional = zip(step.is_pinned or nothing, step.stays or nothing, strict=False)
    columns = zip(step.argmax, before, step.tokens, step.sample, step.entropy, step.is_accepted, strict=True)
    for (token, earlier, seen, sample, entropy, is_accepted), (is_pinned, stays) in zip(
        columns, optional, strict=False
    ):
        yield Cell(
            decode(token),
            "guess",
            entropy,
            is_accepted,
            is_changed=token != earlier,
            is_pinned=bool(is_pinned),
            stays=bool(stays),
            seen=decode(seen),
            sample=decode(sample) if is_accepted and sample != token else None,
        )


def thinned(moments: Sequence[Any], stride: int) -> list[Any]:
    """Return every `stride`-th moment, from the first on, and always the last step and the commit."""
    last = len(moments) - 2
    return [moment for index, moment in enumerate(moments) if index % stride == 0 or index >= last]


def grid_side(trace: Trace) -> int | None:
    """Return 4 or 9 if the prompt is a sudoku of that size (as `blockdiff data sudoku` writes it), else None."""
    cells = _puzzle(trace)
    for side in (4, 9):
        if len(cells) == side * side and all(c == "." or c in "123456789"[:side] for c in cells):
            return side
    return None


def most_entropy(traces: Sequence[Trace]) -> float:
    """Return the upper end of the colour scale: the largest entropy of any step, in nats, and at least 0.5."""
    return max([0.5, *(entropy for trace in traces for step in trace.steps for entropy in step.entropy)])


def grid_moments(trace: Trace, side: int, decode: Decode) -> list[Moment]:
    """Return the moments of all canvases as whole boards: the puzzle's givens, committed cells and guesses."""
    count, moments = side * side, []
    committed: list[Cell] = []
    for canvas in trace.canvases:
        if len(committed) >= count:
            break
        of_canvas = canvas_moments(trace, canvas, decode)
        for moment in of_canvas:
            known = [*committed, *moment.cells]
            cells = [*known, *[Cell("", "noise")] * count][:count]
            together = zip(cells, _puzzle(trace), strict=True)
            shown = tuple(_with_given(cell, clue) for cell, clue in together)
            moments.append(replace(moment, cells=shown, end=next(iter(known[count:]), None)))
        committed += of_canvas[-1].cells
    return moments


def _puzzle(trace: Trace) -> str:
    return prompt_text(trace).strip().removesuffix("=")


def _with_given(cell: Cell, clue: str) -> Cell:
    """Return the cell as drawn where the puzzle has `clue` ("." if it has none).

    Noise and a guess that equals the clue show it; another guess is marked as wrong.
    """
    if clue == ".":
        return cell
    if cell.state != "noise" and cell.text != clue:
        return replace(cell, is_wrong=True)
    return Cell(clue, "given", is_pinned=cell.is_pinned)
