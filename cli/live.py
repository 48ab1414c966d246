"""Canvases on a terminal while they are denoised, for `sample --stream` and `chat`."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from blockdiff.checkpoint.tokenizer import decoder
from blockdiff.terminal import console, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from blockdiff.sampling.trace import CommittedCanvas, Step, Verification

REDRAW_SECONDS = 0.05  # between two drawings


class Watcher:
    """Shows answers while they are sampled.

    Pass `canvas` and, if `is_live`, `step` to `Sampler.generate`; call `close` at the end.

    The text of one request is shown on stdout, the texts of several on stderr (their output lines are on stdout). On a
    terminal, canvases are drawn in place while they are denoised, below the committed texts. Elsewhere only committed
    texts are printed.
    """

    def __init__(self, tokenizer: Any, several: bool, terminal: Console | None = None):
        self.console = terminal or console(stderr=several, wraps=True)
        self.is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.several = several
        self.decode = decoder(tokenizer)
        self._steps: dict[str | int, Step] = {}  # the latest of every request that is being answered
        self._shown: dict[str | int, int] = {}  # characters of each response that are printed or drawn
        self._tail = ""  # the last line of a single response, drawn with the canvas until it is complete
        self._live: Any = None
        self._drawn = -math.inf

    def step(self, step: Step | Verification) -> None:
        """Draw the canvases after a denoising step, at most every REDRAW_SECONDS; verifications are not drawn."""
        from blockdiff.sampling.trace import Verification

        if isinstance(step, Verification):
            return
        self._steps[step.id] = step
        if time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self._draw()

    def commit(self, canvas: CommittedCanvas) -> None:
        """Stop drawing a canvas that is committed, without printing its text."""
        self._steps.pop(canvas.id, None)

    def canvas(self, canvas: CommittedCanvas) -> None:
        """Print the text that a committed canvas adds to its response."""
        self.commit(canvas)
        text = canvas.text[self._shown.get(canvas.id, 0) :]
        self._shown[canvas.id] = len(canvas.text)
        if self.several:
            self._print(f"[{canvas.id}] {text}\n")
        elif not self.is_live:
            self._print(text + "\n" * bool(canvas.finish_reason))
        else:
            lines, line_break, self._tail = (self._tail + text).rpartition("\n")
            if canvas.finish_reason:
                lines, self._tail = (lines + line_break + self._tail).rstrip("\n"), ""
            if lines or canvas.finish_reason:
                self._print(lines + "\n")

    def close(self) -> None:
        """Remove the drawing of `step`, and print the text that it showed and that was not printed yet."""
        self._stop()
        if self._tail:
            self._print(self._tail + "\n")
        self._tail = ""
        self._steps.clear()

    def drawing(self) -> Text:
        """Return the drawing of the present canvases: one request in full, or one line for each of several that fit."""
        from rich.text import Text

        width, height = self.console.size
        if not self.several:
            text = Text(printable(self._tail), overflow="fold")
            heads = []
            for step in self._steps.values():
                text.append_text(guesses(step, self.decode))
                heads.append(Text(f"canvas {step.canvas + 1}, step {step.step + 1}", style="dim"))
            lines = text.wrap(self.console, max(1, width - 1), overflow="fold")[-max(1, height - 3) :]
            return Text("\n").join([*lines, *heads])
        rows = []
        room = max(1, height - 2)
        for id, step in list(self._steps.items())[:room]:
            row = Text(printable(f"[{id}] canvas {step.canvas + 1}, step {step.step + 1}: "), style="dim")
            row.append_text(guesses(step, lambda token: self.decode(token).replace("\n", "⏎").replace("\t", " ")))
            row.truncate(max(1, width - 1), overflow="ellipsis")
            rows.append(row)
        if len(self._steps) > room:
            rows.append(Text(f"… and {len(self._steps) - room} more", style="dim", overflow="ellipsis"))
        return Text("\n").join(rows)

    def _draw(self) -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=self.console, transient=True, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        self._live.update(self.drawing(), refresh=True)
        self._drawn = time.monotonic()

    def _print(self, text: str) -> None:
        """Print text above the drawing, which is removed and drawn again at the next step."""
        self._stop()
        text = printable(text) if self.console.is_terminal else text
        print(text, end="", file=self.console.file, flush=True)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._drawn = -math.inf


def guesses(step: Step, decode: Any) -> Text:
    """Return the likeliest tokens of a step as text: kept ones bold, uncertain ones more orange, pinned ones reversed.

    decode: from a token id to its text.
    """
    from rich.text import Text

    text = Text()
    highest = max(math.log(2), max(step.entropy, default=0.0))
    pinned = step.is_pinned or [False] * len(step.argmax)
    for token, entropy, is_kept, is_pinned in zip(step.argmax, step.entropy, step.is_accepted, pinned, strict=True):
        share = min(1.0, entropy / highest)
        red, green, blue = int(120 + 130 * share), int(190 - 90 * share), int(130 - 100 * share)
        style = "reverse" if is_pinned else f"{'bold ' if is_kept else ''}rgb({red},{green},{blue})"
        text.append(printable(decode(token)), style=style)
    return text
