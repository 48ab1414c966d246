"""What may stand where in the canvases of one request: pinned tokens, allowed tokens, a canvas to start from.

A request without any of these has no control, and its rows cost nothing extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass
class CanvasControl:
    """What holds one canvas of a request; tensors lie on the model's device.

    pinned_L: int64 tokens that are given, -1 where the model decides. start_L: the canvas to start from instead of
    noise, and `first_step` the step at which it enters the schedule. allowed_LW: the tokens allowed at each position,
    packed by `kernels.vocabulary.pack_allowed`; one row stands for all positions.
    """

    pinned_L: Tensor | None = None
    start_L: Tensor | None = None
    first_step: int = 0
    allowed_LW: Tensor | None = None


class Control(Protocol):
    """What holds one request, canvas after canvas.

    `length` is the response's length in tokens where a template fixes it, else None.
    """

    length: int | None

    def begin(self, number: int) -> CanvasControl:
        """The control of canvas `number`, after those before it were committed; asking twice gives the same."""

    def commit(self, tokens: Sequence[int]) -> None:
        """Take note of a committed canvas, all its tokens; RequestError if the response cannot go on from there."""
