"""The requests of OpenAI's protocol, and what this server adds to them under the names of `blockdiff.Request`.

Every field is honoured, passed because it changes no answer, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

from annotated_types import MaxLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from blockdiff.request_options import MOST_STOP, MOST_STOPS, OPTIONS, SERVED, RequestOptions

# Fields that change no answer.
INERT = {"user", "store", "metadata", "service_tier", "safety_identifier"}
INERT |= {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
# Fields that are not honoured, with the values that ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    **dict.fromkeys(("audio", "prediction", "web_search_options", "moderation"), ()),
}
INSTEAD = {
    "frequency_penalty": "repetition_penalty",
    "presence_penalty": "repetition_penalty",
    "functions": "tools",
    "function_call": "tool_choice",
    "suffix": "template",
    "logit_bias": "banned",
    "previous_response_id": "input, with all items so far",
    "conversation": "input, with all items so far",
    "prompt": "instructions and input",
}


T = TypeVar("T")
# A list is refused at its first item of another type: the errors of a million items would take gigabytes.
Items = Annotated[list[T], Field(fail_fast=True)]
Short = Annotated[str, MaxLen(1000)]
Stop = Annotated[str, MaxLen(MOST_STOP)]
MOST_MESSAGES, MOST_TEXTS = 10_000, 1000


class Body(BaseModel):
    """An object whose fields are all known, and have the types that JSON says."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _first_unknown(cls, given: Any) -> Any:
        """Leave out all unknown fields but the first, which is refused."""
        if not isinstance(given, dict):
            return given
        names = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in given if name not in names), None)
        return {name: value for name, value in given.items() if name in names or name == unknown}


class StreamOptions(Body):
    """The options of a stream: whether its last chunk says the usage."""

    include_usage: bool = False
    include_obfuscation: bool = False  # which hides the lengths of chunks: changes no answer


def _served(name: str, kind: Any) -> tuple[Any, Any]:
    """The field of a body for an option of a request: its type in JSON, its default and its least value."""
    default = getattr(RequestOptions, name)
    if OPTIONS[name].rule.kind is Sequence:
        return Annotated[Items[get_args(kind)[0]], MaxLen(MOST_TEXTS)], []  # type: ignore[misc]
    if OPTIONS[name].is_file:
        kind = dict[str, Any] | None
    return kind, Field(default, ge=OPTIONS[name].least)


# The fields of `RequestOptions` that the server takes, under their names there.
ServedOptions: Any = create_model(
    "ServedOptions",
    __base__=Body,
    **{served: _served(name, get_type_hints(RequestOptions)[name]) for name, served in SERVED.items()},  # type: ignore[call-overload]
)


class SampledBody(ServedOptions):
    """The fields of all bodies that ask for answers; those of requests come with `ServedOptions`."""

    neutral: ClassVar = NEUTRAL

    model: Short | None = None
    seed: int | None = None
    stop: Stop | Annotated[Items[Stop], MaxLen(MOST_STOPS)] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool = False

    # beyond the protocol
    timeout: float | None = Field(None, gt=0)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    strategy: Short | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, given: Any) -> Any:
        """Leave out what says nothing: null, fields that change no answer, and neutral values of others."""
        if not isinstance(given, dict):
            return given
        kept = {}
        for name, value in given.items():
            if value is None or (name in INERT and name not in cls.model_fields):
                continue
            if name in cls.neutral and name not in cls.model_fields:
                if value in cls.neutral[name]:
                    continue
                instead = f"; use {INSTEAD[name]}" if name in INSTEAD else "; leave it out"
                raise ValueError(f"{name} {value!r:.60} is not supported by this server{instead}")
            kept[name] = value
        return kept

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class GenerationBody(SampledBody):
    """The fields that chats and completions share."""

    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    stream_options: StreamOptions | None = None
    stream_frames: bool = False  # beyond the protocol


class JsonSchemaFormat(Body):
    """A named schema."""

    name: Short = ""
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """The form of an answer: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class NamedFunction(Body):
    """The name of a function."""

    name: Short


class NamedChoice(Body):
    """The function that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationBody):
    """The body of `POST /v1/chat/completions`. Messages and tools are checked where rows of training are."""

    messages: Annotated[Items[dict[str, Any]], MaxLen(MOST_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Annotated[Items[dict[str, Any]], MaxLen(MOST_TEXTS)] = Field([])
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Short | None = None
    chat_template_kwargs: dict[str, Any] = Field({})
    add_generation_prompt: bool = True
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _agrees(self) -> ChatRequest:
        continues = bool(self.messages) and self.messages[-1].get("role") == "assistant"
        if self.continue_final_message not in (None, continues) or not (self.add_generation_prompt or continues):
            raise ValueError("continue_final_message: a last message of the assistant is continued, and no other is")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        form = self.response_format
        if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
            raise ValueError("response_format: json_schema goes with type json_schema, and with no other")
        if self.tool_choice not in ("none", "auto") and not self.tools:
            raise ValueError("tool_choice asks for a call, but tools declares no function")
        return self


class CompletionRequest(GenerationBody):
    """The body of `POST /v1/completions`: raw texts or tokens to continue."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False


def _few(choices: Any) -> Any:
    """The choices as they came; ValueError for more than any template has holes, before each of them is looked at."""
    if isinstance(choices, dict) and len(choices) > MOST_TEXTS:
        raise ValueError(f"choices has {len(choices)} holes, and {MOST_TEXTS} are the most; give fewer")
    return choices


class ReadRequest(Body):
    """The body of `POST /v1/read`: a prompt or messages, and a template with named holes.

    choices: those of each hole; a free one has none.
    """

    model: Short | None = None
    prompt: str | Items[int] | None = None
    messages: Annotated[Items[dict[str, Any]], MaxLen(MOST_MESSAGES)] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    template: str
    choices: Annotated[dict[str, Annotated[Items[str], MaxLen(MOST_TEXTS)]], BeforeValidator(_few)] = Field(
        default_factory=dict
    )
    steps: int = Field(1, ge=1)
    draws: int = Field(4, ge=1)
    seed: int = 0
    timeout: float | None = Field(None, gt=0)
