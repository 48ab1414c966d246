"""The features of images that rows of an engine share: each image is encoded once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from blockdiff.images import ImageInput
from blockdiff.models.model import BlockDiffusionModel

MOST_TOKENS = 1 << 14  # of images that are kept beside those of the last call


class ImageFeatures:
    """The features of the images that were asked for last, by digest; `clear` where the weights have changed."""

    def __init__(self, model: BlockDiffusionModel):
        self.model = model
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()  # the one that was asked for last comes last

    def of(self, images: Sequence[ImageInput]) -> list[Tensor]:
        """The features [tokens, D] of each image; those that are not there are made in one call."""
        wanted = {image.digest: image for image in images}
        missing = [image.to(self.model.device) for digest, image in wanted.items() if digest not in self._kept]
        if missing:
            made = self.model.image_features(missing).split([image.tokens for image in missing])
            self._kept |= {image.digest: features.clone() for image, features in zip(missing, made, strict=True)}
        for digest in wanted:
            self._kept.move_to_end(digest)
        tokens = sum(map(len, self._kept.values()))
        while tokens > MOST_TOKENS and len(self._kept) > len(wanted):
            tokens -= len(self._kept.popitem(last=False)[1])
        return [self._kept[image.digest] for image in images]

    def clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()
