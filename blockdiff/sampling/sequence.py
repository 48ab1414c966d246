"""One answer to a request, on its way from the prompt's tokens to the result, and the contract of how it grows."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import Counter, abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from blockdiff.images import PlacedImage, images_between, runs_of
from blockdiff.models.page_keys import identities
from blockdiff.sampling.request import Forwards, PromptScores, Result
from blockdiff.sampling.response import parse
from blockdiff.sampling.trace import CommittedCanvas

if TYPE_CHECKING:
    from torch import Tensor

    from blockdiff.models.pages import PagedRow, Pages
    from blockdiff.sampling.control import Control
    from blockdiff.sampling.request import Request
    from blockdiff.sampling.settings import SamplingSettings
    from blockdiff.sampling.strategies import NextToken
    from blockdiff.sampling.strategy import Strategy
    from blockdiff.sampling.trace import Verification

STOP_SPARE = 8  # special tokens allowed within a text that ends a response
NOT_FINITE = "the model's logits are not finite; are its weights? a wider --dtype may help"


@dataclass(frozen=True)
class Proposal:
    """Tokens at the end of a sequence's token_ids that are to be verified; there may be none.

    given: the number of leading tokens that are accepted already; steps: the number of denoising steps or drafter
    passes that made the tokens; last_step: the index of the last one.
    """

    tokens: list[int] = field(default_factory=list)
    given: int = 0
    steps: int = 0
    last_step: int = 0


@dataclass(eq=False)
class Round(ABC):
    """The way in which one answer grows, with its state.

    head: the next-token sampling that decides every token (None: nothing is verified); proposal: the tokens at the end
    of token_ids that the next call encodes and the head verifies (None: there is no proposal); places: as in `Result`,
    counted over all answers to the request.

    As class attributes: denoises: whether canvases are denoised; leads: the number of accepted tokens that are encoded
    together with a proposal.
    """

    head: NextToken | None = None
    proposal: Proposal | None = None
    places: list[tuple[int, int]] = field(default_factory=list)
    denoises: ClassVar[bool] = True
    leads: ClassVar[int] = 0

    # -- asked of the class: what a request, an engine and its scheduler need ----------------------------------

    @classmethod
    @abstractmethod
    def of(cls, strategy: Strategy, settings: SamplingSettings) -> Self:
        """Return the round of an answer that has not begun."""

    @classmethod
    def steps(cls, strategy: Strategy, max_steps: int) -> int:
        """The most denoising steps of one round, if a canvas may have `max_steps`."""
        return max_steps

    @classmethod
    def rounds(cls, settings: SamplingSettings) -> int:
        """The most rounds of one canvas."""
        return 1

    @classmethod
    def answer_chunk(cls, settings: SamplingSettings, chunk_tokens: int) -> int:
        """The number of response tokens that one call encodes, as for a response that was preempted."""
        return settings.canvas_length

    # -- asked of an answer ------------------------------------------------------------------------------------

    def to_encode(self, sequence: Sequence) -> int:
        """The number of tokens at the end of token_ids that must be encoded before the next proposal."""
        return sequence.num_uncomputed

    @property
    def is_between(self) -> bool:
        """True if a preemption now would lose no proposal, whether finished or in progress."""
        return self.proposal is None

    def awaits_head(self, sequence: Sequence) -> bool:
        """True if the head must verify the tokens just encoded before they are accepted."""
        return self.proposal is not None

    @property
    def forward(self) -> str:
        """The field of `Forwards` that counts the next call that encodes."""
        return "encode" if self.proposal is None else "verify"

    def propose(self, sequence: Sequence, proposal: Proposal) -> None:
        """Append a proposal to token_ids, to be encoded and verified."""
        sequence.token_ids += proposal.tokens
        self.proposal = proposal

    def retract(self, sequence: Sequence) -> Proposal:
        """Remove the proposal from the end of token_ids and return it; empty if there is none."""
        proposal, self.proposal = self.proposal or Proposal(), None
        del sequence.token_ids[len(sequence.token_ids) - len(proposal.tokens) :]
        return proposal

    @abstractmethod
    def settle(self, sequence: Sequence, verification: Verification, pages: Pages, settings: SamplingSettings) -> None:
        """Commit the tokens of the encoded proposal that the head accepts, and drop the rest."""

    def verifications(self, sequence: Sequence) -> int:
        """The number of verifications so far: of the current canvas if canvases are verified, else of the response."""
        return len(sequence.steps)

    def preempt(self, sequence: Sequence) -> None:
        """Drop the proposal, finished or not, because the pages that hold it are freed."""
        self.retract(sequence)


@dataclass(eq=False)
class Sequence:
    """One answer to a request. `prepare_sequences` makes it, the engine extends it, and `result` returns its result.

    From the request: prompt, prompt_tokens: the prompt as text ("" if it came as tokens) and as the model's tokens;
    seed: the seed of its draws; max_tokens, max_steps: the most tokens of the response, and the most steps of a canvas;
    round: the way in which it grows, with its state; canvas_length: the length of its canvases, 1 for next tokens;
    images: the prompt's images; draw: the index of this answer among the request's `best_of`; tail_length: the number
    of last prompt tokens that are part of the first canvas, because that canvas begins before the response.

    Shared by all answers to the request: draws: all answers, this one included; calls: their model calls so far, by the
    names of `Forwards`.

    The response so far: `tokens`, the `steps` of each canvas, the `logprobs` and `top_logprobs` of scored tokens, and
    finally a `finish_reason` or an `error`. control: the tokens that the response may have (None: any).

    Set by the engine: owner: the caller, if callers take turns ("": in order of arrival); token_ids: the prompt and the
    committed tokens, which the next ones see, followed by the round's proposal, but without the prompt's tail until the
    first canvas is committed; paged: the pages with the keys and values of encoded tokens (None while the sequence is
    not admitted); hidden_TD: the hidden states of encoded tokens that the head must still verify (None: all are
    accepted); last_hidden_D: the hidden state of the last accepted token, from which the next token is scored, drawn or
    verified; num_preempted: the number of token_ids that were encoded when it was preempted; shared_tokens: the number
    of token_ids that other sequences had encoded; is_watched: whether its steps are recorded; may_capture: whether its
    steps may be captured; events: the caller's list, to which pairs of the sequence and an event are added; is_done:
    whether it has left the engine.
    """

    request: Request
    seed: int
    prompt: str
    prompt_tokens: list[int]
    strategy: Strategy
    max_tokens: int
    max_steps: int
    round: Round
    canvas_length: int
    images: abc.Sequence[PlacedImage] = ()
    draw: int = 0
    tail_length: int = 0

    draws: list[Sequence] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)

    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    control: Control | None = None

    owner: str = ""
    token_ids: list[int] = field(default_factory=list)
    paged: PagedRow | None = None
    hidden_TD: Tensor | None = None
    last_hidden_D: Tensor | None = None
    num_preempted: int = 0
    shared_tokens: int = 0
    is_watched: bool = False
    may_capture: bool = True
    events: list[tuple[Sequence, Any]] = field(default_factory=list)
    is_done: bool = False

    def __post_init__(self) -> None:
        self.token_ids = self.token_ids or self.prompt_tokens[: self.num_prompted]
        self._prompt_identities = identities(self.prompt_tokens, self.images)

    @property
    def id(self) -> str | int:
        """The id of the request; for later answers of `best_of` "ID draw N"."""
        return f"{self.request.id} draw {self.draw}" if self.draw else self.request.id

    @property
    def is_scored(self) -> bool:
        """True if the log-probabilities of its tokens are needed."""
        return self.request.scores or self.request.best_of > 1

    @property
    def num_prompted(self) -> int:
        """The number of prompt tokens that are encoded before the first canvas."""
        return len(self.prompt_tokens) - self.tail_length

    @property
    def tail(self) -> list[int]:
        """The last prompt tokens, with which the first canvas begins; empty once it is committed."""
        return self.prompt_tokens[len(self.token_ids) :]

    @property
    def identities(self) -> list[int]:
        """The identities of the token_ids, which decide whether pages can be shared."""
        if not self.images:
            return self.token_ids
        return [*self._prompt_identities[: len(self.token_ids)], *self.token_ids[len(self.prompt_tokens) :]]

    @property
    def longest_run(self) -> int:
        """The number of tokens of the longest run of images, which one call must encode together."""
        return max((end - first for first, end in runs_of(self.images)), default=0)

    @property
    def first_scored(self) -> int:
        """The index of the first token that is scored, if any is."""
        return 1 if self.request.scores_prompt else len(self.prompt_tokens)

    def placed_images(self, start: int, count: int) -> list[PlacedImage]:
        """The images in `count` token_ids from `start` on, with columns counted from `start`."""
        return images_between(self.images, start, start + count) if self.images else []

    @property
    def num_computed(self) -> int:
        """The number of token_ids that are encoded."""
        return 0 if self.paged is None else self.paged.length

    @property
    def num_uncomputed(self) -> int:
        """The number of token_ids that are still to be encoded."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_prompting(self) -> bool:
        """True while the prompt is being encoded."""
        return self.num_computed < self.num_prompted

    @property
    def is_over(self) -> bool:
        """True if it has failed, or if it has ended and all its tokens are encoded."""
        return self.error is not None or (self.finish_reason is not None and not self.num_uncomputed)

    def num_tokens_until_commit(self, canvas_length: int) -> int:
        """The number of tokens that need room in pages until the next canvas is committed."""
        return self.num_uncomputed + canvas_length

    def commit(self, tokens: list[int], steps: int, settings: SamplingSettings) -> int:
        """Add tokens to the response up to the first that ends it, add an event, and return the number added.

        A response ends with an eos, a stop text or its last position. steps: the number of denoising steps that made
        the tokens. The tokens join token_ids if later tokens or scores need them.
        """
        number, fresh = len(self.steps), tokens[: self.max_tokens - len(self.tokens)]
        end = next((index + 1 for index, token in enumerate(fresh) if token in settings.generation.eos_ids), None)
        self.tokens += fresh[:end]
        is_full = len(self.tokens) == self.max_tokens
        self.finish_reason = "eos" if end is not None else "length" if is_full else None
        self.steps.append(steps)
        if self.control is not None:
            self.control.take(fresh[:end])
            self.error = self.control.obstacle
        num_kept = len(fresh[:end])
        num_kept -= self._stop(num_kept, settings.text)
        if self.error is not None:
            return num_kept
        committed = CommittedCanvas.undecoded(
            functools.partial(_text, settings, self.tokens, len(self.tokens)),
            id=self.id,
            canvas=number,
            prompt=self.prompt,
            tokens=tokens,
            kept=num_kept,
            steps=steps,
            finish_reason=self.finish_reason,
            max_steps=self.max_steps,
            control=self.request.control_in_words,
        )
        self.events.append((self, committed))
        if self.finish_reason is None:
            self.token_ids += self.tail + tokens
        elif self.is_scored:  # the last token predicts nothing
            self.token_ids += tokens[: num_kept - 1]
        return num_kept

    def would_end(self, tokens: list[int], settings: SamplingSettings) -> bool:
        """True if `tokens` would end the response with an eos or a stop text."""
        if not set(tokens).isdisjoint(settings.generation.eos_ids):
            return True
        last = self.tokens[-self._stop_width(0) :] + tokens
        if not self.request.stop or not self._has_stop_text(last, settings.text):
            return False
        return self._has_stop_text(self.tokens + tokens, settings.text)

    def _stop_width(self, fresh: int) -> int:
        """The number of last tokens to search for a stop text that ends in the last `fresh` ones.

        Only special tokens have no bytes, so a text of n bytes begins within n tokens, plus `STOP_SPARE` for special
        ones.
        """
        return fresh + max((len(text.encode()) for text in self.request.stop), default=0) + STOP_SPARE

    def _has_stop_text(self, tokens: list[int], text_of: abc.Callable[[list[int]], str]) -> bool:
        text = text_of(tokens)
        return any(each in text for each in self.request.stop)

    def _stop(self, fresh: int, text_of: abc.Callable[[list[int]], str]) -> int:
        """End the response at its first stop text; return how many of the last `fresh` tokens are cut off.

        The token that completes the text is kept.
        """
        if not self.request.stop or not self._has_stop_text(self.tokens[-self._stop_width(fresh) :], text_of):
            return 0
        whole = len(self.tokens)
        for count in range(whole - fresh + 1, whole + 1):
            if self._has_stop_text(self.tokens[:count], text_of):
                del self.tokens[count:]
                self.finish_reason = "stop"
                return whole - count
        return 0

    def result(self, settings: SamplingSettings) -> Result:
        """Return the result for the caller."""
        if self.error is not None:
            return Result.failed(self.request.id, self.error)
        is_stopped, is_cut = self.finish_reason == "stop", self.finish_reason == "length" and not self.request.form
        response = parse(self.tokens, self.request, settings, self.prompt, is_stopped, is_cut)
        logprobs, top = self.logprobs, self.top_logprobs
        of_prompt, prompt_scores = len(self.prompt_tokens) - self.first_scored, None
        if of_prompt and logprobs is not None:
            prompt_scores = PromptScores(self.prompt_tokens, logprobs[:of_prompt], top[:of_prompt])
            logprobs, top = logprobs[of_prompt:], top[of_prompt:]
        return Result(
            self.request.id,
            response.text,
            self.tokens,
            str(self.finish_reason),
            self.steps,
            reasoning=response.reasoning,
            tool_calls=response.tool_calls,
            logprobs=logprobs,
            top_logprobs=top if self.request.top_logprobs else None,
            prompt_scores=prompt_scores,
            draw=None if self.request.best_of == 1 else self.draw,
            forwards=Forwards(**self.calls),
            places=[*self.round.places],
            prompt_tokens=len(self.prompt_tokens),
            cached_tokens=min(self.shared_tokens, len(self.prompt_tokens)),
        )


def _text(settings: SamplingSettings, tokens: list[int], count: int) -> str:
    """Return the text of the first `count` tokens of a response."""
    return settings.text(tokens[:count])
