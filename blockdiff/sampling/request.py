"""What is asked of a sampler, what it answers, and how a request becomes prompt tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blockdiff.errors import RequestError
from blockdiff.seeding import child_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]


@dataclass(frozen=True)
class Request:
    """One prompt, given in exactly one of three ways.

    `prompt` is raw text (bos is put before it), `messages` a conversation for the chat template, `tokens` the
    prompt's ids as they are. Without `seed` it follows from the seed of the call and `id`.
    """

    id: str | int
    prompt: str | None = None
    messages: Sequence[Message] | None = None
    tokens: Sequence[int] | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Result:
    """The answer to a request.

    `tokens` ends with the first eos if there is one; `text` leaves special tokens out; `steps` are the
    denoising steps of each canvas; `finish_reason` is "eos", "length" or, with the reason in `error`,
    "error". `tokens_per_forward` counts like transformers: tokens other than pad per denoising step.
    """

    id: str | int
    text: str
    tokens: list[int]
    finish_reason: str
    steps: list[int]
    error: str | None = None
    tokens_per_forward: float = field(default=0.0, compare=False)

    def to_record(self) -> dict[str, Any]:
        """The fields of an output line."""
        record = {
            "id": self.id,
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "steps": self.steps,
        }
        return record if self.error is None else record | {"error": self.error}


@dataclass
class Row:
    """A request that is being answered: its prompt tokens, its draws' seed, and what it has so far."""

    place: int
    id: str | int
    seed: int
    prompt: str
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    finish_reason: str | None = None


Prompt = str | Sequence[Message] | Request


def as_request(prompt: Prompt, place: int) -> Request:
    """A prompt in any accepted form as a request; its id is its place in the list unless it brings one."""
    if isinstance(prompt, Request):
        return prompt
    if isinstance(prompt, str):
        return Request(place, prompt=prompt)
    return Request(place, messages=prompt)


def as_row(
    request: Request, place: int, seed: int, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> Row:
    """Tokenise a request; RequestError says what is wrong with it."""
    given = [name for name in ("prompt", "messages", "tokens") if getattr(request, name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"give exactly one of prompt, messages and tokens, got {' and '.join(given) or 'none'}"
        )
    if request.seed is not None and (isinstance(request.seed, bool) or not isinstance(request.seed, int)):
        raise RequestError(f"seed must be an integer, got {request.seed!r}")
    if request.tokens is not None:
        text, tokens = "", list(request.tokens)
    elif tokenizer is None:
        raise RequestError("a prompt in words needs a tokenizer, and the sampler has none")
    elif request.messages is not None:
        text, tokens = _chat(request.messages, tokenizer)
    else:
        text = str(request.prompt)
        tokens = _tokenise(text, tokenizer)
        bos = tokenizer.bos_token_id
        if bos is not None and tokens[:1] != [bos]:
            tokens = [bos, *tokens]
    if not tokens:
        raise RequestError("the prompt is empty")
    outside = [t for t in tokens if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < vocab_size]
    if outside:
        raise RequestError(f"token {outside[0]!r} is not one of the model's {vocab_size} ids")
    own_seed = child_seed(seed, request.id) if request.seed is None else request.seed
    return Row(place, request.id, own_seed, text, tokens)


def _chat(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a list of {role, content} objects with at least one entry")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"message {number} must be an object with role and content")
        if not isinstance(message.get("content"), str):
            raise RequestError(
                f"message {number}: content must be text; images and other parts are not supported"
            )
    if not tokenizer.chat_template:
        raise RequestError("the tokenizer has no chat template; give a raw prompt instead of messages")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is somebody's program: it may raise anything
        raise RequestError(f"the chat template refuses these messages: {error}") from error
    return str(text), _tokenise(str(text), tokenizer)


def _tokenise(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # tokenizers raises plain Exceptions, for example on a character it lacks
        raise RequestError(f"the prompt cannot be tokenised: {error}") from error
