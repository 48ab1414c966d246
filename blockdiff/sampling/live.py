"""The canvases that are denoised together: each with its own step, temperature, draws and prefix.

Tensors: B canvases, `width` of them side by side for each row, L positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.kernels.vocabulary import Stats
from blockdiff.sampling.context import Context
from blockdiff.sampling.draws import STEPS_AHEAD, draw_ahead, second_draws, signed
from blockdiff.sampling.predict import predict
from blockdiff.sampling.scheduler import Row, Slot
from blockdiff.sampling.strategy import Canvases, Decision, Shape, Strategy
from blockdiff.sampling.trace import Step, step_records

if TYPE_CHECKING:
    from blockdiff.models.pages import PagedRow, Pages
    from blockdiff.sampling.control import CanvasControl


@dataclass
class State:
    """What is known of every canvas between two steps; the names are those of `Canvases`.

    entered_B: the engine's step that was step 0; uniform_BTL and noise_BTL: the draws of the steps that begin with the
    last multiple of STEPS_AHEAD; standing_BL: what stands in the next canvas where kept_BL is True.
    """

    seed_B: Tensor
    number_B: Tensor
    entered_B: Tensor
    steps_B: Tensor
    unchanged_B: Tensor
    uniform_BTL: Tensor
    noise_BTL: Tensor
    standing_BL: Tensor
    kept_BL: Tensor
    previous_BL: Tensor
    soft_BLD: Tensor

    def then(self, other: State) -> State:
        """These canvases and then others."""
        return State(*(torch.cat(both) for both in zip(self, other, strict=True)))

    def select(self, places: Tensor) -> State:
        """Some canvases."""
        return State(*(each.index_select(0, places) for each in self))

    def __iter__(self) -> Iterator[Tensor]:
        return (getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Call:
    """Canvases that one call of the model takes: a slice of all rows and of all canvases.

    groups: which of them (None: all) are decided by each strategy.
    """

    rows: slice
    slots: slice
    groups: tuple[tuple[Strategy, Tensor | None], ...]


@dataclass(frozen=True)
class Finished:
    """A canvas that was finished in a step: its tokens, or why it has none."""

    slot: Slot
    tokens: list[int]
    is_finite: bool


class Live:
    """The batch of live canvases. `arrange` it whenever rows come, go or commit, then `step`.

    rows_per_call: how many rows one call of the model takes; buckets: row counts that such a call is padded up to, so
    that its shapes are few (None: no padding).
    """

    def __init__(
        self, context: Context, pages: Pages, width: int, rows_per_call: int, buckets: Sequence[int] | None = None
    ):
        self.context, self.pages, self.width = context, pages, width
        self.rows_per_call, self.buckets = rows_per_call, buckets
        self.rows: list[Row] = []
        self.slots: list[Slot] = []
        self.forwards = 0  # canvases that the model has run, padding included
        self._state: State | None = None
        self._calls: list[Call] = []
        self._controls: list[CanvasControl | None] | None = None  # None where nothing holds any canvas
        self._pinned_BL: Tensor | None = None
        self._start_BL: Tensor | None = None
        self._every_B = torch.empty(0)
        self._shapes: dict[tuple[Strategy, int], list[Shape]] = {}
        self._shapes_B: list[list[Shape]] = []
        self._padding: list[PagedRow] = []  # empty rows

    # -- who is here -------------------------------------------------------------------------------------------

    def arrange(self, rows: Sequence[Row]) -> None:
        """Make these rows the batch, `width` slots each; slots without an index begin now."""
        self.rows = list(rows)
        slots = [slot for row in rows for slot in row.slots]
        fresh = [slot for slot in slots if slot.index is None]
        held = 0 if self._state is None else len(self._state.seed_B)
        places = iter(range(held, held + len(fresh)))
        source = [next(places) if slot.index is None else slot.index for slot in slots]
        device = self.context.model.device
        if len(fresh) == len(slots):
            self._state = self._beginning(fresh) if slots else None
        else:
            assert self._state is not None
            if fresh:
                self._state = self._state.then(self._beginning(fresh))
            if source != list(range(held + len(fresh))):
                self._state = self._state.select(torch.tensor(source, device=device))
        for index, slot in enumerate(slots):
            slot.index = index
        self.slots = slots
        if len(self._shapes) > len(slots):  # requests may bring any number of strategies
            in_use = {(slot.row.strategy, slot.row.asked.max_steps) for slot in slots}
            self._shapes = {key: known for key, known in self._shapes.items() if key in in_use}
        self._shapes_B = [self._shapes.setdefault((s.row.strategy, s.row.asked.max_steps), []) for s in slots]
        self._calls = self._calls_of()
        self._every_B = torch.arange(len(slots), device=device)
        controls = [slot.control for slot in slots]
        self._controls = controls if any(control is not None for control in controls) else None
        self._pinned_BL = self._given([None if c is None else c.pinned_L for c in controls])
        starting = [None if slot.has_begun else slot.control for slot in slots]
        self._start_BL = self._given([None if c is None else c.start_L for c in starting])

    def _given(self, rows: Sequence[Tensor | None]) -> Tensor | None:
        """Tokens that are given, int64 [B, L], -1 where none is; None where no canvas has any."""
        given = next((row for row in rows if row is not None), None)
        if given is None:
            return None
        free_L = torch.full_like(given, -1)
        return torch.stack([free_L if row is None else row for row in rows])

    def _beginning(self, slots: Sequence[Slot]) -> State:
        model = self.context.model
        B, L, device = len(slots), self.context.canvas_length, model.device
        asked = [
            (
                *(signed(slot.row.asked.seed), slot.number or 0, slot.entered, slot.row.asked.max_steps),
                slot.first_step // STEPS_AHEAD * STEPS_AHEAD,
            )
            for slot in slots
        ]
        seed_B, number_B, entered_B, steps_B, first_B = torch.tensor(asked, device=device).unbind(1)
        nothing_B, nothing_BL = torch.zeros_like(seed_B), torch.full((B, L), -1, device=device)
        draws = draw_ahead(seed_B, number_B, first_B, L, model.vocab_size)
        is_kept_BL = torch.zeros((B, L), dtype=torch.bool, device=device)
        soft_BLD = torch.zeros((B, L, model.vocabulary.table.shape[1]), dtype=model.dtype, device=device)
        return State(
            seed_B, number_B, entered_B, steps_B, nothing_B, *draws, nothing_BL, is_kept_BL, nothing_BL, soft_BLD
        )

    def _calls_of(self) -> list[Call]:
        calls = []
        for first in range(0, len(self.rows), self.rows_per_call):
            rows = slice(first, min(first + self.rows_per_call, len(self.rows)))
            slots = slice(rows.start * self.width, rows.stop * self.width)
            by_strategy: dict[Strategy, list[int]] = {}
            for place, slot in enumerate(self.slots[slots]):
                by_strategy.setdefault(slot.row.strategy, []).append(place)
            device = self.context.model.device
            groups = tuple(
                (strategy, torch.tensor(places, device=device) if len(by_strategy) > 1 else None)
                for strategy, places in by_strategy.items()
            )
            calls.append(Call(rows, slots, groups))
        return calls

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self, now: int) -> tuple[list[Finished], list[Step]]:
        """Denoise every canvas once: those that are finished by it, and what is told of rows that are watched."""
        state, steps = self._state, [now - slot.entered for slot in self.slots]
        assert state is not None
        self._draw_on(state, steps)
        step_B = now - state.entered_B
        uniform_BL, tokens_BL = self._drawn(state, steps, step_B)
        if self.context.choices.mask_id is not None:
            tokens_BL = torch.full_like(tokens_BL, self.context.choices.mask_id)
        tokens_BL = state.standing_BL.where(state.kept_BL, tokens_BL)
        if self._start_BL is not None:
            tokens_BL = self._start_BL.where(self._start_BL >= 0, tokens_BL)
            self._start_BL = None
        if self._pinned_BL is not None:
            tokens_BL = self._pinned_BL.where(self._pinned_BL >= 0, tokens_BL)
        shapes = [self._shape(slot, of_steps, step) for slot, of_steps, step in self._with_shapes(steps)]
        temperature_B = torch.tensor([shape.temperature for shape in shapes], device=tokens_BL.device)

        parts = [
            self._call(call, state, tokens_BL, uniform_BL, step_B, temperature_B, shapes, steps)
            for call in self._calls
        ]
        stats, unchanged_B, decision, standing_BL = parts[0] if len(parts) == 1 else _joined(parts)
        told = self._told(tokens_BL, stats, decision, steps, shapes)
        state.unchanged_B, state.previous_BL, state.soft_BLD = unchanged_B, stats.argmax, stats.soft_embedding
        state.kept_BL, state.standing_BL = decision.kept_BL, standing_BL
        for slot in self.slots:
            slot.has_begun = True
        return self._finished(stats, decision, steps), told

    def _draw_on(self, state: State, steps: Sequence[int]) -> None:
        """Draw for the canvases that have used up their draws."""
        due = [place for place, step in enumerate(steps) if step and step % STEPS_AHEAD == 0]
        if not due:
            return
        model = self.context.model
        places = torch.tensor(due, device=model.device)
        first_B = torch.tensor([steps[place] for place in due], device=model.device)
        of_those = state.seed_B[places], state.number_B[places], first_B
        state.uniform_BTL[places], state.noise_BTL[places] = draw_ahead(
            *of_those, self.context.canvas_length, model.vocab_size
        )

    def _drawn(self, state: State, steps: Sequence[int], step_B: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers that pick this step's samples, and its noise."""
        if min(steps) == max(steps):
            place = steps[0] % STEPS_AHEAD
            return state.uniform_BTL[:, place], state.noise_BTL[:, place]
        place_B = step_B % STEPS_AHEAD
        return state.uniform_BTL[self._every_B, place_B], state.noise_BTL[self._every_B, place_B]

    def _with_shapes(self, steps: Sequence[int]) -> Iterator[tuple[Slot, list[Shape], int]]:
        return zip(self.slots, self._shapes_B, steps, strict=True)

    def _shape(self, slot: Slot, known: list[Shape], step: int) -> Shape:
        """What a step draws from; a canvas that waits for those before it counts on, and its shape means nothing."""
        asked = slot.row.asked
        while len(known) <= min(step, asked.max_steps - 1):
            known.append(slot.row.strategy.shape(len(known), asked.max_steps))
        return known[min(step, asked.max_steps - 1)]

    def _call(
        self,
        call: Call,
        state: State,
        tokens_BL: Tensor,
        uniform_BL: Tensor,
        step_B: Tensor,
        temperature_B: Tensor,
        shapes: Sequence[Shape],
        steps: Sequence[int],
    ) -> tuple[Stats, Tensor, Decision, Tensor]:
        """Denoise and decide the canvases of one call."""
        of, model = call.slots, self.context.model
        tokens_BL, seed_B, number_B, step_B = tokens_BL[of], state.seed_B[of], state.number_B[of], step_B[of]
        # without one soft is 0, which changes nothing: only where launches are few is it worth leaving out
        has_signal = model.device.type != "cpu" or any(slot.has_begun for slot in self.slots[of])
        hidden_BLD = self._denoised(call, tokens_BL, state.soft_BLD[of] if has_signal else None)
        first = shapes[of.start].temperature
        temperature = first if all(s.temperature == first for s in shapes[of]) else temperature_B[of]
        controls = None if self._controls is None else self._controls[of]
        others_BLD = self._without_prompts(call, tokens_BL, state.soft_BLD[of] if has_signal else None)
        of_rows = self.context.choices.mask_id, controls, steps[of], shapes[of], self.context.choices.prediction
        stats = predict(model, hidden_BLD, tokens_BL, temperature, uniform_BL[of], *of_rows, others_BLD)
        previous_BL = state.previous_BL[of]
        unchanged_B = (state.unchanged_B[of] + 1) * (stats.argmax == previous_BL).all(-1)
        canvases = Canvases(
            ids=[slot.row.asked.id for slot in self.slots[of]],
            step_B=step_B,
            steps_B=state.steps_B[of],
            temperature_B=temperature_B[of],
            tokens_BL=tokens_BL,
            stats=stats,
            previous_BL=previous_BL,
            unchanged_B=unchanged_B,
            kept_BL=state.kept_BL[of],
            is_pinned_BL=None if self._pinned_BL is None else self._pinned_BL[of] >= 0,
            noise_probability=1 / model.vocab_size if self.context.choices.mask_id is None else 0.0,
            draw=lambda: second_draws(seed_B, number_B, step_B, self.context.canvas_length),
        )
        decision = _decided(canvases, call.groups)
        return stats, unchanged_B, decision, decision.standing(canvases)

    def _denoised(self, call: Call, tokens_BL: Tensor, soft_BLD: Tensor | None) -> Tensor:
        """Hidden states [B, L, D] of the canvases of a call; of next tokens those of the tokens before them."""
        if self.context.is_next_token:
            before = [row.before_D for row in self.rows[call.rows] if row.before_D is not None]
            return torch.stack(before)[:, None]
        rows: list[PagedRow] = [row.paged for row in self.rows[call.rows] if row.paged is not None]
        count, width, L = len(rows), self.width, tokens_BL.shape[1]
        tokens_BT = tokens_BL.reshape(count, width * L)
        soft_BTD = None if soft_BLD is None else soft_BLD.reshape(count, width * L, -1)
        if self.buckets is not None and (bucket := next((b for b in self.buckets if b >= count), count)) > count:
            while len(self._padding) < bucket - count:
                self._padding.append(self.pages.open())
            rows += self._padding[: bucket - count]
            tokens_BT = torch.cat([tokens_BT, tokens_BT.new_zeros(bucket - count, width * L)])
            if soft_BTD is not None:
                soft_BTD = torch.cat([soft_BTD, soft_BTD.new_zeros(bucket - count, *soft_BTD.shape[1:])])
        self.forwards += len(rows) * width
        hidden_BTD = self.pages.denoise(rows, tokens_BT, soft_BTD, canvases=width)[:count]
        return hidden_BTD.reshape(count * width, L, -1)

    def _without_prompts(self, call: Call, tokens_BL: Tensor, soft_BLD: Tensor | None) -> Tensor | None:
        """Hidden states [B, L, D] of the canvases of a call without their prompts, 0 in rows that are not guided."""
        guided = [(place, row.other) for place, row in enumerate(self.rows[call.rows]) if row.other is not None]
        if not guided:
            return None
        count, T = len(self.rows[call.rows]), self.width * tokens_BL.shape[1]
        places = torch.tensor([place for place, _ in guided], device=tokens_BL.device)
        soft_BTD = None if soft_BLD is None else soft_BLD.reshape(count, T, -1)[places]
        hidden_BTD = self.pages.denoise(
            [row for _, row in guided], tokens_BL.reshape(count, T)[places], soft_BTD, canvases=self.width
        )
        all_BTD = hidden_BTD.new_zeros(count, T, hidden_BTD.shape[2]).index_copy(0, places, hidden_BTD)
        return all_BTD.reshape(len(tokens_BL), tokens_BL.shape[1], -1)

    def _finished(self, stats: Stats, decision: Decision, steps: Sequence[int]) -> list[Finished]:
        is_last = [step + 1 == slot.row.asked.max_steps for slot, step in zip(self.slots, steps, strict=True)]
        if decision.stop_B is None and True not in is_last:
            return []  # nothing stops here, so the host need not wait for the device
        is_finite_B = stats.entropy.isfinite().all(-1)
        is_stopped_B = torch.zeros_like(is_finite_B) if decision.stop_B is None else decision.stop_B
        flags_B2 = torch.stack((is_stopped_B, is_finite_B), 1)
        final_BL = stats.argmax if decision.final_BL is None else decision.final_BL
        told_BN = torch.cat((flags_B2, final_BL), 1).cpu()  # the one wait for the device
        finished = []
        for place, (stops, is_finite) in enumerate(told_BN[:, :2].tolist()):
            slot = self.slots[place]
            if (stops or is_last[place] or not is_finite) and slot.number is not None and slot.final is None:
                slot.steps = steps[place] + 1 - slot.first_step
                finished.append(Finished(slot, told_BN[place, 2:].tolist(), bool(is_finite)))
        return finished

    def _told(
        self, tokens_BL: Tensor, stats: Stats, decision: Decision, steps: Sequence[int], shapes: Sequence[Shape]
    ) -> list[Step]:
        """The records of this step of the rows that are watched, each told once even where a row begins again."""
        places = []
        for place, slot in enumerate(self.slots):
            row, number, step = slot.row, slot.number, steps[place]
            if row.is_watched and number is not None and slot.final is None and step > row.told.get(number, -1):
                row.told[number] = step
                places.append(place)
        if not places:
            return []
        chosen = torch.tensor(places, device=tokens_BL.device)
        some = Stats(*(column[chosen] for column in stats))
        at = [(self.slots[p].row.asked.id, self.slots[p].number or 0, steps[p], shapes[p].temperature) for p in places]
        given = None if self._pinned_BL is None else self._pinned_BL[chosen] >= 0
        stays = None if decision.stay_BL is None else decision.stay_BL[chosen]
        return list(step_records(at, tokens_BL[chosen], some, decision.keep_BL[chosen], given, stays))


def _decided(canvases: Canvases, groups: Sequence[tuple[Strategy, Tensor | None]]) -> Decision:
    """What becomes of canvases, those of each strategy decided by it."""
    strategy, places = groups[0]
    if places is None:
        return strategy.decide(canvases)
    keep_BL = torch.zeros_like(canvases.kept_BL)
    stay_BL, stop_B = torch.zeros_like(keep_BL), torch.zeros_like(keep_BL[:, 0])
    final_BL: Tensor | None = None
    for strategy, places in groups:
        assert places is not None
        decision = strategy.decide(_some(canvases, places))
        keep_BL[places] = decision.keep_BL
        if decision.stay_BL is not None:
            stay_BL[places] = decision.stay_BL
        if decision.stop_B is not None:
            stop_B[places] = decision.stop_B
        if decision.final_BL is not None:
            final_BL = canvases.stats.argmax.clone() if final_BL is None else final_BL
            final_BL[places] = decision.final_BL
    return Decision(keep_BL, stop_B, stay_BL, final_BL)


def _some(canvases: Canvases, places: Tensor) -> Canvases:
    """Some of the canvases."""
    return replace(
        canvases,
        ids=[canvases.ids[place] for place in places.tolist()],
        step_B=canvases.step_B[places],
        steps_B=canvases.steps_B[places],
        temperature_B=canvases.temperature_B[places],
        tokens_BL=canvases.tokens_BL[places],
        stats=Stats(*(column[places] for column in canvases.stats)),
        previous_BL=canvases.previous_BL[places],
        unchanged_B=canvases.unchanged_B[places],
        kept_BL=canvases.kept_BL[places],
        is_pinned_BL=None if canvases.is_pinned_BL is None else canvases.is_pinned_BL[places],
        draw=lambda: canvases.uniform_BL[places],
    )


def _joined(
    parts: Sequence[tuple[Stats, Tensor, Decision, Tensor]],
) -> tuple[Stats, Tensor, Decision, Tensor]:
    """What several calls gave, as if it had been one."""
    stats, unchanged, decisions, standing = zip(*parts, strict=True)

    def whole(columns: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor | None:
        if all(column is None for column in columns):
            return None
        return torch.cat([torch.zeros_like(b) if a is None else a for a, b in zip(columns, like, strict=True)])

    keep = [decision.keep_BL for decision in decisions]
    stop_B = whole([decision.stop_B for decision in decisions], [each[:, 0] for each in keep])
    stay_BL = whole([decision.stay_BL for decision in decisions], keep)
    argmax = [column.argmax for column, *_ in parts]
    final_BL = torch.cat([a if d.final_BL is None else d.final_BL for d, a in zip(decisions, argmax, strict=True)])
    return (
        Stats(*(torch.cat(columns) for columns in zip(*stats, strict=True))),
        torch.cat(unchanged),
        Decision(torch.cat(keep), stop_B, stay_BL, final_BL),
        torch.cat(standing),
    )
