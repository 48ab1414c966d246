"""Two models as one: a target, whose next-token predictions decide, and a canvas model of the same tokens that drafts.

Clean tokens go through the layers of both, each with its own keys and values; canvases go through the drafter's alone.
So an engine keeps, shares and cuts the prefixes of both as if they were those of one model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from blockdiff.errors import BlockdiffError
from blockdiff.images import RowImages
from blockdiff.layers.attention import KV, Past
from blockdiff.models.family import BlockDiffusionModel, Rope
from blockdiff.spans import Spans, Sweep


class Drafted(BlockDiffusionModel):
    """A model for verified canvases: `target` verifies, and may be causal; `drafter` denoises.

    Both have the same tokens and lie on the same device. `encode` gives the target's hidden states and `denoise` the
    drafter's, which `drafter.vocabulary` reads; the rest of the model (config, vocabulary, files) is the target's.
    """

    def __init__(self, target: BlockDiffusionModel, drafter: BlockDiffusionModel):
        super().__init__(target.config, target.kernels)
        require_drafter(target, drafter)
        if target.device != drafter.device:
            raise BlockdiffError(f"the draft model is on {drafter.device} and the model on {target.device}; move one")
        self.target, self.drafter, self.canvas_length = target, drafter, drafter.canvas_length
        self.vocab_size, self.vocabulary, self.carried = target.vocab_size, target.vocabulary, target.carried
        kinds = [replace(kind, name=_of("target", name), keeps_selection=False) for name, kind in target.kinds.items()]
        kinds += [replace(kind, name=_of("drafter", name)) for name, kind in drafter.kinds.items()]
        self.kinds = {kind.name: kind for kind in kinds}
        self.layer_kinds = (
            *(_of("target", name) for name in target.layer_kinds),
            *(_of("drafter", name) for name in drafter.layer_kinds),
        )

    @property
    def cached_bytes(self) -> int:
        """The bytes that a prefix holds of one token, in both models."""
        return self.target.cached_bytes + self.drafter.cached_bytes

    def rope(self, positions_BT: Tensor) -> dict[str, Rope]:
        """cos and sin of every kind of layer of both models."""
        of_target = {_of("target", name): x for name, x in self.target.rope(positions_BT).items()}
        return of_target | {_of("drafter", name): x for name, x in self.drafter.rope(positions_BT).items()}

    def forward(
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
        """The target's hidden states of clean tokens with the kv of both models, or the drafter's of canvases."""
        if images is not None or not isinstance(is_noisy, bool):
            raise BlockdiffError("a model with a draft model takes neither images nor clean tokens beside canvases")
        rope, count = self.rope(positions_BT) if rope is None else rope, len(self.target.layer_kinds)
        hidden, kv = list[Tensor](), list[KV]()
        for part, model, of in (("target", self.target, slice(count)), ("drafter", self.drafter, slice(count, None))):
            if is_noisy and part == "target":
                continue
            own_spans = {name: spans[_of(part, name)] for name in model.kinds}
            own_rope = {name: rope[_of(part, name)] for name in model.kinds}
            own_past = None if past is None else past[of]
            x, of_layers = model(tokens_BT, positions_BT, own_spans, own_past, is_noisy, soft_BTD, own_rope)
            hidden.append(x)
            kv += of_layers
        return hidden[0], kv


def require_drafter(target: BlockDiffusionModel, drafter: BlockDiffusionModel) -> None:
    """Raise BlockdiffError for a model that cannot draft for the target: a causal one, or one with other tokens."""
    if not drafter.denoises:
        raise BlockdiffError("the draft model is causal and has no canvases to draft; give one that denoises")
    if target.vocab_size != drafter.vocab_size:
        raise BlockdiffError(
            f"the draft model has {drafter.vocab_size} tokens and the model {target.vocab_size}; "
            "give one of the same tokenizer"
        )


def _of(part: str, name: str) -> str:
    """The name of a kind of layers of one of the two models."""
    return f"{part} {name}"
