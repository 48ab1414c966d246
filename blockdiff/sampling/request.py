"""A request to a sampler and its result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockdiff.errors import RequestError
from blockdiff.sampling.prompt_tokens import conversation_of

if TYPE_CHECKING:
    from blockdiff.sampling.strategy import Strategy

Message = Mapping[str, Any]
SCORES = ("logprobs", "score", "draw")
MOST_DRAWS = 1024  # answers to one request, of which the best is given


@dataclass(frozen=True)
class Request:
    """One prompt, given in exactly one of three ways.

    `prompt` is raw text (bos is put before it), `messages` a conversation for the chat template, `tokens` the
    prompt's ids as they are. Without `seed` it follows from the seed of the call and `id`. `tools` are declarations
    of functions that the conversation may call: {"type": "function", "function": {name, description, parameters}}.
    `thinking` asks the chat template for reasoning; `scores` asks for the log-probability of every token of the answer;
    of `best_of` answers, each with draws of its own, the one with the highest mean log-probability is given.

    Any of the texts `stop` ends the response, whose text stands before it.

    The others override the settings of the call. max_new_tokens: rounded up to whole canvases; max_steps: most
    denoising steps of a canvas; strategy: how its canvases are denoised. What may stand in the response: template, with
    holes; regex; json_schema; banned, texts or token ids; repetition_penalty, 1 for none. draft: a text to start from,
    noised to level `noise` in [0, 1]. Where the prompt's texts spell control tokens, such as `<turn|>`, they are read
    as text, unless `allow_control_tokens`.
    """

    id: str | int
    prompt: str | None = None
    messages: Sequence[Message] | None = None
    tokens: Sequence[int] | None = None
    seed: int | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    thinking: bool = False
    scores: bool = False
    best_of: int = 1
    stop: Sequence[str] = ()
    max_new_tokens: int | None = None
    max_steps: int | None = None
    strategy: Strategy | str | None = None
    template: str | None = None
    regex: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    banned: Sequence[str | int] = ()
    repetition_penalty: float = 1.0
    draft: str | None = None
    noise: float | None = None
    allow_control_tokens: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.id, str | int):
            raise RequestError(f"the id of a request must be text or an integer, got {self.id!r:.80}")

    @property
    def demanded(self) -> str:
        """What is asked of the response beside the prompt, in words; empty where nothing is."""
        words = [f"template {self.template!r}"] if self.template is not None else []
        words += [f"regex {self.regex!r}"] if self.regex is not None else []
        words += [f"JSON schema {self.json_schema}"] if self.json_schema is not None else []
        words += [f"none of {', '.join(map(repr, self.banned))}"] if self.banned else []
        words += [f"repetition penalty {self.repetition_penalty:g}"] if self.repetition_penalty != 1.0 else []
        words += [f"from the draft {self.draft!r}"] if self.draft is not None else []
        return "; ".join(words)

    def check(self) -> None:
        """Raise RequestError, one line that says what is wrong, unless this is a prompt of one kind."""
        given = [name for name in ("prompt", "messages", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            which = " and ".join(given) or "none"
            raise RequestError(f"give exactly one of prompt, messages and tokens, got {which}")
        if self.prompt is not None and not isinstance(self.prompt, str):
            raise RequestError(f"prompt must be text, got {self.prompt!r:.80}")
        if self.seed is not None and not _is_integer(self.seed):
            raise RequestError(f"seed must be an integer, got {self.seed!r:.80}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise RequestError(f"seed has 64 bits at most, got {self.seed!r:.80}")
        if self.tools is not None and self.messages is None:
            raise RequestError("tools are there, but no messages; only a conversation has a place for them")
        for name in ("thinking", "scores", "allow_control_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r:.80}")
        if self.thinking and self.messages is None:
            raise RequestError("thinking is asked for in the chat template, so it needs messages")
        if not _is_integer(self.best_of) or not 1 <= self.best_of <= MOST_DRAWS:
            raise RequestError(f"best_of must be an integer from 1 to {MOST_DRAWS}, got {self.best_of!r:.80}")
        if self.messages is not None:
            conversation_of(self)
        for name in ("max_new_tokens", "max_steps"):
            value = getattr(self, name)
            if value is not None and not (_is_integer(value) and value >= 1):
                raise RequestError(f"{name} must be an integer of at least 1, got {value!r:.80}")
        if isinstance(self.stop, str) or not isinstance(self.stop, Sequence):
            raise RequestError(f"stop must be a list of texts, got {self.stop!r:.80}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop must be a list of texts, got {text!r:.80} in it")
        self._check_controls()

    def _check_controls(self) -> None:
        """Raise RequestError for controls of the wrong kind, or that cannot be together."""
        for name in ("template", "regex", "draft"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                raise RequestError(f"{name} must be text, got {getattr(self, name)!r:.80}")
        if self.json_schema is not None and not isinstance(self.json_schema, str | Mapping):
            raise RequestError(f"json_schema must be an object or its JSON, got {self.json_schema!r:.80}")
        if isinstance(self.banned, str) or not isinstance(self.banned, Sequence):
            raise RequestError(f"banned must be a list of texts and token ids, got {self.banned!r:.80}")
        for banned in self.banned:
            if not (_is_integer(banned) or (isinstance(banned, str) and banned)):
                raise RequestError(f"banned must be a list of texts and token ids, got {banned!r:.80} in it")
        for name, least in (("repetition_penalty", "more than 0"), ("noise", "in [0, 1]")):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if value is not None and not (is_number and (0 <= value <= 1 if name == "noise" else value > 0)):
                raise RequestError(f"{name} must be a number {least}, got {value!r:.80}")
        if self.repetition_penalty is None:
            raise RequestError("repetition_penalty must be a number more than 0, got None")
        if self.noise is not None and self.draft is None:
            raise RequestError("noise is the level to which a draft is noised; give a draft with it")
        if self.draft is not None and self.template is not None:
            raise RequestError("a template says where everything stands, which leaves no place for a draft; give one")
        if self.regex is not None and self.json_schema is not None:
            raise RequestError("give one of regex and json_schema, not both")
        held = next((name for name in ("template", "regex", "json_schema") if getattr(self, name) is not None), None)
        if held is not None and self.thinking:
            raise RequestError(f"{held} says the form of the whole response and leaves no place for thinking; give one")


@dataclass(frozen=True)
class Result:
    """The answer to a request.

    `tokens` ends with the first eos if there is one; `text` leaves special tokens out, and the `reasoning` before the
    answer, which stands apart; `steps` are the denoising steps of each canvas; `finish_reason` is "eos", "length",
    "stop", "cancelled" or, with the reason in `error`, "error". `logprobs`, where asked for, are those of `tokens` by
    next-token prediction, in nats; with `best_of`, `draw` says which of the answers this is, from 0. `tool_calls` are
    the calls in the response as messages have them, which its text leaves out.
    """

    id: str | int
    text: str
    tokens: list[int]
    finish_reason: str
    steps: list[int]
    error: str | None = None
    reasoning: str | None = None
    logprobs: list[float] | None = None
    draw: int | None = None
    tool_calls: list[dict[str, Any]] | None = None

    @property
    def score(self) -> float | None:
        """The mean log-probability per token, in nats; None where it was not asked for."""
        return None if self.logprobs is None else sum(self.logprobs) / max(1, len(self.logprobs))

    @classmethod
    def failed(cls, id: str | int, error: object) -> Result:
        """The answer to what could not be answered."""
        return cls(id, "", [], "error", [], error=str(error))

    def to_record(self) -> dict[str, Any]:
        """The fields of an output line."""
        names = ("id", "text", "tokens", "finish_reason", "steps")
        there = {name: getattr(self, name) for name in ("reasoning", "tool_calls", *SCORES, "error")}
        return {name: getattr(self, name) for name in names} | {k: v for k, v in there.items() if v is not None}


Prompt = str | Sequence[Message] | Request


def as_request(prompt: Prompt, place: int) -> Request:
    """A prompt in any accepted form as a request; its id is its place in the list unless it brings one."""
    if isinstance(prompt, Request):
        return prompt
    if isinstance(prompt, str):
        return Request(place, prompt=prompt)
    return Request(place, messages=prompt)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
