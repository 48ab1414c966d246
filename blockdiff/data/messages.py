"""Messages of a conversation: the forms in files (chat, ShareGPT, OpenAI's tools) become that of chat templates.

Functions raise BadRow with the reason for messages that have none of these forms.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from blockdiff.data.spellings import (
    ANSWER_KEYS,
    CALLERS,
    MESSAGE_KEYS,
    REASONING_KEYS,
    ROLES,
    SPEAKERS,
    calls_of,
    declared_function,
    is_learnt,
    without_blocks,
)
from blockdiff.data.strict_json import BadRow, from_json, type_in_words

THOUGHT = re.compile(r"\s*<think>\n*(.*?)\n*</think>\n*", re.DOTALL)  # reasoning at the beginning of a content
OF_ASSISTANT = (*REASONING_KEYS, "tool_calls")

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://|(file|blob):", re.IGNORECASE)
DATA_URI = re.compile(r"data:image/[^,;]*;base64,", re.IGNORECASE)

Message = dict[str, Any]
Part = dict[str, Any]
# The path of an image, the bytes of its file, or an `ImageInput` of another image processor.
ImageSource = Any


def checked_messages(
    value: Any, name: str, is_prompt: bool = False, unread: set[str] | None = None
) -> tuple[Message, ...]:
    """Check the messages of a conversation, a list or a string with that list as JSON. See `named_messages`."""
    return in_turn(named_messages(value, name, is_prompt, unread))


def named_messages(
    value: Any, name: str, is_prompt: bool = False, unread: set[str] | None = None
) -> list[tuple[str, Message]]:
    """Check the messages of a list. Returns each with its name, such as "messages[2]".

    A message that its author excludes from learning gets `is_learnt` False.
    is_prompt: the messages are to be answered, so assistant messages may be empty.
    unread: a set to which keys that nothing reads are added.
    """
    value = from_json(value, name, "[")
    if not isinstance(value, list | tuple):
        raise BadRow(f"{name} is {type_in_words(value)}; make it a list of objects with role and content")
    lists = [_messages(each, f"{name}[{index}]", is_prompt, unread) for index, each in enumerate(value)]
    return [(f"{name}[{index}]", message) for index, messages in enumerate(lists) for message in messages]


def in_turn(named: Sequence[tuple[str, Message]]) -> tuple[Message, ...]:
    """Join named messages to a conversation: merge tool calls into the turn before, and match answers to calls."""
    messages: list[Message] = []
    calls: list[Message] | None = None  # calls without an answer; None if the turn before has no calls
    for name, message in named:
        before = messages[-1] if messages else {}
        is_same_turn = message.pop("joins", False) and before.get("role") == "assistant"
        if is_same_turn and before.get("is_learnt") == message.get("is_learnt"):
            before["tool_calls"] = [*before.get("tool_calls", ()), *message["tool_calls"]]
            calls = list(before["tool_calls"])
            continue
        if message["role"] == "system" and messages:
            raise BadRow(f"{name} has role system; only the first message can")
        if message["role"] != "tool":
            calls = list(message["tool_calls"]) if message.get("tool_calls") else None
        elif calls is not None:
            _answer(message, calls, name)
        messages.append(message)
    return tuple(messages)


def checked_tools(value: Any) -> tuple[Message, ...] | None:
    """Return declarations of tools in the form {"type": "function", "function": {...}}; None if there are none.

    One in that form keeps its keys and their order, so that a template writes it as elsewhere.
    """
    value = from_json(value, "tools", "[")
    if value is None or value in ([], (), ""):
        return None
    if not isinstance(value, list | tuple):
        raise BadRow(f"tools is {type_in_words(value)}; make it a list of declarations of functions")
    tools = []
    for index, each in enumerate(value):
        tool = from_json(each, f"tools[{index}]", "{")
        declared = declared_function(tool) if isinstance(tool, Mapping) else {}
        function = declared.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRow(f"tools[{index}] declares no function; write {{name, description, parameters}}")
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise BadRow(f"tools[{index}].parameters is {type_in_words(function['parameters'])}; write a JSON schema")
        check_texts(tool, f"tools[{index}]")
        tools.append(dict(declared))
    return tuple(tools)


def with_text_arguments(message: Message) -> Message:
    """Convert the arguments of a message's calls to JSON text."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls} if calls else message


def with_thought_apart(message: Message) -> Message:
    """Move reasoning between <think> and </think> at the beginning of a message's content to its `reasoning`."""
    content = message["content"]
    match = THOUGHT.match(content) if isinstance(content, str) and "reasoning" not in message else None
    if match is None or message["role"] != "assistant" or not content[match.end() :].strip():
        return message
    return {**message, "reasoning": match[1], "content": content[match.end() :]}


def checked_content(value: Any, name: str) -> str | list[Part]:
    """Check a content, a text or a list of parts. Returns one text, or a list of parts if one is an image."""
    if not isinstance(value, list):
        return checked_text(value, name)
    parts = [_part(part, f"{name}[{index}]") for index, part in enumerate(value)]
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _part(value: Any, name: str) -> Part:
    kind = value.get("type") if isinstance(value, Mapping) else type_in_words(value)
    if kind == "text":
        return {"type": "text", "text": checked_text(value.get("text"), f"{name}.text")}
    if kind == "image":
        image, source = value.get("image"), value.get("source")
        if image is None and isinstance(source, Mapping) and source.get("type") == "base64":  # Anthropic's
            image = f"data:{source.get('media_type')};base64,{source.get('data')}"
        if image is None and (other := next((key for key in ("path", "url", "base64") if value.get(key)), None)):
            raise BadRow(f"{name} has its image as {other!r}; write it as 'image'")
        return {"type": "image"} if image is None else {"type": "image", "image": image_source(image, f"{name}.image")}
    if kind == "image_url":
        url = value.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        if not isinstance(url, str) or not url.startswith("data:"):
            raise BadRow(f"{name}.image_url is no data URI, and URLs are not fetched; write data:image/png;base64,...")
        return {"type": "image", "image": image_source(url, f"{name}.image_url")}
    raise BadRow(f"{name} is {kind!r}; only parts of text and images are supported")


def image_source(value: Any, name: str) -> ImageSource:
    """Return an image's path, or its file's bytes from a data URI, from `datasets`, or encoded from a PIL image."""
    from blockdiff.images import ImageInput

    if isinstance(value, ImageInput):
        return value
    if isinstance(value, Mapping):  # as Arrow files and `datasets` have images
        value = value.get("bytes") or value.get("path")
    if isinstance(value, PathLike):
        value = str(value)
    if hasattr(value, "convert") and hasattr(value, "save"):
        value = _png(value, name)
    if isinstance(value, str) and value.startswith("data:"):
        value = _of_uri(value, name)
    if not isinstance(value, str | bytes):
        raise BadRow(f"{name} is {type_in_words(value)}; write the path of an image, a data URI, or a file's bytes")
    if not value:
        raise BadRow(f"{name} is empty; write the path of an image, or leave it out")
    if isinstance(value, str) and ADDRESS.match(checked_text(value, name)):
        raise BadRow(f"{name} is the URL {value!r:.80}, and URLs are not fetched; save the image as a file")
    return value


def _of_uri(uri: str, name: str) -> bytes:
    header = DATA_URI.match(uri)
    if header is None:
        raise BadRow(f"{name} is the data URI {uri!r:.40}, not an image's; write data:image/png;base64,...")
    try:
        return base64.b64decode(uri[header.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRow(f"{name} is a data URI whose base64 is broken ({error}); write it again") from None


def _png(image: Any, name: str) -> bytes:
    """Encode a PIL image as PNG, upright."""
    from PIL import ImageOps

    file = io.BytesIO()
    try:
        upright = ImageOps.exif_transpose(image)
        (upright if upright.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else upright.convert("RGB")).save(file, "PNG")
    except Exception as error:  # a lazily opened file may be anything
        raise BadRow(f"{name} is an image that PIL cannot read ({error}); replace it") from None
    return file.getvalue()


def checked_text(value: Any, name: str) -> str:
    """Return a string. Raises BadRow for other values, and for strings that UTF-8 cannot encode."""
    if not isinstance(value, str):
        raise BadRow(f"{name} is {type_in_words(value)}; make it a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow(f"{name} has half of a surrogate pair (\\ud800-\\udfff); repair the escape") from None
    return value


def check_texts(value: Any, name: str) -> None:
    """Raise BadRow unless UTF-8 can encode all texts in a JSON value."""
    if isinstance(value, str):
        checked_text(value, name)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            check_texts(key, name)
            check_texts(each, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for each in value:
            check_texts(each, name)


def _messages(value: Any, name: str, is_prompt: bool, unread: set[str] | None) -> list[Message]:
    """Convert one message of a row to messages: several if its parts have the answers of tools."""
    value = from_json(value, name, "{")
    if not isinstance(value, Mapping):
        raise BadRow(f"{name} is {type_in_words(value)}; make it an object with role and content")
    messages = [_message(each, name, is_prompt) for each in without_blocks(value, name)]
    if unread is not None:
        read = ANSWER_KEYS if messages[0]["role"] == "tool" else MESSAGE_KEYS
        unread |= {f"messages.{key}" for key, each in value.items() if key not in read and each is not None}
    return messages


def _message(value: Mapping[str, Any], name: str, is_prompt: bool) -> Message:
    is_sharegpt = "from" in value and "role" not in value
    role_key, content_key = ("from", "value") if is_sharegpt else ("role", "content")
    if role_key not in value:
        raise BadRow(f"{name} has no {role_key}; add it")
    role, roles = value[role_key], {**ROLES, **SPEAKERS} if is_sharegpt else ROLES
    if not isinstance(role, str) or role not in roles:
        raise BadRow(f"{name} has {'role' if not is_sharegpt else 'from'} {role!r}; use one of {', '.join(roles)}")
    message: Message = {"role": roles[role]}
    content = value.get(content_key)
    calls = calls_of(value, role, content, name)
    if content_key not in value and not (content_key == "content" and calls):
        raise BadRow(f"{name} has no {content_key}; add it")
    if role in CALLERS:
        content, message["joins"] = "", True
    if message["role"] == "tool" and isinstance(content, Mapping):
        check_texts(content, f"{name}.{content_key}")
        message["content"] = content
    else:
        message["content"] = "" if content is None and calls else checked_content(content, f"{name}.{content_key}")
        if isinstance(message["content"], list) and message["role"] != "user":
            raise BadRow(f"{name} has an image but role {role}; only a user's message can have images")
    if message["role"] != "assistant":
        key = next((key for key in REASONING_KEYS if value.get(key)), "tool_calls" if calls else "")
        if key:
            raise BadRow(f"{name} has {key} but role {role}; only an assistant message can have it")
    for key in REASONING_KEYS:
        if value.get(key) is not None and message["role"] == "assistant":
            message["reasoning"] = checked_text(value[key], f"{name}.{key}")
    if calls:
        message["tool_calls"] = _calls(calls, f"{name}.tool_calls", is_prompt)
    elif message["role"] == "assistant" and not is_prompt and not message["content"].strip():
        raise BadRow(f"{name}.{content_key} of the assistant is empty; fill it or remove the message")
    if message["role"] == "tool":
        message.update({key: value[key] for key in ("name", "tool_call_id") if value.get(key) is not None})
    if value.get("tool_responses"):
        raise BadRow(f"{name} has tool_responses, which are not supported; write messages of role tool after it")
    if not is_prompt and not is_learnt(value, message["role"], name):
        message |= {"is_learnt": False} if message["role"] == "assistant" else {}
    return message


def _calls(value: Any, name: str, is_prompt: bool) -> list[Message]:
    """Check the calls of a message. In a prompt, arguments with incomplete JSON stay text."""
    if not isinstance(value, list):
        raise BadRow(f"{name} is {type_in_words(value)}; make it a list of calls")
    calls = []
    for index, call in enumerate(value):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRow(f"{name}[{index}] calls no function; write {{name, arguments}}")
        check_texts(function["name"], f"{name}[{index}].name")
        arguments = _arguments(function.get("arguments"), f"{name}[{index}].arguments", is_prompt)
        checked = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        calls.append({**({"id": call["id"]} if call.get("id") is not None else {}), **checked})
    return calls


def _arguments(value: Any, name: str, is_prompt: bool) -> dict[str, Any] | str:
    """The arguments of a call. Null, an empty text and the text "null" mean that there are none."""
    if not value or (isinstance(value, str) and value.strip() in ("", "null")):
        return {}
    check_texts(value, name)
    try:
        arguments = from_json(value, name, "{")
    except BadRow:
        if is_prompt:
            return str(value)
        raise
    if not isinstance(arguments, Mapping):
        raise BadRow(f"{name} is {type_in_words(arguments)}; make it an object")
    check_texts(arguments, name)
    return dict(arguments)


def _answer(message: Message, calls: list[Message], name: str) -> None:
    """Set the name of a tool's answer, which templates write, and remove its call from `calls`.

    The call is that of the same id, or else of the same name, or else the first.
    """
    if not calls:
        raise BadRow(f"{name} has role tool, but every call before it has its answer; add the call or remove it")
    call_id = message.get("tool_call_id")
    answered = next((call for call in calls if call_id is not None and call.get("id") == call_id), None)
    if answered is None and call_id is not None and any(call.get("id") is not None for call in calls):
        raise BadRow(f"{name} answers the call {call_id!r}, which the message before it does not have; correct it")
    if answered is None:
        named = [call for call in calls if call["function"]["name"] == message.get("name")]
        answered = named[0] if named else calls[0]
    if message.get("name") not in (None, answered["function"]["name"]):
        raise BadRow(f"{name} is of the tool {message['name']!r}, which is not called before it; correct it")
    message["name"] = answered["function"]["name"]
    calls.remove(answered)
