"""The canvases that are denoised together, each with its own step, temperature, draws and prefix.

This is the host's side: it assigns canvases to rows of the buffers and makes the arguments of a step. `step` is the
device's side. Tensors: B canvases, L positions.
"""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from blockdiff.kernels.vocabulary import Stats
from blockdiff.sampling.canvas_control import CanvasControl, grouped
from blockdiff.sampling.graphs import MOST_GRAPHS, Graphs, HostCopy
from blockdiff.sampling.step import STEPS_AHEAD, CanvasState, CanvasStep, StepCall
from blockdiff.sampling.strategy import Decision, Shape, Strategy, captured_shape, group_canvases
from blockdiff.sampling.trace import step_records

if TYPE_CHECKING:
    from blockdiff.models.model import BlockDiffusionModel
    from blockdiff.models.pages import Pages
    from blockdiff.sampling.rounds.canvases import CanvasRound, RunningCanvas
    from blockdiff.sampling.sequence import Sequence
    from blockdiff.sampling.settings import SamplingSettings


class CanvasBatch:
    """The batch of running canvases, each in its own row of the buffers.

    A canvas keeps its row while its sequence runs. If a sequence leaves, a new canvas gets its row, or else the last
    canvas moves there. graphs: captures steps if possible.
    """

    def __init__(
        self,
        model: BlockDiffusionModel,
        settings: SamplingSettings,
        pages: Pages,
        max_rows: int,
        graphs: Graphs,
    ):
        model = model.denoiser
        self.model, self.settings, self.pages, self.graphs = model, settings, pages, graphs
        self.canvases: list[RunningCanvas] = []  # in the order of their rows
        self._running: list[RunningCanvas] = []  # in the order of the last call
        self.denoised = 0  # canvases that the model has run, padding included
        most = max_rows + graphs.padding(max_rows)
        self._step = CanvasStep(model, settings, pages, most, keeps=not graphs.captures)
        self._control_buffers: dict[str, Tensor] = {}  # read by captured steps
        self._report = HostCopy(self._step.report_BN)
        self._shapes: dict[tuple[Strategy, int], list[Shape]] = {}
        self._shapes_B: list[list[Shape]] = []
        self._canvas_controls: list[CanvasControl] = []
        # the shape of all running canvases and the key of their graph; None if their steps cannot be captured
        self._captured: tuple[Shape, abc.Hashable] | None = None

    def can_capture(self, shape: Shape) -> bool:
        """True if a step of this shape only launches kernels; top_p in torch reads a token count on the host."""
        return shape.top_p >= 1 or self.model.kernels.filters_on_device

    # -- the canvases and their places -------------------------------------------------------------------------

    def _arrange(self, running: list[RunningCanvas]) -> None:
        """Make `running` the batch: assign rows, and write the state of canvases that begin now."""
        self._running, step, device = running, self._step, self.model.device
        self.canvases = canvases = self._placed(running)
        moved = [(n, canvas.index) for n, canvas in enumerate(canvases) if canvas.index not in (None, n)]
        fresh = [n for n, canvas in enumerate(canvases) if canvas.index is None]
        if moved:
            step.state.move(*torch.tensor(moved, device=device).unbind(1))
        if fresh:
            begun = CanvasState.begin([canvases[n] for n in fresh], self.model, self.settings)
            step.state.write(torch.tensor(fresh, device=device), begun)
        for index, canvas in enumerate(canvases):
            canvas.index = index
        if len(self._shapes) > len(canvases):  # requests may bring any number of strategies
            in_use = {(canvas.sequence.strategy, canvas.sequence.max_steps) for canvas in canvases}
            self._shapes = {key: shapes for key, shapes in self._shapes.items() if key in in_use}
        self._shapes_B = [self._shapes.setdefault((c.sequence.strategy, c.sequence.max_steps), []) for c in canvases]
        controls = [canvas.control for canvas in canvases]
        step.write_given(step.pinned_BL, [None if c is None else c.pinned_BL for c in controls])
        starting = [None if canvas.has_begun else canvas.control for canvas in canvases]
        step.write_given(step.start_BL, [None if c is None else c.start_BL for c in starting])
        self._canvas_controls = grouped(controls)
        self._captured = None
        if canvases:
            rows = [canvas.sequence.paged for canvas in canvases if canvas.sequence.paged is not None]
            prefixes = step.prefixes.load(rows + [self.pages.empty] * self.graphs.padding(len(rows)))
            if (shape := self._shape_to_capture()) is not None:
                self._captured = shape, self._prepared(shape, prefixes)
        if len(step.may_stop) > MOST_GRAPHS:  # keep the entries of captured graphs, which a replay does not set again
            used = {key[1] for key in self.graphs.keys}
            step.may_stop = {each: stops for each, stops in step.may_stop.items() if each in used}

    def _placed(self, running: abc.Sequence[RunningCanvas]) -> list[RunningCanvas]:
        """Return the running canvases in the order of their rows."""
        of_round = {canvas.round: canvas for canvas in running}
        places = [of_round.pop(before.round, None) for before in self.canvases]
        new = [canvas for canvas in running if canvas.round in of_round]
        for n, canvas in enumerate(places):
            if canvas is None and new:
                places[n] = new.pop(0)
        while None in places:
            last = places.pop()
            if last is not None:
                places[places.index(None)] = last
        return [canvas for canvas in places if canvas is not None] + new

    def _shape_to_capture(self) -> Shape | None:
        """Return the shape that all canvases share, up to temperature; None if the step cannot be captured."""
        rows = [canvas.sequence for canvas in self.canvases]
        strategies = {row.strategy for row in rows}
        is_observed = any(canvas.sequence.is_watched or canvas.round.is_observed for canvas in self.canvases)
        if not self.graphs.captures or len(strategies) > 1 or is_observed:
            return None
        if not all(row.may_capture for row in rows):
            return None
        if not all(each.rows is None for each in self._canvas_controls):
            return None
        [strategy] = strategies
        shapes = {captured_shape(strategy, steps) for steps in {row.max_steps for row in rows}}
        shape = shapes.pop()
        return None if shapes or shape is None or not self.can_capture(shape) else shape

    def _prepared(self, shape: Shape, prefixes: abc.Hashable) -> abc.Hashable:
        """Fill the buffers that a captured step reads in addition to its rows' buffers; return the graph's key.

        prefixes: the key of the rows' buffers.
        """
        after = slice(len(self.canvases), None)  # strategies divide by the number of steps
        self._step.pinned_BL[after], self._step.state.steps_B[after] = 0, 1
        rows, key = len(self.canvases) + self.graphs.padding(len(self.canvases)), None
        for control in self._canvas_controls:
            most, key = len(self._step.pinned_BL), control.key
            self._canvas_controls = [control.in_buffers(self._control_buffers, most, rows)]
        return rows, (self.canvases[0].sequence.strategy,), shape, prefixes, key

    # -- one step ----------------------------------------------------------------------------------------------

    def propose(self, rows: abc.Sequence[Sequence], now: int) -> list[RunningCanvas]:
        """Denoise the canvas of every row once, and return the canvases that this finishes.

        Records of watched sequences become events. now: the number of the engine's step. An empty `rows` drops the
        previous canvases, so that pages may move before the next call.
        """
        rounds = cast("list[CanvasRound]", [row.round for row in rows])
        each = zip(rounds, rows, strict=True)
        running = [round_.running(row, now, self.settings, self.model.device) for round_, row in each]
        if has_changed := running != self._running:
            self._arrange(running)
        if not self.canvases:
            return []
        steps, step = [now - canvas.step_offset for canvas in self.canvases], self._step
        due = step.state.draw_on(steps, self.settings)
        if places := range(len(steps)) if has_changed else due:
            temperatures = torch.tensor([self._temperatures(n, steps[n]) for n in places], device=self.model.device)
            step.temperature_BT[torch.tensor(places, device=self.model.device)] = temperatures
        step.now.fill_(now)
        call, hidden_BLD = self._call(steps), None
        if self._captured is not None:
            self.graphs.run(self._captured[1], lambda: step(call))
        else:
            callbacks = [canvas.round.on_inputs for canvas in self.canvases]
            signal_BLD = step.state.soft_BLD[: len(steps)]
            signal_BLD = signal_BLD.clone() if any(callbacks) else signal_BLD  # the step writes over it
            inputs, stats, decision = step(call)
            for n, on_inputs in enumerate(callbacks):
                if on_inputs is not None:
                    on_inputs(steps[n], inputs.tokens_BL[n], signal_BLD[n])
            self._record(steps, inputs.tokens_BL, stats, decision)
            hidden_BLD = inputs.hidden_BLD
        self.denoised += call.padded
        for canvas in self.canvases:
            canvas.sequence.calls["denoise"] += 1
        self._report.send(len(steps))
        # if no canvas can end the host need not wait for the device; else it waits here, once
        is_last = any(n + 1 == canvas.sequence.max_steps for n, canvas in zip(steps, self.canvases, strict=True))
        may_end = is_last or step.may_stop[call.strategies]
        finished = self._finished(self._report.read(len(steps)) if may_end else None, steps)
        for canvas in finished:
            if canvas.round.on_last_hidden is not None and hidden_BLD is not None and canvas.index is not None:
                canvas.round.on_last_hidden(hidden_BLD[canvas.index])
        return finished

    def _call(self, steps: abc.Sequence[int]) -> StepCall:
        """Return the arguments of a step; steps: the step number of each canvas."""
        canvases = self.canvases
        shapes, controls = [self._shape(n, step) for n, step in enumerate(steps)], self._canvas_controls
        groups = group_canvases([canvas.sequence.strategy for canvas in canvases], self.model.device)
        # before the first prediction the signal is 0, which changes nothing; it is left out if nothing is captured
        has_signal = self.graphs.captures or any(canvas.has_begun for canvas in canvases)
        ids = [canvas.sequence.id for canvas in canvases]
        count = padded = len(ids) + self.graphs.padding(len(ids))
        if self._captured is None:
            return StepCall(len(ids), padded, ids, groups, controls, shapes, has_signal)
        # a captured step treats canvases of padding as it does others
        return StepCall(count, padded, (), groups, controls, [self._captured[0]] * count, has_signal)

    def _temperatures(self, index: int, step: int) -> list[float]:
        """Return the temperatures of a canvas in the group of STEPS_AHEAD steps that contains `step`."""
        first = step - step % STEPS_AHEAD
        return [self._shape(index, first + ahead).temperature for ahead in range(STEPS_AHEAD)]

    def _shape(self, index: int, step: int) -> Shape:
        """Return the `Shape` (temperature and filters) of step `step` of canvas `index`.

        A step after the last has the last one's.
        """
        sequence, shapes = self.canvases[index].sequence, self._shapes_B[index]
        step = min(step, sequence.max_steps - 1)
        while len(shapes) <= step:
            shapes.append(sequence.strategy.shape(len(shapes), sequence.max_steps))
        return shapes[step]

    def _finished(self, report_BN: Tensor | None, steps: abc.Sequence[int]) -> list[RunningCanvas]:
        """Return the canvases that a step finished; report_BN: as in `step_report` (None: no canvas can have ended)."""
        for canvas in self.canvases:
            canvas.has_begun = True
        if report_BN is None:
            return []
        finished = []
        for canvas, step, (stops, is_finite), final_L in zip(
            self.canvases, steps, report_BN[:, :2].tolist(), report_BN[:, 2:], strict=True
        ):
            is_over = stops or step + 1 == canvas.sequence.max_steps or not is_finite
            if is_over:
                canvas.steps, canvas.final = step + 1 - canvas.first_step, final_L.tolist()
                canvas.is_finite = bool(is_finite)
                finished.append(canvas)
        return finished

    def _record(self, steps: abc.Sequence[int], tokens_BL: Tensor, stats: Stats, decision: Decision) -> None:
        """Add the step to the events of each watched sequence; a step repeated after a preemption is recorded once."""
        watched = {}
        for index, (canvas, step) in enumerate(zip(self.canvases, steps, strict=True)):
            sequence, number = canvas.sequence, canvas.number
            if sequence.is_watched and (number, step) > canvas.round.recorded:
                canvas.round.recorded = number, step
                temperature = self._shape(index, step).temperature
                watched[index] = len(sequence.tail), (sequence.id, number, step, temperature)
        records = step_records(watched, tokens_BL, stats, decision, self._step.pinned_BL[: len(tokens_BL)])
        for index, record in zip(watched, records, strict=True):
            sequence = self.canvases[index].sequence
            sequence.events.append((sequence, record))
