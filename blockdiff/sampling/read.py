"""Reads: the distribution of the holes of a template, from a few denoising steps instead of an answer.

The template's texts are pinned, its holes are noise. After the last step the model's logits in the holes give the
probability of each choice, and the mean over several draws of the noise is the answer. All holes are read at once, each
by its own marginal; for several holes together there is only the product of their marginals.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.errors import RequestError
from blockdiff.request_options import MOST_DRAWS, MOST_STEPS
from blockdiff.sampling.canvas_control import FREE
from blockdiff.sampling.control import require_tokenizer
from blockdiff.sampling.prepare import another_draw, prepare_sequences
from blockdiff.sampling.request import Request
from blockdiff.sampling.rounds import CanvasRound
from blockdiff.sampling.sequence import Sequence
from blockdiff.sampling.strategies import next_token_head
from blockdiff.sampling.template import Hole, parse_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.models.model import BlockDiffusionModel
    from blockdiff.sampling.settings import SamplingSettings

Choices = abc.Mapping[str, abc.Sequence[str]]
MOST_FREE = 16  # tokens of all free holes: for each of them every draw stores the distribution over all tokens
TOP = 10  # likeliest tokens that are listed for each position of a free hole


@dataclass(frozen=True)
class Read:
    """The distributions of the holes of one prompt: by hole and by text.

    probabilities: the mean over draws; spread: their standard deviation over draws, 0 for one. The probabilities of a
    hole's choices add up to 1. A free hole has only its likeliest tokens; if it has several positions, each of them is
    listed as a hole of its own ("name[0]").
    """

    id: str | int
    probabilities: dict[str, dict[str, float]]
    spread: dict[str, dict[str, float]]

    def product_of_marginals(self, **choices: str) -> float:
        """The product of the probabilities of some choices: their joint probability only if holes are independent."""
        product = 1.0
        for hole, text in choices.items():
            product *= self.probabilities[hole][text]
        return product


@dataclass(eq=False)
class RunningRead:
    """A read of one prompt: an engine runs its draws, `sequences`, then `answer` has the result.

    holes: by name, the positions in the canvas and the tokens of each choice (None: a free hole's position).
    log_probabilities: by the index of each finished draw and by hole, the log-probabilities of its choices among all
    tokens, in nats, fp64 (for a free hole of all tokens, -inf for tokens without text).
    """

    model: BlockDiffusionModel
    settings: SamplingSettings
    holes: dict[str, tuple[list[int], dict[str, list[int]] | None]]
    sequences: list[Sequence] = field(default_factory=list)
    log_probabilities: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def prepare(
        cls,
        request: Request,
        template: str,
        choices: Choices | None,
        model: BlockDiffusionModel,
        settings: SamplingSettings,
        steps: int = 1,
        draws: int = 4,
        seed: int = 0,
    ) -> RunningRead:
        """Prepare the read of a request's prompt; RequestError for a read that cannot be done.

        steps: denoising steps before the distributions are read; draws: the number of draws of the noise, with seeds
        derived from the request's seed, or from `seed` if it has none.
        """
        for name, value, most in (("steps", steps, MOST_STEPS), ("draws", draws, MOST_DRAWS)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise RequestError(f"{name} must be an integer from 1 to {most:,}, got {value!r:.80}")
        if not settings.denoises:
            raise RequestError("a read takes a model that denoises, and this one predicts next tokens")
        request.check()
        if request.control_in_words or request.thinking or request.scores or request.best_of > 1:
            raise RequestError("a read takes a prompt alone; leave out scores, thinking, best_of and other controls")
        if steps > 1 and settings.diffusion.mask_id is not None:
            raise RequestError(f"a model of mask noise fills holes for good, so it is read after one step, not {steps}")
        holes, filled = _holes(template, choices, request, require_tokenizer("a read", settings))
        filled_request = replace(request, template=filled, max_steps=steps, max_new_tokens=settings.canvas_length)
        [first] = prepare_sequences(filled_request, settings, seed, model.device)
        first.max_steps = steps  # even if the strategy would take more
        if next_token_head(first.strategy) is not None:
            raise RequestError(
                "a read looks at a canvas that is denoised, not at verified tokens; take another strategy"
            )
        first.round = CanvasRound()  # in which no head draws a token
        assert first.control is not None and first.control.pins is not None
        tail = len(first.tail)
        if first.max_tokens > (room := settings.canvas_length - tail):
            raise RequestError(
                f"the template is longer than the {room} tokens behind the prompt in a canvas of "
                f"{settings.canvas_length}, and a read looks at one canvas; shorten it"
            )
        free = iter([position for position, pin in enumerate(first.control.pins, tail) if pin == FREE])
        reading = cls(model, settings, {})
        for name, (size, of_choices) in holes.items():
            places = [next(free) for _ in range(size)]
            if of_choices is not None or size == 1:
                reading.holes[name] = places, of_choices
            else:
                reading.holes |= {f"{name}[{n}]": ([position], None) for n, position in enumerate(places)}
        for n in range(1, draws):
            another_draw(first, n)
        for n, sequence in enumerate(first.draws):
            assert isinstance(sequence.round, CanvasRound)
            sequence.round.on_last_hidden = reading._reader(n)
        reading.sequences = first.draws
        return reading

    def answer(self) -> Read:
        """Average the distributions over all draws; RequestError if a draw could not be read."""
        self.require_read()
        tokenizer = require_tokenizer("a read", self.settings)
        probabilities, spread = dict[str, dict[str, float]](), dict[str, dict[str, float]]()
        for name, (_, choices) in self.holes.items():
            p_NX = self.scores(name).softmax(-1)
            mean_X, deviation_X = p_NX.mean(0), p_NX.std(0, correction=0)
            if choices is None:
                texts = dict[str, int]()  # parts of characters may have the same text: the likeliest of them is listed
                for token in mean_X.topk(min(TOP, int((mean_X > 0).sum()))).indices.tolist():
                    texts.setdefault(tokenizer.decode([token]), token)
                names, chosen = list(texts), [*texts.values()]
                mean_X, deviation_X = mean_X[chosen], deviation_X[chosen]
            else:
                names = list(choices)
            probabilities[name] = dict(zip(names, mean_X.tolist(), strict=True))
            spread[name] = dict(zip(names, deviation_X.tolist(), strict=True))
        return Read(self.sequences[0].request.id, probabilities, spread)

    def require_read(self) -> None:
        """Raise RequestError if any draw was not read."""
        for n, sequence in enumerate(self.sequences):
            if n not in self.log_probabilities:
                raise RequestError(f"prompt {sequence.request.id!r}: {sequence.error or 'it was not read to its end'}")

    def scores(self, name: str) -> Tensor:
        """The log-probabilities of a hole's choices in every draw, fp64 [N, X]."""
        return torch.stack([self.log_probabilities[n][name] for n in range(len(self.sequences))])

    def _reader(self, draw: int) -> abc.Callable[[Tensor], None]:
        """Return the callback that reads the holes from a draw's last hidden states."""

        def read(hidden_LD: Tensor) -> None:
            self.log_probabilities[draw] = {
                name: self._log_probabilities(hidden_LD[places], choices).cpu()
                for name, (places, choices) in self.holes.items()
            }

        return read

    def _log_probabilities(self, hidden_nD: Tensor, choices: dict[str, list[int]] | None) -> Tensor:
        """Return the log-probabilities of a hole's choices, or of all tokens at a free position, at temperature 1."""
        logits_nV = self.model.vocabulary.logits(hidden_nD).double()
        if choices is not None:
            ids_Xn = torch.tensor([*choices.values()], device=logits_nV.device)
            return logits_nV.log_softmax(-1).gather(-1, ids_Xn.T).sum(0)
        control = self.sequences[0].control
        assert control is not None and control.classes is not None
        allowed = control.classes.token_M[: int(control.classes.end_C[0])]  # texts, and no special token
        return torch.full_like(logits_nV[0], -torch.inf).index_copy_(0, allowed, logits_nV[0, allowed]).log_softmax(-1)


def _holes(
    template: str, choices: Choices | None, request: Request, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, tuple[int, dict[str, list[int]] | None]], str]:
    """Return a template's holes by name, and the template with sizes in place of names.

    A hole is its number of tokens, and the tokens of each choice (None: it is free).
    """
    holes, filled = dict[str, tuple[int, dict[str, list[int]] | None]](), ""
    for part in parse_template(template):
        if isinstance(part, str):
            filled += part.replace("<?", "<??")
            continue
        spellings = {each: request.spelt(each, tokenizer, "the choice") for each in _choices(part, choices, holes)}
        size = part.tokens or _size(part, spellings)
        holes[str(part.name)] = size, spellings or None
        filled += f"<?{size}>"
    if unknown := [name for name in choices or {} if name not in holes]:
        raise RequestError(f"there are choices for {unknown[0]!r}, but the template has no hole <?{unknown[0]}>")
    if (count := sum(size for size, of_choices in holes.values() if of_choices is None)) > MOST_FREE:
        raise RequestError(f"the free holes have {count} tokens together, and a read takes {MOST_FREE} at most")
    return holes, filled


def _choices(hole: Hole, choices: Choices | None, others: abc.Container[str]) -> abc.Sequence[str]:
    """Return the choices of a hole, empty for a free one; RequestError if hole and choices do not fit together.

    others: the names of the holes before it.
    """
    if hole.name is None:
        raise RequestError(f"the template's hole <?{hole.tokens}> has no name; a read tells holes apart by <?name>")
    if hole.name in others:
        raise RequestError(f"the template has two holes <?{hole.name}>; give each a name of its own")
    options = (choices or {}).get(hole.name)
    if (options is None) == (hole.tokens is None):
        other = "both a size and choices" if options is not None else "neither choices nor a size (<?name:4>)"
        raise RequestError(f"the hole <?{hole.name}> has {other}; give one of the two")
    if options is None:
        return ()
    is_list = isinstance(options, abc.Sequence) and not isinstance(options, str)
    if not is_list or len(options) < 2 or not all(isinstance(each, str) and each for each in options):
        raise RequestError(f"the choices of {hole.name!r} must be a list of two texts or more, got {options!r:.80}")
    if len({*options}) < len(options):
        raise RequestError(f"the choices of {hole.name!r} must differ, got {options!r:.80}")
    return options


def _size(hole: Hole, tokens: dict[str, list[int]]) -> int:
    """Return the number of tokens that each choice of a hole has; RequestError if the choices differ in it."""
    (one, first), *others = tokens.items()
    for other, other_tokens in others:
        if len(other_tokens) != len(first):
            raise RequestError(
                f"the choices of {hole.name!r} must have equally many tokens, but {one!r} has {len(first)} and "
                f"{other!r} {len(other_tokens)}"
            )
    return len(first)
