"""One answer to a request, on its way from the prompt's tokens to the result."""

from __future__ import annotations

from collections import Counter, abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from blockdiff.images import PlacedImage, images_between, runs_of
from blockdiff.models.page_keys import identities
from blockdiff.sampling.drafts import BlockDraft, CanvasDraft, Draft, Proposal
from blockdiff.sampling.request import Forwards, PromptScores, Result
from blockdiff.sampling.response import parse
from blockdiff.sampling.strategies import next_token_head

if TYPE_CHECKING:
    from blockdiff.models.pages import PagedRow
    from blockdiff.sampling.canvas_control import CanvasControl
    from blockdiff.sampling.control import Control
    from blockdiff.sampling.request import Request
    from blockdiff.sampling.settings import SamplingSettings
    from blockdiff.sampling.strategy import Strategy
    from blockdiff.sampling.trace import Verification

STOP_SPARE = 8  # special tokens that may stand within a text that ends a response
NOT_FINITE = "the model's logits are not finite; are its weights? a wider --dtype may help"


@dataclass(eq=False)
class RunningCanvas:
    """The canvas of a sequence that is being denoised.

    number: its place in the response; step_offset: the number of the engine's step minus that of the canvas's, which
    begins with `first_step`: 0, or later where it starts from given tokens; control: what may stand in it; index: its
    place in the buffers of the batch (None: it has none yet); has_begun: whether a step has denoised it; final: its
    tokens (None: it is not finished), after so many `steps`; is_finite: False where its logits were not finite.
    """

    sequence: Sequence
    number: int
    step_offset: int
    control: CanvasControl | None = None
    first_step: int = 0
    index: int | None = None
    has_begun: bool = False
    final: list[int] | None = None
    is_finite: bool = True
    steps: int = 0


@dataclass(eq=False)
class Sequence:
    """One answer to a request; `prepare_sequences` makes it, the engine extends it, and `result` gives the end of it.

    What is asked: prompt, prompt_tokens: the prompt as text ("" where it came as tokens) and as the model sees it;
    seed: that of its draws; max_tokens, max_steps: the most tokens of the response, and the most steps of a canvas;
    images: those of the prompt; draw: the number of this answer among the request's `best_of`; on_last_hidden: called
    with the hidden states [L, D] of the last step of a canvas; on_inputs: called with the number of every step of a
    canvas, the tokens that it saw [L] and the self-conditioning signal [L, D].

    What all answers to the request share: draws: all of them, this one included; calls: their model calls so far, by
    the names of `Forwards`; places: those of `Result`.

    The response so far: `tokens`, with the `steps` of each canvas, the `logprobs` and `top_logprobs` of those that are
    scored, and a `finish_reason` or an `error` at its end. control: what may stand in it, and the state of that; draft:
    of its next tokens, where they are verified (None: canvases are committed as they are).

    The rest is the engine's. owner: who asked, if others are to get their turns beside it ("": in the order of
    arrival); token_ids: the prompt and the committed canvases, which the next canvas must see; proposal: the tokens at
    the end of token_ids that are to be verified (None: there is no proposal); paged: the pages with the keys and values
    of those that are encoded (None while the sequence is not admitted); hidden_TD: the hidden states of
    the encoded tokens that are not accepted yet, because a draft among them is to be verified or the next token to be
    drawn (None: all are accepted); last_hidden_D: that of the last accepted token, from which the next one is scored,
    drawn or verified; num_preempted: the number of token_ids that were encoded when it was preempted; shared_tokens:
    the number of token_ids that others had encoded; canvas: the one that is denoised, if any; is_watched: whether its
    steps are recorded; recorded: the canvas and the step that were recorded last; may_capture: whether its steps may be
    captured; events: the caller's list, which gets pairs of the sequence and an event; is_done: whether it has left the
    engine.
    """

    request: Request
    seed: int
    prompt: str
    prompt_tokens: list[int]
    strategy: Strategy
    max_tokens: int
    max_steps: int
    images: abc.Sequence[PlacedImage] = ()
    draw: int = 0
    on_last_hidden: abc.Callable[[Tensor], object] | None = None
    on_inputs: abc.Callable[[int, Tensor, Tensor], object] | None = None

    draws: list[Sequence] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    places: list[tuple[int, int]] = field(default_factory=list)

    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    control: Control | None = None
    draft: Draft | None = None

    owner: str = ""
    token_ids: list[int] = field(default_factory=list)
    proposal: Proposal | None = None
    paged: PagedRow | None = None
    hidden_TD: Tensor | None = None
    last_hidden_D: Tensor | None = None
    num_preempted: int = 0
    shared_tokens: int = 0
    canvas: RunningCanvas | None = None
    is_watched: bool = False
    recorded: tuple[int, int] = (-1, -1)
    may_capture: bool = True
    events: list[tuple[Sequence, Any]] = field(default_factory=list)
    is_done: bool = False

    def __post_init__(self) -> None:
        self.token_ids = self.token_ids or list(self.prompt_tokens)
        self._prompt_identities = identities(self.prompt_tokens, self.images)

    @property
    def id(self) -> str | int:
        """The id of the request, or of an answer to it after the first one "ID draw N"."""
        return f"{self.request.id} draw {self.draw}" if self.draw else self.request.id

    @property
    def is_scored(self) -> bool:
        """True where its tokens are scored."""
        return self.request.scores or self.request.best_of > 1

    @property
    def identities(self) -> list[int]:
        """The identities of the token_ids, by which pages are shared."""
        return [*self._prompt_identities, *self.token_ids[len(self.prompt_tokens) :]] if self.images else self.token_ids

    @property
    def longest_run(self) -> int:
        """The tokens of the longest run of images, which one call encodes."""
        return max((end - first for first, end in runs_of(self.images)), default=0)

    @property
    def first_scored(self) -> int:
        """The place of the first token that is scored, where any is."""
        return 1 if self.request.scores_prompt else len(self.prompt_tokens)

    def placed_images(self, start: int, count: int) -> list[PlacedImage]:
        """The images in so many token_ids from `start` on, with columns counted from there."""
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
        return self.num_computed < len(self.prompt_tokens)

    @property
    def is_ready(self) -> bool:
        """True where a canvas can be denoised behind all tokens, or a block be drafted behind the last one."""
        if not self.is_next_token:
            return self.num_uncomputed == 0
        return bool(self.tokens) and self.num_uncomputed == 1 and self.proposal is None

    @property
    def has_head(self) -> bool:
        """True where next tokens are drawn or verified, for which the last token's hidden state is needed."""
        return next_token_head(self.strategy) is not None

    @property
    def is_next_token(self) -> bool:
        """True where the next token is drawn as soon as all tokens are encoded."""
        return isinstance(self.draft, BlockDraft)

    @property
    def has_drafts(self) -> bool:
        """True where tokens are drafted, which the head verifies, and not drawn one by one."""
        return isinstance(self.draft, CanvasDraft) or (self.draft is not None and self.draft.most > 0)

    @property
    def is_over(self) -> bool:
        """True where nothing is left to do for it: it has failed, or it has ended and all its tokens are encoded."""
        return self.error is not None or (self.finish_reason is not None and not self.num_uncomputed)

    def count_places(self, verification: Verification, kept: int) -> None:
        """Count the drafted tokens of a block by their places, and those that stand; none behind the response's end.

        kept: the tokens of the block that were added to the response.
        """
        for place in range(len(verification.draft) if self.finish_reason is None else kept)[: len(verification.draft)]:
            drafted, stood = self.places[place] if place < len(self.places) else (0, 0)
            self.places[place : place + 1] = [(drafted + 1, stood + (place < verification.accepted))]

    def propose(self, proposal: Proposal) -> None:
        """Put drafted tokens behind the tokens, until they are verified."""
        self.token_ids += proposal.tokens
        self.proposal = proposal

    def retract(self) -> Proposal:
        """Take the proposal away from the end of the token_ids, and return it, empty where there is none."""
        proposal, self.proposal = self.proposal or Proposal(), None
        del self.token_ids[len(self.token_ids) - len(proposal.tokens) :]
        return proposal

    def num_tokens_until_commit(self, canvas_length: int) -> int:
        """The number of tokens that need room in pages until the next canvas is committed."""
        return self.num_uncomputed + canvas_length

    def commit(self, tokens: list[int], steps: int, eos_ids: abc.Collection[int]) -> int:
        """Add any number of tokens to the response, up to the first eos or its last place, which end it.

        steps: the denoising steps that made them. Returns the number of tokens added.
        """
        fresh = tokens[: self.max_tokens - len(self.tokens)]
        end = next((place + 1 for place, token in enumerate(fresh) if token in eos_ids), None)
        self.tokens += fresh[:end]
        is_full = len(self.tokens) == self.max_tokens
        self.finish_reason = "eos" if end is not None else "length" if is_full else None
        self.steps.append(steps)
        if self.control is not None:
            self.control.take(fresh[:end])
            self.error = self.control.obstacle
        return len(fresh[:end])

    def would_end(self, tokens: list[int], settings: SamplingSettings) -> bool:
        """True where the response would end in the next tokens, with eos or a stop text."""
        if not set(tokens).isdisjoint(settings.generation.eos_ids):
            return True
        last = self.tokens[-self._stop_width(0) :] + tokens
        if not self.request.stop or not self._has_stop_text(last, settings.text):
            return False
        return self._has_stop_text(self.tokens + tokens, settings.text)

    def _stop_width(self, fresh: int) -> int:
        """The number of last tokens that have each stop text which ends in the last `fresh` ones.

        Only special tokens have no bytes, so a text of n bytes begins in the n tokens before its last one, or in a few
        more.
        """
        return fresh + max((len(text.encode()) for text in self.request.stop), default=0) + STOP_SPARE

    def _has_stop_text(self, tokens: list[int], text_of: abc.Callable[[list[int]], str]) -> bool:
        text = text_of(tokens)
        return any(each in text for each in self.request.stop)

    def stop(self, fresh: int, text_of: abc.Callable[[list[int]], str]) -> int:
        """End the response at the first of its stop texts; returns how many of its last `fresh` tokens that cuts off.

        A response ends with the token that completes the text.
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
        """The result, as the caller of the engine gets it."""
        if self.error is not None:
            return Result.failed(self.request.id, self.error)
        response = parse(self.tokens, self.request, settings, self.prompt, is_stopped=self.finish_reason == "stop")
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
            places=[*self.places],
            prompt_tokens=len(self.prompt_tokens),
            cached_tokens=min(self.shared_tokens, len(self.prompt_tokens)),
        )
