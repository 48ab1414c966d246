"""The denoising step: one function over buffers that stay where they are, so that it can be captured and replayed."""

from __future__ import annotations

from collections import abc
from dataclasses import replace

import torch
from torch import Tensor

from blockdiff.kernels.vocabulary import Stats
from blockdiff.models.family import BlockDiffusionModel
from blockdiff.models.pages import Pages
from blockdiff.sampling.calls import StepCall, StepInputs, decided
from blockdiff.sampling.canvas_state import CanvasState, step_report
from blockdiff.sampling.draws import STEPS_AHEAD
from blockdiff.sampling.predict import predict
from blockdiff.sampling.settings import SamplingSettings
from blockdiff.sampling.strategy import Decision


class CanvasStep:
    """The step of the canvases of at most `most` rows, `width` of them side by side for each.

    From step to step the host writes the number of the step alone, into `now`; a step leaves its state in the buffers
    for the next one, and draws and temperatures stand there for several steps ahead. What a call launches, and on which
    memory, follows from the `StepCall` and from the key that `StepBuffers.load` returned for the rows. most: rows that
    there may be, padding included; keeps: as in `StepBuffers`, False where steps are captured.
    """

    def __init__(
        self, model: BlockDiffusionModel, settings: SamplingSettings, pages: Pages, width: int, most: int, keeps: bool
    ):
        self.model, self.settings, self.width = model, settings, width
        L, B, device = settings.canvas_length, most * width, model.device
        self.prefixes = pages.step_buffers(most, width, L, keeps)
        self.state = CanvasState.buffers(B, model, settings)
        self.now = torch.zeros((), dtype=torch.int64, device=device)
        self.temperature_BT = torch.ones(B, STEPS_AHEAD, device=device)
        self.start_BL = torch.full((B, L), -1, device=device)  # tokens that are given at the first step, -1 elsewhere
        self.pinned_BL = torch.full((B, L), -1, device=device)  # tokens that are given at every step
        self.report_BN = torch.zeros((B, 2 + L), dtype=torch.int64, device=device)  # by `step_report`
        self.may_stop: dict[tuple[object, ...], bool] = {}  # by strategies: whether they end canvases early
        self._every_B = torch.arange(B, device=device)

    def write_given(self, buffer_BL: Tensor, of_canvases: abc.Sequence[Tensor | None]) -> None:
        """Write the given tokens of canvases into a buffer, from its first place on, and -1 where no token is given."""
        buffer_BL[: len(of_canvases)] = -1
        for place, given_BL in enumerate(of_canvases):
            if given_BL is not None:
                buffer_BL[place] = given_BL[0]

    def __call__(self, call: StepCall) -> tuple[StepInputs, Stats, Decision]:
        """Denoise every canvas of a call once and decide what stays."""
        lo, count = call.first * self.width, call.rows * self.width
        of, mask_id = slice(lo, lo + count), self.settings.diffusion.mask_id
        padded = slice(lo, lo + call.padded * self.width)
        state, every_B = self.state.part(padded), self._every_B[padded]
        step_B = self.now - state.entered_B
        place_B = step_B % STEPS_AHEAD
        uniform_BL, noise_BL = self.state.uniform_BTL[every_B, place_B], self.state.noise_BTL[every_B, place_B]
        temperature_B = self.temperature_BT[every_B, place_B][:count]
        tokens_BL = state.seen(noise_BL, mask_id, self.start_BL[padded], self.pinned_BL[padded])
        # before the first prediction the signal is 0, which changes nothing; it is left out where nothing is captured
        soft_BLD = state.soft_BLD if call.has_signal else None
        hidden_BLD = call.hidden_BLD
        if hidden_BLD is None:
            hidden_BLD = self._denoised(tokens_BL, soft_BLD, call.first)[:count]
        state, tokens_BL, step_B = self.state.part(of), tokens_BL[:count], step_B[:count]
        inputs = StepInputs(hidden_BLD, tokens_BL, temperature_B, uniform_BL[:count], step_B)
        prediction = self.settings.diffusion.prediction
        stats = predict(self.model, inputs, call.controls, call.shapes, mask_id, prediction)
        pinned_BL = self.pinned_BL[of]
        canvases = state.canvases(self.settings, call.ids, step_B, temperature_B, tokens_BL, stats, pinned_BL)
        decision = decided(canvases, call.groups)
        next_state = replace(
            state,
            unchanged_B=canvases.unchanged_B,
            standing_BL=decision.standing(canvases),
            kept_BL=decision.kept_BL,
            previous_BL=stats.argmax,
            soft_BLD=stats.soft_embedding,
        )
        self.report_BN[of] = step_report(stats, decision)  # before the state: a decision may be views of it
        state.write(slice(None), next_state)
        self.start_BL[of].fill_(-1)
        self.may_stop[call.strategies] = decision.stop_B is not None
        return inputs, stats, decision

    def _denoised(self, tokens_BL: Tensor, soft_BLD: Tensor | None, first: int) -> Tensor:
        """Hidden states [B, L, D], by one call, of canvases: `width` side by side after each row from `first` on."""
        rows = len(tokens_BL) // self.width, self.width * tokens_BL.shape[1]
        soft_BTD = None if soft_BLD is None else soft_BLD.reshape(*rows, -1)
        return self.prefixes.denoise(tokens_BL.reshape(rows), soft_BTD, first).reshape(*tokens_BL.shape, -1)
