"""`blockdiff sample`: answers prompts with a model, and writes traces of the denoising."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdiff import terminal
from blockdiff.cli import options, together
from blockdiff.cli.answers import Answers, fingerprint
from blockdiff.cli.model import ModelOptions, SamplingOptions, note_raw_rows, with_groups
from blockdiff.cli.requests import as_conversations, asked_requests, check_fields, drawn, with_options
from blockdiff.cli.tally import AnsweredSoFar, Tally
from blockdiff.errors import RequestError
from blockdiff.request_options import RequestOptions
from blockdiff.terminal import say

if TYPE_CHECKING:
    from blockdiff.parallel.ranks import Ranks
    from blockdiff.sampling import Request, Result, Sampler, Trace

TRACE_KINDS = (".html", ".jsonl", ".png", ".gif")
LONG = 4096  # tokens of a prompt from which on progress lines are printed while it is encoded
DRAWN = 16  # the most requests in a trace that is a page or a picture; a JSONL trace has all


@with_groups
def sample(
    prompt: Annotated[
        str | None, options.option(options.PROMPTS, "TEXT", "Raw text to continue; bos is put before it.")
    ] = None,
    chat: Annotated[
        str | None, options.option(options.PROMPTS, "TEXT", "A user's message, put into the chat template.")
    ] = None,
    prompts: Annotated[
        Path | None,
        options.option(
            options.PROMPTS,
            "FILE",
            "JSONL with prompt or messages, optionally id, seed and other options; - reads stdin.",
        ),
    ] = None,
    raw: options.Raw = False,
    image: options.Images = None,
    system: options.System = None,
    answers_per_prompt: Annotated[
        int, options.option(options.SAMPLING, "N", "Answers to each prompt.", "-n", min=1)
    ] = 1,
    *,
    asked: RequestOptions,
    output: Annotated[
        Path | None, options.option(options.OUTPUT, "FILE", "JSONL to write; - is stdout.", "--output", "-o")
    ] = None,
    overwrite: options.Overwrite = False,
    as_rows: Annotated[
        bool,
        options.flag(
            options.OUTPUT, "--as-rows", "Write rows to train on: each prompt or conversation with its answer."
        ),
    ] = False,
    stream: Annotated[bool, options.flag(options.OUTPUT, "--stream", "Show canvases as they are finished.")] = False,
    trace: Annotated[
        Path | None,
        options.option(options.OUTPUT, "FILE", "Write how the text filled in: .html, .gif, .png, .jsonl."),
    ] = None,
    batch_size: options.BatchSize = 32,
    tensor_parallel: options.TensorParallel = 1,
    verify: options.Verify = False,
    opened: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Answer one prompt, one chat message, or a file of prompts.

    A single prompt is answered by its text. A file gives a JSON line for each
    prompt; docs/cli.md lists the keys. A bad line of a file gets a line with an
    error, and the others are answered.
    """
    _check_usage(prompt, chat, prompts, image, output, trace)
    if output is not None and output.suffix.lower() in (".csv", ".tsv", ".parquet", ".xlsx"):
        raise typer.BadParameter(f"{output}: lines of JSON are written; name it .jsonl", param_hint="--output")
    gives_lines = prompts is not None or output is not None or as_rows
    if output == options.STREAM:
        output = None
    if answers_per_prompt > 1 and asked.best_of > 1:
        raise typer.BadParameter("it gives all answers, and --best-of one of them; leave one out", param_hint="-n")
    if asked.scores and as_rows:
        raise typer.BadParameter(
            "a row to train on has no scores; leave --as-rows or --scores out", param_hint="--scores"
        )
    if prompts == asked.json_schema == options.STREAM:
        raise typer.BadParameter("stdin is read for --prompts already", param_hint="--json-schema")
    if tensor_parallel > 1 and options.STREAM in (prompts, asked.json_schema):
        raise typer.BadParameter("its processes cannot share stdin; name a file", param_hint="--tensor-parallel")
    model = opened.place
    mesh = together.join(tensor_parallel, opened.device, model)
    from blockdiff.cli.live import Watcher
    from blockdiff.sampling import Recorder, Request
    from blockdiff.terminal import quiet

    fields = options.request_fields(asked)
    check_fields(fields, is_raw=prompt is not None)
    read = asked_requests(prompt, chat, prompts, image or ())
    if prompts is not None and not raw and opened.puts_into_chat(read):
        read = as_conversations(read)
    draws = list(drawn(with_options(read, fields, system), answers_per_prompt, sampling.seed))
    entries = [each.entry for each in draws]

    if mesh is not None and not mesh.ranks.is_main:
        output = trace = None
    options.require_free(trace, model, prompts, overwrite=overwrite)
    options.require_free(output, model, prompts, overwrite=True)  # `Answers.keep` keeps its answers
    for written in (output, trace):
        options.make_parent(written)
    quiet()
    ranks = _ranks(opened.device, output, trace, stream) if mesh is None else mesh.ranks
    opened.require_head(scores=asked.scores, best_of=asked.best_of > 1)
    chosen = sampling.strategy_for(opened)
    numbers = dict(seed=sampling.seed, max_new_tokens=sampling.max_new_tokens, max_steps=sampling.steps)
    settings = {**numbers, "strategy": chosen, **opened.identity} | ({"as_rows": True} if as_rows else {})
    if output is not None:
        settings["weights"] = opened.weights
    if verify:
        opened.require_as_written()
    answers = Answers(
        output,
        [fingerprint(entry, settings) for entry in entries],
        ranks.rank,
        is_alone=ranks.row_world == 1,
        rows=entries if as_rows else None,
    )
    with ranks.main_first("reading the output file"):
        answers.keep(overwrite and ranks.is_main)
    answered_before = len(answers.written)
    mine = ranks.agree(answers.missing)[ranks.row_rank :: ranks.row_world]
    sampler = opened.open(chosen, mesh=mesh, device=str(ranks.device) if ranks.world > 1 else None)

    if prompts is not None:
        count = sum(isinstance(entry, Request) and entry.prompt is not None for entry in entries)
        note_raw_rows(count, sampler, "write them as messages to use it")
    recorder = view = None
    if trace is not None:
        ids = [entry.id for entry in entries if isinstance(entry, Request)]
        recorder = Recorder(ids if trace.suffix == ".jsonl" else ids[:DRAWN])
    if stream:
        view = Watcher(sampler.tokenizer, several=gives_lines or max(answers_per_prompt, asked.best_of) > 1)
    results = sampler.stream(
        [entries[entry_index] for entry_index in mine],
        **numbers,
        batch_size=batch_size,
        on_canvas=_each(recorder and recorder.canvas, view and view.canvas),
        on_step=_each(recorder and recorder.step, view and view.is_live and view.step),
    )
    is_file = prompts is not None
    tally, progress = Tally(), AnsweredSoFar(len(mine), is_shown=is_file and view is None and ranks.is_main)
    texts: dict[int, Result] = {}
    try:
        is_alone = not is_file and view is None and ranks.is_main

        def encoded(_: float) -> str | None:
            tokens = sampler.encoded_tokens
            return f"{tokens:,} tokens encoded so far" if tokens >= LONG else None

        with (
            terminal.saying(encoded) if is_alone else nullcontext(),
            ranks.guarded("sampling"),
            ranks.at_own_pace("sampling") as look,
        ):
            for index, result in results:
                entry_index = mine[index]
                tally.add(result)
                tally.counts["cut"] += result.finish_reason == "length" and has_no_length(entries[entry_index])
                if gives_lines:
                    answers.write(entry_index, draws[entry_index].named(result))
                else:
                    texts[entry_index] = result
                progress.add()
                look()
    except KeyboardInterrupt:
        answers.flush()
        progress.close()
        goes_on = f" and in {output}; the same command goes on from there" if output is not None else ""
        say(f"stopped: {answered_before + progress.done} of {len(entries)} answered{goes_on}")
        raise typer.Exit(130) from None
    finally:
        progress.close()
        answers.close()

    if view is not None:
        view.close()
    if trace is not None and recorder is not None:
        _write_trace(trace, recorder.traces, sampler, entries)
    if ranks.row_world > 1:
        tally = tally.summed_over(ranks)
        if ranks.is_main:
            answers.merge()
        ranks.barrier()
    if not ranks.is_main:
        return
    if not tally.counts["answered"] and not answered_before:
        raise RequestError(tally.first_error or "no request could be answered")
    if is_file:
        tally.say(answered_before, progress.seconds, sampling.steps or sampler.generation.max_steps)
    elif view is None or view.several:
        for entry_index in sorted(texts):
            _say_answer(texts[entry_index])
    if sampling.max_new_tokens is None:
        note_one_canvas(tally.counts["cut"], sampler)


def _check_usage(
    prompt: str | None,
    chat: str | None,
    prompts: Path | None,
    image: list[str] | None,
    output: Path | None,
    trace: Path | None,
) -> None:
    """Raise typer.BadParameter for options that exclude each other, for no prompt, and for an unknown trace suffix."""
    if sum(source is not None for source in (prompt, chat, prompts)) != 1:
        raise typer.BadParameter("give exactly one of --prompt, --chat and --prompts", param_hint="--prompt")
    if image and prompts is not None:
        raise typer.BadParameter(
            "lines of --prompts name their images themselves, as image or images", param_hint="--image"
        )
    if trace is not None and trace.suffix not in TRACE_KINDS:
        raise typer.BadParameter(f"{trace} ends in none of {', '.join(TRACE_KINDS)}", param_hint="--trace")
    if trace is not None and trace == output:
        raise typer.BadParameter(f"{trace} is the file of --output, too", param_hint="--trace")


def has_no_length(entry: Request | Result) -> bool:
    """True if nothing in a request bounds its answer's length: neither max_new_tokens nor a form."""
    return getattr(entry, "max_new_tokens", None) is None and getattr(entry, "form", None) is None


def note_one_canvas(count: int, sampler: Sampler) -> None:
    """Note that `count` answers were cut at one canvas, if the model's max_new_tokens is at most a canvas."""
    length = sampler.settings.canvas_length
    if count and 1 < length >= sampler.generation.max_new_tokens:
        answers = "1 answer was" if count == 1 else f"{count:,} answers were"
        say(f"note: {answers} cut at one canvas, {length} tokens, as the settings say; give --max-new-tokens")


def _say_answer(result: Result) -> None:
    """Print an answer: text and tool calls on stdout, reasoning and score on stderr."""
    if result.reasoning is not None:
        say(result.reasoning)
    if result.text or result.tool_calls is None:
        say(result.text, sys.stdout)
    for call in result.tool_calls or ():
        say(json.dumps(call["function"], ensure_ascii=False), sys.stdout)
    if result.score is not None:
        say(f"mean log-probability per token {result.score:.4f}")


def _ranks(device: str, output: Path | None, trace: Path | None, stream: bool) -> Ranks:
    """Return the ranks that share the prompts: this process alone, unless a launcher has started several.

    Also makes SIGTERM act like Ctrl-C. Raises typer.BadParameter if several processes have no output file, or have to
    show or trace their work.
    """
    import torch

    from blockdiff.parallel.ranks import Ranks, from_accelerate

    # SIGTERM ends the work as Ctrl-C does, so that the command reports how many requests are answered.
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks(torch.device("cpu"))
    if output is None or trace is not None or stream:
        raise typer.BadParameter(
            "several processes need a file to write to, and neither show nor trace what they do", param_hint="--output"
        )
    if device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    return from_accelerate()


def _write_trace(path: Path, traces: list[Trace], sampler: Sampler, entries: Sequence[Request | Result]) -> None:
    """Write traces as the suffix of `path` asks: .html a page, .jsonl records, else a picture of the first request."""
    from blockdiff.checkpoint.tokenizer import decoder

    decode = decoder(sampler.tokenizer)
    if path.suffix == ".jsonl":
        from blockdiff.sampling import write_traces

        write_traces(path, traces)
    elif path.suffix == ".html":
        from blockdiff.data.image_file import image_bytes
        from blockdiff.plots.denoising import draw_page
        from blockdiff.sampling import Request

        drawn = {trace.id for trace in traces}
        requests = [entry for entry in entries if isinstance(entry, Request) and entry.id in drawn]
        pictures = {entry.id: [image_bytes(source) for source in entry.sources] for entry in requests}
        draw_page(traces, path, decode, title="How the text filled in", pictures=pictures)
    elif traces:
        from blockdiff.plots.picture import draw_picture

        draw_picture(traces[0], path, decode)


def _each(*listeners: Callable[[Any], object] | Any) -> Callable[[Any], object] | None:
    """Return a listener that calls all given ones; None if none is given, because reporting steps costs time."""
    active = [listener for listener in listeners if listener]
    return (lambda record: [listener(record) for listener in active]) if active else None
