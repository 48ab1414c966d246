"""`blockdiff sample`: answers prompts with a model, and writes traces of how the answers were denoised."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdiff.cli import options, together
from blockdiff.cli.answers import Answers, fingerprint
from blockdiff.cli.tally import AnsweredSoFar, Tally
from blockdiff.errors import RequestError
from blockdiff.terminal import shown

if TYPE_CHECKING:
    from blockdiff.parallel.ranks import Ranks
    from blockdiff.sampling import Request, Result, Sampler, Trace

TRACE_KINDS = (".html", ".jsonl", ".png", ".gif")
CHUNK = 4096  # the least number of requests that are tokenised together
DRAWN = 16  # the number of requests that a page or a picture traces; a JSONL trace has all of them


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
    _check_usage(prompt, chat, prompts, output, trace)
    mesh = together.join(tensor_parallel, device)
    from blockdiff.cli.live import Watcher
    from blockdiff.sampling import Recorder, Request, Sampler
    from blockdiff.terminal import quiet

    entries = _entries(prompt, chat, prompts)
    controls: dict[str, Any] = dict(template=template, regex=regex, json_schema=options.read_text(json_schema))
    controls |= dict(draft=draft, noise=noise, banned=tuple(banned or ()), stop=tuple(stop or ()))
    controls |= dict(repetition_penalty=repetition_penalty)
    Request(1, prompt="", **controls).check()
    asked = dict(thinking=thinking, scores=scores, best_of=best_of, allow_control_tokens=allow_control_tokens)
    entries = [_with_options(entry, **asked, **controls) for entry in entries]

    if mesh is not None and not mesh.ranks.is_main:
        output = trace = None
    options.require_free(trace, model, prompts, overwrite=overwrite)
    options.require_free(output, model, prompts, overwrite=True)  # answers that it has are kept, see `Answers.keep`
    for written in (output, trace):
        options.make_parent(written)
    quiet()
    ranks = _ranks(device, output, trace, stream) if mesh is None else mesh.ranks
    settings = dict(seed=seed, max_new_tokens=max_new_tokens, max_steps=steps, strategy=strategy, exact=exact)
    model_name = Path(model).resolve() if Path(model).exists() else model
    identity = {**settings, "model": str(model_name), "dtype": dtype} | ({"adapter": adapter} if adapter else {})
    identity |= {"quantize": quantize} if quantize else {}
    answers = Answers(
        output, [fingerprint(entry, identity) for entry in entries], ranks.rank, is_alone=ranks.row_world == 1
    )
    with ranks.main_first("reading the output file"):
        answers.keep(overwrite and ranks.is_main)
    answered_before = len(answers.written)
    mine = ranks.agree(answers.missing)[ranks.row_rank :: ranks.row_world]
    sampler = Sampler.from_pretrained(
        model,
        dtype=dtype,
        device=str(ranks.device) if ranks.world > 1 else device,
        kernels=kernels,
        strategy=strategy,
        adapter=adapter,
        mesh=mesh,
        quantize=quantize,
    )

    recorder = view = None
    if trace is not None:
        ids = [entry.id for entry in entries if isinstance(entry, Request)]
        recorder = Recorder(ids if trace.suffix == ".jsonl" else ids[:DRAWN])
    if stream:
        view = Watcher(sampler.tokenizer, several=prompts is not None)
    results = _in_chunks(
        sampler,
        entries,
        mine,
        seed=seed,
        max_new_tokens=max_new_tokens,
        max_steps=steps,
        batch_size=batch_size,
        on_canvas=_each(recorder and recorder.canvas, view and view.canvas),
        on_step=_each(recorder and recorder.step, view and view.is_live and view.step),
        exact=exact,
        graphs=False if no_graphs else None,
    )
    is_file = prompts is not None
    tally, progress = Tally(), AnsweredSoFar(len(mine), is_shown=is_file and view is None and ranks.is_main)
    try:
        with ranks.guarded("sampling"), ranks.at_own_pace("sampling") as look:
            for place, result in results:
                tally.add(result)
                if is_file or output is not None:
                    answers.write(place, result)
                progress.add()
                look()
    except KeyboardInterrupt:
        answers.flush()
        progress.close()
        goes_on = f" and in {output}; the same command goes on from there" if output is not None else ""
        typer.echo(f"stopped: {answered_before + progress.done} of {len(entries)} answered{goes_on}", err=True)
        raise typer.Exit(130) from None
    finally:
        progress.close()
        answers.close()

    if view is not None:
        view.close()
    if trace is not None and recorder is not None:
        _write_trace(trace, recorder.traces, sampler)
    if ranks.row_world > 1:
        tally = tally.with_those_of(ranks)
        if ranks.is_main:
            answers.merge()
        ranks.barrier()
    if not ranks.is_main:
        return
    if not tally.counts["answered"] and not answered_before:
        raise RequestError(tally.first_error or "no request could be answered")
    if is_file:
        tally.say(answered_before, progress.seconds, steps or sampler.generation.max_steps)
    elif output is None and view is None and tally.last is not None:
        _say_answer(tally.last)


def _check_usage(
    prompt: str | None, chat: str | None, prompts: Path | None, output: Path | None, trace: Path | None
) -> None:
    """Raise typer.BadParameter for options that cannot stand together."""
    if sum(given is not None for given in (prompt, chat, prompts)) != 1:
        raise typer.BadParameter("give exactly one of --prompt, --chat and --prompts", param_hint="--prompt")
    if trace is not None and trace.suffix not in TRACE_KINDS:
        raise typer.BadParameter(f"{trace} ends in none of {', '.join(TRACE_KINDS)}", param_hint="--trace")
    if trace is not None and trace == output:
        raise typer.BadParameter(f"{trace} is the file of --output, too", param_hint="--trace")


def _entries(prompt: str | None, chat: str | None, prompts: Path | None) -> list[Request | Result]:
    """The requests: one from the command line, or those of a file with the failures of its bad lines."""
    from blockdiff.sampling import Request, read_prompts

    if prompts is not None:
        return read_prompts(prompts)
    if prompt is not None:
        return [Request(1, prompt=prompt)]
    return [Request(1, messages=[{"role": "user", "content": str(chat)}])]


def _with_options(entry: Request | Result, **asked: Any) -> Request | Result:
    """A request with the command's options for the fields that have their defaults; a failed line as it is."""
    from blockdiff.sampling import Request

    if not isinstance(entry, Request):
        return entry
    defaults = Request(1)
    changes = {name: value for name, value in asked.items() if getattr(entry, name) == getattr(defaults, name)}
    return replace(entry, **changes)


def _in_chunks(
    sampler: Sampler, entries: Sequence[Request | Result], places: Sequence[int], batch_size: int, **settings: Any
) -> Iterator[tuple[int, Result]]:
    """The pairs (place, result) of the entries at these places, in the order in which they are answered."""
    size = max(CHUNK, 32 * batch_size)
    for first in range(0, len(places), size):
        chunk = places[first : first + size]
        results = sampler.stream([entries[place] for place in chunk], batch_size=batch_size, **settings)
        yield from ((chunk[index], result) for index, result in results)


def _say_answer(result: Result) -> None:
    """Print the answer to the only request; what is not its text goes to stderr."""
    if result.reasoning is not None:
        typer.echo(shown(result.reasoning, sys.stderr), err=True)
    if result.text or result.tool_calls is None:
        print(shown(result.text, sys.stdout))
    for call in result.tool_calls or ():
        print(shown(json.dumps(call["function"], ensure_ascii=False), sys.stdout))
    if result.score is not None:
        typer.echo(f"mean log-probability per token {result.score:.4f}", err=True)


def _ranks(device: str, output: Path | None, trace: Path | None, stream: bool) -> Ranks:
    """The ranks that share the prompts; this process is the only one unless a launcher has started several."""
    import torch

    from blockdiff.parallel.ranks import Ranks, from_accelerate

    # SIGTERM ends the work as Ctrl-C does, so that the command says how many requests are answered.
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


def _write_trace(path: Path, traces: list[Trace], sampler: Sampler) -> None:
    """Write traces in the form that the suffix names: a page, records, or a picture of the first request."""
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
    """A listener that calls all the given ones; None where none is given, because telling of steps costs time."""
    given = [listener for listener in listeners if listener]
    return (lambda record: [listener(record) for listener in given]) if given else None
