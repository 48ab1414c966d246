"""A denoising step that reads and writes buffers which stay where they are, so that it can be captured and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from blockdiff.models.family import BlockDiffusionModel
from blockdiff.models.page_rows import PagedRow
from blockdiff.models.pages import Pages
from blockdiff.models.weights import memory_of
from blockdiff.sampling.draws import STEPS_AHEAD
from blockdiff.sampling.graphs import MOST_GRAPHS, Graphs, HostCopy
from blockdiff.sampling.held import FixedHeld, Held
from blockdiff.sampling.live_state import State, ends
from blockdiff.sampling.predict import predict
from blockdiff.sampling.settings import SamplingSettings
from blockdiff.sampling.strategy import Shape, Strategy, decision_of


class FixedStep:
    """The step of canvases that one strategy decides: `load` them, then `run` their steps.

    most: rows at most, `width` canvases of each. What changes from step to step is the number of the step, which the
    host writes, and what a step leaves for the next; draws and temperatures stand there for several steps ahead.
    """

    def __init__(
        self,
        model: BlockDiffusionModel,
        settings: SamplingSettings,
        pages: Pages,
        width: int,
        most: int,
        graphs: Graphs,
    ):
        self.model, self.settings, self.width, self.most, self.graphs = model, settings, width, most, graphs
        self._weights = memory_of(model)
        L, B, device = settings.canvas_length, most * width, model.device
        self.pages = pages
        self.rows = pages.step_buffers(most, width, L, keeps=False)
        self.others = pages.step_buffers(most, width, L, keeps=False)  # of guided rows, without their prompts
        self.held = FixedHeld(B)
        self._now = torch.zeros((), dtype=torch.int64, device=device)
        self._every_B = torch.arange(B, device=device)
        self._temperature_BT = torch.ones(B, STEPS_AHEAD, device=device)
        self._start_BL = torch.full((B, L), -1, device=device)
        self._pinned_BL = torch.zeros((B, L), dtype=torch.int64, device=device)
        self._told_BN = torch.zeros((B, 2 + L), dtype=torch.int64, device=device)
        self._on_host = HostCopy(self._told_BN)
        self._state: State | None = None
        self._key: tuple[int, Strategy, Shape, object] | None = None
        self._may_stop: dict[Strategy, bool] = {}
        self._loaded = 0, 0  # rows, and their canvases without those of padding

    @property
    def is_stale(self) -> bool:
        """Whether weights lie elsewhere than they did: what was captured reads where they were."""
        return self._weights != memory_of(self.model)

    def takes(self, shape: Shape) -> bool:
        """Whether a step of this shape does nothing but launch: top_p natively looks how many tokens it needs."""
        model = self.model
        filters = model.kernels.filters_on_device and not shape.guidance and model.vocabulary.head is None
        return shape.top_p >= 1 or filters

    def load(
        self, rows: Sequence[PagedRow], others: Sequence[PagedRow], strategy: Strategy, shape: Shape, state: State,
        start_BL: Tensor | None, pinned_BL: Tensor | None, held: Held | None,
    ) -> State:  # fmt: skip
        """Take canvases over, and give their state back as it stands in the buffers.

        rows: those of the canvases, and then any that pad the call; others: the same without their prompts, where the
        shape asks for guidance; shape: the `captured_shape` of the strategy; start_BL, pinned_BL: tokens that are given
        at the first step and at every one, -1 elsewhere; held: what holds all canvases.
        """
        count = len(state.seed_B)
        if self._state is None:
            self._state = State(*(x.new_zeros(len(self._every_B), *x.shape[1:]) for x in state))
        for buffer, x in zip(self._state, state, strict=True):
            if buffer.data_ptr() != x.data_ptr():
                buffer[:count] = x
        for buffer_BL, given_BL in ((self._start_BL, start_BL), (self._pinned_BL, pinned_BL)):
            buffer_BL[:count] = -1 if given_BL is None else given_BL
        self._pinned_BL[count:], self._state.steps_B[count:] = 0, 1  # canvases of padding, by which rules divide
        read = self.rows.load(rows), self.others.load(others) if shape.guidance else None
        self._key, self._loaded = (len(rows), strategy, shape, (*read, self.held.load(held))), (len(rows), count)
        if len(self._may_stop) > MOST_GRAPHS:  # requests may bring any number of strategies
            captured = {key[1] for key in self.graphs.keys}
            self._may_stop = {each: stops for each, stops in self._may_stop.items() if each in captured}
        return self._state.part(slice(0, count))

    def set_temperatures(self, places: Sequence[int], temperatures: Sequence[Sequence[float]]) -> None:
        """Set those of canvases from the last multiple of STEPS_AHEAD on, of as many steps."""
        device = self._now.device
        self._temperature_BT[torch.tensor(places, device=device)] = torch.tensor(temperatures, device=device)

    def run(self, strategy: Strategy, now: int) -> None:
        """Denoise every canvas once, and send for what became of it; the host waits for nothing."""
        self._now.fill_(now)
        self.graphs.run(self._key, lambda: self._step(strategy))
        self._on_host.send(self._loaded[1])

    def may_stop(self, strategy: Strategy) -> bool:
        """Whether a canvas can stop before its last step, after a step was run."""
        return self._may_stop[strategy]

    def told(self) -> Tensor:
        """What became of every canvas in the last step, as `ends` says it; the host waits for the step."""
        return self._on_host.read(self._loaded[1])

    def _step(self, strategy: Strategy) -> None:
        """The step itself: what it launches follows from the key of what is loaded, and all else stands in buffers."""
        assert self._state is not None and self._key is not None
        B, L = self._loaded[0] * self.width, self.settings.canvas_length
        state, every_B = self._state.part(slice(0, B)), self._every_B[:B]
        mask_id = self.settings.diffusion.mask_id
        step_B = self._now - state.entered_B
        place_B = step_B % STEPS_AHEAD
        uniform_BL, noise_BL = state.uniform_BTL[every_B, place_B], state.noise_BTL[every_B, place_B]
        temperature_B = self._temperature_BT[every_B, place_B]
        tokens_BL = state.seen(noise_BL, mask_id, self._start_BL[:B], self._pinned_BL[:B])
        rows, shape = (self._loaded[0], self.width * L), self._key[2]
        seen = tokens_BL.view(rows), state.soft_BLD.view(*rows, -1)
        hidden_BLD = self.rows.denoise(*seen).reshape(B, L, -1)
        other_BLD = self.others.denoise(*seen).reshape(B, L, -1) if shape.guidance else None
        held = self.held.read(B)
        of_step = tokens_BL, temperature_B, uniform_BL, mask_id, [] if held is None else [held], step_B, [shape] * B
        stats = predict(self.model, hidden_BLD, *of_step, other_BLD=other_BLD)
        told = (), step_B, temperature_B, tokens_BL, stats, self._pinned_BL[:B]
        canvases = state.canvases(self.settings, *told)
        decision = decision_of(strategy, canvases)
        left = replace(
            state,
            unchanged_B=canvases.unchanged_B,
            standing_BL=decision.standing(canvases),
            kept_BL=decision.kept_BL,
            previous_BL=stats.argmax,
            soft_BLD=stats.soft_embedding,
        )
        self._told_BN[:B] = ends(stats, decision)  # first: a decision may say what stands in the buffers
        for buffer, x in zip(state, left, strict=True):
            if buffer is not x:
                buffer.copy_(x)
        self._start_BL[:B].fill_(-1)
        self._may_stop[strategy] = decision.stop_B is not None
