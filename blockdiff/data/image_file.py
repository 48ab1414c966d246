"""Image files: their bytes, and decoding within limits of time and memory.

A file may be from a stranger. PIL does not limit the scans of a JPEG, the pieces of a file and the tags of its EXIF,
and a megabyte can have so many of them that decoding takes minutes or gigabytes.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING
from warnings import catch_warnings, simplefilter

from blockdiff.data.messages import ImageSource
from blockdiff.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")  # PIL reads others with external programs
MOST_BYTES = 64 << 20  # of a file
MOST_PIXELS = 1 << 26  # of an image before resizing
MOST_SCANS = 64  # of a JPEG; each is a pass over all pixels, and encoders write 1 to 12
MOST_PIECES = 1 << 14  # of a file, plus one for each KiB of it
MOST_NUMBERS = 1 << 16  # of a tag
ORIENTATION = 0x0112  # an EXIF tag
TAG_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}  # of a number
TEXTS = (1, 2, 6, 7)  # types of tags that are not parsed into numbers
# PIL's transpositions for the orientations from 2 to 8
UPRIGHT = ["FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"]


def image_name(source: ImageSource) -> str:
    """Return the name of an image for messages."""
    return source if isinstance(source, str) else f"an image of {len(source):,} bytes"


def image_bytes(source: ImageSource) -> bytes:
    """Read the bytes of an image's file. Raises DataError if it cannot be read or is too large."""
    if isinstance(source, bytes):
        content = source
    else:
        path = Path(source)
        try:
            if not path.is_file():
                raise DataError(f"{source}: no such image; check the path")
            with path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise DataError(f"{source}: cannot be read ({error.strerror}); check the file") from None
    if len(content) > MOST_BYTES:
        raise DataError(f"{image_name(source)}: has more than {MOST_BYTES >> 20} MiB; make the image smaller")
    return content


def decoded(content: bytes, name: str) -> Image:
    """Decode the bytes of a file into an upright image. Raises DataError if it is no image, damaged or too large."""
    from PIL import Image

    image = opened(content, name)
    try:
        if getattr(image, "is_animated", False) and image.format != "MPO":  # a phone's JPEG with a preview
            raise DataError(f"{name}: has several frames, and animations are not read; save one frame as an image")
        image.load()
        orientation = image.getexif().get(ORIENTATION, 1)
    except DataError:
        raise
    except Exception as error:  # decoders raise many kinds of errors for damaged files
        raise _damaged(name, error) from None
    if orientation not in range(2, 9):
        return image
    return image.transpose(Image.Transpose[UPRIGHT[orientation - 2]])


_OPENING = Lock()  # warning filters apply to the whole process


def opened(content: bytes, name: str) -> Image:
    """Open the image in the bytes of a file without decoding its pixels. Raises DataError like `decoded`."""
    from PIL import Image

    try:
        _check_structure(content, name)
        with _OPENING, catch_warnings():
            simplefilter("ignore", Image.DecompressionBombWarning)  # an error follows below
            image = Image.open(_Pieces(content, name), formats=FORMATS)
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise Image.DecompressionBombError
        image.info.pop("Raw profile type exif", None)  # EXIF as text in a PNG, to which no limit applies
        if not _tags_fit(image.info.get("exif", b"").removeprefix(b"Exif\0\0")):
            raise _too_many(name)
        return image
    except DataError:
        raise
    except Image.UnidentifiedImageError:
        raise DataError(f"{name}: not an image in any of {', '.join(FORMATS)}; write one of them") from None
    except Image.DecompressionBombError:
        raise DataError(f"{name}: has more than {MOST_PIXELS:,} pixels; make the image smaller") from None
    except Exception as error:
        raise _damaged(name, error) from None


class _Pieces(io.BytesIO):
    """The bytes of a file, with limits on the number of reads and of bytes that a decoder reads."""

    def __init__(self, content: bytes, name: str):
        super().__init__(content)
        self._name, self._pieces, self._bytes = name, MOST_PIECES + (len(content) >> 10), (1 << 20) + 4 * len(content)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read the next bytes. Raises DataError if a limit is exceeded."""
        piece = super().read(size)
        self._pieces -= 1
        self._bytes -= len(piece)
        if self._pieces < 0 or self._bytes < 0:
            raise _too_many(self._name)
        return piece


def _check_structure(content: bytes, name: str) -> None:
    """Raise DataError for a JPEG or TIFF with too many scans or tags, before PIL reads it."""
    tags = [content] if content[:2] in (b"II", b"MM") else []
    if content[:2] == b"\xff\xd8":
        exif = b""
        for number, (code, segment) in enumerate(_segments(content)):
            if number > MOST_PIECES:
                raise _too_many(name)
            if code == 0xE1 and segment.startswith(b"Exif\0\0"):
                exif += segment[6:]  # PIL concatenates them
            elif code == 0xE2 and segment.startswith(b"MPF\0"):
                tags.append(segment[4:])
        tags.append(exif)
        if content.count(b"\xff\xda") > MOST_SCANS:
            raise _too_many(name)
    if not all(map(_tags_fit, tags)):
        raise _too_many(name)


def _segments(jpeg: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the code and content of each segment before a JPEG's pixels, found as PIL finds them."""
    offset = 2
    while 0 <= (offset := jpeg.find(b"\xff", offset)) <= len(jpeg) - 4:
        code = jpeg[offset + 1]
        if code == 0xDA:
            return
        if code in (0x00, 0x01, 0xFF) or 0xD0 <= code <= 0xD9:  # padding, and codes without content
            offset += 1
            continue
        size = max(2, int.from_bytes(jpeg[offset + 2 : offset + 4], "big"))
        yield code, jpeg[offset + 4 : offset + 2 + size]
        offset += 2 + size


def _tags_fit(tiff: bytes) -> bool:
    """Return True if the first tags of a TIFF structure need at most its bytes, and each has few numbers.

    True if it is no such structure, which PIL refuses; False for BigTIFF.
    """
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None or len(tiff) < 8:
        return True  # PIL refuses it
    if 43 in tiff[2:4]:  # BigTIFF, for files of gigabytes
        return False
    (start,) = struct.unpack_from(f"{order}L", tiff, 4)
    count = int.from_bytes(tiff[start : start + 2], "little" if order == "<" else "big")
    entries = tiff[start + 2 : start + 2 + 12 * count]
    tags = [
        (kind, number) for _, kind, number, _ in struct.iter_unpack(f"{order}HHLL", entries[: len(entries) // 12 * 12])
    ]
    size = sum(TAG_BYTES.get(kind, 0) * number for kind, number in tags)
    return size <= len(tiff) and all(number <= MOST_NUMBERS or kind in TEXTS for kind, number in tags)


def _too_many(name: str) -> DataError:
    return DataError(f"{name}: has more scans, pieces or tags than an image needs; save it anew")


def _damaged(name: str, error: Exception) -> DataError:
    return DataError(f"{name}: not a whole image ({one_line(error)}); write or download it again")


def one_line(error: Exception) -> str:
    """Return an error's text on one line, at most 200 characters."""
    return " ".join(f"{error}".split())[:200] or type(error).__name__
