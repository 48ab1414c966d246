"""Parts "bf16", "fp8" and "drafted" of `benchmarks.quick`: engines of the released shapes with random weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.models import Size
from benchmarks.step_operations import STEPS
from blockdiff.checkpoint import preset_config
from blockdiff.checkpoint.generation import Generation
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.models.dflash.config import read as drafter_config
from blockdiff.models.drafted import Drafted
from blockdiff.models.family import family_of
from blockdiff.models.fp8 import fp8_layers, put_in_fp8
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.sampling import Engine, Request, Result

RELEASED, TARGET, DRAFTER = "diffusiongemma-26b-a4b", "qwen3-8b", "qwen3-8b-drafter"
# Milliseconds on an H200 with a prefix of 1k, by arithmetic: a step of the released model in bf16, and a round of a
# drafter and its target, whose weights are read once, or whose products of 16 tokens a row take longer.
FLOORS = {1: 11.0, 32: 103.0}
ROUND_FLOORS = {1: 3.9, 32: 13.0}
MOST_STEPS = 200  # of a canvas, which no request of a measurement reaches
FACTOR = 2.0  # times its floor that a step may take
ALPHABET = 'abcdefgh0123456789{}[]":,. '
# What differs from the shapes of a target and of its drafter on a CPU.
SMALL = dict(vocab_size=384, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
SMALL |= dict(head_dim=16, num_hidden_layers=3)

Measurement = tuple[str, Callable[[], dict[str, Any]]]  # the name of a figure, and what finds it


def random_model(config: Any, device: torch.device, quantize: bool = False) -> BlockDiffusionModel:
    """A model of a config with numbers drawn on the device; bf16, on a CPU fp32."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with torch.device("meta" if quantize else device):
            model: BlockDiffusionModel = family_of(config).model_class(config, kernels="auto")
        if quantize:
            put_in_fp8(model, fp8_layers(model))
            model = model.to_empty(device=device)
    finally:
        torch.set_default_dtype(default)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dtype in (torch.uint8, torch.float8_e4m3fn):
                tensor.view(torch.uint8).random_(0, 0x48)  # codes of finite numbers
            elif tensor.is_floating_point() and tensor.dim() > 1:
                tensor.normal_(std=0.02)
            elif tensor.is_floating_point() and quantize:
                tensor.fill_(1.0)
    return model.eval()


def config_of(preset: str) -> Any:
    """The config of a preset without its image side."""
    return Size("", preset, rows=1, prompt=1, steps=(1, 2)).config()


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Within it the names of the kernels that Triton compiles, or finds among those that it keeps, are noted."""
    found: list[str] = []
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield found
        return
    compile_kernel = JITFunction._do_compile

    def noted(kernel: Any, *arguments: Any) -> Any:
        found.append(kernel.__name__)
        return compile_kernel(kernel, *arguments)

    with patch.object(JITFunction, "_do_compile", noted):
        yield found


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def prompts(rows: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random prompts, the same for as many rows."""
    draws = torch.Generator().manual_seed(rows)
    return torch.randint(3, vocab_size, (rows, length), generator=draws).tolist()


@contextmanager
def running(engine: Engine, rows: int, prompt: int, asked: dict[str, Any]) -> Iterator[None]:
    """Within it all rows of an engine are encoded, and a step of their kind has been called, and captured.

    Raises RuntimeError where rows end before it does.
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
    """Milliseconds of each of so many steps of an engine with all rows in their canvases; sorted."""
    device, found = engine.model.device, []
    with running(engine, rows, prompt, asked):
        for _ in range(steps):
            wait(device)
            begin = time.perf_counter()
            engine.step()
            wait(device)
            found.append(1e3 * (time.perf_counter() - begin))
    return sorted(found)


def by_kernel(engine: Engine, rows: int, prompt: int, most: int = 12) -> dict[str, Any]:
    """The kernels that take most of the device's time in a step, with their milliseconds."""
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with running(engine, rows, prompt, {}), profile:
        engine.step()
        wait(engine.model.device)
    times = {each.key[:80]: each.self_device_time_total / 1e3 for each in profile.key_averages()}
    return dict(rows=rows, ms=dict(sorted(times.items(), key=lambda pair: -pair[1])[:most]))


def one_gpu(quantize: bool, preset: str, device: torch.device, prompt: int, rows: int) -> Iterator[Measurement]:
    """Cold start, memory, and steps of few rows and of many."""
    begin, is_cuda = time.monotonic(), device.type == "cuda"
    model = random_model(config_of(preset), device, quantize)
    wait(device)
    drawn, before = time.monotonic() - begin, free_bytes(device)
    generation = Generation(eos_ids=(1,), pad_id=0, confidence=1e-12, max_new_tokens=model.canvas_length)
    options = dict(tokenizer=character_tokenizer(ALPHABET), generation=generation, max_rows=rows)
    options |= {} if is_cuda else {"capacity": rows * (prompt + 4 * model.canvas_length)}
    begin, engine = time.monotonic(), Engine(model, **options)

    def cold_start() -> dict[str, Any]:
        with compilations() as compiled:
            engine.warm_up()
            wait(device)
            seconds, first = time.monotonic() - begin, len(compiled)
            for count in (1, 2, 4, 8, 16, 32):
                if count <= rows:
                    step_times(engine, count, prompt, {}, 1)
            later = len(compiled) - first
        short = f"{later} kernels were compiled after the warm-up" if later else ""
        return dict(
            seconds_to_draw=round(drawn, 1),
            seconds=round(seconds, 1),
            compiled=first,
            compiled_later=later,
            short=short,
        )

    def step(count: int, kind: str) -> dict[str, Any]:
        floor = FLOORS.get(count) if preset == RELEASED and kind == "plain" and not quantize else None
        with compilations() as compiled:
            line = timed(step_times(engine, count, prompt, STEPS[kind], 10), floor)
        if compiled:
            line["short"] = f"{', '.join(sorted(set(compiled)))} compiled after the warm-up"
        return line | dict(kind=kind, rows=count)

    yield "cold start", cold_start
    for count in (1, rows):
        for kind in STEPS:
            yield "step", partial(step, count, kind)
        if is_cuda:
            yield "kernels", partial(by_kernel, engine, count, prompt)
    if is_cuda:
        yield "pages", lambda: memory_line(engine, before, free_bytes(device), torch.cuda.mem_get_info(device)[1])


def timed(times: list[float], floor: float | None) -> dict[str, Any]:
    """The median and the worst of sorted times beside a floor."""
    median = times[len(times) // 2]
    short = f"more than {FACTOR:g} times the floor of {floor:g} ms" if floor and median > FACTOR * floor else ""
    return dict(median_ms=median, worst_ms=times[-1], floor_ms=floor, short=short)


def free_bytes(device: torch.device) -> int:
    """The bytes of a GPU that nobody holds; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def memory_line(engine: Engine, before: int, after: int, total: int) -> dict[str, Any]:
    """The memory that the engine's calls and captured steps hold beside its pages, against what was left free for them.

    before, after: the bytes that were free before there was an engine, and are after all its steps.
    """
    pages = sum(x.nbytes for pool in engine.pages.pools.values() for x in pool.tensors)
    kept, taken, gib = engine.pages.kept_free or 0, before - after - pages, 2**30
    peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
    line = dict(tokens=engine.pages.capacity, pages_gib=pages / gib, kept_gib=kept / gib, taken_gib=taken / gib)
    line |= dict(peak_reserved_gib=peak / gib, free_gib=after / gib, total_gib=total / gib)
    short = "calls hold more than was kept free for them" if taken > kept else ""
    if after < 0.02 * total:
        short = "less than 2 % of the memory is free after the steps"
    return line | dict(short=short)


def drafted(preset: str, device: torch.device, prompt: int, rows: int) -> Iterator[Measurement]:
    """Rounds of a drafter's pass and its verification, of whole blocks, beside next tokens one by one."""
    target_of, drafter_of = preset_config(TARGET).to_dict(), preset_config(DRAFTER).to_dict()
    if preset != RELEASED:
        target_of |= SMALL
        own = drafter_of["dflash_config"] | {"mask_token_id": 5, "target_layer_ids": [0, 1]}
        drafter_of |= SMALL | {"num_target_layers": 3, "dflash_config": own}
    for values in (target_of, drafter_of):
        values.pop("layer_types", None)  # one for each layer of the released shape
    config = type(preset_config(TARGET))(**target_of)
    target = random_model(config, device)
    model = Drafted(target, random_model(drafter_config(drafter_of), device)).eval()
    generation = Generation(eos_ids=(), pad_id=0, max_new_tokens=MOST_STEPS)
    options = dict(tokenizer=character_tokenizer(ALPHABET), generation=generation, max_rows=rows)
    options |= dict(capacity=rows * (prompt + 2 * MOST_STEPS), tokens_per_step=8 * prompt)
    ways = {"next_token": (target, None), f"speculative:block={model.canvas_length}": (model, ROUND_FLOORS)}
    for strategy, (of, floors) in ways.items():
        engine = Engine(of, strategy=strategy, **options)
        yield "cold start", partial(_warmed, engine, strategy)
        for count in (1, rows):
            yield "round", partial(_round, engine, strategy, count, prompt, floors if preset == RELEASED else None)


def _warmed(engine: Engine, strategy: str) -> dict[str, Any]:
    begin = time.monotonic()
    engine.warm_up()
    wait(engine.model.device)
    return dict(kind=strategy, seconds=round(time.monotonic() - begin, 1))


def _round(engine: Engine, strategy: str, rows: int, prompt: int, floors: dict[int, float] | None) -> dict[str, Any]:
    times = step_times(engine, rows, prompt, {}, 20)
    return timed(times, (floors or {}).get(rows)) | dict(kind=strategy, rows=rows)
