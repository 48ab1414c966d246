"""Chooses the tiles of blockdiff/kernels/tiles.json: `python -m benchmarks.tune`, on a GPU.

For every line of attention over spans, of experts and of their router the tiles around the present one that fit into
the GPU's memory are timed, each kernel by itself, and the fastest is written; `--jobs` processes compile them before.
Without a GPU, `--architecture 86` chooses by what the kernels compile to: the largest tile, no larger than that of
sm_90, that fits, spills nothing and executes no product twice. The file says of each architecture on what machine, when
and how its lines were chosen.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.runtime.jit import JITFunction

from benchmarks.compiled import Wanted, compiled, fits
from blockdiff.kernels import tiles
from blockdiff.kernels.expert_mlp.triton import expert_mlp
from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.fp8.triton import fp8_linear
from blockdiff.kernels.launch import Unserved, forget_sizes
from blockdiff.kernels.nvfp4 import Nvfp4
from blockdiff.kernels.nvfp4.triton import nvfp4_linear
from blockdiff.kernels.routing.triton import routed_tokens
from blockdiff.kernels.span_attention.triton import span_attention
from blockdiff.kernels.tiles import SHARED_MEMORY, Tile
from blockdiff.spans import denoise_spans, encode_spans

DTYPES = {2: torch.bfloat16, 4: torch.float32}
MOST_TRIED = 12  # tiles that fit, tried before the best of them is taken
MOST_TIMED = 30  # tiles of a line that are timed, the nearest to the present one
MARGIN = 0.99  # another tile must take less than this share of the present one's seconds
Key = tuple[str, int, int]  # kernel, architecture, element size
# Kernels of experts, those without a gradient first, and the arguments that distinguish launches of one kernel.
OF_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gate_up": ("expert_mlp_gate_up", {}),
    "down": ("expert_mlp_product", {"WEIGHT_N": 704}),
    "activation_backward": ("expert_mlp_activation_backward", {}),
    "grad_x": ("expert_mlp_product", {"WEIGHT_N": 1}),
}


@dataclass(frozen=True)
class Problem:
    """A line of the table: a kernel at one size, and a call that launches it.

    arguments: values that distinguish its launches from others of the same kernel; same: for a size of the tile, the
    line whose size it must equal.
    """

    line: str
    kernel: str
    up_to: float
    call: Callable[[torch.dtype], None]
    arguments: dict[str, Any] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)

    def wanted(self, kernel: str, arguments: dict[str, Any]) -> bool:
        """Return whether a launch belongs to this line."""
        return kernel == self.kernel and all(arguments[name] == value for name, value in self.arguments.items())


def attention(head: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Run an encode with the released model's heads, forward and backward, and a denoising pass over a prefix.

    The prefix is a quarter of the encode; on a GPU sizes are large enough to time.
    """
    rows, T = (4, 4096) if torch.cuda.is_available() else (2, 128)
    shapes = ((rows, T, 16, head), (rows, T, kv_heads, head), (rows, T, kv_heads, head))
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    out = span_attention(q, None, None, k, v, encode_spans(torch.zeros(rows, T, dtype=torch.int64)), 1.0)
    out.sum().backward()
    canvases, prefix, L = 8 * rows, T // 4, T // 16
    starts = torch.full((canvases, 1), prefix)
    spans = denoise_spans(starts, torch.zeros_like(starts), torch.full_like(starts, L), L)
    sizes = ((L, 16), (prefix, kv_heads), (prefix, kv_heads), (L, kv_heads), (L, kv_heads))
    q, pk, pv, k, v = (torch.randn(canvases, *size, head).to(dtype) for size in sizes)
    with torch.no_grad():
        span_attention(q, pk, pv, k, v, spans, 1.0)


@torch.no_grad()
def router(dtype: torch.dtype) -> None:
    """Run the router of a canvas of the released model."""
    x, weight = torch.randn(256, 2816).to(dtype), torch.randn(128, 2816).to(dtype)
    routed_tokens(x, torch.ones(2816, dtype=dtype), 2816**-0.5, weight, torch.ones(128, dtype=dtype), 8)


def experts(tokens: int, dtype: torch.dtype) -> None:
    """Run experts of the released model's sizes, forward and backward with everything trained."""
    E, k, D, F = 128, 8, 2816, 704
    x, gate_up, down = (torch.empty(shape, dtype=dtype) for shape in ((tokens, D), (E, 2 * F, D), (E, D, F)))
    for each in (x, gate_up, down):
        if each.is_cuda:  # zeros would take less power, and so less time
            each.normal_(std=0.02)
        each.requires_grad_()
    index = torch.rand(tokens, E).topk(k).indices
    expert_mlp(x, gate_up, down, index, torch.full((tokens, k), 1 / k, requires_grad=True)).sum().backward()


def drawn(form: Any, *shape: int) -> Any:
    """Return a matrix of random codes in a form of fewer bits."""
    made = form.empty_like(torch.empty(shape))
    for tensor in made:
        if tensor.is_floating_point():
            tensor.fill_(1.0)
        else:
            tensor.random_(0, 0x48)  # no NaN
    return made


def experts_in(form: Any, tokens: int, dtype: torch.dtype) -> None:
    """Run the released model's experts with weights in a form of fewer bits, forward, and back to their inputs."""
    E, k, D, F = 128, 8, 2816, 704
    gate_up, down, index = drawn(form, E, 2 * F, D), drawn(form, E, D, F), torch.rand(tokens, E).topk(k).indices
    x = torch.randn(tokens, D).to(dtype).requires_grad_()
    expert_mlp(x, gate_up, down, index, torch.full((tokens, k), 1 / k)).sum().backward()


def linear_in(form: Any, linear: Callable[..., Any], dtype: torch.dtype, tokens: int = 256) -> None:
    """Run the linear layers of a canvas with weights in a form of fewer bits, forward, and back to their inputs."""
    for inner, columns in ((2816, 4096), (4096, 2816), (2816, 2048), (2112, 2816)):
        linear(torch.randn(tokens, inner).to(dtype).requires_grad_(), drawn(form, columns, inner)).sum().backward()


def problems() -> list[Problem]:
    """Return the lines to choose; a line whose sizes another must equal comes first."""
    found = []
    keys = "span_attention_backward_keys"
    for head, kv_heads in ((64, 8), (128, 8), (256, 8), (512, 2)):
        attend = partial(attention, head, kv_heads)
        for kernel in ("span_attention_forward", "span_attention_backward_queries", *((keys,) if head < 512 else ())):
            found.append(Problem(kernel, kernel, head, attend))
    found.append(Problem(f"{keys}_k", keys, 512, attend, {"grad_v": None}))
    found.append(Problem(f"{keys}_v", keys, 512, attend, {"grad_k": None}, {"columns": f"{keys}_k"}))
    for up_to, tokens in ((24, 256), (192, 2048), (float("inf"), 8192)):
        mix, rows = partial(experts, tokens), {"rows": "expert_mlp_gate_up"}
        for name, (kernel, arguments) in OF_EXPERTS.items():
            found.append(Problem(f"expert_mlp_{name}", kernel, up_to, mix, arguments, rows))
        found.append(Problem("expert_mlp_outer_product", "expert_mlp_outer_product", up_to, mix))
        for form, suffix, names in ((Fp8, "_fp8", list(OF_EXPERTS)[:2]), (Nvfp4, "_nvfp4", list(OF_EXPERTS))):
            mix, rows = partial(experts_in, form, tokens), {"rows": f"expert_mlp_gate_up{suffix}"}
            for name in names:
                kernel, arguments = OF_EXPERTS[name]
                found.append(Problem(f"expert_mlp_{name}{suffix}", kernel, up_to, mix, arguments, rows))
    found.append(Problem("routed_tokens", "router_scores", 128, router, same={"columns": "routed_tokens"}))
    found.append(Problem("fp8_product", "fp8_product", float("inf"), partial(linear_in, Fp8, fp8_linear)))
    for up_to, tokens in ((32, 32), (512, 256), (float("inf"), 4096)):
        products = partial(linear_in, Nvfp4, nvfp4_linear, tokens=tokens)
        for line, back in (("nvfp4_product", False), ("nvfp4_product_back", True)):
            found.append(Problem(line, "nvfp4_product", up_to, products, {"BACK": back}))
    return found


def candidates(tile: Tile, fixed: dict[str, int], factors: tuple[float, ...]) -> list[Tile]:
    """Return tiles with the sizes of `tile` times `factors`, and up to its stages, the largest first.

    fixed: sizes that do not vary.
    """
    choices = {name: [int(getattr(tile, name) * f) for f in factors] for name in ("rows", "columns", "inner")}
    choices |= dict(warps=[4, 8], stages=list(range(1, tile.stages + 1 + (max(factors) > 1))))
    choices |= {name: [value] for name, value in fixed.items()}
    found = {Tile(**dict(zip(choices, sizes, strict=True))) for sizes in itertools.product(*choices.values())}
    possible = (other for other in found if area(other))
    return sorted(possible, key=lambda other: (-area(other), -other.stages, other.warps != tile.warps, -other.rows))


def area(tile: Tile) -> int:
    """Return the elements of a tile's result, times its summands if it has some; 0 if tensor cores cannot do it."""
    sizes = (tile.rows, tile.columns, *((tile.inner,) if tile.inner else ()))
    return math.prod(sizes) if all(tiles.LEAST <= size <= 256 for size in sizes) else 0


def by_compiling(problem: Problem, key: Key, choices: list[Tile]) -> Tile:
    """Return the first tile that fits, spills nothing and executes no product twice; else the nearest to that."""
    tried: dict[Tile, tuple[float, int]] = {}
    for tile in choices:
        with trying(key, tile):
            lines = compiled(lambda: problem.call(DTYPES[key[2]]), key[1], problem.wanted)
        if lines and all(map(fits, lines)):
            tried[tile] = max(line["products"] or 1.0 for line in lines), max(line["stack"] for line in lines)
            if tried[tile] <= (1.01, 0):
                return tile
        if len(tried) == MOST_TRIED:
            break
    if not tried:
        raise SystemExit(f"{problem.line} up to {problem.up_to:g}: no tile fits sm_{key[1]}")
    return min(tried, key=lambda tile: tried[tile])


def by_timing(problem: Problem, key: Key, choices: list[Tile], present: Tile, pool: Any) -> Tile:
    """Return the fastest tile near the present one on this GPU; the present one if none is clearly faster.

    The processes of `pool` compile the tiles first. Tiles that do not fit on the device are left out.
    """
    nearest = sorted(choices, key=lambda tile: distance(tile, present))[:MOST_TIMED]
    begin = time.monotonic()
    list(pool.imap_unordered(partial(compile_tile, problem, key), nearest))
    print(f"  {problem.line}: {len(nearest)} tiles compiled in {time.monotonic() - begin:.0f} s", flush=True)
    seconds = {}
    for tile in nearest:
        try:
            with trying(key, tile):
                seconds[tile] = _seconds(problem.wanted, lambda: problem.call(DTYPES[key[2]]))
        except (triton.runtime.errors.OutOfResources, Unserved):
            continue
    for tile in sorted(seconds, key=lambda tile: seconds[tile])[:4]:
        print(f"  {1e3 * seconds[tile]:.3f} ms: {tile}", flush=True)
    fastest = min(seconds, key=lambda tile: seconds[tile])
    return fastest if seconds[fastest] < MARGIN * seconds.get(present, math.inf) else present


def distance(tile: Tile, present: Tile) -> float:
    """Return the number of doublings, halvings and stages between two tiles."""
    pairs = ((getattr(tile, name), getattr(present, name)) for name in ("rows", "columns", "inner", "warps"))
    return sum(abs(math.log2(a / b)) for a, b in pairs if b) + abs(tile.stages - present.stages)


def compile_tile(problem: Problem, key: Key, tile: Tile) -> None:
    """Compile the wanted kernels with a tile into Triton's cache, without any launch."""
    launch = JITFunction.run

    def run(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if problem.wanted(kernel.__name__, dict(zip(kernel.arg_names, arguments, strict=False)) | named):
            launch(kernel, *arguments, grid=grid, warmup=True, **named)

    with trying(key, tile), patch.object(JITFunction, "run", run), torch.device("cuda"):
        try:
            problem.call(DTYPES[key[2]])
        except (triton.runtime.errors.OutOfResources, Unserved):
            return


@contextmanager
def trying(key: Key, tile: Tile) -> Iterator[None]:
    """In the block the table has only this tile for a kernel."""
    forget_sizes()
    with patch.dict(tiles.table(), {key: [(float("inf"), tile)]}):
        yield
    forget_sizes()


def _seconds(wanted: Wanted, call: Callable[[], None]) -> float:
    """Return the seconds of the wanted launches of a call on the GPU, each timed alone."""
    launch, seconds = JITFunction.run, []

    def run(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        work = partial(launch, kernel, *arguments, grid=grid, warmup=warmup, **named)
        if wanted(kernel.__name__, dict(zip(kernel.arg_names, arguments, strict=False)) | named):
            seconds.append(1e-3 * triton.testing.do_bench(work, warmup=5, rep=20))
        return work()

    with patch.object(JITFunction, "run", run), torch.device("cuda"):
        call()
    return sum(seconds)


def write(made: dict[str, str]) -> None:
    """Write the table as it is now; equal lines of several architectures become one."""
    lines: dict[str, dict[str, Any]] = {}
    for (kernel, architecture, size), entries in sorted(tiles.table().items()):
        for limit, tile in entries:
            up_to = None if limit == float("inf") else int(limit)
            numbers = [tile.rows, tile.columns, tile.inner, tile.warps, tile.stages]
            line = dict(kernel=kernel, bytes=size, up_to=up_to, tile=numbers, architectures=[])
            lines.setdefault(json.dumps(line), line)["architectures"].append(architecture)
    of_tiles = ",\n  ".join(json.dumps(line) for line in lines.values())
    text = f'{{\n "made": {json.dumps(made, indent=2)},\n "tiles": [\n  {of_tiles}\n ]\n}}\n'
    tiles.FILE.write_text(text, encoding="utf-8")


def main() -> None:
    """Choose and write; print every line as it is chosen."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument(
        "--architecture", action="append", type=int, choices=SHARED_MEMORY, help="choose by compiling, without a GPU"
    )
    parser.add_argument(
        "--only",
        action="append",
        help='lines whose name and limit ("expert_mlp_down inf") have this in them (may be repeated)',
    )
    parser.add_argument("--bytes", type=int, choices=DTYPES, default=2, help="of an element (default: 2)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes that compile (default: a core each)"
    )
    options = parser.parse_args()
    made, table = json.loads(tiles.FILE.read_text(encoding="utf-8"))["made"], tiles.table()
    on_gpu = not options.architecture
    pool = multiprocessing.get_context("spawn").Pool(options.jobs) if on_gpu else None
    how = f"timed on {torch.cuda.get_device_name()}" if on_gpu else "compiled for it, not timed"
    versions = f"Triton {triton.__version__}, torch {torch.__version__}"
    for architecture in options.architecture or [tiles.architecture(torch.device("cuda", 0))]:
        made[str(architecture)] = f"{how}: {versions}, {datetime.date.today().isoformat()}"
        for (kernel, of, size), entries in list(table.items()):
            if of == 90:
                table.setdefault((kernel, architecture, size), list(entries))
        for problem in problems():
            if not any(name in f"{problem.line} {problem.up_to:g}" for name in options.only or ("",)):
                continue
            key = problem.line, architecture, options.bytes
            base = dict(table[key] if on_gpu else table[problem.line, 90, options.bytes])[problem.up_to]
            fixed = {
                name: getattr(base if line == problem.line else dict(table[line, *key[1:]])[problem.up_to], name)
                for name, line in problem.same.items()
            }
            choices = candidates(base, fixed, (0.5, 1, 2) if on_gpu else (0.25, 0.5, 1))
            chosen = by_timing(problem, key, choices, base, pool) if pool else by_compiling(problem, key, choices)
            table[key] = [(limit, chosen if limit == problem.up_to else tile) for limit, tile in table[key]]
            print(f"sm_{architecture}, {problem.line}, up to {problem.up_to:g}: {chosen}", flush=True)
            write(dict(sorted(made.items(), key=lambda pair: int(pair[0]))))


if __name__ == "__main__":
    main()
