"""Images in the messages of a row: found, put in, and removed for a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockdiff.data.messages import BadRow, ImageSource, Message, Part, from_json, image_source
from blockdiff.errors import DataError

MARKER = "<image>"  # where an image belongs in a text, for rows with a column of images


def column_of_images(row: Mapping[str, Any]) -> tuple[ImageSource, ...]:
    """Return the images in a row's column `image` or `images`, which has one or a list; () without such a column."""
    keys = [key for key in ("image", "images") if row.get(key) not in (None, "", [])]
    for key in ("video", "videos", "audio", "audios"):
        if row.get(key) not in (None, "", []):
            raise BadRow(f"{key} is there, and only texts and images are read; remove it, or the row")
    if len(keys) > 1:
        raise BadRow("both image and images are there; keep one")
    if not keys:
        return ()
    value = from_json(row[keys[0]], keys[0], "[")
    if not isinstance(value, list | tuple):
        return (image_source(value, keys[0]),)
    return tuple(image_source(each, f"{keys[0]}[{index}]") for index, each in enumerate(value))


def text_with_images(text: str, images: Sequence[ImageSource]) -> list[Part]:
    """Return the parts of a text with an image at each marker or, if it has no marker, with all images before it."""
    pieces = text.split(MARKER)
    if len(pieces) == 1:
        pieces = [*[""] * len(images), text]
    if len(pieces) != len(images) + 1:
        raise BadRow(_unlike(len(pieces) - 1, len(images)))
    parts = [{"type": "text", "text": pieces[0]}]
    for image, piece in zip(images, pieces[1:], strict=True):
        parts += [{"type": "image", "image": image}, {"type": "text", "text": piece}]
    return [part for part in parts if part.get("text") != ""]


def with_images(messages: Sequence[Message], images: Sequence[ImageSource]) -> tuple[Message, ...]:
    """Put the images of a column into messages: into parts without an image, at markers, or before the first user text.

    Raises BadRow if there are more or fewer images than places.
    """
    parts = [part for message in messages for part in image_parts(message)]
    holes = [part for part in parts if "image" not in part]
    if not images and not holes:
        return tuple(messages)
    if len(holes) < len(parts):
        raise BadRow("some images are in messages and others are not; write all of them in one way")
    if holes:
        if len(holes) != len(images):
            raise BadRow(f"{len(holes)} parts of type image have none, and images has {len(images)}; correct either")
        return replaced(messages, images)
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    counts = {index: messages[index]["content"].count(MARKER) for index in users}
    if not sum(counts.values()) and users:
        counts[users[0]] = len(images)
    if sum(counts.values()) != len(images):
        raise BadRow(_unlike(sum(counts.values()), len(images)))
    result, taken = list(messages), 0
    for index in users:
        message_images = images[taken : taken + counts[index]]
        taken += len(message_images)
        if message_images:
            result[index] = {**messages[index], "content": text_with_images(messages[index]["content"], message_images)}
    return tuple(result)


def image_parts(message: Mapping[str, Any]) -> list[Part]:
    """Return the parts of a message that are images."""
    content = message.get("content")
    return [part for part in content if part["type"] == "image"] if isinstance(content, list) else []


def images_in(messages: Iterable[Mapping[str, Any]]) -> list[ImageSource]:
    """Return the images of messages in their order."""
    return [part["image"] for message in messages for part in image_parts(message)]


def replaced(messages: Sequence[Message], images: Sequence[ImageSource]) -> tuple[Message, ...]:
    """Return the messages with these images in their image parts, one for each."""
    sources = iter(images)
    return tuple(_mapped(message, lambda part: {"type": "image", "image": next(sources)}) for message in messages)


def for_template(messages: Sequence[Message]) -> list[Message]:
    """Return the messages as chat templates read them: image parts without the image, and without `is_learnt`."""
    shown = (_mapped(message, lambda part: {"type": "image"}) for message in messages)
    return [{key: value for key, value in message.items() if key != "is_learnt"} for message in shown]


def _mapped(message: Message, change: Any) -> Message:
    if not image_parts(message):
        return message
    return {**message, "content": [change(part) if part["type"] == "image" else part for part in message["content"]]}


def _unlike(markers: int, images: int) -> str:
    return f"the texts have {markers} of {MARKER}, and the number of images is {images}; correct either"


def located(source: ImageSource, where: str, root: str | None = None, anywhere: bool = False) -> ImageSource:
    """Make the path of an image absolute, relative to `root` (None: the folder of the row's file); bytes stay.

    where: "file:line" of the row. Raises DataError, which names the row, if the path leads out of the folder, unless
    `anywhere`.
    """
    if not isinstance(source, str):
        return source
    folder = Path(where.rpartition(":")[0]).parent if root is None else Path(root)
    try:
        folder, path = folder.resolve(), (folder / source).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{where}: {source!r:.200} is no path ({error}); correct it") from None
    if not anywhere and not path.is_relative_to(folder):
        raise DataError(
            f"{where}: {source!r:.200} lies outside of {folder}; move it there (data.images.root of a recipe names "
            "another folder)"
        )
    return str(path)
