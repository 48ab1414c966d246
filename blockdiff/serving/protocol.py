"""The requests of OpenAI's protocol, with this server's additions under the names of `blockdiff.Request`.

Every field is honoured, ignored because it changes no answer, or refused by name.
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
# Fields that this server does not support, with the values that ask for nothing; others are refused.
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
INSTEAD = {  # the field to use in place of an unsupported one, for messages
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
    """A JSON object of a request. Unknown fields and values of other types are refused; nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _first_unknown(cls, body: Any) -> Any:
        """Drop all unknown fields except the first, for which pydantic reports the error."""
        if not isinstance(body, dict):
            return body
        names = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in body if name not in names), None)
        return {name: value for name, value in body.items() if name in names or name == unknown}


class StreamOptions(Body):
    """The options of a stream. include_usage: its last chunk has the usage."""

    include_usage: bool = False
    include_obfuscation: bool = False  # would hide the lengths of chunks; has no effect here


def _served(name: str, kind: Any) -> tuple[Any, Any]:
    """Return pydantic's (type, default or Field) of a body's field for the option `name` of a request.

    kind: the type of the option in `RequestOptions`. A field whose command-line option names a file is a JSON object.
    """
    default = getattr(RequestOptions, name)
    if OPTIONS[name].rule.kind is Sequence:
        return Annotated[Items[get_args(kind)[0]], MaxLen(MOST_TEXTS)], []  # type: ignore[misc]
    if OPTIONS[name].is_file:
        kind = dict[str, Any] | None
    return kind, Field(default, ge=OPTIONS[name].least)


# The fields of `RequestOptions` that the server accepts, under their names in the protocol.
ServedOptions: Any = create_model(
    "ServedOptions",
    __base__=Body,
    **{served: _served(name, get_type_hints(RequestOptions)[name]) for name, served in SERVED.items()},  # type: ignore[call-overload]
)


class SampledBody(ServedOptions):
    """The fields that all bodies for generated answers share; `ServedOptions` adds the options of a request.

    neutral: unsupported fields with the values that ask for nothing, which are accepted.
    """

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
    def _without_neutral(cls, body: Any) -> Any:
        """Drop nulls, fields that change no answer, and neutral values. Raises ValueError for unsupported values."""
        if not isinstance(body, dict):
            return body
        fields = {}
        for name, value in body.items():
            if value is None or (name in INERT and name not in cls.model_fields):
                continue
            if name in cls.neutral and name not in cls.model_fields:
                if value in cls.neutral[name]:
                    continue
                instead = f"; use {INSTEAD[name]}" if name in INSTEAD else "; leave it out"
                raise ValueError(f"{name} {value!r:.60} is not supported by this server{instead}")
            fields[name] = value
        return fields

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts, () if none are given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class GenerationBody(SampledBody):
    """The fields that chats and completions share."""

    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    stream_options: StreamOptions | None = None
    stream_frames: bool = False  # beyond the protocol


class JsonSchemaFormat(Body):
    """A JSON schema with a name."""

    name: Short = ""
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """The form of an answer: text, any JSON object, or JSON of a given schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class NamedFunction(Body):
    """A function, by its name."""

    name: Short


class NamedChoice(Body):
    """The choice of one function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationBody):
    """The body of `POST /v1/chat/completions`. `data.messages` checks messages and tools, as it does training rows."""

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
    """The body of `POST /v1/completions`. prompt: a text, token ids, or a list of either, to continue."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False


def _few(choices: Any) -> Any:
    """Return the choices unchanged. Raises ValueError for over MOST_TEXTS holes, before pydantic reads each."""
    if isinstance(choices, dict) and len(choices) > MOST_TEXTS:
        raise ValueError(f"choices has {len(choices)} holes, and {MOST_TEXTS} are the most; give fewer")
    return choices


class ReadRequest(Body):
    """The body of `POST /v1/read`: a prompt or messages, and a template with named holes.

    choices: the texts to choose from, by hole; a free hole has none.
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
