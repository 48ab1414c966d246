"""`ImageReader`: images become a model's inputs, by transformers' image processor.

It is always the processor of the PIL backend, so that an image has the same pixels on every machine.
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
CACHE_BYTES = 512 << 20  # of processed images in memory
WORKERS = 8


# A family's tokens, as ids or texts: the one before an image, the placeholder of each part, and the one after it.
ImageTokens = tuple[int | str, int, int | str]


def processor_settings(directory: Path) -> Mapping[str, Any]:
    """Return the settings of a checkpoint's image processor, from its files. Raises DataError if there are none."""
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
        f"{directory}: has no {PROCESSORS[1]}, the settings of the image processor; copy it from the released model"
    )


def _is_no_guess(record: logging.LogRecord) -> bool:
    """Filter out transformers' warning about images that are at most 3 pixels wide; their channels are first, too."""
    return "channel dimension is ambiguous" not in record.getMessage()


@dataclass(frozen=True)
class ImageProcessor:
    """transformers' image processor of a checkpoint, for one image at a time."""

    cut: Any
    settings: bytes

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ImageProcessor:
        """Construct the processor of a `preprocessor_config.json`. Raises DataError if it describes none."""
        import transformers

        if "image_processor_type" not in values:
            raise DataError(
                f"the model has no settings of an image processor; load it from a checkpoint with {PROCESSORS[1]}"
            )
        kind = str(values["image_processor_type"]).removesuffix("Fast").removesuffix("Pil")
        processor_class = getattr(transformers, f"{kind}Pil", None)
        if processor_class is None:
            raise DataError(
                f"image_processor_type: transformers has no {kind}Pil, which would cut images without a GPU"
            )
        logging.getLogger("transformers.image_utils").addFilter(_is_no_guess)
        try:
            cut = processor_class.from_dict(dict(values))
        except Exception as error:  # transformers raises a dozen kinds
            raise DataError(f"the image processor cannot be constructed ({one_line(error)})") from None
        settings = json.dumps([kind, cut.to_dict()], sort_keys=True, default=str)
        return cls(cut, hashlib.sha256(settings.encode()).digest())

    @property
    def most_tokens(self) -> int:
        """The largest number of tokens of an image."""
        if hasattr(self.cut, "max_soft_tokens"):
            return int(self.cut.max_soft_tokens)
        return int(self.cut.size["longest_edge"]) // (self.cut.patch_size * self.cut.merge_size) ** 2  # of its pixels

    def __call__(self, image: Image, name: str) -> ImageInput:
        """Cut an image into patches. Raises DataError for a shape that the processor refuses."""
        try:
            output = self.cut(images=[image], return_tensors="pt")
        except Exception as error:
            size = "{} x {}".format(*image.size)
            raise DataError(f"{name}: the model cannot use an image of {size} pixels ({one_line(error)})") from None
        if "image_grid_thw" in output:
            values = {"pixel_values": output["pixel_values"], "image_grid_thw": output["image_grid_thw"][0]}
            tokens = int(values["image_grid_thw"].prod()) // self.cut.merge_size**2
        else:
            is_patch_P = (output["image_position_ids"][0] >= 0).all(-1)  # the others are padding
            values = {name: output[name][0][is_patch_P] for name in ("pixel_values", "image_position_ids")}
            tokens = int(output["num_soft_tokens_per_image"][0])
        digest = hashlib.sha256(self.settings)
        for key, value in values.items():
            digest.update(f"{key} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.contiguous().numpy().data)
        return ImageInput(values, tokens, digest.digest())


class ImageReader:
    """Reads images for one model in threads, and caches the last ones in memory by content.

    settings: the directory with the image processor's settings, or the settings. They are read with the first image.
    tokens: the family's image tokens.
    root, anywhere: where paths in rows may lead (`data.images`).
    adapt: converts the settings to those of a processor that exists for PIL (`Family.image_processor`).
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
        self._cache: OrderedDict[bytes, ImageInput] = OrderedDict()
        self._size = 0  # of the cache, in bytes
        self._lock = Lock()
        self._begun: dict[ImageSource, Future[ImageInput]] = {}

    @cached_property
    def processor(self) -> ImageProcessor:
        """The image processor. Raises DataError if the settings describe none."""
        return ImageProcessor.of(self.adapt(self._values()))

    @cached_property
    def _workers(self) -> ThreadPoolExecutor:
        _ = self.processor  # imports outside of threads
        return ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1), thread_name_prefix="images")

    @property
    def fingerprint(self) -> str:
        """The settings that decide the number of an image's tokens, as text."""
        try:
            settings = self._values()
        except DataError:  # rows without images need no settings
            settings = {}
        return json.dumps([settings, self.tokens], sort_keys=True, default=str)

    def _values(self) -> Mapping[str, Any]:
        return self.settings if isinstance(self.settings, Mapping) else processor_settings(Path(self.settings))

    def located(self, source: ImageSource, where: str) -> ImageSource:
        """Make the path of an image in the row at "file:line" absolute. Raises DataError if it leaves the folder."""
        return located(source, where, self.root, self.anywhere)

    def read(self, source: ImageSource) -> ImageInput:
        """Read an image from its path or bytes; an `ImageInput` is returned itself. Raises DataError if that fails."""
        if isinstance(source, ImageInput):
            return source
        content = image_bytes(source)
        key = hashlib.blake2b(content, digest_size=32).digest()
        with self._lock:
            if (cached := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return cached
        image = self.processor(decoded(content, image_name(source)), image_name(source))
        with self._lock:
            if key not in self._cache:
                self._cache[key] = image
                self._size += image.nbytes
            while self._size > CACHE_BYTES and len(self._cache) > 1:
                self._size -= self._cache.popitem(last=False)[1].nbytes
        return image

    def begin(self, sources: Iterable[ImageSource]) -> None:
        """Begin to read the images of the next call of `read_all`. Another thread may still wait for earlier ones."""
        self._begun = {source: self._workers.submit(self.read, source) for source in dict.fromkeys(sources)}

    def read_all(self, sources: Sequence[ImageSource]) -> list[ImageInput | DataError]:
        """Read images. Returns each image or its error."""
        if all(isinstance(source, ImageInput) for source in sources):  # no processor is needed
            return list(sources)
        futures = [self._begun.get(source) or self._workers.submit(self.read, source) for source in sources]
        return [_outcome(future) for future in futures]

    def facts(self, sources: Sequence[ImageSource]) -> list[tuple[int, bytes] | DataError]:
        """Return the number of tokens and the digest of every image, or its error, without keeping the images."""

        def look(source: ImageSource) -> tuple[int, bytes]:
            image = self.read(source)
            return image.tokens, image.digest

        return [_outcome(future) for future in [self._workers.submit(look, source) for source in sources]]


def _outcome(future: Future[Any]) -> Any:
    try:
        return future.result()
    except DataError as error:
        return error
