"""Traces: the course of a request as plain records; `blockdiff.plots.denoising` draws them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockdiff.files import write_text
from blockdiff.kernels.vocabulary import Stats

if TYPE_CHECKING:
    from blockdiff.sampling.strategy import Decision


@dataclass(frozen=True)
class Step:
    """One denoising step of one request; every list has one entry per canvas position.

    `tokens` is the step's input canvas, `argmax` and `sample` its predictions (or the tokens that replace them),
    `entropy` (nats) their uncertainty at this temperature, and `is_accepted` whether `sample` was kept for the next
    step. Optional: `is_pinned` marks positions whose token is given, and `stays` positions that keep their token of
    `tokens`. Every other position gets new noise.
    """

    id: str | int
    canvas: int
    step: int
    temperature: float
    tokens: list[int]
    argmax: list[int]
    sample: list[int]
    entropy: list[float]
    is_accepted: list[bool]
    is_pinned: list[bool] | None = None
    stays: list[bool] | None = None


@dataclass(frozen=True)
class Verification:
    """The verification of one draft of a canvas by the model's next-token predictions.

    `step` is the number of the denoising step that finished the draft, and `draft` has all tokens of the canvas. Its
    first `given` tokens were accepted before; its first `accepted` ones are accepted now, because they equal the head's
    tokens. `own` is the head's token after those: it replaces the draft's token, or begins the next canvas (None: all
    were accepted, and no canvas follows).
    """

    id: str | int
    canvas: int
    step: int
    draft: list[int]
    given: int
    accepted: int
    own: int | None


def step_records(
    steps: Mapping[int, tuple[int, tuple[str | int, int, int, float]]],
    tokens_BL: Tensor,
    stats: Stats,
    decision: Decision,
    pinned_BL: Tensor,
) -> list[Step]:
    """Make the records of one denoising step, for some canvases of a batch.

    steps: by a canvas's row in the batch, the number of its first positions to leave out (the prompt's tail), and the
    request's id, canvas number, step and temperature; pinned_BL: given tokens, -1 elsewhere.
    """
    if not steps:
        return []
    chosen = torch.tensor([*steps], device=tokens_BL.device)
    sample_BL = stats.sample if decision.tokens_BL is None else decision.tokens_BL
    columns = (tokens_BL, stats.argmax, sample_BL, stats.entropy, decision.keep_BL)
    tails = [tail for tail, _ in steps.values()]

    def listed(column_BL: Tensor) -> list[list[Any]]:
        return [row[tail:] for tail, row in zip(tails, column_BL[chosen].tolist(), strict=True)]

    is_pinned = [each if any(each) else None for each in listed(pinned_BL >= 0)]
    stays = [None] * len(steps) if decision.stay_BL is None else listed(decision.stay_BL)
    of_canvases = zip(steps.values(), *map(listed, columns), is_pinned, stays, strict=True)
    return [Step(*step, *of_canvas) for (_, step), *of_canvas in of_canvases]


@dataclass(frozen=True)
class CommittedCanvas:
    """A committed canvas: all its `tokens`, and how many of them are `kept` (up to the first eos).

    `prompt` and `text` are the prompt and the whole response so far; `steps` counts the denoising steps of this canvas;
    `finish_reason` is the response's if this canvas ends it, else None. Optional: `max_steps` is the most steps that
    the canvas could take, and `control` describes what the request pins or demands ("template 'a <?4>'", "regex
    '[0-9]+'").
    """

    id: str | int
    canvas: int
    prompt: str
    tokens: list[int]
    kept: int
    text: str
    steps: int
    finish_reason: str | None
    max_steps: int | None = None
    control: str = ""

    @classmethod
    def undecoded(cls, decode: Callable[[], str], **fields: Any) -> CommittedCanvas:
        """Return a canvas whose `text` is decoded at its first use, and not at every commit of a long response."""
        canvas = cls(**fields, text="")
        object.__delattr__(canvas, "text")
        object.__setattr__(canvas, "_decode", decode)
        return canvas

    def __getattr__(self, name: str) -> Any:
        if name != "text" or "_decode" not in vars(self):
            raise AttributeError(name)
        object.__setattr__(self, "text", self._decode())
        return self.text


@dataclass
class Trace:
    """One request from first noise to last commit; steps, verifications and canvases in the order in which they ran."""

    id: str | int
    prompt: str = ""
    text: str = ""
    steps: list[Step] = field(default_factory=list)
    canvases: list[CommittedCanvas] = field(default_factory=list)
    control: str = ""
    verifications: list[Verification] = field(default_factory=list)

    def steps_of(self, canvas: int) -> list[Step]:
        return [step for step in self.steps if step.canvas == canvas]


class Recorder:
    """Collects traces: pass `on_step=recorder.step, on_canvas=recorder.canvas` to `Sampler.generate`.

    With `ids` only the requests of these ids are recorded.
    """

    def __init__(self, ids: Iterable[str | int] | None = None) -> None:
        self._ids = None if ids is None else set(ids)
        self._traces: dict[str | int, Trace] = {}

    @property
    def traces(self) -> list[Trace]:
        """The traces so far, in the order in which their requests started."""
        return list(self._traces.values())

    def step(self, step: Step | Verification) -> None:
        """Add a denoising step or a verification to the trace of its request."""
        if self._ids is None or step.id in self._ids:
            trace = self._trace(step.id)
            if isinstance(step, Step):
                trace.steps.append(step)
            else:
                trace.verifications.append(step)

    def canvas(self, canvas: CommittedCanvas) -> None:
        if self._ids is None or canvas.id in self._ids:
            trace = self._trace(canvas.id)
            trace.canvases.append(canvas)
            trace.prompt, trace.text, trace.control = canvas.prompt, canvas.text, canvas.control

    def _trace(self, id: str | int) -> Trace:
        return self._traces.setdefault(id, Trace(id))


def write_traces(path: str | Path, traces: Iterable[Trace]) -> None:
    """Write traces as JSON lines, one request per line."""
    lines = (json.dumps(asdict(trace), ensure_ascii=False) for trace in traces)
    write_text(path, "".join(f"{line}\n" for line in lines))
