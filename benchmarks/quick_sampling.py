"""Parts of the quick run about sampling: engines of the released shapes with random weights, and drafts."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.quick import RELEASED
from benchmarks.quick_figures import Figures
from benchmarks.quick_start import FACTOR, ceilings_of, random_model, released
from benchmarks.step_operations import STEPS
from blockdiff import memory
from blockdiff.checkpoint import preset_config
from blockdiff.checkpoint.config import config_from
from blockdiff.checkpoint.generation import Generation
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.models.drafted import Drafted
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.sampling import Engine, Request, Result

TARGET, DRAFTER = "qwen3-8b", "qwen3-8b-drafter"
MOST_STEPS = 200  # of a canvas; no request of a measurement reaches it
SAME_STEPS = 16  # steps that are compared bit by bit
ALPHABET = 'abcdefgh0123456789{}[]":,. '
# On a CPU, changes of the shapes of a target and of its drafter.
SMALL = dict(vocab_size=384, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
SMALL |= dict(head_dim=16, num_hidden_layers=3)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """In the block, list the kernels that this process loads for the first time.

    "compiled" precedes the name of a kernel that was not in Triton's cache on disk.
    """
    found: list[str] = []
    try:
        from triton import knobs
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield found
        return
    compile_kernel, was_kept = JITFunction._do_compile, [True]

    def listen(*arguments: Any, **named: Any) -> None:
        was_kept[0] = bool(named.get("cache_hit"))

    def noted(kernel: Any, *arguments: Any) -> Any:
        was_kept[0] = True
        compiled = compile_kernel(kernel, *arguments)
        found.append(("" if was_kept[0] else "compiled ") + kernel.__name__)
        return compiled

    with patch.object(JITFunction, "_do_compile", noted), patch.object(knobs.compilation, "listener", listen):
        yield found


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def prompts(rows: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return random prompts, the same for equal arguments."""
    draws = torch.Generator().manual_seed(rows)
    return torch.randint(3, vocab_size, (rows, length), generator=draws).tolist()


@contextmanager
def running(engine: Engine, rows: int, prompt: int, asked: dict[str, Any]) -> Iterator[None]:
    """In the block all rows of an engine are encoded, and their kind of step has run, and is captured if possible.

    Raises RuntimeError if a row ends before the block does.
    """
    try:
        for n, tokens in enumerate(prompts(rows, prompt, engine.model.vocab_size)):
            engine.submit(Request(n, tokens=tokens, seed=n, max_steps=MOST_STEPS, **asked))
        for _ in range(MOST_STEPS // 2):
            engine.step()
            if engine.load.rows == rows:
                break
        for _ in range(2):
            engine.step()
        yield
        there, ended = engine.load.rows, [each for each in engine.events() if isinstance(each, Result)]
        if there != rows or ended:
            why = "".join(f": {each.error}" for each in ended[:1] if each.error)
            raise RuntimeError(f"{there} of {rows} rows ran{why}")
    finally:
        engine.clear()


def step_times(engine: Engine, rows: int, prompt: int, asked: dict[str, Any], steps: int) -> list[float]:
    """Return the milliseconds of `steps` steps of an engine whose rows are all in their canvases, sorted."""
    device, found = engine.model.device, []
    with running(engine, rows, prompt, asked):
        for _ in range(steps):
            wait(device)
            begin = time.perf_counter()
            engine.step()
            wait(device)
            found.append(1e3 * (time.perf_counter() - begin))
    return sorted(found)


def by_kernel(engine: Engine, rows: int, prompt: int, most: int = 40) -> dict[str, Any]:
    """Return the milliseconds of the `most` slowest kernels in a step, the sum over all kernels, and the wall time."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with running(engine, rows, prompt, {}), torch.profiler.profile(activities=activities) as profile:
        begin = time.perf_counter()
        engine.step()
        wait(engine.model.device)
        wall = 1e3 * (time.perf_counter() - begin)
    times, counts = dict[str, float](), dict[str, int]()
    for each in profile.key_averages():
        times[each.key] = times.get(each.key, 0.0) + each.self_device_time_total / 1e3
        counts[each.key] = counts.get(each.key, 0) + each.count
    listed = sorted((name for name in times if times[name] > 0), key=lambda name: -times[name])
    ms = {f"{name} x{counts[name]}": round(times[name], 4) for name in listed[:most]}
    return dict(rows=rows, profiled_wall_ms=wall, sum_ms=sum(times.values()), ms=ms)


def engine_of(figures: Figures, quantize: str | None = None) -> Engine:
    """Return the engine of the released model, made once per process."""
    name = f"{quantize} engine" if quantize else "engine"
    if name not in figures.kept:
        model = released(figures, quantize)
        generation = Generation(eos_ids=(1,), pad_id=0, confidence=1e-12, max_new_tokens=model.canvas_length)
        options = dict(tokenizer=character_tokenizer(ALPHABET), generation=generation, max_rows=figures.rows)
        if not figures.is_cuda:
            options |= {"capacity": figures.rows * (figures.prompt + 4 * model.canvas_length)}
        before = free_bytes(figures.device)
        figures.kept[name], figures.kept["free before"] = Engine(model, **options), before
    engine: Engine = figures.kept[name]
    return engine


def sampling(figures: Figures, quantize: str | None = None) -> None:
    """Measure an engine's start, its memory, and steps of few rows and of many."""
    engine, device = engine_of(figures, quantize), figures.device
    floor = ceilings_of(figures).pass_ms

    def started() -> dict[str, Any]:
        begin = time.monotonic()
        with compilations() as met, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            engine.warm_up()
            wait(device)
        new = [name for name in met if name.startswith("compiled ")]
        line = dict(engine_seconds=round(time.monotonic() - begin, 1), kernels=len(met), compiled=new)
        line |= dict(captured=sum(each is not None for each in engine._graphs._replays.values()))
        line |= dict(said=sorted({str(each.message)[:300] for each in said}))
        is_short = figures.is_cuda and (not engine.captures or not line["captured"] or engine._graphs._is_refused)
        return line | dict(short="steps are not captured" if is_short else "")

    def step(count: int, kind: str) -> dict[str, Any]:
        with compilations() as met:
            times = step_times(engine, count, figures.prompt, STEPS[kind], 10)
        line = timed(times, floor(engine.model, count * engine.model.canvas_length) if figures.is_cuda else None)
        return dict(kind=kind, rows=count) | line | ({"met": sorted(met)} if met else {})

    figures.make("engine", started, limit=200)
    for count in dict.fromkeys((1, figures.rows)):
        for kind in STEPS:
            figures.make(f"step, {count} rows, {kind}", partial(step, count, kind))
            if kind == "plain" and figures.is_cuda:
                figures.make(f"step, {count} rows, by kernel", partial(by_kernel, engine, count, figures.prompt))
    if figures.is_cuda:
        before = figures.kept["free before"]
        total = torch.cuda.mem_get_info(device)[1]
        of_calls = {name: nbytes / 2**30 for name, nbytes in engine._calls.peaks.items()}
        figures.make("memory", lambda: memory_line(engine, before, free_bytes(device), total) | dict(gib_of=of_calls))


def quantised(figures: Figures, quantize: str) -> None:
    """Measure the figures of `sampling` with weights in fewer bits."""
    figures.free("engine", "model")
    sampling(figures, quantize)
    figures.free(f"{quantize} engine", f"{quantize} model")


def graphs(figures: Figures) -> None:
    """Check that replayed steps give the same bits as launched steps."""
    engine = engine_of(figures)
    for count in dict.fromkeys((1, figures.rows)):
        figures.make(f"{SAME_STEPS} steps of {count} rows", partial(same_bits, engine, count, figures.prompt))


def same_bits(engine: Engine, rows: int, prompt: int) -> dict[str, Any]:
    """Return the state tensors of running canvases that differ after some steps with and without graphs."""

    def state() -> dict[str, torch.Tensor]:
        engine.pages.forget()  # rows with cached prompts would begin sooner
        with running(engine, rows, prompt, {}):
            for _ in range(SAME_STEPS):
                engine.step()
            part = engine._proposer._step.state.part(slice(0, rows))  # type: ignore[attr-defined]
            named = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
            return {name: x.clone() for name, x in named.items() if name != "offset_B"}

    replayed = state()
    graphs, was_refused = engine._graphs, engine._graphs._is_refused
    graphs._is_refused = True  # padded like captured steps: other shapes may round differently
    try:
        launched, again = state(), state()
    finally:
        graphs._is_refused = was_refused
    differ = {name: _apart(x, replayed[name]) for name, x in launched.items() if not torch.equal(x, replayed[name])}
    unsteady = [name for name, x in launched.items() if not torch.equal(x, again[name])]
    short = f"replayed steps differ in {', '.join(differ)}" if differ else ""
    if unsteady:
        short += f"; two runs without graphs differ in {', '.join(unsteady)}"
    return dict(rows=rows, differ=differ, short=short.removeprefix("; "))


def _apart(x: torch.Tensor, y: torch.Tensor) -> str:
    return f"{int((x != y).sum())} of {x.numel()}, at most {float((x.float() - y.float()).abs().max()):.2g}"


def timed(times: list[float], floor: float | None) -> dict[str, Any]:
    """Return the median, least and worst of sorted times with their floor; `short` if the median is far above it."""
    median = times[len(times) // 2]
    short = f"more than {FACTOR:g} times the floor" if floor and median > FACTOR * floor else ""
    return dict(median_ms=median, least_ms=times[0], worst_ms=times[-1], floor_ms=floor, short=short)


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU; 0 on a CPU."""
    return (memory.available_bytes(device) or 0) if device.type == "cuda" else 0


def memory_line(engine: Engine, before: int, after: int, total: int) -> dict[str, Any]:
    """Compare the memory that calls and captured steps hold with the memory kept free for them outside of pages.

    before, after: free bytes before the engine was made, and after all its steps.
    """
    pages = sum(x.nbytes for pool in engine.pages.pools.values() for x in pool.tensors)
    kept, taken, gib = engine.pages.kept_free or 0, before - after - pages, 2**30
    peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
    line = dict(tokens=engine.pages.capacity, pages_gib=pages / gib, kept_gib=kept / gib, taken_gib=taken / gib)
    line |= dict(peak_reserved_gib=peak / gib, free_gib=after / gib, total_gib=total / gib)
    return line | dict(short="calls hold more than was kept free for them" if taken > kept else "")


def drafted(figures: Figures) -> None:
    """Measure a drafter's rounds over whole blocks (its pass and the verification), and next tokens one by one."""
    figures.free(*figures.kept.keys() - {"ceilings"})
    device, rows, prompt = figures.device, figures.rows, figures.prompt
    target_of, drafter_of = preset_config(TARGET).to_dict(), preset_config(DRAFTER).to_dict()
    if figures.preset != RELEASED:
        target_of |= SMALL
        own = drafter_of["dflash_config"] | {"mask_token_id": 5, "target_layer_ids": [0, 1]}
        drafter_of |= SMALL | {"num_target_layers": 3, "dflash_config": own}
    for values in (target_of, drafter_of):
        values.pop("layer_types", None)  # one for each layer of the released shape
    target, drafter = (random_model(config_from(values, "here"), device) for values in (target_of, drafter_of))
    model = Drafted(target, drafter).eval()
    generation = Generation(eos_ids=(), pad_id=0, max_new_tokens=MOST_STEPS)
    options = dict(tokenizer=character_tokenizer(ALPHABET), generation=generation, max_rows=rows)
    options |= dict(capacity=rows * (prompt + 2 * MOST_STEPS), tokens_per_step=8 * prompt)

    def floor(of: BlockDiffusionModel, count: int) -> float | None:
        if not figures.is_cuda:
            return None
        if not isinstance(of, Drafted):
            return ceilings_of(figures).pass_ms(of, count, vocabulary=1)
        tokens = count * of.canvas_length
        return sum(ceilings_of(figures).pass_ms(each, tokens, vocabulary=1) for each in (of.target, of.drafter))

    ways = {"next_token": target, f"speculative:block={model.canvas_length}": model}
    for strategy, of in ways.items():
        engine = Engine(of, strategy=strategy, **options)
        figures.make(f"engine, {strategy}", partial(_warmed, engine))
        for count in dict.fromkeys((1, rows)):
            floor_ms = floor(of, count)

            def round_(
                engine: Engine = engine, count: int = count, floor_ms: float | None = floor_ms
            ) -> dict[str, Any]:
                return dict(rows=count) | timed(step_times(engine, count, prompt, {}, 20), floor_ms)

            figures.make(f"round, {count} rows, {strategy}", round_)


def _warmed(engine: Engine) -> dict[str, Any]:
    with compilations() as met:
        engine.warm_up()
        wait(engine.model.device)
    return dict(kernels=len(met), compiled=[name for name in met if name.startswith("compiled ")])
