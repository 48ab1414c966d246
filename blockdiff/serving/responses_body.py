"""The body of `POST /v1/responses`, and its conversion to a chat: messages, tools, and the form of the answer.

The items of its input are a history. Only the fields of an item that concern the model are read, because clients send
items back as they received them, with ids, states and notes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MaxLen
from pydantic import Field

from blockdiff.serving.bodies import checked_body
from blockdiff.serving.protocol import (
    MOST_MESSAGES,
    MOST_TEXTS,
    NEUTRAL,
    Body,
    ChatRequest,
    Items,
    SampledBody,
    Short,
)
from blockdiff.serving.refusals import Refused

PATH = "/v1/responses"
TEXTS = ("input_text", "output_text", "text")  # types of parts with a text
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"


class TextFormat(Body):
    """The form of an answer: text, any JSON object, or JSON of a given schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Short | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextOptions(Body):
    """The options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Body):
    """The options of reasoning. summary: any value asks for all the reasoning as a summary.

    effort: as `reasoning_effort` of chats. The other fields have no effect.
    """

    effort: Short | None = None
    summary: Short | None = None
    generate_summary: Short | None = None
    context: Short | None = None
    mode: Literal["standard"] | None = None


class FunctionChoice(Body):
    """The choice of one function that must be called."""

    type: Literal["function"]
    name: Short


class Obfuscation(Body):
    """The options of a stream."""

    include_obfuscation: bool = False  # would hide the lengths of deltas; has no effect here


class ResponsesRequest(SampledBody):
    """The body of `POST /v1/responses`."""

    neutral: ClassVar = {
        **NEUTRAL,
        "background": (False,),
        "truncation": ("disabled",),
        "context_management": ([],),
        **dict.fromkeys(("previous_response_id", "conversation", "prompt"), ()),
    }

    input: str | Annotated[Items[dict[str, Any]], MaxLen(MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    max_tool_calls: int | None = None  # limits hosted tools, of which there are none
    tools: Annotated[Items[dict[str, Any]], MaxLen(MOST_TEXTS)] = Field([])
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    include: Annotated[Items[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]], MaxLen(10)] = (
        Field([])
    )
    top_logprobs: int = Field(0, ge=0, le=20)
    metadata: dict[str, Any] = Field({})
    stream_options: Obfuscation | None = None
    chat_template_kwargs: dict[str, Any] = Field({})  # beyond the protocol

    @property
    def asks_for_logprobs(self) -> bool:
        """True if the body asks for the log-probabilities of the answer."""
        return LOGPROBS in self.include or self.top_logprobs > 0


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """Convert a body to the equal body of a chat. Raises Refused for items and tools that chats do not have."""
    fields = {name: getattr(body, name) for name in SampledBody.model_fields}
    fields |= dict(
        messages=messages_of(body),
        max_completion_tokens=body.max_output_tokens,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)],
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort,
        logprobs=body.asks_for_logprobs,
        top_logprobs=body.top_logprobs,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    if isinstance(body.tool_choice, FunctionChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    if (form := body.text.format) is not None:
        fields["response_format"] = {"type": form.type}
        if form.schema_ is not None:
            fields["response_format"]["json_schema"] = {"name": form.name or "", "schema": form.schema_}
        if (form.type == "json_schema") != (form.schema_ is not None):
            raise Refused("text.format: schema goes with type json_schema, and with no other", param="text.format")
    return checked_body(fields, ChatRequest, PATH)


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Convert instructions and input to the messages of a chat.

    Reasoning, a text and the calls after it become one message of the assistant. Reasoning without a text or call of
    the assistant after it is left out.
    """
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*system, {"role": "user", "content": body.input}]
    return [*system, *items_as_messages(body.input)]


def items_as_messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert input items to messages. Raises Refused, with the item's index, for one that cannot be read."""
    messages = list[dict[str, Any]]()
    thoughts, called = list[str](), set[str]()
    for index, item in enumerate(items):
        name = f"input[{index}]"
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "reasoning":
            thoughts += _thoughts(item, name)
            continue
        if kind == "message" and item.get("role") == "assistant":
            turn = _turn(messages, thoughts)
            turn["content"] += _text(item.get("content"), f"{name}.content")
        elif kind == "message":
            messages.append({"role": _string(item, "role", name), "content": _content(item, name)})
        elif kind == "function_call":
            function = {"name": _string(item, "name", name), "arguments": _string(item, "arguments", name)}
            called.add(id := _string(item, "call_id", name))
            turn = _turn(messages, thoughts, is_call=True)
            turn.setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})
        elif kind == "function_call_output":
            if (id := _string(item, "call_id", name)) not in called:
                raise Refused(f"{name}.call_id: no function_call before it has the call_id {id!r:.80}", param=name)
            content = _text(item.get("output"), f"{name}.output")
            messages.append({"role": "tool", "tool_call_id": id, "content": content})
        elif kind == "item_reference":
            words = "refers to an item by its id, and this server keeps none; send the item itself (store: false)"
            raise Refused(f"{name} {words}", param=name)
        else:
            words = "takes messages, function calls with their outputs, and reasoning"
            raise Refused(f"{name} is {str(kind)!r:.60}; this server {words}", param=name)
        thoughts = []
    return messages


def _turn(messages: list[dict[str, Any]], thoughts: list[str], is_call: bool = False) -> dict[str, Any]:
    """Return the assistant's message that a text or a call belongs to: the last message, or a new one after it.

    A text begins a new message, unless the last message is the assistant's and has calls, whose outputs follow the
    text. thoughts: reasoning to add to the message.
    """
    if not messages or messages[-1]["role"] != "assistant" or not (is_call or "tool_calls" in messages[-1]):
        messages.append({"role": "assistant", "content": ""})
    turn = messages[-1]
    if thoughts:
        turn["reasoning"] = "\n".join([*([turn["reasoning"]] if "reasoning" in turn else []), *thoughts])
    return turn


def _thoughts(item: Mapping[str, Any], name: str) -> list[str]:
    """Return the texts of a reasoning item, else those of its summaries; [] if it has neither."""
    for field in ("content", "summary"):
        if parts := item.get(field):
            entries = parts if isinstance(parts, list) else [parts]
            return [_string(part, "text", f"{name}.{field}[{index}]") for index, part in enumerate(entries)]
    return []


def _content(item: Mapping[str, Any], name: str) -> str | list[dict[str, Any]]:
    """Return the content of a message: its text, or a list of parts if it has images. name: of the item, for errors."""
    content = item.get("content")
    if not isinstance(content, list) or not any(_type(part) == "input_image" for part in content):
        return _text(content, f"{name}.content")
    parts = []
    for index, part in enumerate(content):
        where = f"{name}.content[{index}]"
        if _type(part) != "input_image":
            parts.append({"type": "text", "text": _text([part], f"{name}.content", index)})
            continue
        url = part.get("image_url")
        if not isinstance(url, str) or not url.startswith("data:"):
            words = "is no data URI, and no address or file is fetched; write data:image/png;base64,..."
            raise Refused(f"{where}.image_url {words}", param=where)
        parts.append({"type": "image_url", "image_url": url})
    return parts


def _text(content: Any, name: str, first: int = 0) -> str:
    """Return a text, or the joined texts of parts; "" for None. first: the index of the first part, for errors."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content if isinstance(content, list) else [content], first):
        where = f"{name}[{index}]"
        if _type(part) not in (*TEXTS, "refusal"):
            words = "only parts of text can stand there, and images in messages of a user"
            raise Refused(f"{where} is {str(_type(part))!r:.60}; {words}", param=where)
        texts.append(_string(part, "refusal" if part["type"] == "refusal" else "text", where))
    return "".join(texts)


def _type(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def _string(value: Any, key: str, name: str) -> str:
    text = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(text, str):
        raise Refused(f"{name}.{key} is not there or no text; add it", param=name)
    return text


def _tool(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Convert the declaration of a function to the form of chats. Raises Refused for a tool that is no function."""
    if _type(tool) != "function":
        words = "this server runs no tools; declare functions, which the client calls"
        raise Refused(f"{name} is {str(_type(tool))!r:.60}; {words}", param=name)
    return {
        "type": "function",
        "function": {key: each for key, each in tool.items() if key != "type" and each is not None},
    }
