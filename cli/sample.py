"""`blockdiff sample`: text out of a model, and what happened on the way."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdiff.cli import options, together
from blockdiff.cli.answers import Answers, Progress, fingerprint
from blockdiff.errors import RequestError
from blockdiff.metrics import at_limit
from blockdiff.terminal import shown

if TYPE_CHECKING:
    from blockdiff.parallel.ranks import Ranks
    from blockdiff.sampling import Request, Result, Sampler, Trace

TRACE_KINDS = (".html", ".jsonl", ".png", ".gif")
CHUNK = 4096  # requests that are tokenised together at least
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
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the response (may be repeated).")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Show canvases as they are finished.")] = False,
    batch_size: options.BatchSize = 32,
    exact: Annotated[
        bool, typer.Option("--exact", help="The same tokens to the bit whatever runs together, on a CPU; slower.")
    ] = False,
    no_graphs: Annotated[
        bool, typer.Option("--no-graphs", help="On a GPU, launch every denoising step anew, without CUDA graphs.")
    ] = False,
    adapter: options.Adapter = None,
    dtype: options.Dtype = "auto",
    quantize: options.Quantize = None,
    device: options.Device = "auto",
    kernels: options.Kernels = "auto",
    tensor_parallel: options.TensorParallel = 1,
) -> None:
    """Answer one prompt, one chat message, or a file of prompts.

    Output lines are id, text, tokens, finish_reason ("eos", "length", "stop" or "error"), steps (denoising steps
    per canvas) and what was asked for: reasoning, logprobs and score, draw. A bad line of a prompts file
    gets an error record and the others continue.
    """
    if sum(given is not None for given in (prompt, chat, prompts)) != 1:
        raise typer.BadParameter("give exactly one of --prompt, --chat and --prompts", param_hint="--prompt")
    if trace is not None and trace.suffix not in TRACE_KINDS:
        raise typer.BadParameter(f"{trace} ends in none of {', '.join(TRACE_KINDS)}", param_hint="--trace")
    if trace is not None and trace == output:
        raise typer.BadParameter(f"{trace} is the file of --output, too", param_hint="--trace")

    mesh = together.join(tensor_parallel, device)
    speaks = mesh is None or mesh.ranks.is_main
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
    held |= dict(stop=tuple(stop or ()))
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
    if not speaks:
        output = trace = None
    options.require_free(trace, model, prompts, overwrite=overwrite)
    options.require_free(output, model, prompts, overwrite=True)  # what it has is gone on with
    for written in (output, trace):
        options.make_parent(written)
    quiet()
    settings = dict(seed=seed, max_new_tokens=max_new_tokens, max_steps=steps, strategy=strategy, exact=exact)
    place = Path(model).resolve() if Path(model).exists() else model
    identity = {**settings, "model": str(place), "dtype": dtype} | ({"adapter": adapter} if adapter else {})
    identity |= {"quantize": quantize} if quantize else {}
    ranks = _ranks(device, output, trace, stream) if mesh is None else mesh.ranks
    asked = [fingerprint(entry, identity) for entry in entries]
    answers = Answers(output, asked, ranks.rank, ranks.row_world == 1)
    with ranks.main_first("reading the output file"):
        answers.keep(overwrite and ranks.is_main)
    before = len(answers.written)
    missing = answers.missing if mesh is None else ranks.agree(answers.missing)
    mine = missing[ranks.row_rank :: ranks.row_world]
    chosen = str(ranks.device) if ranks.world > 1 else device
    how: dict[str, Any] = dict(dtype=dtype, kernels=kernels, strategy=strategy, adapter=adapter, mesh=mesh)
    how |= dict(quantize=quantize)
    sampler = Sampler.from_pretrained(model, device=chosen, **how)

    recorder = view = None
    if trace is not None:
        ids = [entry.id for entry in entries if isinstance(entry, Request)]
        recorder = Recorder(ids if trace.suffix == ".jsonl" else ids[:DRAWN])
    if stream:
        view = Watcher(sampler.tokenizer, several=prompts is not None)
    on_canvas = _each(recorder and recorder.canvas, view and view.canvas)
    on_step = _each(recorder and recorder.step, view and view.is_live and view.step)

    start, chunk = time.perf_counter(), max(CHUNK, 32 * batch_size)
    counts: Counter[str] = Counter()
    first_error = shown_result = None
    is_file = prompts is not None
    progress = Progress(len(mine), 0, is_shown=is_file and view is None and ranks.is_main)
    try:
        with ranks.guarded("sampling"), ranks.at_own_pace("sampling") as look:
            for first in range(0, len(mine), chunk):
                own = mine[first : first + chunk]
                found = sampler.stream(
                    [entries[place] for place in own],
                    seed=seed,
                    max_new_tokens=max_new_tokens,
                    max_steps=steps,
                    batch_size=batch_size,
                    on_canvas=on_canvas,
                    on_step=on_step,
                    exact=exact,
                    graphs=False if no_graphs else None,
                )
                for place, result in found:
                    counts["answered" if result.error is None else "failed"] += 1
                    counts["tokens"] += len(result.tokens)
                    counts["canvases"] += len(result.steps)
                    counts["steps"] += sum(result.steps)
                    first_error, shown_result = first_error or result.error, result
                    if is_file or output is not None:
                        answers.write(own[place], result)
                    progress.add()
                    look()
    except KeyboardInterrupt:
        answers.flush()
        progress.close()
        _say_where_it_stands(before + progress.done, len(entries), output)
        raise typer.Exit(130) from None
    finally:
        progress.close()
        answers.close()
    seconds = time.perf_counter() - start
    if view is not None:
        view.close()
    if trace is not None and recorder is not None:
        write_trace(trace, recorder.traces, sampler)
    if not speaks:
        return
    if ranks.row_world > 1:
        counts = sum(ranks.gather(counts), Counter())
        first_error = next((error for error in ranks.gather(first_error) if error), None)
        if ranks.is_main:
            answers.merge()
        ranks.barrier()
        if not ranks.is_main:
            return
    if not counts["answered"] and not before:
        raise RequestError(first_error or "no request could be answered")
    if is_file:
        words = [f"{counts['answered']} answered", f"{counts['failed']} failed", f"{counts['tokens']} tokens"]
        words += [f"{before} were there already"] if before else []
        per_canvas = counts["steps"] / max(1, counts["canvases"])
        limit = at_limit(per_canvas, steps or sampler.generation.max_steps)
        typer.echo(f"{', '.join(words)} in {seconds:.1f} s, {per_canvas:.2f} steps per canvas{limit}", err=True)
        if first_error:
            typer.echo(f"first failure: {shown(first_error, sys.stderr)}", err=True)
    elif output is None and view is None and shown_result is not None:
        if shown_result.reasoning is not None:
            typer.echo(shown(shown_result.reasoning, sys.stderr), err=True)
        if shown_result.text or shown_result.tool_calls is None:
            print(shown(shown_result.text, sys.stdout))
        for call in shown_result.tool_calls or ():
            print(shown(json.dumps(call["function"], ensure_ascii=False), sys.stdout))
        if shown_result.score is not None:
            typer.echo(f"mean log-probability per token {shown_result.score:.4f}", err=True)


def _ranks(device: str, output: Path | None, trace: Path | None, stream: bool) -> Ranks:
    """This process among those that share the prompts: alone, unless a launcher has started several."""
    import torch

    from blockdiff.parallel.ranks import Ranks, from_accelerate

    # SIGTERM ends the work as Ctrl-C does, so that what is answered is said.
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


def _say_where_it_stands(done: int, total: int, output: Path | None) -> None:
    place = f" and in {output}; the same command goes on from there" if output is not None else ""
    typer.echo(f"stopped: {done} of {total} answered{place}", err=True)


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
