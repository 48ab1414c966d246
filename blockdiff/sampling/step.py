"""The denoising step, from top to bottom: its arguments, the state of canvases between two steps, and the step.

The step is one function over buffers at fixed addresses, so that it can be captured and replayed. `batch` assigns
canvases to their rows. Tensors: B canvases, L positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.kernels.vocabulary import Stats
from blockdiff.models.pages import Pages
from blockdiff.sampling.canvas_control import CanvasControl
from blockdiff.sampling.predict import PredictInputs, predict, with_given
from blockdiff.sampling.strategy import Canvases, Decision, Shape, Strategy, decide_groups
from blockdiff.seeding import Stream, signed, to_integers, to_uniform, uniform, words

if TYPE_CHECKING:
    from blockdiff.models.model import BlockDiffusionModel
    from blockdiff.sampling.rounds.canvases import RunningCanvas
    from blockdiff.sampling.settings import SamplingSettings

# One call of the generator covers this many steps: most canvases stop before they need a second one.
STEPS_AHEAD = 8


@dataclass(frozen=True)
class StepCall:
    """The arguments of a step over `count` canvases, followed by padding canvases up to `padded`.

    ids: the ids of the canvases' sequences; groups: each strategy with the indices of its canvases (None: all);
    controls: the controls of canvases that have one; shapes: the shape that each canvas draws from; has_signal: whether
    the self-conditioning signal is read, which is 0 before a canvas's first prediction.
    """

    count: int
    padded: int
    ids: Sequence[str | int]
    groups: tuple[tuple[Strategy, Tensor | None], ...]
    controls: Sequence[CanvasControl]
    shapes: Sequence[Shape]
    has_signal: bool = True

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The strategies that decide."""
        return tuple(strategy for strategy, _ in self.groups)


@dataclass
class CanvasState:
    """The state of every canvas between two steps; fields named as in `Canvases` have the same meaning.

    offset_B: the number of the engine's step minus that of the canvas's step; uniform_BTL and noise_BTL: the draws of
    STEPS_AHEAD steps, beginning at the last multiple of STEPS_AHEAD; standing_BL: the input tokens of the next step
    where kept_BL is True.
    """

    seed_B: Tensor
    number_B: Tensor
    offset_B: Tensor
    steps_B: Tensor
    unchanged_B: Tensor
    uniform_BTL: Tensor
    noise_BTL: Tensor
    standing_BL: Tensor
    kept_BL: Tensor
    previous_BL: Tensor
    whole_B: Tensor
    soft_BLD: Tensor

    @classmethod
    def begin(
        cls, canvases: Sequence[RunningCanvas], model: BlockDiffusionModel, settings: SamplingSettings
    ) -> CanvasState:
        """Return the state of canvases before their first steps."""
        numbers = [
            (
                signed(canvas.sequence.seed),
                canvas.number,
                canvas.step_offset,
                canvas.sequence.max_steps,
                canvas.first_step // STEPS_AHEAD * STEPS_AHEAD,
            )
            for canvas in canvases
        ]
        state = cls.buffers(len(canvases), model, settings)
        columns_B = torch.tensor(numbers, device=model.device).unbind(1)
        state.seed_B, state.number_B, state.offset_B, state.steps_B, first_B = columns_B
        draws = draw_ahead(state.seed_B, state.number_B, first_B, settings.canvas_length, model.vocab_size)
        state.uniform_BTL, state.noise_BTL = draws
        state.previous_BL.fill_(-1)
        return state

    @classmethod
    def buffers(cls, count: int, model: BlockDiffusionModel, settings: SamplingSettings) -> CanvasState:
        """Allocate the state of `count` canvases, filled with zeros."""
        L, D = settings.canvas_length, model.vocabulary.signal_width

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(count, *shape, dtype=dtype, device=model.device)

        return cls(
            seed_B=zeros(),
            number_B=zeros(),
            offset_B=zeros(),
            steps_B=zeros(),
            unchanged_B=zeros(),
            uniform_BTL=zeros(STEPS_AHEAD, L, dtype=torch.float32),
            noise_BTL=zeros(STEPS_AHEAD, L),
            standing_BL=zeros(L),
            kept_BL=zeros(L, dtype=torch.bool),
            previous_BL=zeros(L),
            whole_B=zeros(),
            soft_BLD=zeros(L, D, dtype=model.dtype),
        )

    def write(self, to: Tensor | slice, other: CanvasState) -> None:
        """Copy the state of other canvases to the indices `to`."""
        for mine, source in zip(self, other, strict=True):
            if not (isinstance(to, slice) and mine is source):
                mine[to] = source

    def move(self, to: Tensor, come: Tensor) -> None:
        """Copy the state of the canvases at indices `come` to indices `to`; the two may overlap."""
        for each in self:
            each[to] = each[come]

    def part(self, of: slice) -> CanvasState:
        """Return the state of a slice of canvases, as views."""
        return CanvasState(*(each[of] for each in self))

    def draw_on(self, steps: Sequence[int], settings: SamplingSettings) -> list[int]:
        """Make new draws for canvases that have used up theirs; return the indices of those canvases.

        steps: the step number of each canvas.
        """
        due = [index for index, step in enumerate(steps) if step and step % STEPS_AHEAD == 0]
        if due:
            device = self.seed_B.device
            places = torch.tensor(due, device=device)
            first_B = torch.tensor([steps[index] for index in due], device=device)
            addresses = self.seed_B[places], self.number_B[places], first_B
            draws = draw_ahead(*addresses, settings.canvas_length, settings.vocab_size)
            self.uniform_BTL[places], self.noise_BTL[places] = draws
        return due

    def seen(self, noise_BL: Tensor, mask_id: int | None, start_BL: Tensor, pinned_BL: Tensor) -> Tensor:
        """Return the input tokens [B, L] of a step; start_BL, pinned_BL: given tokens, -1 elsewhere."""
        if mask_id is not None:
            noise_BL = torch.full_like(noise_BL, mask_id)
        tokens_BL = self.standing_BL.where(self.kept_BL, noise_BL)
        for given_BL in (start_BL, pinned_BL):
            tokens_BL = given_BL.where(given_BL >= 0, tokens_BL)
        return tokens_BL

    def canvases(
        self,
        settings: SamplingSettings,
        ids: Sequence[str | int],
        step_B: Tensor,
        temperature_B: Tensor,
        tokens_BL: Tensor,
        stats: Stats,
        pinned_BL: Tensor,
    ) -> Canvases:
        """Return the `Canvases` that a strategy decides, after a step with the input tokens `tokens_BL`."""
        mask_id = settings.diffusion.mask_id
        is_masked_BL = torch.zeros_like(self.kept_BL) if mask_id is None else tokens_BL == mask_id
        return Canvases(
            ids=ids,
            step_B=step_B,
            steps_B=self.steps_B,
            temperature_B=temperature_B,
            tokens_BL=tokens_BL,
            stats=stats,
            previous_BL=self.previous_BL,
            unchanged_B=(self.unchanged_B + 1) * (stats.argmax == self.previous_BL).all(-1),
            kept_BL=self.kept_BL,
            is_pinned_BL=pinned_BL >= 0,
            is_masked_BL=is_masked_BL,
            whole_B=self.whole_B if mask_id is None else (self.whole_B + 1) * ~is_masked_BL.any(-1),
            end_ids=settings.generation.eos_ids,
            noise_probability=1 / settings.vocab_size if mask_id is None else 0.0,
            draw=lambda: second_draws(self.seed_B, self.number_B, step_B, settings.canvas_length),
        )

    def __iter__(self) -> Iterator[Tensor]:
        return (getattr(self, field.name) for field in fields(self))


class CanvasStep:
    """The denoising step of at most `most` canvases, padding included.

    Between steps the host only writes the step number, to `now`. A step writes its state to buffers for the next one;
    draws and temperatures are stored there several steps ahead. The `StepCall` and the key that `StepBuffers.load`
    returned for the rows determine the launched kernels and their memory. keeps: as in `StepBuffers`, False if steps
    are captured.
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

    def write_given(self, buffer_BL: Tensor, of_canvases: Sequence[Tensor | None]) -> None:
        """Write the given tokens of canvases to the first rows of a buffer, and -1 where no token is given."""
        buffer_BL[: len(of_canvases)] = -1
        for row, given_BL in enumerate(of_canvases):
            if given_BL is not None:
                buffer_BL[row] = given_BL[0]

    def __call__(self, call: StepCall) -> tuple[PredictInputs, Stats, Decision]:
        """Denoise every canvas once and decide which tokens are kept."""
        unpadded, padded, mask_id = slice(call.count), slice(call.padded), self.settings.diffusion.mask_id
        state, every_B = self.state.part(padded), self._every_B[padded]
        step_B = self.now - state.offset_B
        place_B = step_B % STEPS_AHEAD
        uniform_BL, noise_BL = self.state.uniform_BTL[every_B, place_B], self.state.noise_BTL[every_B, place_B]
        temperature_B = self.temperature_BT[every_B, place_B][unpadded]
        tokens_BL = state.seen(noise_BL, mask_id, self.start_BL[padded], self.pinned_BL[padded])
        hidden_BLD = self.prefixes.denoise(tokens_BL, state.soft_BLD if call.has_signal else None)[unpadded]
        state, tokens_BL, step_B = self.state.part(unpadded), tokens_BL[unpadded], step_B[unpadded]
        inputs = PredictInputs(hidden_BLD, tokens_BL, temperature_B, uniform_BL[unpadded], step_B)
        stats = predict(self.model, inputs, call.controls, call.shapes, mask_id)
        pinned_BL = self.pinned_BL[unpadded]
        if self.settings.aligned:  # rows without a control of their own have the prompt's tail
            stats = with_given(stats, pinned_BL)
        canvases = state.canvases(self.settings, call.ids, step_B, temperature_B, tokens_BL, stats, pinned_BL)
        decision = decide_groups(canvases, call.groups)
        next_state = replace(
            state,
            unchanged_B=canvases.unchanged_B,
            standing_BL=decision.standing(canvases),
            kept_BL=decision.kept_BL,
            previous_BL=stats.argmax,
            whole_B=canvases.whole_B,
            soft_BLD=stats.soft_embedding,
        )
        self.report_BN[unpadded] = step_report(stats, decision)  # first, for a decision may have views of `state`
        state.write(slice(None), next_state)
        self.start_BL[unpadded].fill_(-1)
        self.may_stop[call.strategies] = decision.stop_B is not None
        return inputs, stats, decision


def step_report(stats: Stats, decision: Decision) -> Tensor:
    """Return the step's report to the host, int64 [B, 2 + L]: is stopped, is finite, and the final tokens."""
    is_finite_B = stats.entropy.isfinite().all(-1)
    is_stopped_B = torch.zeros_like(is_finite_B) if decision.stop_B is None else decision.stop_B
    final_BL = stats.argmax if decision.final_BL is None else decision.final_BL
    return torch.cat((torch.stack((is_stopped_B, is_finite_B), 1), final_BL), 1)


def draw_ahead(
    seed_B: Tensor, canvas_B: Tensor, first_B: Tensor, length: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Draw the random numbers of STEPS_AHEAD steps of every canvas, from its step `first_B` on (all int64 [B]).

    Returns the numbers that pick samples, float32 [B, STEPS_AHEAD, L] in [0, 1), and noise tokens for positions that
    are not accepted, int64 of the same shape.
    """
    step_BT = first_B[:, None] + torch.arange(STEPS_AHEAD, device=seed_B.device)
    words_BTN = words(seed_B[:, None], Stream.SAMPLE, (canvas_B[:, None], step_BT), 2 * length)
    return to_uniform(words_BTN[..., :length]), to_integers(words_BTN[..., length:], vocab_size)


def second_draws(seed_B: Tensor, canvas_B: Tensor, step_B: Tensor, length: int) -> Tensor:
    """Draw a second uniform number per position of a step, float32 [B, L], for strategies that draw their decision."""
    return uniform(seed_B, Stream.DECIDE, (canvas_B, step_B), length)
