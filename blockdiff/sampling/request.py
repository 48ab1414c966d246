"""What is asked of a sampler, what it answers, and how a request becomes prompt tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blockdiff.data.messages import BadRow, checked_messages, checked_tools
from blockdiff.errors import RequestError
from blockdiff.seeding import child_seed
from blockdiff.time_limit import TEMPLATE_SECONDS, time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Request:
    """One prompt, given in exactly one of three ways.

    `prompt` is raw text (bos is put before it), `messages` a conversation for the chat template, `tokens` the
    prompt's ids as they are. Without `seed` it follows from the seed of the call and `id`. `tools` are declarations
    of functions that the conversation may call: {"type": "function", "function": {name, description, parameters}}.
    """

    id: str | int
    prompt: str | None = None
    messages: Sequence[Message] | None = None
    tokens: Sequence[int] | None = None
    seed: int | None = None
    tools: Sequence[Mapping[str, Any]] | None = None

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
        if self.messages is not None:
            _conversation(self)


@dataclass(frozen=True)
class Result:
    """The answer to a request.

    `tokens` ends with the first eos if there is one; `text` leaves special tokens out; `steps` are the
    denoising steps of each canvas; `finish_reason` is "eos", "length" or, with the reason in `error`, "error".
    """

    id: str | int
    text: str
    tokens: list[int]
    finish_reason: str
    steps: list[int]
    error: str | None = None

    @classmethod
    def failed(cls, id: str | int, error: object) -> Result:
        """The answer to what could not be answered."""
        return cls(id, "", [], "error", [], error=str(error))

    def to_record(self) -> dict[str, Any]:
        """The fields of an output line."""
        names = ("id", "text", "tokens", "finish_reason", "steps", "error")
        return {name: getattr(self, name) for name in names if name != "error" or self.error is not None}


@dataclass
class Pending:
    """A request that is being answered: its prompt tokens, its draws' seed, and the response so far.

    `error` says why it cannot be answered any further.
    """

    place: int
    id: str | int
    seed: int
    prompt: str
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    def commit(self, tokens: list[int], steps: int, eos_ids: Sequence[int], is_last: bool) -> int:
        """Add a canvas to the response up to its first eos, which ends it; returns how many tokens that is."""
        end = next((place + 1 for place, token in enumerate(tokens) if token in eos_ids), None)
        self.finish_reason = "eos" if end is not None else "length" if is_last else None
        kept = len(tokens) if end is None else end
        self.tokens += tokens[:kept]
        self.steps.append(steps)
        return kept


Prompt = str | Sequence[Message] | Request


def as_request(prompt: Prompt, place: int) -> Request:
    """A prompt in any accepted form as a request; its id is its place in the list unless it brings one."""
    if isinstance(prompt, Request):
        return prompt
    if isinstance(prompt, str):
        return Request(place, prompt=prompt)
    return Request(place, messages=prompt)


def tokenised(
    request: Request, place: int, seed: int, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> Pending:
    """A request with the tokens of its prompt, not yet answered; RequestError says what is wrong with it."""
    request.check()
    if request.tokens is not None:
        text, tokens = "", list(request.tokens)
    elif tokenizer is None:
        raise RequestError("a prompt in words needs a tokenizer, and the sampler has none")
    elif request.messages is not None:
        text = _chat(request, tokenizer)
        tokens = _tokens(text, tokenizer)
    else:
        text = str(request.prompt)
        tokens, bos = _tokens(text, tokenizer), tokenizer.bos_token_id
        if bos is not None and tokens[:1] != [bos]:
            tokens = [bos, *tokens]
    if not tokens:
        raise RequestError("the prompt is empty")
    outside = [token for token in tokens if not _is_integer(token) or not 0 <= token < vocab_size]
    if outside:
        raise RequestError(f"token {outside[0]!r} is not one of the model's {vocab_size} ids")
    own_seed = child_seed(seed, request.id) if request.seed is None else request.seed
    return Pending(place, request.id, own_seed, text, tokens)


def _conversation(request: Request) -> tuple[list[Message], list[Message] | None]:
    """The messages and tools of a request in the form that chat templates read; RequestError says what is wrong."""
    try:
        messages = checked_messages(request.messages, "messages")
        tools = checked_tools(request.tools)
    except BadRow as error:
        raise RequestError(str(error)) from None
    if not messages:
        raise RequestError("messages must be a list of {role, content} objects with at least one entry")
    if messages[-1]["role"] == "assistant":
        raise RequestError("the last message is the assistant's, so nothing is left to answer; leave it out")
    return list(messages), None if tools is None else list(tools)


def _chat(request: Request, tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        raise RequestError("the tokenizer has no chat template; give a raw prompt instead of messages")
    messages, tools = _conversation(request)
    options: dict[str, Any] = {"tools": tools} if tools else {}
    try:
        with time_limit(TEMPLATE_SECONDS):
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))
    except Exception as error:  # a template is somebody's program: it may raise anything
        raise RequestError(f"the chat template refuses these messages: {str(error) or type(error).__name__}") from error


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # tokenizers raises plain Exceptions, for example on a character it lacks
        raise RequestError(f"the prompt cannot be tokenised: {error}") from error


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
