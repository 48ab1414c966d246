"""Drafts: a text from which denoising starts, part of it replaced by noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockdiff.errors import RequestError
from blockdiff.sampling.controls.restriction import FREE, Restriction, is_number, tokenizer_for

if TYPE_CHECKING:
    from blockdiff.sampling.request import Request
    from blockdiff.sampling.settings import SamplingSettings

NOISE = 0.5


@dataclass(frozen=True)
class Draft:
    """A text, each token of which is replaced by noise with probability `noise`."""

    text: str
    noise: float

    @classmethod
    def of(cls, request: Request) -> Draft | None:
        """The `draft` and `noise` of a request."""
        text, noise = request.draft, request.noise
        if text is not None and not isinstance(text, str):
            raise RequestError(f"draft must be text, got {text!r:.80}")
        if noise is not None and not (is_number(noise) and 0 <= noise <= 1):
            raise RequestError(f"noise must be a number in [0, 1], got {noise!r:.80}")
        if noise is not None and text is None:
            raise RequestError("noise is the level to which a draft is noised; give a draft with it")
        if text is None:
            return None
        if request.template is not None:
            raise RequestError("a template says where everything stands, which leaves no place for a draft; give one")
        return cls(text, NOISE if noise is None else noise)

    def __str__(self) -> str:
        return f"from the draft {self.text!r}"

    def restriction(self, request: Request, settings: SamplingSettings, canvases: int) -> Restriction:
        """The tokens of the text over whole canvases, with eos (noise, where there is none) after its end."""
        if settings.is_next_token:
            raise RequestError("a draft is where denoising starts, and next_token denoises nothing; leave it out")
        start = request.spelt(self.text, tokenizer_for("a draft", settings), "the draft")
        room, eos_ids = canvases * settings.canvas_length, settings.generation.eos_ids
        if len(start) > room:
            raise RequestError(
                f"the draft has {len(start)} tokens, but the response at most {room}; "
                "shorten it or raise max_new_tokens (over HTTP, max_tokens)"
            )
        fill = [eos_ids[0]] if eos_ids else [FREE]
        return Restriction(start=start + fill * (-len(start) % settings.canvas_length), noise=self.noise)
