"""`blockdiff sample`: text out of a model, and what happened on the way."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from blockdiff.cli import options
from blockdiff.errors import BlockdiffError, RequestError
from blockdiff.metrics import at_limit
from blockdiff.terminal import printable, shown

if TYPE_CHECKING:
    from blockdiff.sampling import Request, Result, Sampler, Trace

TRACE_KINDS = (".html", ".jsonl", ".png", ".gif")
DRAWN = 16  # requests on a page; a JSONL trace has them all


def sample(
    model: options.Model,
    prompt: Annotated[str | None, typer.Option(help="Raw text to continue (bos is put before it).")] = None,
    chat: Annotated[str | None, typer.Option(help="A user's message, put into the chat template.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSONL: prompt or messages, optionally id, seed.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSONL to write.")] = None,
    overwrite: options.Overwrite = False,
    seed: options.Seed = 0,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Rounded up to whole canvases.")] = None,
    steps: options.MaxSteps = None,
    strategy: options.Strategy = None,
    trace: Annotated[Path | None, typer.Option(help="How it filled in: FILE.html, .gif, .png or .jsonl.")] = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="Ask for reasoning, which is kept apart.")] = False,
    scores: Annotated[bool, typer.Option("--scores", help="Give every token's next-token log-probability.")] = False,
    best_of: Annotated[
        int, typer.Option(min=1, help="Draw so many answers and give the one with the highest mean score.")
    ] = 1,
    allow_control_tokens: options.AllowControlTokens = False,
    template: options.Template = None,
    regex: options.Regex = None,
    json_schema: options.JsonSchema = None,
    draft: options.Draft = None,
    noise: options.Noise = None,
    banned: options.Banned = None,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    stream: Annotated[bool, typer.Option("--stream", help="Show canvases as they are finished.")] = False,
    batch_size: options.BatchSize = 32,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    kernels: options.Kernels = "auto",
) -> None:
    """Answer one prompt, one chat message, or a file of prompts.

    Output lines are id, text, tokens, finish_reason ("eos", "length" or "error"), steps (denoising steps
    per canvas) and what was asked for: reasoning, logprobs and score, draw. A bad line of a prompts file
    gets an error record and the others continue.
    """
    if sum(given is not None for given in (prompt, chat, prompts)) != 1:
        raise typer.BadParameter("give exactly one of --prompt, --chat and --prompts", param_hint="--prompt")
    if trace is not None and trace.suffix not in TRACE_KINDS:
        raise typer.BadParameter(f"{trace} ends in none of {', '.join(TRACE_KINDS)}", param_hint="--trace")
    if trace is not None and trace == output:
        raise typer.BadParameter(f"{trace} is the file of --output, too", param_hint="--trace")

    from blockdiff.cli.live import Watcher
    from blockdiff.sampling import Recorder, Request, Sampler, read_prompts
    from blockdiff.terminal import quiet

    entries: list[Request | Result]
    if prompts is not None:
        entries = read_prompts(prompts)
    elif prompt is not None:
        entries = [Request(1, prompt=prompt)]
    else:
        entries = [Request(1, messages=[{"role": "user", "content": str(chat)}])]
    # What holds the response; a line of a prompts file goes before the command's options.
    held: dict[str, Any] = dict(template=template, regex=regex, draft=draft, noise=noise, banned=tuple(banned or ()))
    held |= dict(json_schema=options.read_text(json_schema), repetition_penalty=repetition_penalty)
    unheld = Request(1, prompt="")
    held = {name: value for name, value in held.items() if value != getattr(unheld, name)}
    replace(unheld, **held).check()
    entries = [
        replace(
            entry,
            thinking=thinking or entry.thinking,
            scores=scores or entry.scores,
            best_of=best_of if entry.best_of == 1 else entry.best_of,
            allow_control_tokens=allow_control_tokens,
            **{name: value for name, value in held.items() if getattr(entry, name) == getattr(unheld, name)},
        )
        if isinstance(entry, Request)
        else entry
        for entry in entries
    ]
    for written in (output, trace):
        options.require_free(written, model, prompts, overwrite=overwrite)
        options.make_parent(written)
    quiet()
    sampler = Sampler.from_pretrained(model, dtype=dtype, device=device, kernels=kernels, strategy=strategy)

    recorder = view = None
    if trace is not None:
        ids = [entry.id for entry in entries if isinstance(entry, Request)]
        recorder = Recorder(ids if trace.suffix == ".jsonl" else ids[:DRAWN])
    if stream:
        view = Watcher(sampler.tokenizer, several=prompts is not None)
    on_canvas = _each(recorder and recorder.canvas, view and view.canvas)
    on_step = _each(recorder and recorder.step, view and view.is_live and view.step)

    start, chunk = time.perf_counter(), 8 * batch_size
    counts: Counter[str] = Counter()
    first_error = None
    lines = sys.stdout.buffer if prompts is not None else None
    with nullcontext(lines) if output is None else output.open("wb", buffering=0) as file:
        # In chunks, so that a long file shows results early; draws do not depend on what runs together.
        for first in range(0, len(entries), chunk):
            results = sampler.generate(
                entries[first : first + chunk],
                seed=seed,
                max_new_tokens=max_new_tokens,
                max_steps=steps,
                batch_size=batch_size,
                on_canvas=on_canvas,
                on_step=on_step,
            )
            for result in results:
                counts["answered" if result.error is None else "failed"] += 1
                counts["tokens"] += len(result.tokens)
                counts["canvases"] += len(result.steps)
                counts["steps"] += sum(result.steps)
                first_error = first_error or result.error
                if file is not None:
                    _write_line(file, result, output)
    seconds = time.perf_counter() - start
    if view is not None:
        view.close()
    if trace is not None and recorder is not None:
        write_trace(trace, recorder.traces, sampler)
    if not counts["answered"]:
        raise RequestError(first_error or "no request could be answered")
    if prompts is not None:
        words = [f"{counts['answered']} answered", f"{counts['failed']} failed", f"{counts['tokens']} tokens"]
        per_canvas = counts["steps"] / counts["canvases"]
        limit = at_limit(per_canvas, steps or sampler.generation.max_steps)
        typer.echo(f"{', '.join(words)} in {seconds:.1f} s, {per_canvas:.2f} steps per canvas{limit}", err=True)
        if first_error:
            typer.echo(f"first failure: {shown(first_error, sys.stderr)}", err=True)
    elif output is None and view is None:
        if results[0].reasoning is not None:
            typer.echo(shown(results[0].reasoning, sys.stderr), err=True)
        if results[0].text or results[0].tool_calls is None:
            print(shown(results[0].text, sys.stdout))
        for call in results[0].tool_calls or ():
            print(shown(json.dumps(call["function"], ensure_ascii=False), sys.stdout))
        if results[0].score is not None:
            typer.echo(f"mean log-probability per token {results[0].score:.4f}", err=True)


def _write_line(file: IO[bytes], result: Result, path: Path | None) -> None:
    """Write one output line, whole or not at all; half a surrogate pair is written as the JSON escape it is."""
    text = json.dumps(result.to_record(), ensure_ascii=False) + "\n"
    line = (printable(text) if file.isatty() else text).encode("utf-8", "backslashreplace")
    start = file.tell() if file.seekable() else None
    try:
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.flush()
    except OSError as error:
        if path is None:
            raise
        if start is not None:
            with suppress(OSError):  # /dev/full, say
                file.truncate(start)
        raise BlockdiffError(
            f"{path}: {error.strerror}; it has the answers before that of {result.id!r}, ask for the others elsewhere"
        ) from None


def write_trace(path: Path, traces: list[Trace], sampler: Sampler) -> None:
    """Write traces as the kind that the suffix names: a page, records, or a picture of the first request."""
    from blockdiff.checkpoint.tokenizer import decoder

    decode = decoder(sampler.tokenizer)
    if path.suffix == ".jsonl":
        from blockdiff.sampling import write_traces

        write_traces(path, traces)
    elif path.suffix == ".html":
        from blockdiff.plots.denoising import draw_page

        draw_page(traces, path, decode, title="How the text filled in")
    elif traces:
        from blockdiff.plots.picture import draw_picture

        draw_picture(traces[0], path, decode)


def _each(*listeners: Callable[[Any], object] | Any) -> Callable[[Any], object] | None:
    """One listener that calls all that are there; None where none is (hearing of steps costs time)."""
    there = [listener for listener in listeners if listener]
    return (lambda record: [listener(record) for listener in there]) if there else None
