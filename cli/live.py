"""What `sample --stream` shows: finished canvases, and on a terminal the canvas while it is denoised."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from blockdiff.checkpoint.tokenizer import decoder
from blockdiff.terminal import console

if TYPE_CHECKING:
    from rich.text import Text

    from blockdiff.sampling.trace import CommittedCanvas, Step


class Watcher:
    """Pass `canvas` and, where `is_live`, `step` to `Sampler.generate`; close it at the end.

    The text of one request is shown on stdout, that of several on stderr (their output lines are on stdout).
    """

    def __init__(self, tokenizer: Any, several: bool):
        self.console = console(stderr=several)
        self.is_live = self.console.is_terminal
        self.several = several
        self.decode = decoder(tokenizer)
        self.shown: dict[str | int, int] = {}  # characters of each response that stand on the screen
        self.live: Any = None

    def step(self, step: Step) -> None:
        """Draw the canvas of one denoising step in place; of several requests only the latest is seen."""
        from rich.live import Live

        if self.live is None:
            self.live = Live(console=self.console, transient=True, auto_refresh=False)
            self.live.start()
        self.live.update(self._picture(step), refresh=True)

    def canvas(self, canvas: CommittedCanvas) -> None:
        """Print what a committed canvas adds to its response."""
        self.close()
        text = canvas.text[self.shown.get(canvas.id, 0) :]
        self.shown[canvas.id] = len(canvas.text)
        file = self.console.file
        if self.several:
            print(f"[{canvas.id}] {text}", file=file, flush=True)
        else:
            print(text, end="\n" if canvas.finish_reason else "", file=file, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was before `step` drew on it."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _picture(self, step: Step) -> Text:
        """The guesses of a step: kept ones bold, the others the more orange the less sure."""
        from rich.text import Text

        text = Text()
        text.append(f"canvas {step.canvas + 1}, step {step.step + 1}\n", style="dim")
        highest = max(math.log(2), max(step.entropy, default=0.0))
        for token, entropy, is_accepted in zip(step.argmax, step.entropy, step.is_accepted, strict=True):
            share = min(1.0, entropy / highest)
            red, green, blue = int(120 + 130 * share), int(190 - 90 * share), int(130 - 100 * share)
            style = f"{'bold ' if is_accepted else ''}rgb({red},{green},{blue})"
            text.append(self.decode(token), style=style)
        return text
