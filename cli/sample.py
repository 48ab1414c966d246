"""`blockdiff sample`: text out of a model, and what happened on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdiff.errors import RequestError

if TYPE_CHECKING:
    from blockdiff.sampling import Request, Result, Sampler, Trace

TRACE_KINDS = (".html", ".jsonl", ".png")
DRAWN = 16  # requests on a page; a JSONL trace has them all


def sample(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint directory or a hub id.")],
    prompt: Annotated[str | None, typer.Option(help="Raw text to continue (bos is put before it).")] = None,
    chat: Annotated[str | None, typer.Option(help="A user's message, put into the chat template.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL: prompt or messages, optionally id, seed.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSONL to write.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the draws; a line's own seed goes before it.")
    ] = 0,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Rounded up to whole canvases.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Most denoising steps per canvas.")] = None,
    trace: Annotated[Path | None, typer.Option(help="How it filled in: FILE.html, .jsonl or .png.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Show canvases as they are finished.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 32,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16, float16 or float64.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    kernels: Annotated[str, typer.Option(help="auto, triton or torch.")] = "auto",
) -> None:
    """Answer one prompt, one chat message, or a file of prompts.

    Output lines are id, text, tokens, finish_reason ("eos", "length" or "error") and steps (denoising steps
    per canvas). A bad line of a prompts file gets an error record and the others continue.
    """
    if sum(given is not None for given in (prompt, chat, prompts)) != 1:
        raise typer.BadParameter("give exactly one of --prompt, --chat and --prompts", param_hint="--prompt")
    if trace is not None and trace.suffix not in TRACE_KINDS:
        raise typer.BadParameter(f"{trace} ends in none of {', '.join(TRACE_KINDS)}", param_hint="--trace")

    from blockdiff.cli.live import Watcher
    from blockdiff.cli.loading import load_sampler, make_parent
    from blockdiff.cli.prompts import read_prompts
    from blockdiff.sampling import Recorder, Request, Result

    entries: list[Request | Result]
    if prompts is not None:
        entries = read_prompts(prompts)
    elif prompt is not None:
        entries = [Request(1, prompt=prompt)]
    else:
        entries = [Request(1, messages=[{"role": "user", "content": str(chat)}])]
    make_parent(output)
    make_parent(trace)

    sampler = load_sampler(model, dtype, device, kernels)
    requests = [entry for entry in entries if isinstance(entry, Request)]
    recorder = Recorder()
    traced = {r.id for r in requests[: len(requests) if trace and trace.suffix == ".jsonl" else DRAWN]}
    on_step: list[Callable[[Any], object]] = []
    on_canvas: list[Callable[[Any], object]] = []
    if trace is not None:
        on_step.append(lambda step: recorder.step(step) if step.id in traced else None)
        on_canvas.append(lambda canvas: recorder.canvas(canvas) if canvas.id in traced else None)
    view = Watcher(sampler.tokenizer, several=prompts is not None) if stream else None
    if view is not None:
        on_canvas.append(view.canvas)
        if view.is_live:
            on_step.append(view.step)

    start = time.perf_counter()
    results: dict[int, Result] = {i: entry for i, entry in enumerate(entries) if isinstance(entry, Result)}
    places = [i for i, entry in enumerate(entries) if isinstance(entry, Request)]
    with Lines(output, is_shown=prompts is not None) as lines:
        # Chunks, so that a long file shows results early; draws do not depend on what runs together.
        for chunk in (places[i : i + 8 * batch_size] for i in range(0, len(places), 8 * batch_size)):
            answers = sampler.generate(
                [entries[i] for i in chunk],
                seed=seed,
                max_new_tokens=max_new_tokens,
                max_steps=steps,
                batch_size=batch_size,
                on_canvas=_each(on_canvas),
                on_step=_each(on_step),
            )
            results |= dict(zip(chunk, answers, strict=True))
            lines.write([results.pop(i) for i in sorted(results) if i <= chunk[-1]])
        lines.write([results.pop(i) for i in sorted(results)])
    if view is not None:
        view.close()
    if trace is not None:
        write_trace(trace, recorder.traces, sampler)
    if lines.answered == 0:
        raise RequestError(lines.error or "no request could be answered")
    if prompts is None:
        if output is None and view is None:
            print(lines.last.text)  # type: ignore[union-attr]
        return
    seconds = time.perf_counter() - start
    per_canvas = sum(lines.steps) / max(1, len(lines.steps))
    summary = f"{lines.answered} answered, {lines.failed} failed, {lines.tokens} tokens in {seconds:.1f} s"
    typer.echo(f"{summary}, {per_canvas:.2f} steps per canvas", err=True)
    if lines.failed:
        typer.echo(f"first failure: {lines.error}", err=True)


class Lines:
    """Where output lines go (a file, or stdout where they are the answer), and what they add up to."""

    def __init__(self, path: Path | None, is_shown: bool):
        self.path, self.is_shown = path, is_shown
        self.answered = self.failed = self.tokens = 0
        self.steps: list[int] = []
        self.error: str | None = None
        self.last: Result | None = None

    def __enter__(self) -> Lines:
        self.file = self.path.open("w", encoding="utf-8") if self.path is not None else None
        return self

    def __exit__(self, *error: object) -> None:
        if self.file is not None:
            self.file.close()

    def write(self, results: list[Result]) -> None:
        """Write results as they are, one line each."""
        for result in results:
            if result.finish_reason == "error":
                self.failed += 1
                self.error = self.error or result.error
            else:
                self.answered += 1
            self.tokens += len(result.tokens)
            self.steps += result.steps
            self.last = result
            line = json.dumps(result.to_record(), ensure_ascii=False)
            if self.file is not None:
                self.file.write(line + "\n")
                self.file.flush()
            elif self.is_shown:
                print(line, flush=True)


def write_trace(path: Path, traces: list[Trace], sampler: Sampler) -> None:
    """Write traces as the kind that the suffix names: a page, records, or a picture of the first request."""
    from blockdiff.sampling import write_traces

    if path.suffix == ".jsonl":
        write_traces(path, traces)
        return

    from blockdiff.cli.loading import decoder

    decode = decoder(sampler.tokenizer)
    if path.suffix == ".html":
        from blockdiff.plots.denoising import draw_page

        draw_page(traces, path, decode, title="How the text filled in")
    elif traces:
        from blockdiff.plots.picture import draw_picture

        draw_picture(traces[0], path, decode)


def _each(callbacks: list[Callable[[Any], object]]) -> Callable[[Any], None] | None:
    """One callback that calls all of them; None when there are none (listening to steps costs time)."""
    if not callbacks:
        return None

    def call(record: Any) -> None:
        for callback in callbacks:
            callback(record)

    return call
