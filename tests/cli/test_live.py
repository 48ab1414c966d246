"""The drawing of live canvases: what is printed, what fits a terminal, and what a terminal never gets."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from blockdiff.cli.live import Watcher, guesses
from blockdiff.sampling.trace import CommittedCanvas, Step
from tests.support.chat_tokenizer import chat_tokenizer

TOKENIZER = chat_tokenizer()
pytestmark = pytest.mark.quick


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def step(text: str, id: str | int = 1, canvas: int = 0, number: int = 0) -> Step:
    tokens = ids(text)
    entropy = [0.1 * place for place in range(len(tokens))]
    return Step(id, canvas, number, 0.8, tokens, tokens, tokens, entropy, [True] + [False] * (len(tokens) - 1))


def committed(text: str, id: str | int = 1, canvas: int = 0, end: str | None = None) -> CommittedCanvas:
    return CommittedCanvas(id, canvas, "", ids(text), len(ids(text)), text, 3, end)


def watcher(several: bool = False, width: int = 40, height: int = 10, is_terminal: bool = True) -> Watcher:
    term = {"TERM": "xterm", "COLUMNS": str(width), "LINES": str(height)}
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=width, height=height, _environ=term, markup=False)
    return Watcher(TOKENIZER, several, console)


def written(view: Watcher) -> str:
    file = view.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def on_screen(output: str) -> list[str]:
    """The lines that a terminal shows after `output`: it obeys line breaks, \\r, cursor up and erase line."""
    lines, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if piece == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\r":
            column = 0
        elif piece.startswith("\x1b"):
            if piece.endswith("A"):
                row -= int(piece[2:-1] or 1)
            elif piece.endswith("K"):
                lines[row] = ""
        else:
            lines[row] = lines[row][:column].ljust(column) + piece + lines[row][column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in lines]


def test_off_a_terminal_only_committed_texts_are_written_and_as_they_are() -> None:
    view = watcher(is_terminal=False)
    assert not view.is_live
    view.canvas(committed("one \x1b[2J"))
    view.canvas(committed("one \x1b[2J two", canvas=1, end="eos"))
    view.close()
    assert written(view) == "one \x1b[2J two\n"
    many = watcher(several=True, is_terminal=False)
    many.canvas(committed("a", id="x"))
    many.canvas(committed("b", id="y", end="eos"))
    many.canvas(committed("a c", id="x", canvas=1, end="eos"))
    assert written(many) == "[x] a\n[y] b\n[x]  c\n"


def test_a_terminal_keeps_the_text_once_and_nothing_of_the_drawing() -> None:
    view = watcher(width=30)
    texts = ("first line\nthe second ", "is long, longer than a line is wide", ".")
    for canvas in range(len(texts)):
        for number in range(3):
            view._drawn = -1e9
            view.step(step("noise noise noise", canvas=canvas, number=number))
        view.canvas(committed("".join(texts[: canvas + 1]), canvas=canvas, end="eos" if canvas == 2 else None))
    view.close()
    plain = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", written(view))
    assert "noise" in plain and "canvas 2, step 3" in plain
    shown = [line for line in on_screen(written(view)) if line]
    assert shown == ["first line", "the second is long, longer than a line is wide."]


def test_what_was_committed_when_an_answer_is_ended_stays() -> None:
    view = watcher()
    view.step(step("noise"))
    view.canvas(committed("half of an"))
    view.step(step("noise", canvas=1))
    view.close()
    assert [line for line in on_screen(written(view)) if line] == ["half of an"]


@pytest.mark.parametrize(("width", "height"), [(80, 8), (12, 5), (3, 2), (1, 1)])
@pytest.mark.parametrize("several", [False, True])
def test_a_drawing_fits_the_terminal(several: bool, width: int, height: int) -> None:
    view = watcher(several, width, height)
    for id in range(8 if several else 1):
        view._steps[id] = step("a text of some words\nand a second line of it, " * 8, id=id)
    drawing = view.drawing()
    lines = drawing.plain.split("\n")
    assert len(lines) <= max(2, height)
    if several and height > 4:
        assert lines[0].startswith("[0] canvas 1"[: width - 2]) and lines[-1].startswith("… and")
    view.step(step("once more", id=0))
    widest = max(len(line) for line in on_screen(written(view)))
    assert widest <= max(width, 8)


def test_several_requests_are_drawn_together_and_leave_when_they_are_done() -> None:
    view = watcher(several=True, height=24)
    for id in ("a", "b", "c"):
        view.step(step(f"text of {id}", id=id))
    assert [line[:5] for line in view.drawing().plain.split("\n")] == ["[a] c", "[b] c", "[c] c"]
    view.canvas(committed("done", id="b", end="eos"))
    assert [line[:5] for line in view.drawing().plain.split("\n")] == ["[a] c", "[c] c"]
    view.close()
    assert [line for line in on_screen(written(view)) if line] == ["[b] done"]


def test_control_characters_of_a_canvas_never_reach_the_terminal() -> None:
    hostile = "a\x1b[2J\x07\x9b31m\u202eb"
    assert guesses(step(hostile), lambda _: "\x1b]0;x\x07").plain.count("\\u001b]0;x\\u0007") == len(ids(hostile))
    view = watcher()
    view.step(step(hostile))
    view.canvas(committed(hostile, end="eos"))
    assert not re.search(r"\x1b\[2J|\x07|\x9b|\u202e", written(view))
    assert "a\\u001b[2J\\u0007\\u009b31m\\u202eb" in written(view)
