"""Decisions: questions about a state become reads of one denoising step, and the reads become answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from blockdiff.data.template import turn_closing
from blockdiff.decisions.form import ONE_BY_ONE, Asked, Asking, Form, ask_jointly, ask_one, hole, with_question
from blockdiff.decisions.question import Question, Value
from blockdiff.errors import RequestError
from blockdiff.sampling.control import require_tokenizer
from blockdiff.sampling.read import RunningRead
from blockdiff.sampling.request import Request

if TYPE_CHECKING:
    from blockdiff.models.model import BlockDiffusionModel
    from blockdiff.sampling.sequence import Sequence as RunningSequence
    from blockdiff.sampling.settings import SamplingSettings


@dataclass(frozen=True)
class Answer:
    """The probabilities of a question's options, in their order.

    label_mass: the probability of all labels together among all tokens; spread: the standard deviation of each
    probability over draws; temperature: the temperature that was applied; is_calibrated: whether it was fitted on
    labelled rows.
    """

    question: Question
    probabilities: tuple[float, ...]
    label_mass: float
    spread: tuple[float, ...]
    temperature: float = 1.0
    is_calibrated: bool = False

    @property
    def place(self) -> int:
        """The index of the likeliest option."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def value(self) -> Value:
        """The value of the likeliest option."""
        return self.question.options[self.place].value

    @property
    def confidence(self) -> float:
        """The probability of the likeliest option, times `label_mass`."""
        return self.probabilities[self.place] * self.label_mass

    @property
    def score(self) -> float:
        """The expected index of the options: the expected level of a score, the probability of true of a predicate."""
        return sum(index * p for index, p in enumerate(self.probabilities))

    @property
    def facts(self) -> dict[str, Any]:
        """The details of an answer by name: label mass, temperature, whether it was fitted, and spread."""
        return {
            "label_mass": self.label_mass,
            "temperature": self.temperature,
            "calibrated": self.is_calibrated,
            "spread": list(self.spread),
        }

    def to_record(self) -> dict[str, Any]:
        """Return the answer in the form of `POST /v1/decisions`."""
        kind, options = self.question.type, self.question.options
        head: dict[str, Any] = {"type": kind, "name": self.question.name}
        if kind == "predicate":
            return head | {"probability": self.probabilities[1]}
        pairs = zip(options, self.probabilities, strict=True)
        if kind == "choice":
            known = [{"value": option.value, "probability": p} for option, p in pairs]
            return head | {"choice": self.value, "probabilities": known, "confidence": self.confidence}
        levels = [{"value": option.value, "label": option.text, "probability": p} for option, p in pairs]
        return head | {"score": self.score, "probabilities": levels, "confidence": self.confidence}


TemperatureOf = Callable[[Question], float | None]  # None: not calibrated


def uncalibrated(question: Question) -> None:
    """Return None, no temperature, for any question."""


@dataclass(eq=False)
class RunningDecision:
    """The questions about one state: an engine runs `sequences`, then `answers` has the results."""

    asked: list[Asked]
    reads: list[RunningRead]

    @classmethod
    def prepare(
        cls,
        request: Request,
        questions: Sequence[Question],
        model: BlockDiffusionModel,
        settings: SamplingSettings,
        asking: Asking = ONE_BY_ONE,
        seed: int = 0,
    ) -> RunningDecision:
        """Prepare the reads of questions about the state, the request's text or messages.

        The state is encoded once, up to its last whole page; each question's text after it is encoded separately.
        Raises RequestError for questions that cannot be asked.
        """
        if request.tokens is not None:
            raise RequestError("a decision is asked about text or messages; give one of them, not tokens")
        messages = request.messages if request.messages is not None else [{"role": "user", "content": request.prompt}]
        if settings.tokenizer is not None:
            settings = replace(settings, closing=turn_closing(settings.tokenizer))
        groups = [ask_one(question, asking.form) for question in questions]
        if asking.joint:
            groups = _jointly(questions, asking.form, request, settings)
        reads = []
        for index, each in enumerate(groups):
            of_it = replace(
                request,
                id=f"{request.id}/{index}" if len(groups) > 1 else request.id,
                prompt=None,
                messages=with_question([dict(message) for message in messages], each),
            )
            choices = each.choices(each.spellings(partial(_count, of_it, settings)))
            narrow = settings.narrowed(_length(each, of_it, settings))
            reads.append(
                RunningRead.prepare(of_it, each.template, choices, model, narrow, asking.steps, asking.draws, seed)
            )
        return cls(groups, reads)

    @property
    def sequences(self) -> list[list[RunningSequence]]:
        """The draws of each read."""
        return [read.sequences for read in self.reads]

    @property
    def scores(self) -> list[Tensor]:
        """The log-probabilities of each question's labels in every draw, in order, fp64 [N, X].

        A label that is read with and without a space before it gets the higher of the two.
        """
        return [by_space_SNX.amax(0) for by_space_SNX in self._by_space()]

    def answers(self, temperature_of: TemperatureOf = uncalibrated) -> list[Answer]:
        """The answers to the questions, in order; RequestError if a draw could not be read."""
        for read in self.reads:
            read.require_read()
        questions = [question for group in self.asked for question in group.questions]
        return [
            answer_of(question, by_space_SNX, temperature_of(question))
            for question, by_space_SNX in zip(questions, self._by_space(), strict=True)
        ]

    def _by_space(self) -> list[Tensor]:
        """Return the log-probabilities of each question's labels by spelling and draw, [S, N, X]."""
        log_probabilities = []
        for group, read in zip(self.asked, self.reads, strict=True):
            for index, labels in enumerate(group.labels):
                scores_NS = read.scores(hole(index))
                log_probabilities.append(scores_NS.unflatten(-1, (-1, len(labels))).movedim(1, 0))
        return log_probabilities


def answer_of(question: Question, by_space_SNX: Tensor, temperature: float | None) -> Answer:
    """Make an answer from the log-probabilities of the labels in N draws, for S spellings of each label."""
    p_NX = (by_space_SNX.amax(0) / (temperature or 1.0)).softmax(-1)
    mass = float(by_space_SNX.exp().sum((0, 2)).mean())
    p_X, spread_X = p_NX.mean(0).tolist(), p_NX.std(0, correction=0).tolist()
    return Answer(question, tuple(p_X), min(1.0, mass), tuple(spread_X), temperature or 1.0, temperature is not None)


def _jointly(questions: Sequence[Question], form: Form, request: Request, settings: SamplingSettings) -> list[Asked]:
    """Distribute the questions over as few canvases as hold them all, as evenly as possible."""
    room = settings.first_canvas(request)
    for count in range(1, len(questions) + 1):
        size = math.ceil(len(questions) / count)
        groups = [ask_jointly(questions[lo : lo + size], form) for lo in range(0, len(questions), size)]
        if all(_length(each, request, settings) <= room for each in groups):
            return groups
    raise RequestError(f"the {room} tokens of a canvas behind the prompt hold no answer line; ask one by one")


def _length(group: Asked, request: Request, settings: SamplingSettings) -> int:
    """Return the number of tokens of the canvas: its text, one token for each question, and the end of the turn."""
    text, end = group.template, max(1, len(settings.closing))
    for index in range(len(group.questions)):
        text = text.replace(f"<?{hole(index)}>", "\0")
    return sum(_count(request, settings, part) for part in text.split("\0") if part) + len(group.questions) + end


def _count(request: Request, settings: SamplingSettings, text: str) -> int:
    return len(request.spelt(text, require_tokenizer("a decision", settings), "the text"))
