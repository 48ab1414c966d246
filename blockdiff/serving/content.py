"""The messages of a body: images come as data URIs alone, and everything else that is no text is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockdiff.errors import RequestError
from blockdiff.serving.limits import Limits
from blockdiff.serving.mapping import check_size


def check_parts(messages: Sequence[Mapping[str, Any]], limits: Limits) -> None:
    """Raise RequestError for parts of other types than `text` and `image_url`, and for too many images.

    A part `image`, which could name a file, is one of them. `image_url` is refused elsewhere where it is no data URI.
    """
    count = 0
    for place, message in enumerate(messages):
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in ("text", "image_url"):
                raise RequestError(
                    f"messages[{place}].content[{number}] is {str(kind)!r:.60}; this server takes parts of the types "
                    "text and image_url"
                )
            count += kind == "image_url"
    check_size("the images of messages", count, limits.images)
