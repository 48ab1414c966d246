"""Images as a model takes them: cut by transformers' image processor.

Always the processor of the PIL backend, so that an image has the same pixels on every machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from blockdiff.data.image_file import decoded, image_bytes, image_name, one_line
from blockdiff.data.image_parts import located
from blockdiff.data.messages import ImageSource
from blockdiff.errors import DataError
from blockdiff.images import ImageInput

if TYPE_CHECKING:
    from PIL.Image import Image

PROCESSORS = ("processor_config.json", "preprocessor_config.json")
KEPT_BYTES = 512 << 20  # of images that were cut
WORKERS = 8


# The tokens, as ids or texts, that a family puts before an image, for each of its parts, and after it.
ImageTokens = tuple[int | str, int, int | str]


def processor_settings(directory: Path) -> Mapping[str, Any]:
    """The values for an image processor in the files of a checkpoint; DataError where they say nothing."""
    for file in (directory / name for name in PROCESSORS):
        try:
            values = json.loads(file.read_bytes())
            values = values.get("image_processor", values)
            if "image_processor_type" in values:
                return values
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            raise DataError(f"{file}: cannot be read ({one_line(error)}); copy it from the released model") from None
    raise DataError(
        f"{directory}: has no {PROCESSORS[1]}, which says how images are cut; copy that of the released model"
    )


def _is_no_guess(record: logging.LogRecord) -> bool:
    """False for the warning on images of at most 3 pixels' width, whose channels come first as those of all others."""
    return "channel dimension is ambiguous" not in record.getMessage()


@dataclass(frozen=True)
class ImageProcessor:
    """transformers' image processor of a checkpoint, for one image at a time."""

    cut: Any
    settings: bytes

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ImageProcessor:
        """The processor with the values of a `preprocessor_config.json`; DataError where they describe none."""
        import transformers

        if "image_processor_type" not in values:
            raise DataError(
                f"it is not known how the model's images are cut; load it from a checkpoint with {PROCESSORS[1]}"
            )
        kind = str(values["image_processor_type"]).removesuffix("Fast").removesuffix("Pil")
        made = getattr(transformers, f"{kind}Pil", None)
        if made is None:
            raise DataError(
                f"image_processor_type: transformers has no {kind}Pil, which would cut images without a GPU"
            )
        logging.getLogger("transformers.image_utils").addFilter(_is_no_guess)
        try:
            cut = made.from_dict(dict(values))
        except Exception as error:  # transformers raises a dozen kinds
            raise DataError(f"the image processor cannot be made ({one_line(error)})") from None
        settings = json.dumps([kind, cut.to_dict()], sort_keys=True, default=str)
        return cls(cut, hashlib.sha256(settings.encode()).digest())

    @property
    def most_tokens(self) -> int:
        """The most tokens that an image becomes."""
        if hasattr(self.cut, "max_soft_tokens"):
            return int(self.cut.max_soft_tokens)
        return int(self.cut.size["longest_edge"]) // (self.cut.patch_size * self.cut.merge_size) ** 2  # of its pixels

    def __call__(self, image: Image, name: str) -> ImageInput:
        """An image cut into patches; DataError for a shape that the processor refuses."""
        try:
            found = self.cut(images=[image], return_tensors="pt")
        except Exception as error:
            size = "{} x {}".format(*image.size)
            raise DataError(f"{name}: of {size} pixels, which the model cannot take ({one_line(error)})") from None
        if "image_grid_thw" in found:
            values = {"pixel_values": found["pixel_values"], "image_grid_thw": found["image_grid_thw"][0]}
            tokens = int(values["image_grid_thw"].prod()) // self.cut.merge_size**2
        else:
            is_patch_P = (found["image_position_ids"][0] >= 0).all(-1)  # the others are padding
            values = {name: found[name][0][is_patch_P] for name in ("pixel_values", "image_position_ids")}
            tokens = int(found["num_soft_tokens_per_image"][0])
        digest = hashlib.sha256(self.settings)
        for key, value in values.items():
            digest.update(f"{key} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.contiguous().numpy().data)
        return ImageInput(values, tokens, digest.digest())


class ImageReader:
    """Reads images for one model: sources become `ImageInput`s, in threads beside the caller.

    The last ones stay in memory by content. settings: the directory with the files of the image processor, which is
    made at the first image, or the values in them. tokens: those of the family. root and anywhere: where paths in
    rows may lead (`data.images`). adapt: makes of the values those of a processor that PIL has (as
    `Family.image_processor` does).
    """

    def __init__(
        self,
        settings: str | Path | Mapping[str, Any],
        tokens: ImageTokens,
        root: str | None = None,
        anywhere: bool = False,
        adapt: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: values,
    ) -> None:
        self.settings, self.tokens = settings, tokens
        self.root, self.anywhere, self.adapt = root, anywhere, adapt
        self._kept: OrderedDict[bytes, ImageInput] = OrderedDict()
        self._size = 0  # of those, in bytes
        self._lock = Lock()
        self._begun: dict[ImageSource, Future[ImageInput]] = {}

    @cached_property
    def processor(self) -> ImageProcessor:
        """The image processor; DataError where the settings describe none."""
        return ImageProcessor.of(self.adapt(self._values()))

    @cached_property
    def _workers(self) -> ThreadPoolExecutor:
        _ = self.processor  # imports are not for threads
        return ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1), thread_name_prefix="images")

    @property
    def fingerprint(self) -> str:
        """The settings that decide how many tokens an image has, as text."""
        try:
            settings = self._values()
        except DataError:  # only images need them
            settings = {}
        return json.dumps([settings, self.tokens], sort_keys=True, default=str)

    def _values(self) -> Mapping[str, Any]:
        return self.settings if isinstance(self.settings, Mapping) else processor_settings(Path(self.settings))

    def located(self, source: ImageSource, where: str) -> ImageSource:
        """The image of a row at "file:line" with its path made absolute; DataError where it leads out of the folder."""
        return located(source, where, self.root, self.anywhere)

    def read(self, source: ImageSource) -> ImageInput:
        """An image by its path or bytes, or as it was given; DataError says what is wrong with it."""
        if isinstance(source, ImageInput):
            return source
        content = image_bytes(source)
        key = hashlib.blake2b(content, digest_size=32).digest()
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        image = self.processor(decoded(content, image_name(source)), image_name(source))
        with self._lock:
            if key not in self._kept:
                self._kept[key] = image
                self._size += image.nbytes
            while self._size > KEPT_BYTES and len(self._kept) > 1:
                self._size -= self._kept.popitem(last=False)[1].nbytes
        return image

    def begin(self, sources: Iterable[ImageSource]) -> None:
        """Begin to read images that `read_all` will ask for next; another thread may still wait for others."""
        self._begun = {source: self._workers.submit(self.read, source) for source in dict.fromkeys(sources)}

    def read_all(self, sources: Sequence[ImageSource]) -> list[ImageInput | DataError]:
        """Every image, or the error that says what is wrong with it."""
        if all(isinstance(source, ImageInput) for source in sources):  # which need no processor
            return list(sources)
        futures = [self._begun.get(source) or self._workers.submit(self.read, source) for source in sources]
        return [_outcome(future) for future in futures]

    def facts(self, sources: Sequence[ImageSource]) -> list[tuple[int, bytes] | DataError]:
        """Number of tokens and digest of every image, or what is wrong with it; the images are not held."""

        def look(source: ImageSource) -> tuple[int, bytes]:
            image = self.read(source)
            return image.tokens, image.digest

        return [_outcome(future) for future in [self._workers.submit(look, source) for source in sources]]


def _outcome(future: Future[Any]) -> Any:
    try:
        return future.result()
    except DataError as error:
        return error
