"""Whole answers by transformers' `generate`, with the requests, batches and scripts of `benchmarks.sampling`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion, StoppingCriteriaList
from transformers.models.diffusion_gemma import generation_diffusion_gemma as theirs

from blockdiff.checkpoint.generation import Generation
from blockdiff.sampling.request import Request
from blockdiff.seeding import signed
from tests.oracles.lockstep import Draws

PAD = 0


class Peer:
    """transformers' model in ordinary use: requests of similar length in left-padded batches.

    steps: scripted denoising steps of every canvas, by request id (None: the model's own stopping rule). A finished row
    then stops at its first step, which favours transformers over its own rule. `canvas_forwards` counts canvases
    through the decoder.
    """

    def __init__(
        self,
        model: DiffusionGemmaForBlockDiffusion,
        generation: Generation,
        steps: Sequence[int] | None = None,
        experts: str = "eager",
    ):
        self.model, self.generation, self.steps = model, generation, steps
        model.set_experts_implementation(experts)
        self.config = theirs.DiffusionGemmaGenerationConfig(**generation.to_dict())
        self.canvas_forwards = 0

    @torch.no_grad()
    def answer(self, requests: Sequence[Request], limit: int) -> dict[int, tuple[list[int], float]]:
        """Return the new tokens of every request, by id, and its tokens per forward; `limit`: rows per batch."""
        found: dict[int, tuple[list[int], float]] = {}
        order = sorted(requests, key=lambda request: len(request.tokens or ()))

        def count(_: Any, inputs: Any, named: dict[str, Any]) -> None:
            self.canvas_forwards += len(named["decoder_input_ids"])

        hook = self.model.model.decoder.register_forward_pre_hook(count, with_kwargs=True)
        try:
            for first in range(0, len(order), limit):
                found |= self._batch(order[first : first + limit])
        finally:
            hook.remove()
        return found

    def _batch(self, requests: Sequence[Request]) -> dict[int, tuple[list[int], float]]:
        width = max(len(request.tokens or ()) for request in requests)
        rows = [[PAD] * (width - len(request.tokens or ())) + list(request.tokens or ()) for request in requests]
        lengths = torch.tensor([len(request.tokens or ()) for request in requests])
        options: dict[str, Any] = {}
        changed: AbstractContextManager[Any] = nullcontext()
        if int(lengths.min()) < width:
            options["attention_mask"] = torch.arange(width) >= width - lengths[:, None]
        most = max(request.max_new_tokens or self.generation.max_new_tokens for request in requests)
        if self.steps is not None:
            length = self.model.config.canvas_length
            limits_B = torch.tensor([request.max_new_tokens or most for request in requests])
            script = Script(torch.tensor([self.steps[int(request.id)] for request in requests]), limits_B, length)
            options["stopping_criteria"] = StoppingCriteriaList([lambda ids, *_, **__: script.finished(ids, width)])
            changed = mock.patch.object(self.model, "_prepare_diffusion_stopping_criteria", lambda _: script)
        with changed:
            output = self.model.generate(
                input_ids=torch.tensor(rows), generation_config=self.config, max_new_tokens=most, **options
            )
        new_tokens = output.sequences[:, width:].tolist()
        pairs = zip(new_tokens, output.tokens_per_forward.tolist(), strict=True)
        return {int(request.id): pair for request, pair in zip(requests, pairs, strict=True)}


class Script:
    """Replaces transformers' stopping rules: a canvas ends after scripted steps, a response at its limit."""

    def __init__(self, steps_B: Tensor, limits_B: Tensor, canvas_length: int):
        self.steps_B, self.limits_B, self.canvas_length = steps_B, limits_B, canvas_length
        self.canvas, self.step = -1, 0

    def reset(self) -> None:
        """Begin a new canvas."""
        self.canvas, self.step = self.canvas + 1, 0

    def __call__(self, argmax_BL: Tensor, logits_BLV: Tensor, **_: Any) -> Tensor:
        """Return which canvases finish with this step."""
        self.step += 1
        is_done_B = self.limits_B <= self.canvas * self.canvas_length
        return is_done_B | (self.steps_B <= self.step)

    def finished(self, tokens_BS: Tensor, prompt: int) -> Tensor:
        """Return which responses are complete."""
        return self.limits_B <= tokens_BS.shape[1] - prompt


@contextmanager
def addressed_draws(seeds: Sequence[int], length: int, vocab_size: int) -> Iterator[None]:
    """In the block one batch of transformers' `generate` draws what our requests with these seeds draw.

    To compare, not to time.
    """
    state = SimpleNamespace(canvas=-1, step=0, expects_renoise=False, draws=None)

    def randint(low: int, high: int, size: tuple[int, ...], device: Any = None) -> Tensor:
        # First the first canvas; then, after every sample, the noise of the next step.
        if state.expects_renoise:
            state.step += 1
        else:
            state.canvas, state.step = state.canvas + 1, 0
            state.draws = Draws(torch.tensor([signed(seed) for seed in seeds]), state.canvas, length, vocab_size)
        state.expects_renoise = False
        noise_BL: Tensor = state.draws.of_step(state.step)[1]
        return noise_BL

    def multinomial(probabilities_NV: Tensor, num_samples: int) -> Tensor:
        state.expects_renoise = True
        uniform_N1 = state.draws.of_step(state.step)[0].reshape(-1, 1)
        cdf_NV = probabilities_NV.cumsum(-1)
        return torch.searchsorted(cdf_NV, uniform_N1 * cdf_NV[:, -1:], right=True).clamp_(max=vocab_size - 1)

    fake = SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch) if not name.startswith("__")})
    fake.randint, fake.multinomial = randint, multinomial
    with mock.patch.object(theirs, "torch", fake):
        yield
