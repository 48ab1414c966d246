"""Shared memory of every kernel with every tile, for every architecture: `python -m benchmarks.tile_memory`.

Compiles the ops in bf16 and fp32 at sizes that take each line of tiles.json, and all that chooses its tile otherwise,
and writes `results/tile_memory.json`, with which a test compares the table. Needs no GPU, and some fifteen minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import compiled as ops
from benchmarks.compiled import compiled
from blockdiff.kernels.launch import Unserved
from blockdiff.kernels.tiles import SHARED_MEMORY

FILE = Path(__file__).parent / "results" / "tile_memory.json"
SIZES = ("ROWS", "COLUMNS", "INNER", "num_warps", "num_stages")  # constants of a launch; a line of tiles.json has them
# Lines whose kernels have other names.
KERNELS = {
    "span_attention_backward_keys_k": "span_attention_backward_keys",
    "span_attention_backward_keys_v": "span_attention_backward_keys",
    "routed_tokens": "router_scores",
    "expert_mlp_down": "expert_mlp_product",
    "expert_mlp_down_fp8": "expert_mlp_product",
    "expert_mlp_down_nvfp4": "expert_mlp_product",
    "expert_mlp_gate_up_fp8": "expert_mlp_gate_up",
    "expert_mlp_gate_up_nvfp4": "expert_mlp_gate_up",
    "expert_mlp_activation_backward_nvfp4": "expert_mlp_activation_backward",
    "expert_mlp_grad_x": "expert_mlp_product",
    "expert_mlp_grad_x_nvfp4": "expert_mlp_product",
    "nvfp4_product_back": "nvfp4_product",
}
Key = tuple[str, int, int, tuple[int, ...]]  # kernel, architecture, bytes of an element, sizes


def calls() -> Iterator[tuple[int, Callable[[], None]]]:
    """Yield the bytes of an element, and a call that launches kernels with such elements."""
    for dtype in (torch.bfloat16, torch.float32):
        found: list[Callable[..., None]] = []
        found += [partial(ops.attention, *heads) for heads in ((64, 8), (128, 8), (256, 8), (512, 2))]
        found += [partial(ops.block_sparse, heads=128, d=d) for d in (64, 128, 256)]
        found += [partial(ops.experts, tokens) for tokens in (256, 2048, 8192)] + [partial(ops.experts, 8192, rank=16)]
        found += [partial(ops.in_fp8, tokens, goes_back=tokens > 256) for tokens in (16, 256, 8192)]
        found += [partial(ops.in_nvfp4, tokens, goes_back=True) for tokens in (32, 256, 2048, 8192)]
        found += [partial(ops.router, experts) for experts in (128, 256, 512)]
        found += [partial(ops.gated, tokens) for tokens in (16, 256, 1024)]
        found += [ops.norms, ops.inference, ops.vocabulary]
        yield from ((dtype.itemsize, partial(call, dtype=dtype)) for call in found)


def line_key(kernel: str, architecture: int, size: int, constants: dict[str, Any]) -> Key:
    """Return the key of a launch, for elements of `size` bytes."""
    return kernel, architecture, size, tuple(constants.get(name, 0) for name in SIZES)


def read() -> dict[Key, int]:
    """Return bytes of shared memory by key, from the file."""
    lines = json.loads(FILE.read_text(encoding="utf-8"))["kernels"]
    return {(name, on, size, tuple(sizes)): shared for name, on, size, sizes, shared in lines}


def measure(architecture: int, only: str = "") -> dict[Key, int]:
    """Return bytes of shared memory by key on an architecture: the largest of all launches with a tile.

    only: a part of the kernels' names.
    """
    found: dict[Key, int] = {}

    def served(call: Callable[[], None]) -> None:
        try:
            call()
        except Unserved as obstacle:  # the table has no line for this kernel; the rest of the call is skipped
            print(f"sm_{architecture}: {obstacle.reason}", flush=True)

    for size, call in calls():
        for line in compiled(partial(served, call), architecture, lambda name, _: only in name, sizes_only=True):
            key = line_key(line["kernel"], architecture, size, line["constants"])
            found[key] = max(found.get(key, 0), line["shared"])
    return found


def main() -> None:
    """Compile and write; print the keys for which the table has no line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tile_memory", description=__doc__)
    parser.add_argument("--architecture", action="append", type=int, choices=SHARED_MEMORY, help="default: all")
    parser.add_argument("--only", default="", help="kernels with this in their name; the others' lines stay")
    options = parser.parse_args()
    found = read() if FILE.is_file() else {}
    for architecture in options.architecture or SHARED_MEMORY:
        found = {key: shared for key, shared in found.items() if key[1] != architecture or options.only not in key[0]}
        found |= measure(architecture, options.only)
        rows = ",\n  ".join(json.dumps([*key, shared]) for key, shared in sorted(found.items()))
        made = f"Triton {triton.__version__}, torch {torch.__version__}"
        FILE.write_text(f'{{\n "made": "{made}",\n "kernels": [\n  {rows}\n ]\n}}\n', encoding="utf-8")
        print(f"sm_{architecture}: {sum(key[1] == architecture for key in found)} lines", flush=True)


if __name__ == "__main__":
    main()
