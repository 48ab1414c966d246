"""Chooses the tiles of blockdiff/kernels/tiles.json: `python -m benchmarks.tune`, on a GPU.

For every line of attention over spans and of experts the tiles around the present one that fit into the GPU's memory
are timed, each kernel by itself, and the fastest is written. Without a GPU, `--architecture 86` chooses by what the
kernels compile to: the largest tile, no larger than that of sm_90, that fits, spills nothing and executes no product
twice. The file says of each architecture on what machine, when and how its lines were chosen.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
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
from blockdiff.kernels.launch import forget_sizes
from blockdiff.kernels.span_attention.triton import span_attention
from blockdiff.kernels.tiles import SHARED_MEMORY, Tile
from blockdiff.spans import encode_spans

DTYPES = {2: torch.bfloat16, 4: torch.float32}
MOST_TRIED = 12  # tiles that fit and are looked at where none suits
Key = tuple[str, int, int]  # kernel, architecture, element size


@dataclass(frozen=True)
class Problem:
    """A line of the table: a kernel at one size, and a call that launches it.

    arguments: values that tell its launches from others of the same kernel; same: a size of the tile, and the line
    whose it has to be.
    """

    line: str
    kernel: str
    up_to: float
    call: Callable[[torch.dtype], None]
    arguments: dict[str, Any] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)

    def wanted(self, kernel: str, arguments: dict[str, Any]) -> bool:
        """True for a launch of this line."""
        return kernel == self.kernel and all(arguments[name] == value for name, value in self.arguments.items())


def attention(head: int, kv_heads: int, dtype: torch.dtype) -> None:
    """An encode of the released model's number of heads, forward and backward; on a GPU of a size worth timing."""
    rows, T = (4, 4096) if torch.cuda.is_available() else (2, 128)
    shapes = ((rows, T, 16, head), (rows, T, kv_heads, head), (rows, T, kv_heads, head))
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    out = span_attention(q, None, None, k, v, encode_spans(torch.zeros(rows, T, dtype=torch.int64)), 1.0)
    out.sum().backward()


def experts(tokens: int, dtype: torch.dtype) -> None:
    """Experts of the released model's sizes, forward and backward with everything trained."""
    E, k, D, F = 128, 8, 2816, 704
    x, gate_up, down = (
        torch.empty(shape, dtype=dtype, requires_grad=True) for shape in ((tokens, D), (E, 2 * F, D), (E, D, F))
    )
    index = torch.rand(tokens, E).topk(k).indices
    expert_mlp(x, gate_up, down, index, torch.full((tokens, k), 1 / k, requires_grad=True)).sum().backward()


def problems() -> list[Problem]:
    """The lines of the table that are chosen here, those first whose sizes others have to have."""
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
        for name, same in (("gate_up", rows), ("activation_backward", rows), ("outer_product", {})):
            found.append(Problem(f"expert_mlp_{name}", f"expert_mlp_{name}", up_to, mix, same=same))
        for name, stride in (("down", 704), ("grad_x", 1)):
            found.append(Problem(f"expert_mlp_{name}", "expert_mlp_product", up_to, mix, {"WEIGHT_N": stride}, rows))
    return found


def candidates(tile: Tile, fixed: dict[str, int], factors: tuple[float, ...]) -> list[Tile]:
    """Tiles with so many times its sizes, and up to its stages, the largest first."""
    choices = {name: [int(getattr(tile, name) * f) for f in factors] for name in ("rows", "columns", "inner")}
    choices |= dict(warps=[4, 8], stages=list(range(1, tile.stages + 1 + (max(factors) > 1))))
    choices |= {name: [value] for name, value in fixed.items()}
    found = {Tile(**dict(zip(choices, sizes, strict=True))) for sizes in itertools.product(*choices.values())}
    possible = (other for other in found if area(other))
    return sorted(possible, key=lambda other: (-area(other), -other.stages, other.warps != tile.warps, -other.rows))


def area(tile: Tile) -> int:
    """Elements of the result, times summands where the tile has some; 0 where tensor cores have no such product."""
    sizes = (tile.rows, tile.columns, *((tile.inner,) if tile.inner else ()))
    return math.prod(sizes) if all(tiles.LEAST <= size <= 256 for size in sizes) else 0


def by_compiling(problem: Problem, key: Key, choices: list[Tile]) -> Tile:
    """The first tile that fits, spills nothing and executes no product twice, else the one that comes nearest."""
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


def by_timing(problem: Problem, key: Key, choices: list[Tile]) -> Tile:
    """The fastest on this machine's GPU; what it has no room for is left out."""
    seconds = {}
    for tile in choices:
        try:
            with trying(key, tile):
                seconds[tile] = _seconds(problem.wanted, lambda: problem.call(DTYPES[key[2]]))
        except triton.runtime.errors.OutOfResources:
            continue
    return min(seconds, key=lambda tile: seconds[tile])


@contextmanager
def trying(key: Key, tile: Tile) -> Iterator[None]:
    """Within it the table has this tile, and no other, for a kernel."""
    forget_sizes()
    with patch.dict(tiles.table(), {key: [(float("inf"), tile)]}):
        yield
    forget_sizes()


def _seconds(wanted: Wanted, call: Callable[[], None]) -> float:
    """Seconds of the wanted launches of a call on the GPU, each by itself."""
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
    """The table as it is now, equal lines of several architectures as one."""
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
    """Chooses and writes; prints every line as it is chosen."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument(
        "--architecture", action="append", type=int, choices=SHARED_MEMORY, help="choose by compiling, without a GPU"
    )
    parser.add_argument("--only", default="", help="lines whose name has this in it")
    parser.add_argument("--bytes", type=int, choices=DTYPES, default=2, help="of an element (default: 2)")
    options = parser.parse_args()
    made, table = json.loads(tiles.FILE.read_text(encoding="utf-8"))["made"], tiles.table()
    on_gpu = not options.architecture
    for architecture in options.architecture or [tiles.architecture(torch.device("cuda", 0))]:
        for (kernel, of, size), entries in list(table.items()):
            if of == 90:
                table.setdefault((kernel, architecture, size), list(entries))
        for problem in problems():
            if options.only not in problem.line:
                continue
            key = problem.line, architecture, options.bytes
            base = dict(table[key] if on_gpu else table[problem.line, 90, options.bytes])[problem.up_to]
            fixed = {
                name: getattr(base if line == problem.line else dict(table[line, *key[1:]])[problem.up_to], name)
                for name, line in problem.same.items()
            }
            choose, factors = (by_timing, (0.5, 1, 2)) if on_gpu else (by_compiling, (0.25, 0.5, 1))
            chosen = choose(problem, key, candidates(base, fixed, factors))
            table[key] = [(limit, chosen if limit == problem.up_to else tile) for limit, tile in table[key]]
            print(f"sm_{architecture}, {problem.line}, up to {problem.up_to:g}: {chosen}", flush=True)
        how = f"timed on {torch.cuda.get_device_name()}" if on_gpu else "compiled for it, not timed"
        versions = f"Triton {triton.__version__}, torch {torch.__version__}"
        made[str(architecture)] = f"{how}: {versions}, {datetime.date.today().isoformat()}"
        write(dict(sorted(made.items(), key=lambda pair: int(pair[0]))))


if __name__ == "__main__":
    main()
