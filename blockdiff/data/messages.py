"""Messages of a conversation in the forms in which files write them: chat, ShareGPT, tools as OpenAI has them.

Each comes out in one form, the one that chat templates read, or is refused with the reason.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from blockdiff.data.strict_json import DECODER

# What rows call the roles, and what they are called here.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
}
# Further names, in conversations of the ShareGPT form.
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant"}
REASONING_KEYS = ("reasoning", "reasoning_content")
OF_ASSISTANT = (*REASONING_KEYS, "tool_calls")

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://|(file|blob):", re.IGNORECASE)
DATA_URI = re.compile(r"data:image/[^,;]*;base64,", re.IGNORECASE)

Message = dict[str, Any]
Part = dict[str, Any]
# The path of an image, the bytes of its file, or an `ImageInput` that somebody else's processor has made.
ImageSource = Any


class BadRow(Exception):
    """The reason for refusing a row; the reader of the file adds the place."""


def checked_messages(value: Any, name: str, is_prompt: bool = False) -> tuple[Message, ...]:
    """The messages of a conversation: a list of them, or a string with that list as JSON.

    is_prompt: it is to be answered, not learnt, and may have empty messages of the assistant.
    """
    value = from_json(value, name, "[")
    if not isinstance(value, list | tuple):
        raise BadRow(f"{name} is {type_in_words(value)}; make it a list of objects with role and content")
    messages = tuple(_message(message, f"{name}[{index}]", is_prompt) for index, message in enumerate(value))
    calls: list[Message] = []
    for index, message in enumerate(messages):
        if message["role"] == "system" and index > 0:
            raise BadRow(f"{name}[{index}] has role system; only the first message can")
        if message["role"] == "tool":
            _answer(message, calls, f"{name}[{index}]")
        else:
            calls = list(message.get("tool_calls", ()))
    return messages


def checked_tools(value: Any) -> tuple[Message, ...] | None:
    """Declarations of tools in the form {"type": "function", "function": {...}}; None where there are none.

    One in that form stays as it is, keys and their order: a template writes what it writes elsewhere.
    """
    value = from_json(value, "tools", "[")
    if value is None or value in ([], (), ""):
        return None
    if not isinstance(value, list | tuple):
        raise BadRow(f"tools is {type_in_words(value)}; make it a list of declarations of functions")
    tools = []
    for index, tool in enumerate(from_json(each, f"tools[{index}]", "{") for index, each in enumerate(value)):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRow(f"tools[{index}] declares no function; write {{name, description, parameters}}")
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise BadRow(f"tools[{index}].parameters is {type_in_words(function['parameters'])}; write a JSON schema")
        check_texts(tool, f"tools[{index}]")
        tools.append(dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)})
    return tuple(tools)


def left_out_tool(text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Message] | None) -> str | None:
    """The name of a tool that is declared or called, but that a chat template left out of the text."""
    sources = (tools, *(message.get("tool_calls") for message in messages))
    names = [each["function"]["name"] for source in sources for each in source or ()]
    return next((name for name in names if name not in text), None)


def checked_content(value: Any, name: str) -> str | list[Part]:
    """Content is text, or a list of parts: it becomes one text, or a list of parts where there is an image."""
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
        image = value.get("image")
        if image is None and (other := next((key for key in ("path", "url", "base64") if value.get(key)), None)):
            raise BadRow(f"{name} has its image as {other!r}; write it as 'image'")
        return {"type": "image"} if image is None else {"type": "image", "image": image_source(image, f"{name}.image")}
    if kind == "image_url":
        url = value.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        if not isinstance(url, str) or not url.startswith("data:"):
            raise BadRow(f"{name}.image_url is no data URI, and no address is fetched; write data:image/png;base64,...")
        return {"type": "image", "image": image_source(url, f"{name}.image_url")}
    raise BadRow(f"{name} is {kind!r}; only parts of text and images are supported")


def image_source(value: Any, name: str) -> ImageSource:
    """The path of an image, or the bytes of its file: those of a data URI, of `datasets`, or made of PIL's image."""
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
        raise BadRow(f"{name} is {type_in_words(value)}; give the path of an image, a data URI, or the bytes of a file")
    if not value:
        raise BadRow(f"{name} is empty; give the path of an image, or leave it out")
    if isinstance(value, str) and ADDRESS.match(checked_text(value, name)):
        raise BadRow(f"{name} is the address {value!r:.80}, and no address is fetched; save the image as a file")
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
    """The bytes of a PNG file with the pixels of PIL's image, upright."""
    from PIL import ImageOps

    file = io.BytesIO()
    try:
        upright = ImageOps.exif_transpose(image)
        (upright if upright.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else upright.convert("RGB")).save(file, "PNG")
    except Exception as error:  # a lazily opened file may be anything
        raise BadRow(f"{name} is an image that PIL cannot read ({error}); make it anew") from None
    return file.getvalue()


def checked_text(value: Any, name: str) -> str:
    """A string that can be written as UTF-8."""
    if not isinstance(value, str):
        raise BadRow(f"{name} is {type_in_words(value)}; make it a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow(f"{name} has half of a surrogate pair (\\ud800-\\udfff); repair the escape") from None
    return value


def check_texts(value: Any, name: str) -> None:
    """Raise BadRow unless all texts in a JSON value can be written as UTF-8."""
    if isinstance(value, str):
        checked_text(value, name)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            check_texts(key, name)
            check_texts(each, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for each in value:
            check_texts(each, name)


def from_json(value: Any, name: str, opens: str) -> Any:
    """The JSON value in a string that begins with `opens` (a CSV file has no lists); any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(opens):
        return value
    try:
        return DECODER.decode(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{name} is a string that is not valid JSON ({error}); write JSON") from None


def type_in_words(value: Any) -> str:
    """The type of a JSON value, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    number = "a number" if isinstance(value, int | float) else type(value).__name__
    return names.get(type(value), number)


def _message(value: Any, name: str, is_prompt: bool) -> Message:
    value = from_json(value, name, "{")
    if not isinstance(value, Mapping):
        raise BadRow(f"{name} is {type_in_words(value)}; make it an object with role and content")
    is_sharegpt = "from" in value and "role" not in value
    role_key, content_key = ("from", "value") if is_sharegpt else ("role", "content")
    calls = None if is_sharegpt else value.get("tool_calls")
    for key in (role_key, content_key):
        if key not in value and not (key == "content" and calls):
            raise BadRow(f"{name} has no {key}; add it")
    role, roles = value[role_key], {**ROLES, **SPEAKERS} if is_sharegpt else ROLES
    if not isinstance(role, str) or role not in roles:
        raise BadRow(f"{name} has {'role' if not is_sharegpt else 'from'} {role!r}; use one of {', '.join(roles)}")
    message: Message = {"role": roles[role]}
    content = value.get(content_key)
    if message["role"] == "tool" and isinstance(content, Mapping):
        check_texts(content, f"{name}.{content_key}")
        message["content"] = content
    else:
        message["content"] = "" if content is None and calls else checked_content(content, f"{name}.{content_key}")
        if isinstance(message["content"], list) and message["role"] != "user":
            raise BadRow(f"{name} has an image but role {role}; only a user's message can have images")
    for key in OF_ASSISTANT:
        if value.get(key) and message["role"] != "assistant":
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
    return message


def _calls(value: Any, name: str, is_prompt: bool) -> list[Message]:
    """The calls of a message; of one in a prompt, arguments whose JSON is broken off stay the text they are."""
    if not isinstance(value, list):
        raise BadRow(f"{name} is {type_in_words(value)}; make it a list of calls")
    calls = []
    for index, call in enumerate(value):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRow(f"{name}[{index}] calls no function; write {{name, arguments}}")
        where = f"{name}[{index}].arguments"
        arguments, is_broken = function.get("arguments") or {}, False
        try:
            arguments = from_json(arguments, where, "{")
        except BadRow:
            if not (is_broken := is_prompt):
                raise
        if not (is_broken or isinstance(arguments, Mapping)):
            raise BadRow(f"{where} is {type_in_words(arguments)}; make it an object")
        check_texts(function["name"], f"{name}[{index}].name")
        check_texts(arguments, where)
        arguments = arguments if is_broken else dict(arguments)
        kept = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        calls.append({**({"id": call["id"]} if call.get("id") is not None else {}), **kept})
    return calls


def _answer(message: Message, calls: list[Message], name: str) -> None:
    """Give the answer of a tool the name of the tool, which chat templates write: by its call's id, or by its place."""
    if not calls:
        raise BadRow(f"{name} has role tool, but no call of a tool comes before it; add tool_calls or remove it")
    asked = message.get("tool_call_id")
    found = next((call for call in calls if asked is not None and call.get("id") == asked), None)
    if found is None and asked is not None and any(call.get("id") is not None for call in calls):
        raise BadRow(f"{name} answers the call {asked!r}, which the message before it does not have; correct it")
    if found is None:
        named = [call for call in calls if call["function"]["name"] == message.get("name")]
        found = named[0] if named else calls[0]
    if message.get("name") not in (None, found["function"]["name"]):
        raise BadRow(f"{name} is of the tool {message['name']!r}, which is not called before it; correct it")
    message["name"] = found["function"]["name"]
    calls.remove(found)
