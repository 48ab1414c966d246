"""`Drafted`: two models as one, a target whose next-token predictions verify, and a model that drafts.

Clean tokens go through the layers of both models, which keep their own keys and values; a `Drafter` gets the outputs of
some of the target's layers in place of tokens. Canvases go through the draft model alone. So an engine can keep, share
and truncate the prefixes of both as those of one model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from blockdiff.errors import BlockdiffError
from blockdiff.images import ImageInput, RowImages
from blockdiff.layers.attention import KV, Past
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.models.layer_kind import Rope
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.spans import Spans, Sweep


class Drafter(BlockDiffusionModel):
    """A model that drafts tokens for one target from the outputs of some of the target's layers.

    It has no vocabulary before `drafts_for` sets the target. For clean tokens `forward` takes the result of `reading`,
    a float tensor, in place of token ids.
    """

    typical = "fc.weight"
    self_conditioning = None
    _vocabulary: tuple[Vocabulary, ...] = ()  # no submodule, since its weights are the target's

    def drafts_for(self, target: BlockDiffusionModel) -> None:
        """Share a target's vocabulary; raise BlockdiffError if the drafter was not trained for such a target."""
        super().drafts_for(target)
        self._vocabulary = (target.vocabulary,)

    @property
    def vocabulary(self) -> Vocabulary:  # type: ignore[override]
        """The target's vocabulary; BlockdiffError before there is a target."""
        if not self._vocabulary:
            raise BlockdiffError("a drafter has no vocabulary of its own; give it beside the model that it drafts for")
        return self._vocabulary[0]

    def reading(self, tokens_BT: Tensor, features_BTF: Tensor) -> Tensor:
        """Return the drafter's input for clean tokens, [B, T, ...].

        features_BTF: the outputs of the target's layers for these tokens, concatenated.
        """
        raise NotImplementedError

    def draft(self, anchor_B: Tensor, count: int, denoise: Callable[..., Tensor]) -> Tensor:
        """Draft the next `count` tokens [B, count] of rows; anchor_B: their last tokens.

        denoise: returns the hidden states of the first tokens of a block; arguments as of `StepBuffers.denoise`.
        """
        raise NotImplementedError


def draft_block(
    model: BlockDiffusionModel, mask_id: int, anchor_B: Tensor, count: int, denoise: Callable[..., Tensor]
) -> Tensor:
    """Draft the next `count` tokens [B, count] of rows by one pass over blocks of masks.

    A block has `canvas_length` tokens, as in training, of which the first is the row's last token, in anchor_B.
    denoise: as in `Drafter.draft`.
    """
    blocks_BL = anchor_B.new_full((len(anchor_B), model.canvas_length), mask_id)
    blocks_BL[:, 0] = anchor_B
    hidden_BLD = denoise(blocks_BL)[:, 1 : 1 + count]
    anyone_N = anchor_B.new_zeros(hidden_BLD.shape[:2].numel())
    _, likeliest_N = model.vocabulary.scores(hidden_BLD.flatten(0, 1), anyone_N)
    return likeliest_N.view(hidden_BLD.shape[:2])


class Drafted(BlockDiffusionModel):
    """A model for verified canvases: `target` verifies, and may be causal; `drafter` denoises.

    Both have the same tokens and device. `encode` returns the target's hidden states, `denoise` the drafter's, for
    `drafter.vocabulary`. Everything else (config, vocabulary, files) is the target's.
    """

    def __init__(self, target: BlockDiffusionModel, drafter: BlockDiffusionModel):
        super().__init__(target.config, target.kernels)
        drafter.drafts_for(target)
        if target.device != drafter.device:
            raise BlockdiffError(f"the draft model is on {drafter.device} and the model on {target.device}; move one")
        self.target, self.drafter, self.denoises, self.canvas_length = target, drafter, True, drafter.canvas_length
        self.vocabulary, self.carried = target.vocabulary, target.carried
        kinds = [replace(kind, name=_of("target", name), keeps_selection=False) for name, kind in target.kinds.items()]
        kinds += [replace(kind, name=_of("drafter", name)) for name, kind in drafter.kinds.items()]
        self.kinds = {kind.name: kind for kind in kinds}
        self.layer_kinds = (
            *(_of("target", name) for name in target.layer_kinds),
            *(_of("drafter", name) for name in drafter.layer_kinds),
        )

    @property
    def denoiser(self) -> BlockDiffusionModel:
        """The model that drafts."""
        return self.drafter

    @property
    def encoder(self) -> BlockDiffusionModel:
        """The target."""
        return self.target

    @property
    def canvas_kinds(self) -> dict[str, str]:
        """The name of each kind of layers in the drafter -> its name in `kinds` of this model."""
        return {name: _of("drafter", name) for name in self.drafter.kinds}

    def rope(self, positions_BT: Tensor) -> dict[str, Rope]:
        """Return cos and sin for positions, by kind of layer of both models."""
        of_target = {_of("target", name): x for name, x in self.target.rope(positions_BT).items()}
        return of_target | {_of("drafter", name): x for name, x in self.drafter.rope(positions_BT).items()}

    def image_features(self, inputs: Sequence[ImageInput]) -> Tensor:
        """Return the target's embeddings of images."""
        return self.target.image_features(inputs)

    def forward(  # type: ignore[override]  # nobody reads the layers of two models
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        spans: Mapping[str, Spans | Sweep],
        past: Sequence[Past] | None = None,
        is_noisy: bool | Tensor = False,
        soft_BTD: Tensor | None = None,
        rope: Mapping[str, Rope] | None = None,
        images: RowImages | None = None,
    ) -> tuple[Tensor, list[KV]]:
        """Return the target's hidden states of clean tokens and the kv of both models; for canvases the drafter's."""
        shown = self.drafter.target_layers
        if not isinstance(is_noisy, bool) or (images is not None and not shown):
            raise BlockdiffError("a model with a draft model takes neither images nor clean tokens beside canvases")
        rope, count = self.rope(positions_BT) if rope is None else rope, len(self.target.layer_kinds)

        def of(part: str, model: BlockDiffusionModel, layers: slice) -> tuple[Any, ...]:
            own_spans, own_rope = ({name: each[_of(part, name)] for name in model.kinds} for each in (spans, rope))
            return positions_BT, own_spans, None if past is None else past[layers], is_noisy, soft_BTD, own_rope

        of_drafter = of("drafter", self.drafter, slice(count, None))
        if is_noisy:
            return self.drafter(tokens_BT, *of_drafter)
        hidden, kv = self.target(tokens_BT, *of("target", self.target, slice(count)), images, shown)
        if shown:
            assert isinstance(self.drafter, Drafter)
            hidden, features = with_features(hidden, len(shown))
            tokens_BT = self.drafter.reading(tokens_BT, features)
        return hidden, kv + self.drafter(tokens_BT, *of_drafter)[1]


def with_features(hidden_BTX: Tensor, layers: int) -> tuple[Tensor, Tensor]:
    """Split a target's result into hidden states [B, T, D] and outputs of `layers` shown layers [B, T, layers * D]."""
    D = hidden_BTX.shape[-1] // (1 + layers)
    hidden, features = hidden_BTX.split([D, layers * D], -1)
    return hidden.contiguous(), features


def _of(part: str, name: str) -> str:
    """Return the name in `Drafted` of the kind of layers `name` of the "target" or the "drafter"."""
    return f"{part} {name}"
