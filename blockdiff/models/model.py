"""`BlockDiffusionModel`, the base of every family's model: it encodes clean tokens and denoises canvases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from blockdiff.errors import BlockdiffError
from blockdiff.images import ImageInput, PlacedImage, RowImages
from blockdiff.kernels import Kernels, resolve
from blockdiff.kernels.scratch import shared_scratch
from blockdiff.layers.attention import KV, Past, of_last
from blockdiff.layers.norm import RMSNorm
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.models.family import NO_HEAD, Family
from blockdiff.models.image_side import ImageSide
from blockdiff.models.layer_kind import LayerKind, Rope
from blockdiff.models.prefix import Prefix
from blockdiff.spans import Spans, Sweep


class BlockDiffusionModel(nn.Module):
    """A denoiser with a prefix, the base of every family's model; other code does not distinguish families.

    A causal model has no canvases (`denoises` is False, `canvas_length` 1) and only encodes. Use weights only inside a
    call of a module, of the model or its vocabulary: sharded weights are gathered around such calls.
    """

    config: Family
    denoises: bool
    leaves_clean_out: bool = False  # whether the last layer may skip a sweep's clean tokens
    canvas_length: int
    vocab_size: int
    kernels: Kernels
    vocabulary: Vocabulary
    self_conditioning: nn.Module | None  # called on embeddings [B, T, D] and a signal; None: reads none
    layers: nn.ModuleList  # each has an encoder_scalar and a decoder_scalar, [1] (None: 1)
    norm: RMSNorm
    kinds: dict[str, LayerKind]  # by name
    layer_kinds: tuple[str, ...]  # the name of each layer's kind
    image_side: ImageSide | None  # None until it is needed: see `checkpoint.images`
    typical = "vocabulary.table"  # the parameter whose dtype and device are the model's
    target_layers: tuple[int, ...] = ()  # of a drafter: the layers of its target whose outputs it reads
    mask_id: int  # of a drafter with masks: the mask token
    carried: Any = None  # tensors and files of the checkpoint that the model does not run
    # The device and the dtype in which sharded weights are gathered (None: as they are stored).
    gathered_on: torch.device | None = None
    gathered_in: torch.dtype | None = None

    def __init__(self, config: Family, kernels: str | Kernels = "auto"):
        super().__init__()
        self.config, self.kernels, self.image_side = config, resolve(kernels), None
        self.denoises, self.canvas_length, self.vocab_size = config.denoises, config.canvas_length, config.vocab_size

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
        shown: Sequence[int] = (),
    ) -> tuple[Tensor, list[KV]]:
        """Run the layers on tokens; return hidden states [B, T, D] after the final norm, and each layer's kv.

        spans: by kind of layer. past: each layer's prefix tensors, dense or in pages (`span_attention/paged.py`).
        is_noisy: False for clean tokens (encode), True for tokens of canvases (denoise), or booleans [B, T]. soft_BTD:
        the signal of noisy tokens, the soft embedding of their last prediction (None: none). rope: the result of
        `rope(positions_BT)`, if already computed. images: the rows' images with features, which replace the embeddings
        of their placeholders. shown: layers whose outputs are appended to the hidden states, [B, T, (1 + layers) * D].

        If all tokens are noisy the list of kv is empty, since no later call sees them. A layer that wrote its kv to the
        pages of `past` has an empty tuple.

        In a sweep over clean rows and their canvases, T = S + C * L, `spans` are `Sweep`s, which determine the noisy
        tokens; soft_BTD covers the canvases only, and no kv is returned. If the sweep does not need the clean tokens'
        hidden states, the last layer may compute only their keys and values; the result is then [B, C * L, D].
        """
        rope = self.rope(positions_BT) if rope is None else rope
        x, kv, outputs = self.embedded(tokens_BT), list[KV](), dict[int, Tensor]()
        if images is not None:
            x = images.into(x)
        sweep, spans_of_last = next(iter(spans.values())), None
        if isinstance(sweep, Sweep):
            clean, noisy = x.split([sweep.clean_tokens, x.shape[1] - sweep.clean_tokens], 1)
            x = torch.cat([clean, self._conditioned(noisy, soft_BTD)], 1)
            is_noisy = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]) >= sweep.clean_tokens
            if not sweep.wants_clean:
                spans_of_last = spans if self.leaves_clean_out else None
                spans = {name: each.with_clean() if isinstance(each, Sweep) else each for name, each in spans.items()}
        elif isinstance(is_noisy, Tensor):
            x = torch.where(is_noisy[..., None], self._conditioned(x, soft_BTD), x)
        elif is_noisy:
            x = self._conditioned(x, soft_BTD)
        with nullcontext() if torch.compiler.is_compiling() else shared_scratch():
            for n, (kind, layer) in enumerate(zip(self.layer_kinds, self.layers, strict=True)):
                if spans_of_last is not None and n == len(self.layers) - 1:
                    spans = spans_of_last
                x, layer_kv = layer(x, rope[kind], spans[kind], None if past is None else past[n], is_noisy)
                if is_noisy is not True and not isinstance(sweep, Sweep):
                    kv.append(layer_kv)
                if n in shown:
                    outputs[n] = x
        hidden = self.norm(x)
        return torch.cat([hidden, *(outputs[n] for n in shown)], -1) if shown else hidden, kv

    def embedded(self, tokens_BT: Tensor) -> Tensor:
        """Return the input [B, T, D] of the first layer."""
        x: Tensor = self.vocabulary.embed(tokens_BT)
        return x

    def _conditioned(self, x: Tensor, soft_BTD: Tensor | None) -> Tensor:
        """Add the signal to embeddings of noisy tokens if the model reads one; BlockdiffError for a causal model."""
        if not self.denoises:
            raise BlockdiffError(
                "a causal model denoises nothing; `blockdiff init --from` adds what that needs, or sample next tokens"
            )
        if self.self_conditioning is None:
            return x
        conditioned: Tensor = self.self_conditioning(x, soft_BTD)
        return conditioned

    def drafts_for(self, target: BlockDiffusionModel) -> None:
        """Check that this model can draft for a target, and prepare it.

        Raises BlockdiffError for a causal model or one with a prefix of blocks, and for a target with another number of
        tokens or without next-token head.
        """
        if not target.config.predicts_next_tokens:
            raise BlockdiffError(f"{NO_HEAD}: it verifies no drafts; sample it without a draft model")
        if self.config.block is not None:
            raise BlockdiffError(
                "the draft model's canvases begin at multiples of its blocks (prefix: blocks), and verified ones "
                "anywhere; give another one"
            )
        if not self.denoises:
            raise BlockdiffError("the draft model is causal and has no canvases to draft; give one that denoises")
        if target.vocab_size != self.vocab_size:
            raise BlockdiffError(
                f"the draft model has {self.vocab_size} tokens and the model {target.vocab_size}; "
                "give one of the same tokenizer"
            )

    @property
    def denoiser(self) -> BlockDiffusionModel:
        """The model that denoises canvases: this one, or the one that drafts for it."""
        return self

    @property
    def encoder(self) -> BlockDiffusionModel:
        """The model whose hidden states of clean tokens `encode` returns: this one, or the target of a drafter."""
        return self

    @property
    def canvas_kinds(self) -> dict[str, str]:
        """The name of each kind of layers in the denoiser -> its name in `kinds` of this model."""
        return {name: name for name in self.kinds}

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        return self.gathered_on or self._typical.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights that the model computes with."""
        return self.gathered_in or self.kept_dtype

    @property
    def kept_dtype(self) -> torch.dtype:
        """The dtype in which the weights are stored."""
        return self._typical.dtype

    @property
    def _typical(self) -> nn.Parameter:
        parameter: nn.Parameter = attrgetter(self.typical)(self)
        return parameter

    def parameters_of(self, part: str) -> list[nn.Parameter]:
        """Return the parameters of one of the family's parts."""
        return [p for name, p in self.named_parameters() if self.config.part_of(name) == part]

    def rope(self, positions_BT: Tensor) -> dict[str, Rope]:
        """Return cos and sin for positions, by kind of layer."""
        return {name: kind.rope(positions_BT, self.dtype) for name, kind in self.kinds.items()}

    def image_features(self, inputs: Sequence[ImageInput]) -> Tensor:
        """Return the embeddings of images, concatenated [sum of their tokens, D], by one call of the image side.

        Raises BlockdiffError if the model has no image side or not yet its weights, and if an input's number of tokens
        does not match its pixels.
        """
        if self.image_side is None:
            raise BlockdiffError("the model's image side is not there yet; call blockdiff.with_image_side(model) first")
        features: Tensor = self.image_side(inputs)
        if len(features) != (tokens := sum(image.tokens for image in inputs)):
            raise BlockdiffError(f"images of {tokens} tokens have {len(features)} embeddings; mend ImageInput.tokens")
        return features

    def encode(
        self,
        tokens_BS: Tensor,
        lengths: Tensor | None = None,
        prefix: Prefix | None = None,
        images: Sequence[Sequence[PlacedImage]] | None = None,
    ) -> Prefix:
        """Encode clean tokens; with `prefix`, append them to it (and consume it).

        tokens_BS: int64, right-padded. lengths: number of valid tokens of each row, int64 [B] (None: all valid).
        images: the images of each row, with columns of this call (see `images.images_between` for a part of a row).
        Returns the Prefix for `denoise` and further calls; its `hidden` is [B, S, D]. Raises BlockdiffError for lengths
        outside 0 to S, and if a row of `prefix` ends within a block of `config.block` tokens.
        """
        _require_lengths(lengths, tokens_BS)
        placed = None if images is None else self.placed(images, tokens_BS.shape[1])
        column = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        doc_start_BS = torch.zeros_like(tokens_BS)
        if lengths is not None:
            doc_start_BS = torch.where(column < lengths[:, None], 0, -1)
        if prefix is None:
            spans = {name: kind.encode_spans(doc_start_BS, None, placed) for name, kind in self.kinds.items()}
            hidden, kv = self(tokens_BS, column.expand(tokens_BS.shape), spans, images=placed)
            return Prefix.of(hidden, kv, [self.kinds[name] for name in self.layer_kinds], lengths)
        prefix.require_whole_blocks()
        spans = {
            name: prefix.held(kind, kind.encode_spans(doc_start_BS, prefix.lengths_B, placed))
            for name, kind in self.kinds.items()
        }
        hidden, kv = self(tokens_BS, prefix.lengths_B[:, None] + column, spans, prefix.layers(), images=placed)
        return prefix.extended(hidden, kv, lengths)

    def placed(self, images: Sequence[Sequence[PlacedImage]], width: int) -> RowImages | None:
        """Return the images of a call's rows with their features, on the model's device; None if there are none.

        images: the images of each row, with columns of this call. width: the number of columns of the call.
        """
        placed = RowImages.of(images, width)
        if placed is None:
            return None
        placed = placed.to(self.device)
        return placed.with_features(self.image_features(placed.inputs))

    def denoise(self, canvas_BL: Tensor, prefix: Prefix, soft_embedding: Tensor | None = None) -> Tensor:
        """Return the hidden states [B, L, D] of one canvas per row, after the final norm; the prefix is unchanged.

        canvas_BL: int64 noisy tokens, right after the row's cached tokens. soft_embedding: the signal [B, L, D] of the
        last prediction (None, or rows of zeros: no signal). Raises BlockdiffError for a causal model and for a canvas
        longer than the model's.
        """
        if self.denoises and canvas_BL.shape[1] > self.canvas_length:
            raise BlockdiffError(
                f"denoise: a canvas of {canvas_BL.shape[1]} tokens, and the model's have {self.canvas_length} at most; "
                "denoise and encode one canvas after the other"
            )
        positions_BL, spans, rope = prefix.canvas(canvas_BL.shape[1], self.rope)
        hidden, _ = self(canvas_BL, positions_BL, spans, prefix.layers(), True, soft_embedding, rope)
        return hidden

    def unembed(self, hidden: Tensor) -> Tensor:
        """Return soft-capped logits, fp32 [..., V], for a few tokens; training and sampling compute them in chunks."""
        return self.vocabulary.logits(hidden)

    def soft_embedding(self, logits: Tensor) -> Tensor:
        """Return the soft embedding [..., D] of logits [..., V] (see `Vocabulary.soft_embedding_of`)."""
        return self.vocabulary.soft_embedding_of(logits)


def _require_lengths(lengths: Tensor | None, tokens_BS: Tensor) -> None:
    """Raise BlockdiffError unless every row of `tokens_BS` has a length from 0 to the width of the call."""
    if lengths is None:
        return
    (B, S), wrong = tokens_BS.shape, None
    if lengths.shape != (B,):
        wrong = f"shape {[*lengths.shape]} for {B} rows"
    elif len(outside := lengths[(lengths < 0) | (lengths > S)]):
        wrong = f"{int(outside[0])} of {S} columns"
    if wrong is not None:
        raise BlockdiffError(f"encode: lengths have {wrong}; give the number of valid tokens of each row")


def wanted(x: Tensor, is_noisy: bool | Tensor, tokens: int) -> tuple[Tensor, bool | Tensor]:
    """Cut x [B, T, D] and `is_noisy` to the last `tokens` tokens, for which attention returned outputs."""
    if tokens == x.shape[1]:
        return x, is_noisy
    return x[:, -tokens:], of_last(is_noisy, tokens)


def routed(layer: Any, normed: Tensor, spans: Spans | Sweep, is_noisy: bool | Tensor) -> Tensor:
    """Return the weighted sum [B, T, D] of the outputs of the experts that the layer's router chooses per token."""
    normed_ND = normed.flatten(0, 1)
    padding_N = None if spans.padding_BT is None else spans.padding_BT.flatten()
    summed: Tensor = layer.experts(normed_ND, *layer.router(normed_ND), padding_N, is_noisy)
    return summed.view_as(normed)


def layer_scalar(layer: Any, is_noisy: bool | Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the factor of a layer's output: [1] for all tokens, [B, T, 1] if tokens differ, None without a scalar.

    Call it in the layer's forward, where sharded weights are gathered.
    """
    clean, noisy = layer.encoder_scalar, layer.decoder_scalar
    if not isinstance(is_noisy, Tensor):
        scalar = noisy if is_noisy else clean
    elif noisy is None:
        scalar = clean
    else:
        scalar = torch.where(is_noisy[..., None], noisy, torch.ones_like(noisy) if clean is None else clean)
    return scalar if scalar is None or scalar.dtype is dtype else scalar.to(dtype)
