"""The answers of OpenAI's protocol."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class CachedTokens(BaseModel):
    """The tokens of a prompt that were encoded already."""

    cached_tokens: int = 0


class ReasoningTokens(BaseModel):
    """The tokens of answers that are reasoning."""

    reasoning_tokens: int = 0


class Usage(BaseModel):
    """Counts of tokens, of the `denoising_steps` of all canvases and of all model calls (`forwards`) of the answers."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: CachedTokens = CachedTokens()
    completion_tokens_details: ReasoningTokens = ReasoningTokens()
    denoising_steps: int = 0
    forwards: int = 0


class Function(BaseModel):
    """A call: the function's name, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a function; `index` is there in streams."""

    index: int | None = None
    id: str
    type: Literal["function"] = "function"
    function: Function


class Message(BaseModel):
    """The assistant's message, or in a stream what is new of it."""

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
    """A token of an answer, and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(BaseModel):
    """The log-probabilities of an answer's tokens, by next-token prediction."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """The log-probabilities of a completion's tokens, by next-token prediction."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int]


class Choice(BaseModel):
    """One answer, or in a stream what is new of it; `steps` are the denoising steps of each canvas."""

    index: int
    finish_reason: FinishReason | None = None
    steps: list[int] | None = None


class ChatChoice(Choice):
    """One answer of a chat."""

    message: Message
    logprobs: ChatLogprobs | None = None


class ChatDelta(Choice):
    """The news of one answer of a chat."""

    delta: Message
    logprobs: ChatLogprobs | None = None


class CompletionChoice(Choice):
    """One completion, or in a stream what is new of it."""

    text: str
    logprobs: CompletionLogprobs | None = None


class Frame(BaseModel):
    """A denoising step, position by position: the likeliest tokens and their texts, how unsure the model is (entropy in
    nats), which samples are kept, which tokens are given (pinned), and which stand as they were (stays).

    `is_committed`: this is the finished canvas after its last step, and the kept tokens are part of the answer.
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
    """The fields that all answers share."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: Usage | None = None


class Chunk(Answer):
    """An event of a stream; `frame` is there where it is a denoising step."""

    frame: Frame | None = None


class Model(BaseModel):
    """A model that can be asked."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "blockdiff"
    max_model_len: int | None = None


class Models(BaseModel):
    """The models that can be asked."""

    object: Literal["list"] = "list"
    data: list[Model]
