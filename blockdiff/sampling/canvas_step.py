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
    """The step of at most `most` canvases.

    From step to step the host writes the number of the step alone, into `now`; a step leaves its state in the buffers
    for the next one, and draws and temperatures stand there for several steps ahead. What it launches, and on which
    memory, follows from the `StepCall` and from the key that `StepBuffers.load` returned for the rows. most: canvases
    that there may be, padding included; keeps: as in `StepBuffers`, False where steps are captured.
    """

    def __init__(self, model: BlockDiffusionModel, settings: SamplingSettings, pages: Pages, most: int, keeps: bool):
        self.model, self.settings = model, settings
        L, B, device = settings.canvas_length, most, model.device
        self.prefixes = pages.step_buffers(most, L, keeps)
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
        """Denoise every canvas once and decide what stays."""
        of, padded, mask_id = slice(call.count), slice(call.padded), self.settings.diffusion.mask_id
        state, every_B = self.state.part(padded), self._every_B[padded]
        step_B = self.now - state.entered_B
        place_B = step_B % STEPS_AHEAD
        uniform_BL, noise_BL = self.state.uniform_BTL[every_B, place_B], self.state.noise_BTL[every_B, place_B]
        temperature_B = self.temperature_BT[every_B, place_B][of]
        tokens_BL = state.seen(noise_BL, mask_id, self.start_BL[padded], self.pinned_BL[padded])
        hidden_BLD = call.hidden_BLD
        if hidden_BLD is None:
            hidden_BLD = self.prefixes.denoise(tokens_BL, state.soft_BLD if call.has_signal else None)[of]
        state, tokens_BL, step_B = self.state.part(of), tokens_BL[of], step_B[of]
        inputs = StepInputs(hidden_BLD, tokens_BL, temperature_B, uniform_BL[of], step_B)
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
