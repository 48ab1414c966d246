"""The messages of a body, with known fields only, and with bytes for images, so that nothing can open a path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockdiff.data.image_file import opened
from blockdiff.data.messages import BadRow, image_source
from blockdiff.errors import DataError, RequestError
from blockdiff.serving.limits import Limits
from blockdiff.serving.mapping import check_size

FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
EMPTY = ("refusal", "annotations", "audio", "function_call", "images")  # fields that may be there if they are empty
# Fields that front ends keep with the messages of a history; models do not see them.
READ_OVER = ("id", "timestamp", "reasoning_details", "provider_specific_fields")


def served_messages(messages: Sequence[Mapping[str, Any]], limits: Limits) -> list[dict[str, Any]]:
    """Return the messages with the bytes of their images in place of data URIs.

    All system messages are merged into one, the first: chat templates write no other. Raises RequestError for unknown
    fields, for parts of other types than `text` and `image_url`, for an image that is no data URI, and for too many
    images or pixels.
    """
    served = _one_system([_message(message, f"messages[{index}]") for index, message in enumerate(messages)])
    contents = (message["content"] for message in served if isinstance(message.get("content"), list))
    images = [part["image"] for content in contents for part in content if part["type"] == "image"]
    check_size("the images of messages", len(images), limits.images)
    check_size("the pixels of all images", sum(map(pixels, images)), limits.pixels)
    return served


def pixels(file: bytes) -> int:
    """Return the number of pixels according to the header of an image file.

    0 if it is no image; the image reader refuses it later.
    """
    try:
        with opened(file, "an image") as image:
            return image.width * image.height
    except DataError:
        return 0


def _message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    fields = {key: value for key, value in message.items() if key not in READ_OVER}
    values = {key: value for key, value in fields.items() if value is not None or key == "content"}
    if unknown := next((key for key in values if key not in FIELDS + EMPTY), None):
        raise RequestError(f"{name}.{unknown:.60} is not a field of a message; a message has role and content")
    if "role" not in values:
        raise RequestError(f"{name} has no role; add it")
    if used := next((key for key in EMPTY if values.get(key)), None):
        raise RequestError(f"{name}.{used} is not supported by this server; leave it out")
    served = {key: value for key, value in values.items() if key in FIELDS}
    if served.get("content") is None:  # messages with tool calls, and some front ends, leave it out
        served["content"] = ""
    content = served.get("content")
    if isinstance(content, list):
        served["content"] = [_part(part, f"{name}.content[{number}]") for number, part in enumerate(content)]
    return served


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the texts of all system and developer messages into one system message, the first."""
    systems = [message for message in messages if message["role"] in ("system", "developer")]
    if len(systems) < 2 and systems == messages[: len(systems)]:
        return messages
    contents = [message["content"] for message in systems]
    texts = [each if isinstance(each, str) else "".join(part["text"] for part in each) for each in contents]
    return [{"role": "system", "content": "\n\n".join(texts)}, *(each for each in messages if each not in systems)]


def _part(part: Any, name: str) -> dict[str, Any]:
    """Return a part of a message: a text, or an image with its bytes. name: of the part, for errors."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return {"type": "text", "text": part.get("text")}
    if kind != "image_url":
        raise RequestError(f"{name} is {str(kind)!r:.60}; this server takes parts of the types text and image_url")
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str) or not url.startswith("data:"):
        raise RequestError(
            f"{name}.image_url is no data URI, and URLs are not fetched; write data:image/png;base64,..."
        )
    try:
        return {"type": "image", "image": image_source(url, f"{name}.image_url")}
    except BadRow as error:
        raise RequestError(str(error)) from None
