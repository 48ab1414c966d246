"""The canvases that are denoised together: each with its own step, temperature, draws and prefix.

Tensors: B canvases, `width` of them side by side for each row, L positions.
"""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.kernels.vocabulary import Stats
from blockdiff.sampling.calls import Call, calls_of, decided, joined
from blockdiff.sampling.draws import STEPS_AHEAD
from blockdiff.sampling.fixed_step import FixedStep
from blockdiff.sampling.graphs import Graphs
from blockdiff.sampling.held import Held, given_tokens, held_canvases
from blockdiff.sampling.live_state import State, ends
from blockdiff.sampling.predict import predict
from blockdiff.sampling.strategies import captured_shape
from blockdiff.sampling.strategy import Decision, Shape, Strategy
from blockdiff.sampling.trace import Step, step_records

if TYPE_CHECKING:
    from blockdiff.models.family import BlockDiffusionModel
    from blockdiff.models.page_buffers import StepBuffers
    from blockdiff.models.page_rows import PagedRow
    from blockdiff.models.pages import Pages
    from blockdiff.sampling.sequence import CanvasInFlight, Sequence
    from blockdiff.sampling.settings import SamplingSettings


class Live:
    """The batch of live canvases. `arrange` it whenever rows come, go or commit, then `step`.

    exact: whether every row has calls of its own; buckets: row counts that a call of all rows is padded up to, so that
    its shapes are few (None: no padding); graphs: where steps that can be are captured and replayed (None: none).
    """

    def __init__(
        self,
        model: BlockDiffusionModel,
        settings: SamplingSettings,
        pages: Pages,
        width: int,
        max_rows: int,
        exact: bool,
        buckets: abc.Sequence[int] | None = None,
        graphs: Graphs | None = None,
    ):
        self.model, self.settings, self.pages, self.width = model, settings, pages, width
        self.rows_per_call, self.buckets = 1 if exact else max_rows, None if exact else buckets
        self.sequences: list[Sequence] = []
        self.canvases: list[CanvasInFlight] = []
        self.forwards = 0  # canvases that the model has run, padding included
        self._state: State | None = None
        self._calls: list[Call] = []
        self._held: list[list[Held]] = []  # what holds the canvases of each call
        self._pinned_BL: Tensor | None = None
        self._start_BL: Tensor | None = None
        self._every_B = torch.empty(0)
        self._shapes: dict[tuple[Strategy, int], list[Shape]] = {}
        self._shapes_B: list[list[Shape]] = []
        most = max_rows + self._missing(max_rows)
        of_steps = most, width, settings.canvas_length, graphs is None
        self._prefixes, self._without_prompts = pages.step_buffers(*of_steps), pages.step_buffers(*of_steps)
        self.fixed = None if graphs is None else FixedStep(model, settings, pages, width, most, graphs)
        # of the live canvases, where their steps can be captured: the strategy, and what it draws from
        self._captured: tuple[Strategy, Shape] | None = None
        self._is_loaded = False

    # -- who is here -------------------------------------------------------------------------------------------

    def arrange(self, rows: abc.Sequence[Sequence]) -> None:
        """Make these rows the batch, `width` canvases each; canvases without an index begin now."""
        self.sequences = list(rows)
        canvases = [canvas for row in rows for canvas in row.in_flight]
        fresh = [canvas for canvas in canvases if canvas.index is None]
        held = 0 if self._state is None else len(self._state.seed_B)
        places = iter(range(held, held + len(fresh)))
        source = [next(places) if canvas.index is None else canvas.index for canvas in canvases]
        device = self.model.device
        if len(fresh) == len(canvases):
            self._state = State.of(fresh, self.model, self.settings) if canvases else None
        else:
            assert self._state is not None
            if fresh:
                self._state = self._state.then(State.of(fresh, self.model, self.settings))
            if source != list(range(held + len(fresh))):
                self._state = self._state.select(torch.tensor(source, device=device))
        for index, canvas in enumerate(canvases):
            canvas.index = index
        self.canvases = canvases
        if len(self._shapes) > len(canvases):  # requests may bring any number of strategies
            in_use = {(canvas.sequence.strategy, canvas.sequence.max_steps) for canvas in canvases}
            self._shapes = {key: known for key, known in self._shapes.items() if key in in_use}
        self._shapes_B = [self._shapes.setdefault((s.sequence.strategy, s.sequence.max_steps), []) for s in canvases]
        strategies = [canvas.sequence.strategy for canvas in canvases]
        self._calls = calls_of(strategies, len(rows), self.rows_per_call, device)
        self._every_B = torch.arange(len(canvases), device=device)
        controls = [canvas.control for canvas in canvases]
        of_all = self.settings.canvas_length, self.model.vocab_size, device
        self._held = [held_canvases(controls[call.slots], *of_all) for call in self._calls]
        self._pinned_BL = given_tokens([None if c is None else c.pinned_L for c in controls])
        starting = [None if canvas.has_begun else canvas.control for canvas in canvases]
        self._start_BL = given_tokens([None if c is None else c.start_L for c in starting])
        self._captured, self._is_loaded = self._one_strategy(), False
        if self._captured is None and not self.settings.is_next_token:
            self._load(self._prefixes, [row.paged for row in rows])
            self._load(self._without_prompts, [row.without_prompt for row in rows])

    def _load(self, buffers: StepBuffers, rows: abc.Sequence[PagedRow | None]) -> None:
        """Load those rows that there are, and those that pad the call of them."""
        there = [row for row in rows if row is not None]
        if there:
            buffers.load([*there, *[self.pages.empty] * self._missing(len(there))])

    def _one_strategy(self) -> tuple[Strategy, Shape] | None:
        """The strategy of all canvases, where their steps can be captured; None where they run as they are."""
        if self.fixed is None or len(self._calls) != 1 or len(self._calls[0].groups) > 1:
            return None
        if any(row.is_watched for row in self.sequences) or not all(held.rows is None for held in self._held[0]):
            return None
        [(strategy, _)] = self._calls[0].groups
        told = self.settings.diffusion.prediction, self.settings.diffusion.mask_id
        shapes = {captured_shape(strategy, steps, *told) for steps in {row.max_steps for row in self.sequences}}
        shape = shapes.pop()
        return None if shapes or shape is None or not self.fixed.takes(shape) else (strategy, shape)

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self, now: int) -> tuple[list[CanvasInFlight], list[Step]]:
        """Denoise every canvas once: those that are finished by it, and what is told of rows that are watched."""
        state, steps = self._state, [now - canvas.entered for canvas in self.canvases]
        assert state is not None
        if self._captured is not None:
            return self._finished(self._run(*self._captured, state, now, steps), steps), []
        state.draw_on(steps, self.settings)
        step_B = now - state.entered_B
        uniform_BL, noise_BL = self._drawn(state, steps, step_B)
        tokens_BL = state.seen(noise_BL, self.settings.diffusion.mask_id, self._start_BL, self._pinned_BL)
        self._start_BL = None
        shapes = [self._shape(*of_canvas) for of_canvas in zip(self.canvases, self._shapes_B, steps, strict=True)]
        temperature_B = torch.tensor([shape.temperature for shape in shapes], device=tokens_BL.device)

        parts = [
            self._call(call, held, state, tokens_BL, uniform_BL, step_B, temperature_B, shapes)
            for call, held in zip(self._calls, self._held, strict=True)
        ]
        stats, unchanged_B, decision, standing_BL = parts[0] if len(parts) == 1 else joined(parts)
        told = self._told(tokens_BL, stats, decision, steps, shapes)
        state.unchanged_B, state.previous_BL, state.soft_BLD = unchanged_B, stats.argmax, stats.soft_embedding
        state.kept_BL, state.standing_BL = decision.kept_BL, standing_BL
        # where nothing stops here the host need not wait for the device; else this is the one wait
        may_end = decision.stop_B is not None or self._is_last(steps)
        return self._finished(ends(stats, decision).cpu() if may_end else None, steps), told

    def _run(self, strategy: Strategy, shape: Shape, state: State, now: int, steps: abc.Sequence[int]) -> Tensor | None:
        """Denoise every canvas once in fixed buffers; what the host is told, None where nothing can end."""
        assert self.fixed is not None
        if not self._is_loaded:
            rows, others = (
                [row for row in rows if row is not None] + [self.pages.empty] * self._missing(len(rows))
                for rows in ([row.paged for row in self.sequences], [row.without_prompt for row in self.sequences])
            )
            given = self._start_BL, self._pinned_BL
            held = next(iter(self._held[0]), None)
            state = self._state = self.fixed.load(rows, others, strategy, shape, state, *given, held)
            self._start_BL = None
        due = state.draw_on(steps, self.settings)
        if places := due if self._is_loaded else range(len(steps)):
            self.fixed.set_temperatures(places, [self._temperatures(place, steps[place]) for place in places])
        self._is_loaded = True
        self.fixed.run(strategy, now)
        self.forwards += (
            (len(self.sequences) + self._missing(len(self.sequences))) * self.width * (2 if shape.guidance else 1)
        )
        return self.fixed.told() if self.fixed.may_stop(strategy) or self._is_last(steps) else None

    def _drawn(self, state: State, steps: abc.Sequence[int], step_B: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers that pick this step's samples, and its noise."""
        if min(steps) == max(steps):
            place = steps[0] % STEPS_AHEAD
            return state.uniform_BTL[:, place], state.noise_BTL[:, place]
        place_B = step_B % STEPS_AHEAD
        return state.uniform_BTL[self._every_B, place_B], state.noise_BTL[self._every_B, place_B]

    def _temperatures(self, place: int, step: int) -> list[float]:
        """Those of a canvas from the last multiple of STEPS_AHEAD on."""
        canvas, known, first = self.canvases[place], self._shapes_B[place], step - step % STEPS_AHEAD
        return [self._shape(canvas, known, first + ahead).temperature for ahead in range(STEPS_AHEAD)]

    def _is_last(self, steps: abc.Sequence[int]) -> bool:
        """Whether some canvas is at the last step that it may take."""
        return any(step + 1 == canvas.sequence.max_steps for canvas, step in zip(self.canvases, steps, strict=True))

    def _shape(self, canvas: CanvasInFlight, known: list[Shape], step: int) -> Shape:
        """What a step draws from; a canvas that waits for those before it counts on, and its shape means nothing."""
        asked = canvas.sequence
        while len(known) <= min(step, asked.max_steps - 1):
            known.append(canvas.sequence.strategy.shape(len(known), asked.max_steps))
        return known[min(step, asked.max_steps - 1)]

    def _call(
        self,
        call: Call,
        held: abc.Sequence[Held],
        state: State,
        tokens_BL: Tensor,
        uniform_BL: Tensor,
        step_B: Tensor,
        temperature_B: Tensor,
        shapes: abc.Sequence[Shape],
    ) -> tuple[Stats, Tensor, Decision, Tensor]:
        """Denoise and decide the canvases of one call."""
        of, model, settings = call.slots, self.model, self.settings
        if len(self._calls) > 1:
            state = state.part(of)
            tokens_BL, uniform_BL, step_B, temperature_B = (
                x[of] for x in (tokens_BL, uniform_BL, step_B, temperature_B)
            )
        # without one soft is 0, which changes nothing: only where launches are few is it worth leaving out
        has_signal = model.device.type != "cpu" or any(canvas.has_begun for canvas in self.canvases[of])
        soft_BLD = state.soft_BLD if has_signal else None
        hidden_BLD = self._denoised(call, tokens_BL, soft_BLD)
        first = shapes[of.start].temperature
        temperature = first if all(s.temperature == first for s in shapes[of]) else temperature_B
        others_BLD = self._unprompted(call, tokens_BL, soft_BLD)
        of_rows = settings.diffusion.mask_id, held, step_B, shapes[of], settings.diffusion.prediction
        stats = predict(model, hidden_BLD, tokens_BL, temperature, uniform_BL, *of_rows, others_BLD)
        ids = [canvas.sequence.id for canvas in self.canvases[of]]
        pinned_BL = None if self._pinned_BL is None else self._pinned_BL[of]
        canvases = state.canvases(settings, ids, step_B, temperature_B, tokens_BL, stats, pinned_BL)
        decision = decided(canvases, call.groups)
        return stats, canvases.unchanged_B, decision, decision.standing(canvases)

    def _denoised(self, call: Call, tokens_BL: Tensor, soft_BLD: Tensor | None) -> Tensor:
        """Hidden states [B, L, D] of the canvases of a call; of next tokens those of the tokens before them."""
        if self.settings.is_next_token:
            before = [row.last_hidden_D for row in self.sequences[call.rows] if row.last_hidden_D is not None]
            return torch.stack(before)[:, None]
        return self._after(self._prefixes, call.rows.start, tokens_BL, soft_BLD)

    def _after(self, buffers: StepBuffers, first: int, tokens_BL: Tensor, soft_BLD: Tensor | None) -> Tensor:
        """Hidden states [B, L, D] of canvases, `width` side by side after each row from the first on, by one call."""
        width, (B, L) = self.width, tokens_BL.shape
        count, missing = B // width, self._missing(B // width)
        tokens_BT = tokens_BL.reshape(count, width * L)
        soft_BTD = None if soft_BLD is None else soft_BLD.reshape(count, width * L, -1)
        if missing:
            tokens_BT = torch.cat([tokens_BT, tokens_BT.new_zeros(missing, width * L)])
            if soft_BTD is not None:
                soft_BTD = torch.cat([soft_BTD, soft_BTD.new_zeros(missing, *soft_BTD.shape[1:])])
        self.forwards += len(tokens_BT) * width
        return buffers.denoise(tokens_BT, soft_BTD, first)[:count].reshape(B, L, -1)

    def _missing(self, count: int) -> int:
        """How many rows a call of so many is padded by."""
        return next((bucket for bucket in self.buckets or () if bucket >= count), count) - count

    def _unprompted(self, call: Call, tokens_BL: Tensor, soft_BLD: Tensor | None) -> Tensor | None:
        """Hidden states [B, L, D] of the canvases of a call without their prompts, 0 in rows that are not guided."""
        guided = [place for place, row in enumerate(self.sequences[call.rows]) if row.without_prompt is not None]
        if not guided:
            return None
        first = sum(row.without_prompt is not None for row in self.sequences[: call.rows.start])
        of_rows = [place * self.width + n for place in guided for n in range(self.width)]
        places = torch.tensor(of_rows, device=tokens_BL.device)
        soft = None if soft_BLD is None else soft_BLD[places]
        hidden_BLD = self._after(self._without_prompts, first, tokens_BL[places], soft)
        return hidden_BLD.new_zeros(*tokens_BL.shape, hidden_BLD.shape[2]).index_copy(0, places, hidden_BLD)

    def _finished(self, told_BN: Tensor | None, steps: abc.Sequence[int]) -> list[CanvasInFlight]:
        """What is finished by a step, as `ends` tells it; None: nothing is."""
        for canvas in self.canvases:
            canvas.has_begun = True
        if told_BN is None:
            return []
        finished = []
        for canvas, step, (stops, is_finite), final_L in zip(
            self.canvases, steps, told_BN[:, :2].tolist(), told_BN[:, 2:], strict=True
        ):
            is_over = stops or step + 1 == canvas.sequence.max_steps or not is_finite
            if is_over and canvas.number is not None and canvas.final is None:
                canvas.steps, canvas.final = step + 1 - canvas.first_step, final_L.tolist()
                canvas.is_finite = bool(is_finite)
                finished.append(canvas)
        return finished

    def _told(
        self, tokens_BL: Tensor, stats: Stats, decision: Decision, steps: abc.Sequence[int], shapes: abc.Sequence[Shape]
    ) -> list[Step]:
        """The records of this step of the rows that are watched, each told once even where a row begins again."""
        places = []
        for place, canvas in enumerate(self.canvases):
            row, number, step = canvas.sequence, canvas.number, steps[place]
            if row.is_watched and number is not None and canvas.final is None and step > row.told.get(number, -1):
                row.told[number] = step
                places.append(place)
        if not places:
            return []
        chosen = torch.tensor(places, device=tokens_BL.device)
        some = Stats(*(column[chosen] for column in stats))
        at = [
            (self.canvases[p].sequence.id, self.canvases[p].number or 0, steps[p], shapes[p].temperature)
            for p in places
        ]
        given = None if self._pinned_BL is None else self._pinned_BL[chosen] >= 0
        stays = None if decision.stay_BL is None else decision.stay_BL[chosen]
        return list(step_records(at, tokens_BL[chosen], some, decision.keep_BL[chosen], given, stays))
