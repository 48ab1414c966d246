"""`blockdiff eval`: how well and how fast a model solves a task, alone or compared with another model."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdiff.cli import options, together
from blockdiff.cli.decide import DECISIONS, Calibrate, DecisionOptions, judge, print_report
from blockdiff.cli.model import ModelOptions, SamplingOptions, note_raw_rows, with_groups
from blockdiff.errors import BlockdiffError, RequestError
from blockdiff.evals import TASKS
from blockdiff.evals import task as find_task
from blockdiff.terminal import say_out

if TYPE_CHECKING:
    from blockdiff.data.rows import Row
    from blockdiff.parallel.mesh import Mesh
    from blockdiff.sampling.strategy import Strategy

HARNESS = "lm-eval:"
Say = Callable[[str], object]  # `say_out`, or `_say_nothing` if stdout has JSON only


@with_groups
def evaluate(
    task: Annotated[
        str,
        options.option(
            None,
            "NAME",
            f"The rule of what is right: {', '.join(TASKS)}, your module:function, or lm-eval:NAME of that harness.",
        ),
    ] = "exact",
    data: Annotated[
        str | None,
        options.option(
            options.ROWS,
            "ROWS",
            "Rows to answer: a file, directory, pattern or hub id (with lm-eval: a directory of YAML tasks).",
        ),
    ] = None,
    columns: options.Columns = None,
    subset: options.Subset = None,
    split: options.Split = "test",
    limit: Annotated[int | None, options.option(options.ROWS, "N", "Answer only the first N rows.", min=1)] = None,
    chat: Annotated[bool, options.flag(options.PROMPTS, "--chat", "Put raw prompts into the chat template.")] = False,
    raw: options.Raw = False,
    system: options.System = None,
    thinking: options.Thinking = False,
    allow_control_tokens: options.AllowControlTokens = False,
    best_of: options.BestOf = 1,
    compare: Annotated[
        str | None,
        options.option(None, "OTHER", "A second model, which answers the same rows; the difference is tested."),
    ] = None,
    decisions: Annotated[
        str | None, options.option(DECISIONS, "FILE", "Judge typed decisions on these labelled rows instead of a task.")
    ] = None,
    calibrate: Calibrate = None,
    plot: Annotated[Path | None, options.option(DECISIONS, "FILE", "A reliability diagram, as PNG.")] = None,
    output: Annotated[Path | None, options.option(options.OUTPUT, "FILE", "JSON to write.", "--output", "-o")] = None,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
    batch_size: options.BatchSize = 100,
    tensor_parallel: options.TensorParallel = 1,
    *,
    asking: DecisionOptions,
    opened: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Answer the rows of a task, and report accuracy and denoising steps per canvas together.

    A fine-tuned model can be better in one of the two and worse in the other.
    """
    model = opened.place
    if output == options.STREAM:
        raise typer.BadParameter("the numbers are printed by --json", param_hint="--output")
    if chat and raw:
        raise typer.BadParameter("it leaves prompts as they are; give it or --chat", param_hint="--raw")
    if decisions is not None:
        if data is not None or compare is not None:
            raise typer.BadParameter("it goes without --data and --compare", param_hint="--decisions")
        options.require_free(output, model, decisions, overwrite=overwrite)
        options.require_free(plot, overwrite=overwrite)
        options.make_parent(output)
        decision_settings = dict(seed=sampling.seed, batch_size=batch_size, is_calibrated=not asking.uncalibrated)
        report = judge(opened, decisions, calibrate, plot, decision_settings, asking.asking(sampling.steps))
        if not as_json:
            print_report(report)
        _write(report, output, as_json)
        return
    if calibrate is not None or plot is not None:
        raise typer.BadParameter("needs --decisions", param_hint="--calibrate" if calibrate else "--plot")
    say: Say = _say_nothing if as_json else say_out
    is_of_harness = task.startswith(HARNESS)
    if task == HARNESS:
        raise typer.BadParameter("name a task of the harness, such as lm-eval:gsm8k", param_hint="--task")
    if is_of_harness and (compare is not None or columns or best_of > 1 or tensor_parallel > 1 or system is not None):
        others = "--compare, --columns, --best-of, --system and --tensor-parallel"
        raise typer.BadParameter(f"{task} goes without {others}", param_hint="--task")
    if is_of_harness:
        options.require_free(output, model, overwrite=overwrite)
        options.make_parent(output)
        arguments: dict[str, Any] = dict(seed=sampling.seed, steps=sampling.steps, max_gen_toks=sampling.max_new_tokens)
        arguments |= dict(
            batch_size=batch_size, chat=chat or (not raw and opened.asks_chat), limit=limit, thinking=thinking
        )
        written = _by_harness(opened, sampling.strategy_for(opened), task, data, say, **arguments)
        _write(written, output, as_json)
        return
    if task not in TASKS and ":" not in task:
        near = get_close_matches(task, [*TASKS, f"{HARNESS}NAME"], 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        names = f"{', '.join(TASKS)}, module:function, {HARNESS}NAME"
        raise typer.BadParameter(f"{task!r} is none of {names}{meant}", param_hint="--task")
    if data is None:
        raise typer.BadParameter("name the rows to answer", param_hint="--data")
    mesh = together.join(tensor_parallel, opened.device, model)
    if mesh is not None and not mesh.ranks.is_main:
        output = None
    from blockdiff.data.sources import Source, read_rows
    from blockdiff.evals.questions import questions_of
    from blockdiff.terminal import quiet

    source = Source(data, subset=subset, split=split, columns=options.parse_columns(columns))
    rows = [row.located() for row in islice(read_rows(source), limit)]
    rows = [row.as_conversation() for row in rows] if chat else rows
    questions_of(rows, find_task(task))  # raises for bad rows now, before the weights are read
    options.require_free(output, model, compare, data, overwrite=overwrite)
    options.make_parent(output)
    quiet()
    models = [opened]
    if compare is not None:
        models.append(replace(opened, model=compare, checkpoint=None, adapter=None, draft_model=None))
    rows_of_models = [
        _asked(rows, not (chat or raw) and each.puts_into_chat(rows), system, thinking) for each in models
    ]
    for each in models:
        each.require_head(best_of=best_of > 1)
    strategies = [sampling.strategy_for(each) for each in models]
    settings: dict[str, Any] = dict(batch_size=batch_size, seed=sampling.seed, thinking=thinking, best_of=best_of)
    settings |= dict(max_steps=sampling.steps, max_new_tokens=sampling.max_new_tokens)
    settings |= dict(allow_control_tokens=allow_control_tokens) | ({} if mesh is None else {"ranks": mesh.ranks})
    reports = [
        _report(each, chosen, mesh, model_rows, task, data, settings)
        for each, chosen, model_rows in zip(models, strategies, rows_of_models, strict=True)
    ]
    if compare is None:
        [written] = reports
        _print_report(written, say)
    else:
        first, second = reports
        written = {"task": task, "data": data, **_compared(first, second, say)}
    if mesh is None or mesh.ranks.is_main:
        _write(written, output, as_json)


def _write(report: dict[str, Any], output: Path | None, as_json: bool) -> None:
    """Write a report as JSON to `output` if given, and to stdout if `as_json`."""
    text = json.dumps(report, indent=1, default=str) + "\n"
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:  # the answers may have taken hours
            sys.stdout.write(text)
            raise BlockdiffError(f"{output}: cannot be written ({error.strerror}); the JSON is on stdout") from None
    if as_json:
        sys.stdout.write(text)


def _say_nothing(*_: object) -> None:
    """Print nothing, so that stdout has only the JSON."""


def _report(
    opened: ModelOptions,
    strategy: Strategy | None,
    mesh: Mesh | None,
    rows: list[Row],
    task: str,
    data: str,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Return the report of one model, whose weights are freed afterwards; RequestError if it answers no row."""
    from blockdiff.evals.run import evaluate as answer
    from blockdiff.evals.settings import settings_record

    sampler = opened.open(strategy, mesh=mesh)
    note_raw_rows(sum(row.messages is None for row in rows), sampler, "--chat puts them into it")
    numbers = answer(sampler, rows, find_task(task), **settings)
    failed = _failures(numbers)
    if len(failed) == numbers["count"]:
        raise RequestError(f"{opened.place}: no row could be answered: {failed[0]}")
    return {"model": opened.place, "data": data, "settings": settings_record(sampler), **numbers}


def _failures(report: dict[str, Any]) -> list[str]:
    """Return the errors of the rows that were not answered."""
    return [record["error"] for record in report["records"] if "error" in record]


def _print_report(report: dict[str, Any], say: Say) -> None:
    from blockdiff.evals import summary

    say("\n".join(summary.lines(report)))
    if failed := _failures(report):
        say(f"not answered      {len(failed)}, first {failed[0]}")


def _compared(first: dict[str, Any], second: dict[str, Any], say: Say) -> dict[str, Any]:
    """Print the reports of two models and their comparison; return the content of the JSON."""
    from blockdiff.evals import compare as pairs

    for report in (first, second):
        say(f"\n{report['model']}" if report is second else report["model"])
        _print_report(report, say)
    comparison = pairs.compare(first, second)
    say("\n" + "\n".join(pairs.lines(first, second, comparison)))
    records = comparison.pop("records")
    models = [{name: value for name, value in report.items() if name != "records"} for report in (first, second)]
    return {"models": models, "comparison": comparison, "records": records}


def _by_harness(
    opened: ModelOptions,
    strategy: Strategy | None,
    task: str,
    directory: str | None,
    say: Say,
    chat: bool,
    limit: int | None,
    **arguments: Any,
) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness, print its table and what the texts cost; return the content of the JSON."""
    try:
        from blockdiff.evals import lm_eval as harness
    except ImportError as error:
        if error.name not in ("lm_eval", "blockdiff.evals.lm_eval"):
            raise
        raise BlockdiffError("lm-evaluation-harness is not there; pip install 'lm_eval>=0.4.13'") from None
    from blockdiff.evals.settings import settings_record
    from blockdiff.evals.summary import cost_lines
    from blockdiff.terminal import quiet

    quiet()
    sampler = opened.open(strategy)
    started = time.perf_counter()
    report = harness.evaluate(
        sampler, task.removeprefix(HARNESS).split(","), directory, chat=chat, limit=limit, **arguments
    )
    seconds = time.perf_counter() - started
    for name, results in report["results"].items():
        for metric, figure in results.items():
            if isinstance(figure, float) and not metric.partition(",")[0].endswith("_stderr"):
                say(f"{name}  {metric.removesuffix(',none')}  {figure:.4f}")
    costs = report["costs"]
    if costs is not None:
        say("\n".join(cost_lines({**costs, "max_steps": arguments["steps"] or sampler.generation.max_steps})))
    say(f"time  {seconds:.1f} s")
    settings = settings_record(sampler)
    settings["versions"]["lm_eval"] = importlib.metadata.version("lm_eval")
    parts: dict[str, Any] = {name: report.get(name) for name in ("results", "costs", "samples", "configs", "n-shot")}
    about = {"model": opened.place, "task": task, "data": directory, "settings": settings, "seconds": seconds}
    return {**about, **arguments, **parts}


def _asked(rows: list[Row], is_chat: bool, system: str | None, thinking: bool) -> list[Row]:
    """Return the rows as requests to a model: as conversations if `is_chat`, with the system message if one is given.

    Raises typer.BadParameter for a row of raw text if `system` or `thinking` needs a conversation.
    """
    rows = [row.as_conversation() for row in rows] if is_chat else rows
    for name, is_asked in (("--thinking", thinking), ("--system", system is not None)):
        if is_asked:
            _require_conversations(rows, name)
    return rows if system is None else [_with_system(row, system) for row in rows]


def _require_conversations(rows: list[Row], option: str) -> None:
    raw = next((row for row in rows if row.messages is None), None)
    if raw is not None:
        raise typer.BadParameter(
            f"{raw.where} is a prompt in raw text, which has no place for it; give --chat as well", param_hint=option
        )


def _with_system(row: Row, system: str) -> Row:
    """Return a conversation with a system message first, unless it has one."""
    messages = row.messages or ()
    if messages and messages[0]["role"] == "system":
        return row
    return replace(row, messages=({"role": "system", "content": system}, *messages))
