"""The canvases that are denoised together, each with its own step, temperature, draws and prefix.

This is the host's side: which canvas has which place in the buffers, and which calls a step makes. `canvas_step` is the
device's. Tensors: B canvases, `width` of them side by side for each row, L positions.
"""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.kernels.vocabulary import Stats
from blockdiff.models.weights import memory_of
from blockdiff.sampling.calls import StepCall, groups_of
from blockdiff.sampling.canvas_control import CanvasControl, grouped
from blockdiff.sampling.canvas_state import CanvasState
from blockdiff.sampling.canvas_step import CanvasStep
from blockdiff.sampling.draws import STEPS_AHEAD
from blockdiff.sampling.graphs import MOST_GRAPHS, Graphs, HostCopy
from blockdiff.sampling.strategy import Decision, Shape, Strategy, captured_shape
from blockdiff.sampling.trace import Step, step_records

if TYPE_CHECKING:
    from blockdiff.models.family import BlockDiffusionModel
    from blockdiff.models.page_buffers import StepBuffers
    from blockdiff.models.page_rows import PagedRow
    from blockdiff.models.pages import Pages
    from blockdiff.sampling.sequence import CanvasInFlight, Sequence
    from blockdiff.sampling.settings import SamplingSettings


class CanvasBatch:
    """The batch of live canvases. `arrange` it whenever sequences come, go or commit, then `step`.

    Sequences that stay keep their places; one that leaves is replaced by a new one, else by the last. width: the
    canvases that each row has side by side; exact: whether every row has calls of its own; buckets: row counts that a
    call of all rows is padded up to, so that its shapes are few (None: no padding); graphs: capture and replay the
    steps that can be captured (None: no step is).
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
        self.exact, self.buckets, self.graphs = exact, None if exact else buckets, graphs
        self.sequences: list[Sequence] = []
        self.canvases: list[CanvasInFlight] = []
        self.denoised = 0  # canvases that the model has run, padding included
        most = max_rows + self._missing(max_rows)
        self._step = CanvasStep(model, settings, pages, width, most, keeps=graphs is None)
        self._control_buffers: dict[str, Tensor] = {}  # which captured steps read
        self._report = HostCopy(self._step.report_BN)
        self._shapes: dict[tuple[Strategy, int], list[Shape]] = {}
        self._shapes_B: list[list[Shape]] = []
        self._controls_of_calls: list[list[CanvasControl]] = []
        self._is_new = False
        # where steps of the live canvases can be captured: the shape of all, and the key of the graph
        self._captured: tuple[Shape, abc.Hashable] | None = None
        self._memory: abc.Hashable = None  # where the weights lay when steps were captured

    def can_capture(self, shape: Shape) -> bool:
        """True where a step of this shape only launches kernels; native top_p asks how many tokens it needs."""
        filters = self.model.kernels.filters_on_device and self.model.vocabulary.head is None
        return shape.top_p >= 1 or filters

    # -- the canvases and their places -------------------------------------------------------------------------

    def arrange(self, live: abc.Sequence[Sequence]) -> None:
        """Make these sequences the batch, with `width` canvases each; canvases without an index begin now."""
        self.sequences, step, device = self._placed(live), self._step, self.model.device
        self.canvases = canvases = [canvas for row in self.sequences for canvas in row.in_flight]
        moved = [(n, canvas.index) for n, canvas in enumerate(canvases) if canvas.index not in (None, n)]
        fresh = [n for n, canvas in enumerate(canvases) if canvas.index is None]
        if moved:
            step.state.move(*torch.tensor(moved, device=device).unbind(1))
        if fresh:
            begun = CanvasState.of([canvases[n] for n in fresh], self.model, self.settings)
            step.state.write(torch.tensor(fresh, device=device), begun)
        for index, canvas in enumerate(canvases):
            canvas.index = index
        if len(self._shapes) > len(canvases):  # requests may bring any number of strategies
            in_use = {(canvas.sequence.strategy, canvas.sequence.max_steps) for canvas in canvases}
            self._shapes = {key: known for key, known in self._shapes.items() if key in in_use}
        self._shapes_B = [self._shapes.setdefault((c.sequence.strategy, c.sequence.max_steps), []) for c in canvases]
        controls = [canvas.control for canvas in canvases]
        step.write_given(step.pinned_BL, [None if c is None else c.pinned_BL for c in controls])
        starting = [None if canvas.has_begun else canvas.control for canvas in canvases]
        step.write_given(step.start_BL, [None if c is None else c.start_BL for c in starting])
        self._controls_of_calls = [grouped(controls[of]) for of in self._slices()]
        self._is_new, self._captured = True, None
        if not self.settings.is_next_token and self.sequences:
            prefixes = self._load(step.prefixes, [row.paged for row in self.sequences])
            if (shape := self._shape_to_capture()) is not None:
                self._captured = shape, self._prepared(shape, prefixes)
        if len(step.may_stop) > MOST_GRAPHS:  # what replayed steps said is needed; others say it again
            used = set() if self.graphs is None else {key[1] for key in self.graphs.keys}
            step.may_stop = {each: stops for each, stops in step.may_stop.items() if each in used}

    def _placed(self, live: abc.Sequence[Sequence]) -> list[Sequence]:
        """The live sequences in the order of their places."""
        new = [row for row in live if row not in self.sequences]
        places: list[Sequence | None] = [row if row in live else None for row in self.sequences]
        for n, row in enumerate(places):
            if row is None and new:
                places[n] = new.pop(0)
        while None in places:
            last = places.pop()
            if last is not None:
                places[places.index(None)] = last
        return [row for row in places if row is not None] + new

    def _slices(self) -> list[slice]:
        """The places of the canvases of each call."""
        if not self.exact:
            return [slice(0, len(self.canvases))]
        return [slice(n * self.width, (n + 1) * self.width) for n in range(len(self.sequences))]

    def _missing(self, count: int) -> int:
        """The number of rows that a call of so many is padded by."""
        return next((bucket for bucket in self.buckets or () if bucket >= count), count) - count

    def _load(self, buffers: StepBuffers, rows: abc.Sequence[PagedRow | None]) -> abc.Hashable:
        """Load the rows that are not None, and empty rows that pad their call; the key of `StepBuffers.load`."""
        there = [row for row in rows if row is not None]
        return buffers.load([*there, *[self.pages.empty] * self._missing(len(there))]) if there else None

    def _shape_to_capture(self) -> Shape | None:
        """The shape that all canvases draw from, at whatever temperatures; None if their step cannot be captured."""
        strategies = {row.strategy for row in self.sequences}
        controls = next(iter(self._controls_of_calls), [])
        is_looked_at = any(row.is_watched or row.reader or row.visitor for row in self.sequences)
        if self.graphs is None or len(strategies) > 1 or is_looked_at:
            return None
        if not all(each.rows is None for each in controls):
            return None
        [strategy], diffusion = strategies, self.settings.diffusion
        steps = {row.max_steps for row in self.sequences}
        shapes = {captured_shape(strategy, each, diffusion.prediction, diffusion.mask_id) for each in steps}
        shape = shapes.pop()
        return None if shapes or shape is None or not self.can_capture(shape) else shape

    def _prepared(self, shape: Shape, prefixes: abc.Hashable) -> abc.Hashable:
        """Fill the buffers that a captured step reads beside those of its rows; returns the key of the step's graph.

        prefixes: the key of the rows' buffers. Graphs of weights that have moved are forgotten.
        """
        assert self.graphs is not None
        if (memory := memory_of(self.model)) != self._memory:
            self.graphs.forget()  # captured steps read the memory where the weights were
            self._memory = memory
        padding = slice(len(self.canvases), None)  # strategies divide by the number of steps
        self._step.pinned_BL[padding], self._step.state.steps_B[padding] = 0, 1
        rows, key = len(self.sequences) + self._missing(len(self.sequences)), None
        for control in self._controls_of_calls[0]:
            most, key = len(self._step.pinned_BL), control.key
            self._controls_of_calls = [[control.in_buffers(self._control_buffers, most, rows * self.width)]]
        return rows, (self.sequences[0].strategy,), shape, prefixes, key

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self, now: int) -> tuple[list[CanvasInFlight], list[Step]]:
        """Denoise every canvas once; returns the canvases that this finishes, and the records of the watched ones.

        now: the number of the engine's step.
        """
        steps, step = [now - canvas.entered for canvas in self.canvases], self._step
        due = step.state.draw_on(steps, self.settings)
        if places := range(len(steps)) if self._is_new else due:
            temperatures = torch.tensor([self._temperatures(n, steps[n]) for n in places], device=self.model.device)
            step.temperature_BT[torch.tensor(places, device=self.model.device)] = temperatures
        self._is_new = False
        step.now.fill_(now)
        calls, records, hidden = self._calls(steps), list[Step](), list[Tensor]()
        if self._captured is not None:
            assert self.graphs is not None
            self.graphs.run(self._captured[1], lambda: step(calls[0]))
        else:
            for call, of in zip(calls, self._slices(), strict=True):
                visited = self._visited(of)
                signal_BLD = step.state.soft_BLD[of]
                signal_BLD = signal_BLD.clone() if visited else signal_BLD  # the step writes over it
                inputs, stats, decision = step(call)
                for n, visitor in visited.items():
                    visitor(steps[of.start + n], inputs.tokens_BL[n], signal_BLD[n])
                records += self._records(of.start, steps, inputs.tokens_BL, stats, decision)
                hidden.append(inputs.hidden_BLD)
        for call in calls:
            self.denoised += call.padded * self.width if call.hidden_BLD is None else 0
        if not self.settings.is_next_token:
            for row in self.sequences:
                row.calls["denoise"] += 1
        self._report.send(len(steps))
        # where no canvas can end the host need not wait for the device; else it waits here, once
        is_last = any(n + 1 == canvas.sequence.max_steps for n, canvas in zip(steps, self.canvases, strict=True))
        may_end = is_last or any(step.may_stop[call.strategies] for call in calls)
        finished = self._finished(self._report.read(len(steps)) if may_end else None, steps)
        for canvas in finished:
            if canvas.sequence.reader is not None and canvas.index is not None:
                number, place = divmod(canvas.index, self.width) if self.exact else (0, canvas.index)
                canvas.sequence.reader(hidden[number][place])
        return finished, records

    def _calls(self, steps: abc.Sequence[int]) -> list[StepCall]:
        """The calls of a step; steps: the step that each canvas is at."""
        calls, width = [], self.width
        for of, controls in zip(self._slices(), self._controls_of_calls, strict=True):
            rows = self.sequences[of.start // width : -(-of.stop // width)]
            some, missing = self.canvases[of], self._missing(len(rows))
            hidden_BLD = None
            if self.settings.is_next_token:
                hidden_BLD = torch.stack([r.last_hidden_D for r in rows if r.last_hidden_D is not None])[:, None]
            count, shapes = len(rows), [self._shape(n, steps[n]) for n in range(of.start, of.stop)]
            if self._captured is not None:  # it treats rows of padding as it does others
                count += missing
                shapes = [self._captured[0]] * (count * width)
            calls.append(
                StepCall(
                    first=of.start // width,
                    rows=count,
                    padded=len(rows) + missing if hidden_BLD is None else len(rows),
                    ids=() if self._captured is not None else [canvas.sequence.id for canvas in some],
                    groups=groups_of([canvas.sequence.strategy for canvas in some], self.model.device),
                    controls=controls,
                    shapes=shapes,
                    has_signal=not self._is_cheaper_without(some),
                    hidden_BLD=hidden_BLD,
                )
            )
        return calls

    def _is_cheaper_without(self, canvases: abc.Sequence[CanvasInFlight]) -> bool:
        """True where no canvas has a prediction yet and no step is captured, so that the signal, 0, is left out."""
        return self.graphs is None and not any(canvas.has_begun for canvas in canvases)

    def _temperatures(self, place: int, step: int) -> list[float]:
        """The temperatures of a canvas in the STEPS_AHEAD steps of which this step is one."""
        first = step - step % STEPS_AHEAD
        return [self._shape(place, first + ahead).temperature for ahead in range(STEPS_AHEAD)]

    def _shape(self, place: int, step: int) -> Shape:
        """The shape of a step of the canvas in this place.

        The steps of a finished canvas that waits for those before it are counted on; they get the last step's shape,
        which has no effect.
        """
        sequence, known = self.canvases[place].sequence, self._shapes_B[place]
        step = min(max(step, 0), sequence.max_steps - 1)
        while len(known) <= step:
            known.append(sequence.strategy.shape(len(known), sequence.max_steps))
        return known[step]

    def _finished(self, report_BN: Tensor | None, steps: abc.Sequence[int]) -> list[CanvasInFlight]:
        """The canvases that a step has finished; report_BN: by `step_report` (None: no canvas can have ended)."""
        for canvas in self.canvases:
            canvas.has_begun = True
        if report_BN is None:
            return []
        finished = []
        for canvas, step, (stops, is_finite), final_L in zip(
            self.canvases, steps, report_BN[:, :2].tolist(), report_BN[:, 2:], strict=True
        ):
            is_over = stops or step + 1 == canvas.sequence.max_steps or not is_finite
            if is_over and canvas.number is not None and canvas.final is None:
                canvas.steps, canvas.final = step + 1 - canvas.first_step, final_L.tolist()
                canvas.is_finite = bool(is_finite)
                finished.append(canvas)
        return finished

    def _visited(self, of: slice) -> dict[int, abc.Callable[[int, Tensor, Tensor], object]]:
        """The visitors of the canvases of a call that are not finished, by place in the call."""
        return {
            n: canvas.sequence.visitor
            for n, canvas in enumerate(self.canvases[of])
            if canvas.sequence.visitor is not None and canvas.number is not None and canvas.final is None
        }

    def _records(
        self, first: int, steps: abc.Sequence[int], tokens_BL: Tensor, stats: Stats, decision: Decision
    ) -> list[Step]:
        """The records of the watched sequences of a call; one that is repeated after a preemption is recorded once.

        first: the place of the call's first canvas.
        """
        watched = {}
        for place, canvas in enumerate(self.canvases[first : first + len(tokens_BL)]):
            sequence, number, step = canvas.sequence, canvas.number, steps[first + place]
            if not sequence.is_watched or number is None or canvas.final is not None:
                continue
            if step > sequence.recorded.get(number, -1):
                sequence.recorded[number] = step
                watched[place] = sequence.id, number, step, self._shape(first + place, step).temperature
        pinned_BL = self._step.pinned_BL[first : first + len(tokens_BL)]
        return step_records(watched, tokens_BL, stats, decision, pinned_BL)
