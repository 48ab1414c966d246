"""The repetition penalty: tokens of the prompt and of what was committed are less likely, as in transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockdiff.errors import RequestError
from blockdiff.sampling.controls.restriction import Restriction, is_number

if TYPE_CHECKING:
    from blockdiff.sampling.request import Request
    from blockdiff.sampling.settings import SamplingSettings


@dataclass(frozen=True)
class Penalty:
    """The factor by which the logits of tokens that were seen before are lowered; 1 changes nothing."""

    factor: float

    @classmethod
    def of(cls, request: Request) -> Penalty | None:
        """The `repetition_penalty` of a request."""
        factor = request.repetition_penalty
        if not is_number(factor) or not factor > 0:
            raise RequestError(f"repetition_penalty must be a number more than 0, got {factor!r:.80}")
        return None if factor == 1.0 else cls(factor)

    def __str__(self) -> str:
        return f"repetition penalty {self.factor:g}"

    def restriction(self, request: Request, settings: SamplingSettings, canvases: int) -> Restriction:
        """The factor."""
        return Restriction(penalty=self.factor)
