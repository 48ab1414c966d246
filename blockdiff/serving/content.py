"""The messages of a body: images come as data URIs alone, and everything else that is no text is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockdiff.errors import RequestError
from blockdiff.serving.limits import Limits
from blockdiff.serving.mapping import check_size


def checked_messages(messages: Sequence[Mapping[str, Any]], limits: Limits) -> list[dict[str, Any]]:
    """Messages with each part `image_url` as a part `image`, which has its data URI; RequestError for other parts.

    A part names no file and no address: the server reads neither.
    """
    found, count = [], 0
    for place, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts = [_part(part, f"messages[{place}].content[{n}]") for n, part in enumerate(content)]
            count += sum(part["type"] == "image" for part in parts)
            message = {**message, "content": parts}
        found.append(dict(message))
    check_size("the images of messages", count, limits.images)
    return found


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return dict(part)
    if kind != "image_url":
        raise RequestError(f"{where} is {str(kind)!r:.60}; this server takes parts of the types text and image_url")
    given = part.get("image_url")
    uri = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(uri, str) or not uri.startswith("data:"):
        raise RequestError(
            f"{where}.image_url is no data URI, and this server reads no address and no file; send the image itself, "
            "as data:image/png;base64,..."
        )
    return {"type": "image", "image": uri}
