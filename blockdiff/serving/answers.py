"""The answers of OpenAI's protocol: pydantic models of the JSON that the server sends."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class CachedTokens(BaseModel):
    """The number of prompt tokens whose encoding was cached."""

    cached_tokens: int = 0


class ReasoningTokens(BaseModel):
    """The number of tokens of answers that are reasoning."""

    reasoning_tokens: int = 0


class Usage(BaseModel):
    """Counts for all answers to a request: tokens, denoising steps of all canvases, and model calls (`forwards`)."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: CachedTokens = CachedTokens()
    completion_tokens_details: ReasoningTokens = ReasoningTokens()
    denoising_steps: int = 0
    forwards: int = 0


class Function(BaseModel):
    """The function of a tool call: its name, and the arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A tool call. index: its number in the answer, set in streams only."""

    index: int | None = None
    id: str
    type: Literal["function"] = "function"
    function: Function


class Message(BaseModel):
    """The assistant's message, or in a stream the new part of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None


class TopLogprob(BaseModel):
    """A token and its log-probability in nats."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    """A token of an answer, and the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(BaseModel):
    """The log-probabilities of an answer's tokens, by next-token prediction."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """The log-probabilities of a completion's tokens, by next-token prediction (None: a token with none before it).

    text_offset: the character at which each token's text begins.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int]


class Choice(BaseModel):
    """One answer, or in a stream the new part of it. steps: denoising steps of each canvas."""

    index: int
    finish_reason: FinishReason | None = None
    steps: list[int] | None = None


class ChatChoice(Choice):
    """One answer of a chat."""

    message: Message
    logprobs: ChatLogprobs | None = None


class ChatDelta(Choice):
    """The new part of one answer of a chat, in a stream."""

    delta: Message
    logprobs: ChatLogprobs | None = None


class CompletionChoice(Choice):
    """One completion, or in a stream the new part of it."""

    text: str
    logprobs: CompletionLogprobs | None = None


class Frame(BaseModel):
    """A denoising step of one canvas; every list has one entry per position.

    tokens, texts: the likeliest tokens; entropy: the model's uncertainty in nats; is_kept: the sample is kept for the
    next step; is_pinned: the token is given; stays: the token is left as it was. is_committed: this is the finished
    canvas after its last step, and the kept tokens are part of the answer.
    """

    index: int
    canvas: int
    step: int
    temperature: float | None = None
    tokens: list[int]
    texts: list[str]
    entropy: list[float] | None = None
    is_kept: list[bool]
    is_pinned: list[bool] | None = None
    stays: list[bool] | None = None
    is_committed: bool = False


class Answer(BaseModel):
    """The fields that answers of chats and completions share."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: Usage | None = None


class Chunk(Answer):
    """An event of a stream. frame: set if the event is a denoising step or a committed canvas."""

    frame: Frame | None = None


class Model(BaseModel):
    """The entry of `/v1/models` for the model or an adapter."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "blockdiff"
    max_model_len: int | None = None


class Models(BaseModel):
    """The answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]
