"""A cache of image features, so that an engine encodes an image once for all rows that contain it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from blockdiff.images import ImageInput
from blockdiff.models.model import BlockDiffusionModel

MOST_TOKENS = 1 << 14  # of cached images; only the images of the last call may have more


class ImageFeatures:
    """The features of the most recently used images, by digest. Call `clear` after a change of the weights."""

    def __init__(self, model: BlockDiffusionModel):
        self.model = model
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()  # the most recently used last

    def of(self, images: Sequence[ImageInput]) -> list[Tensor]:
        """Return the features [tokens, D] of each image; missing ones are computed in one call."""
        by_digest = {image.digest: image for image in images}
        missing = [image.to(self.model.device) for digest, image in by_digest.items() if digest not in self._kept]
        if missing:
            computed = self.model.image_features(missing).split([image.tokens for image in missing])
            self._kept |= {image.digest: features.clone() for image, features in zip(missing, computed, strict=True)}
        for digest in by_digest:
            self._kept.move_to_end(digest)
        tokens = sum(map(len, self._kept.values()))
        while tokens > MOST_TOKENS and len(self._kept) > len(by_digest):
            tokens -= len(self._kept.popitem(last=False)[1])
        return [self._kept[image.digest] for image in images]

    def clear(self) -> None:
        """Remove all features."""
        self._kept.clear()
