"""The settings of a model's answers: from its checkpoint, or replaced by a caller."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blockdiff.canvas import narrow_length
from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.checkpoint.generation import Generation
from blockdiff.checkpoint.tokenizer import OTHER_MODELS
from blockdiff.data.images import ImageReader
from blockdiff.errors import RequestError
from blockdiff.sampling.request import Request
from blockdiff.sampling.strategy import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SamplingSettings:
    """The settings with which requests are answered, unless they set their own; made by `sampling_settings`.

    generation: the most steps and tokens, and the special tokens in use; diffusion: how the model was trained to
    denoise; strategy: how canvases are denoised; canvas_length: the length of sampled canvases, 1 for next tokens;
    denoises: whether responses grow by canvases, and not by next tokens; positions: the most tokens that the model can
    see (None: no bound); fill_id: the token that fills a last canvas after the eos (None: the eos again);
    predicts_next_tokens: whether the model has a next-token head; is_drafted: whether another model drafts; block: the
    most tokens of a drafted block, its accepted first one included (None: no drafted blocks, but perhaps drafted
    canvases); image_reader: reads images in prompts (None: the model accepts no images); aligned: whether canvases
    begin at multiples of their length, counted from the prompt's start, and not right after the prompt; is_seeded:
    whether a canvas begins with the head's next token; closing: the tokens that end a response before the fill (empty:
    an eos).
    """

    tokenizer: PreTrainedTokenizerBase | None
    generation: Generation
    diffusion: DiffusionSettings
    strategy: Strategy
    canvas_length: int
    vocab_size: int
    denoises: bool = True
    positions: int | None = None
    fill_id: int | None = None
    predicts_next_tokens: bool = True
    is_drafted: bool = False
    block: int | None = None
    image_reader: ImageReader | None = None
    aligned: bool = False
    is_seeded: bool = False
    closing: tuple[int, ...] = ()

    def narrowed(self, tokens: int) -> SamplingSettings:
        """Return the settings with the shortest canvas for `tokens` tokens (`canvas.narrow_length`).

        Canvases aligned to blocks, of a model whose clean tokens see whole blocks, keep their length.
        """
        return self if self.aligned else replace(self, canvas_length=narrow_length(tokens, self.canvas_length))

    @property
    def round_length(self) -> int:
        """The most tokens of a canvas or of a drafter's block; 1 if next tokens are drawn one by one."""
        return self.block or self.canvas_length

    def ending(self, count: int) -> list[int]:
        """Return `count` tokens that fill the last canvas after a response: `closing` or an eos, then fill tokens."""
        if not count:
            return []
        eos_id = self.generation.eos_ids[0]
        tokens = [*(self.closing or (eos_id,)), *[eos_id if self.fill_id is None else self.fill_id] * count]
        return tokens[:count]

    def tail(self, prompt: int) -> int:
        """The number of last tokens of a prompt of `prompt` tokens that are part of the response's first canvas."""
        return prompt % self.canvas_length if self.aligned else 0

    def first_canvas(self, request: Request) -> int:
        """The number of response tokens in the first canvas."""
        if not self.aligned:
            return self.canvas_length
        tokens = request.as_tokens(self.tokenizer, self.vocab_size, self.image_reader).tokens
        return self.canvas_length - self.tail(len(tokens))

    def in_blocks(self, tokens: int) -> int:
        """Round `tokens` up to whole blocks if clean tokens see whole blocks: pages and chunks must end there."""
        return -(-tokens // self.canvas_length) * self.canvas_length if self.aligned else tokens

    def max_tokens(self, max_new_tokens: int, prompt: int = 0) -> int:
        """The most tokens of a response to a prompt of `prompt` tokens: `max_new_tokens` rounded up to whole canvases.

        Raises RequestError if that leaves no position for a prompt.
        """
        tail = self.tail(prompt)
        max_tokens = -(-(tail + max_new_tokens) // self.canvas_length) * self.canvas_length - tail
        if self.positions is not None and max_tokens >= self.positions:
            raise RequestError(
                f"max_new_tokens {max_new_tokens} leaves no room for a prompt in the model's {self.positions} "
                "positions; ask for fewer"
            )
        return max_tokens

    def excess(self, request: Request) -> int:
        """The number of tokens by which a request exceeds the model's positions; 0 or less if it fits."""
        if self.positions is None:
            return 0
        tokens = request.as_tokens(self.tokenizer, self.vocab_size, self.image_reader).tokens
        max_new_tokens = request.max_new_tokens or self.generation.max_new_tokens
        return len(tokens) + self.max_tokens(max_new_tokens, len(tokens)) - self.positions

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a response without special tokens; "" without a tokenizer."""
        if self.tokenizer is None:
            return ""
        size = len(self.tokenizer)
        if any(token >= size for token in tokens):
            warnings.warn(
                f"the model answers with tokens that the tokenizer, which has {size}, has no text for; {OTHER_MODELS}",
                stacklevel=1,
            )
        # Not every eos of every tokenizer is a special token that decoding would leave out.
        has_end = bool(tokens) and tokens[-1] in self.generation.eos_ids
        return str(self.tokenizer.decode(tokens[: -1 if has_end else None], skip_special_tokens=True))
