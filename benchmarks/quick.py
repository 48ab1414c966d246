"""The released model with random weights on one GPU, in minutes: `python -m benchmarks.quick PART`.

Every figure is one JSON line, printed and added to `--output`; "short" says what falls short in it, in words. Parts:
"bf16" and "fp8": from an engine's start to its memory, its first compilations and steps of 1 and 32 rows with prompts
of 1,024 tokens, plain, with top_p and under a JSON schema; "nccl": tiny trainings of two processes, one for each way to
split a model. On a CPU a preset of its size takes the same way.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import machine
from benchmarks.models import Size
from benchmarks.step_operations import STEPS
from blockdiff.checkpoint.generation import Generation
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.models.fp8 import fp8_layers, put_in_fp8
from blockdiff.sampling import Engine, Request

RELEASED = "diffusiongemma-26b-a4b"
FLOORS = {1: 11.0, 32: 103.0}  # ms a step of the released model in bf16 on an H200 with a prefix of 1k, by arithmetic
MOST_STEPS = 200  # of a canvas, which no request of a measurement reaches
FACTOR = 2.0  # times its floor that a step may take
SPLITS = {"FSDP2": "parallel.shard=full", "experts": "parallel.experts=2", "tensor": "parallel.tensor=2"}
ALPHABET = 'abcdefgh0123456789{}[]":,. '


def random_model(preset: str, device: torch.device, quantize: bool) -> DiffusionGemma:
    """A model of a preset's sizes, with numbers drawn on the device; bf16, on a CPU fp32."""
    size = Size("", preset, rows=1, prompt=1, steps=(1, 2))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with torch.device("meta" if quantize else device):
            model = DiffusionGemma(size.config(), kernels="auto")
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


def step_times(engine: Engine, rows: int, prompt: int, asked: dict[str, Any], steps: int) -> list[float]:
    """Milliseconds of each of so many steps of an engine with all rows in their canvases; sorted."""
    draws, device = torch.Generator().manual_seed(rows), engine.model.device
    for n in range(rows):
        tokens = torch.randint(3, engine.model.vocab_size, (prompt,), generator=draws).tolist()
        engine.submit(Request(n, tokens=tokens, seed=n, max_steps=MOST_STEPS, **asked))
    for _ in range(MOST_STEPS // 2):  # until all prompts are encoded
        engine.step()
        if len(getattr(engine._batch, "canvases", ())) == rows:
            break
    for _ in range(2):  # a step of this kind is called, and captured
        engine.step()
    found = []
    for _ in range(steps):
        wait(device)
        begin = time.perf_counter()
        engine.step()
        wait(device)
        found.append(1e3 * (time.perf_counter() - begin))
    for n in range(rows):
        engine.cancel(n)
    engine.events()
    return sorted(found)


def by_kernel(work: Callable[[], object], most: int = 12) -> dict[str, float]:
    """The kernels that take most of the device's time in a call, with their milliseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
    times = {each.key[:80]: each.self_device_time_total / 1e3 for each in profile.key_averages()}
    return dict(sorted(times.items(), key=lambda pair: -pair[1])[:most])


def one_gpu(quantize: bool, preset: str, device: torch.device, prompt: int, rows: int) -> Iterator[dict[str, Any]]:
    """Cold start, memory, and steps of few rows and of many."""
    begin, model = time.monotonic(), random_model(preset, device, quantize)
    wait(device)
    drawn, is_cuda = time.monotonic() - begin, device.type == "cuda"
    generation = Generation(eos_ids=(1,), pad_id=0, confidence=1e-12, max_new_tokens=model.canvas_length)
    options = dict(tokenizer=character_tokenizer(ALPHABET), generation=generation, max_rows=rows)
    options |= {} if is_cuda else {"capacity": rows * (prompt + 4 * model.canvas_length)}
    with compilations() as compiled:
        begin, engine = time.monotonic(), Engine(model, **options)
        engine.warm_up()
        wait(device)
        seconds, first = time.monotonic() - begin, len(compiled)
        for count in (1, 2, 4, 8, 16, 32):
            if count <= rows:
                step_times(engine, count, prompt, {}, 1)
        later = len(compiled) - first
    short = f"{later} kernels were compiled after the warm-up" if later else ""
    cold = dict(seconds_to_draw=round(drawn, 1), seconds=round(seconds, 1), compiled=first, compiled_later=later)
    yield dict(figure="cold start", **cold, short=short)
    if is_cuda:
        free, total = torch.cuda.mem_get_info(device)
        peak = torch.cuda.max_memory_reserved(device)
        memory = dict(peak_gib=peak / 2**30, free_gib=free / 2**30, total_gib=total / 2**30)
        short = "" if free > 0.02 * total else "less than 2 % of the memory is free after the warm-up and 32 rows"
        yield dict(figure="pages", rows=rows, tokens=engine.pages.capacity, **memory, short=short)
    for count in (1, rows):
        for kind, asked in STEPS.items():
            times = step_times(engine, count, prompt, asked, 10)
            line = dict(figure="step", kind=kind, rows=count, median_ms=times[len(times) // 2], worst_ms=times[-1])
            floor = FLOORS.get(count) if preset == RELEASED and kind == "plain" and not quantize else None
            if floor is not None and times[len(times) // 2] > FACTOR * floor:
                line["short"] = f"more than {FACTOR:g} times the floor of {floor:g} ms"
            yield dict(floor_ms=floor, short="") | line
        if is_cuda:
            yield dict(figure="kernels", rows=count, ms=by_kernel(partial(step_times, engine, count, prompt, {}, 1)))


def nccl(device: torch.device) -> Iterator[dict[str, Any]]:
    """A tiny training of two processes for each way to split a model."""
    from benchmarks.tiny_run import make_inputs

    if device.type == "cuda" and torch.cuda.device_count() < 2:
        return
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        make_inputs(folder)
        for name, setting in SPLITS.items():
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "blockdiff", "train"]
            words += [str(folder / "recipe.yaml"), "--output", str(folder / name)]
            words += ["--set", setting]
            begin = time.monotonic()
            done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
            said = [line for line in done.stderr.splitlines() if "error" in line.lower()] or ["it ended without a word"]
            short = said[0] if done.returncode else ""
            yield dict(figure=name, seconds=round(time.monotonic() - begin, 1), short=short)


def main(words: list[str] | None = None) -> int:
    """Prints one JSON object a figure; returns 1 where one falls short."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quick", description=__doc__)
    parser.add_argument("part", choices=("bf16", "fp8", "nccl"))
    parser.add_argument("--device", default="cuda", help="cuda or cpu (cuda)")
    parser.add_argument("--preset", default=RELEASED, help=f"in recipes/presets ({RELEASED})")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt (1024)")
    parser.add_argument("--rows", type=int, default=32, help="rows at most (32)")
    parser.add_argument("--output", type=Path, help="a file that lines are added to")
    options = parser.parse_args(words)
    device, falls_short = torch.device(options.device), False
    sizes = options.preset, device, options.prompt, options.rows
    for line in nccl(device) if options.part == "nccl" else one_gpu(options.part == "fp8", *sizes):
        text = json.dumps(dict(part=options.part, device=machine.name(device), **line))
        print(text, flush=True)
        falls_short |= bool(line.get("short"))
        if options.output is not None:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
    return int(falls_short)


if __name__ == "__main__":
    sys.exit(main())
