"""Training steps and generation with transformers' model, as fast as its public interface allows.

One encode of the whole row serves the AR loss and, cropped to the canvas's start, both denoising passes. Attention is
SDPA. Nothing is masked without need, so SDPA can choose its fastest kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

from blockdiff.canvas import Batch

EXPERTS = ("grouped_mm", "eager")
KV = list[tuple[Tensor, Tensor]]


class TrainingStep:
    """The objective on rows of equal length: `step() -> (canvas loss, AR loss)`, with gradient.

    noisy_BCL: the corrupted canvases, drawn outside of the peer's time; scored: the index of the one canvas per row
    that is scored; pass_one_rows: "all", or "coin" for only the rows that use the signal.
    """

    def __init__(
        self,
        model: DiffusionGemmaForBlockDiffusion,
        batch: Batch,
        noisy_BCL: Tensor,
        scored: int = 0,
        pass_one_rows: str = "coin",
        experts: str = "eager",
    ):
        self.model, self.batch, self.scored, self.experts = model, batch, scored, experts
        self.B, self.C, self.L = noisy_BCL.shape
        self.noisy_BT = noisy_BCL.flatten(1)
        self.start = int(batch.start_BC[0, 0])
        assert bool((batch.start_BC[:, 0] == self.start).all()), "the peer crops one cache for all rows"
        self.coin_B = batch.coin_BC[:, 0]
        self.pass_one_rows = None if pass_one_rows == "all" else self.coin_B.nonzero()[:, 0]
        window, row = model.config.text_config.sliding_window, batch.tokens_BS.shape[1]
        self.fits_window = row < window  # then the cache holds the whole row and can be cropped
        self.masks = None if self.C == 1 else self._canvas_masks()

    def __call__(self) -> tuple[Tensor, Tensor]:
        self.model.set_experts_implementation(self.experts)
        hidden_BSD, kv = self._encode()
        logits_BSV = self._logits(hidden_BSD[:, :-1])
        ar = F.cross_entropy(logits_BSV.flatten(0, 1), self.batch.tokens_BS[:, 1:].flatten())

        with torch.no_grad():
            signal = self._pass_one(kv)
        logits_BTV = self._denoise(self.noisy_BT, kv, signal, self.coin_B)
        columns = slice(self.scored * self.L, (self.scored + 1) * self.L)
        target = self.batch.canvas_BCL[:, self.scored].flatten()
        return F.cross_entropy(logits_BTV[:, columns].flatten(0, 1), target), ar

    def _encode(self) -> tuple[Tensor, KV]:
        """Return the hidden states of the whole row, and the keys and values that the canvas sees."""
        encoder, tokens = self.model.model.encoder, self.batch.tokens_BS
        cache = DynamicCache(config=self.model.config.text_config)
        if self.fits_window:
            hidden = encoder(input_ids=tokens, past_key_values=cache).last_hidden_state
            stop = None if self.C > 1 else self.start
            return hidden, [(layer.keys[:, :, :stop], layer.values[:, :, :stop]) for layer in cache.layers]
        # A sliding cache forgets: stop at the canvas's start, copy its keys and values, continue.
        prompt = encoder(input_ids=tokens[:, : self.start], past_key_values=cache).last_hidden_state
        kv = [(layer.keys, layer.values) for layer in cache.layers]
        response = encoder(input_ids=tokens[:, self.start :], past_key_values=cache).last_hidden_state
        return torch.cat([prompt, response], 1), kv

    def _pass_one(self, kv: KV) -> Tensor:
        rows = self.pass_one_rows
        if rows is None:
            return self._denoise(self.noisy_BT, kv)
        some = self._denoise(self.noisy_BT[rows], [(k[rows], v[rows]) for k, v in kv])
        return some.new_zeros(self.B, *some.shape[1:]).index_copy_(0, rows, some)

    def _denoise(
        self, canvas_BT: Tensor, kv: KV, signal_BTV: Tensor | None = None, has_signal_B: Tensor | None = None
    ) -> Tensor:
        cache = DynamicCache(config=self.model.config.text_config)
        for n, (keys, values) in enumerate(kv):
            cache.update(keys, values, n)
        # the canvases of a row have positions one after another
        positions_1T = torch.arange(canvas_BT.shape[1], device=canvas_BT.device)[None] + self.start
        return self.model(
            decoder_input_ids=canvas_BT,
            past_key_values=cache,
            self_conditioning_logits=signal_BTV,
            self_conditioning_mask=has_signal_B,
            decoder_attention_mask=self.masks,
            decoder_position_ids=positions_1T,
        ).logits

    def _canvas_masks(self) -> dict[str, Tensor]:
        """Return masks [1, 1, C * L, S + C * L], True if seen: the clean tokens before a canvas, and the canvas."""
        S, T = self.batch.tokens_BS.shape[1], self.C * self.L
        device = self.noisy_BT.device
        canvas_T = torch.arange(T, device=device) // self.L
        sees_clean = torch.arange(S, device=device) < (self.start + canvas_T * self.L)[:, None]
        mask = torch.cat([sees_clean, canvas_T == canvas_T[:, None]], 1)[None, None]
        return dict.fromkeys(set(self.model.config.text_config.layer_types), mask)

    def _logits(self, hidden: Tensor) -> Tensor:
        cap = self.model.final_logit_softcapping
        return torch.tanh(self.model.lm_head(hidden).float() / cap) * cap


def logits_of_two_steps(
    model: DiffusionGemmaForBlockDiffusion, tokens_BS: Tensor, canvas_BL: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the logits of a denoise without a signal, and of a second one with these logits as its signal."""
    cache = DynamicCache(config=model.config.text_config)
    model.model.encoder(input_ids=tokens_BS, past_key_values=cache)
    first = model(decoder_input_ids=canvas_BL, past_key_values=cache).logits
    second = model(decoder_input_ids=canvas_BL, past_key_values=cache, self_conditioning_logits=first).logits
    return first, second


def generation(
    model: DiffusionGemmaForBlockDiffusion,
    tokens_BS: Tensor,
    steps: int,
    confidence: float,
    experts: str,
    cache: str = "dynamic",
) -> Callable[[], object]:
    """Return a call that generates one canvas; a static cache makes transformers compile the denoising step."""

    def run() -> object:
        model.set_experts_implementation(experts)
        return model.generate(
            input_ids=tokens_BS,
            max_new_tokens=model.config.canvas_length,
            max_denoising_steps=steps,
            stability_threshold=1,
            confidence_threshold=confidence,
            eos_token_id=1,
            pad_token_id=0,
            cache_implementation=cache,
        )

    return run


def denoising_steps(model: DiffusionGemmaForBlockDiffusion, generate: Callable[[], object]) -> int:
    """Return the number of denoising steps in a call of `generate` (not compiled)."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    hook = model.model.decoder.register_forward_hook(count)
    try:
        generate()
    finally:
        hook.remove()
    return calls
