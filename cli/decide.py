"""`blockdiff decide` and `blockdiff eval --decisions`: answer the typed questions of a file, or judge the answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from blockdiff.cli import options
from blockdiff.cli.model import ModelOptions, with_groups
from blockdiff.errors import BlockdiffError
from blockdiff.terminal import say, say_out

if TYPE_CHECKING:
    from blockdiff.decisions import Asking
    from blockdiff.sampling import Sampler

DECISIONS = "Decisions"  # the group of their options in `--help`
Calibrate = Annotated[
    str | None,
    options.option(DECISIONS, "FILE", "Fit temperatures on these rows first, and keep them in blockdiff.json."),
]


@dataclass(frozen=True)
class DecisionOptions:
    """The options for how questions are asked and read."""

    form: Annotated[
        Literal["decisions", "systemone"],
        options.option(DECISIONS, "FORM", "decisions: letters for all types; systemone: no and yes, letters, numbers."),
    ] = "decisions"
    joint: Annotated[bool, options.flag(DECISIONS, "--joint", "Questions about one state share canvases.")] = False
    draws: Annotated[int, options.option(DECISIONS, "N", "Draws of the noise of a slot.", min=1)] = 4
    uncalibrated: Annotated[
        bool, options.flag(DECISIONS, "--uncalibrated", "Leave out temperatures that were fitted.")
    ] = False

    def asking(self, steps: int | None) -> Asking:
        """Return how the options ask questions. steps: denoising steps of each canvas (None: 1)."""
        from blockdiff.decisions import Asking

        return Asking(self.form, self.joint, steps or 1, self.draws)


@with_groups
def decide(
    questions: Annotated[
        str, options.option(options.ROWS, "FILE", "Rows with input or messages, and questions.", "--questions")
    ],
    output: Annotated[
        Path | None, options.option(options.OUTPUT, "FILE", "JSONL to write; default: stdout.", "--output", "-o")
    ] = None,
    overwrite: options.Overwrite = False,
    batch_size: options.BatchSize = 32,
    steps: options.MaxSteps = None,
    seed: options.Seed = 0,
    *,
    asked: DecisionOptions,
    opened: ModelOptions,
) -> None:
    """Answer the typed questions of a file with probabilities, a JSON line for each row.

    docs/decisions.md says what a question is, and what the probabilities mean.
    """
    from blockdiff.evals.decisions import decide_rows, read_decision_rows
    from blockdiff.terminal import quiet

    rows = list(read_decision_rows(questions, has_answers=False))
    options.require_free(output, opened.place, questions, overwrite=overwrite)
    options.make_parent(output)
    quiet()
    sampler = opened.open(None)
    is_calibrated = not asked.uncalibrated
    settings: dict[str, Any] = dict(seed=seed, batch_size=batch_size, is_calibrated=is_calibrated)
    file = None if output is None else output.open("w", encoding="utf-8")
    write: Callable[[str], object] = say_out if file is None else (lambda line: file.write(line + "\n"))
    try:
        for row in decide_rows(sampler, rows, asked.asking(steps), **settings):
            index = row[0].row
            answers = [each.answer.to_record() | each.answer.facts for each in row]
            id = index + 1 if rows[index].id is None else rows[index].id
            write(json.dumps({"id": id, "answers": answers}, ensure_ascii=False))
    finally:
        if file is not None:
            file.close()


def judge(
    opened: ModelOptions, file: str, calibrate: str | None, plot: Path | None, settings: dict[str, Any], asking: Asking
) -> dict[str, Any]:
    """Return the report on the labelled rows of `file`, after temperatures are fitted on `calibrate`, if given."""
    from blockdiff.evals import decisions
    from blockdiff.evals.settings import settings_record
    from blockdiff.terminal import quiet

    rows = list(decisions.read_decision_rows(file, has_answers=True))
    others = [] if calibrate is None else list(decisions.read_decision_rows(calibrate, has_answers=True))
    decisions.require_other_rows(rows, others)
    directory = opened.files.adapter or opened.files.weights
    if calibrate is not None and not Path(opened.place).is_dir():
        raise BlockdiffError(f"{opened.place}: temperatures are kept beside the model; name a directory of your own")
    quiet()
    sampler = opened.open(None)
    if others:
        seed, batch_size = settings["seed"], settings["batch_size"]
        _keep(sampler, decisions.fit(sampler, others, asking, seed=seed, batch_size=batch_size), directory)
    report = decisions.evaluate(sampler, rows, asking, **settings)
    if plot is not None:
        from blockdiff.plots.reliability import draw_reliability

        draw_reliability(report, plot)
    return {"model": opened.place, "data": file, "settings": settings_record(sampler), **report}


def print_report(report: dict[str, Any]) -> None:
    """Print the report of `judge` for a person."""
    from blockdiff.evals import decisions

    say_out("\n".join(decisions.lines(report)))


def _keep(sampler: Sampler, fits: dict[str, dict[str, Any]], directory: Path) -> None:
    """Keep fitted temperatures in the model's directory and for this process, and print them."""
    from blockdiff.sampling.calibration import FEW, HIGHEST, LOWEST

    for fit in fits.values():
        temperature, count = fit["temperature"], fit["rows"]
        notes = [f"under {FEW} rows, which hold no temperature"] if count < FEW else []
        notes += ["at its bound: more rows are needed"] if temperature in (LOWEST, HIGHEST) else []
        words = f"{fit['of']}: temperature {temperature:.3f} from {count} answers, NLL {fit['before']:.4f}"
        say("; ".join([f"{words} to {fit['after']:.4f}", *notes]))
    diffusion = replace(sampler.diffusion, calibration={**sampler.diffusion.calibration, **fits})
    diffusion.save(directory)
    sampler.settings = replace(sampler.settings, diffusion=diffusion)
