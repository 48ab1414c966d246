"""The Triton kernels compiled for an H200, which needs none: they fit, and where most is to be lost nothing is spilled.

Compiled, not run, in bf16 and at the sizes of the released models: of each op the case that needs most, some of them
until their sizes are known. `python -m benchmarks.compiled` compiles all cases to the end, for every architecture. A
process of its own compiles, for Triton interprets in this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tile_memory import line_key, read
from blockdiff.kernels.tiles import SHARED_MEMORY

ROOT = Path(__file__).resolve().parents[2]
STACK = 168  # bytes that attention keeps there over a loop, not in it: more since it is compiled for no sizes


ATTENTION = ("span_attention, d = 512", "norms")
INFERENCE = ("inference", "fp8, 256 tokens")
NVFP4 = "nvfp4, 256 tokens"
SIZED = ("block_sparse", "vocabulary", "expert_mlp, low rank")  # compiled until their sizes are known


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """The lines of `benchmarks.compiled` about the kernels of these ops, none of which takes more shared memory than
    its tile is known to take."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compiled", "--architecture", "90", "--json"]
    lines = []
    counted = [f"--loops={op}" for op in (*ATTENTION, NVFP4)]
    for ops, words in (((*ATTENTION, *INFERENCE, NVFP4), counted), (SIZED, ["--sizes"])):
        words = [*command, *(f"--only={op}" for op in ops), *words]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines += [json.loads(line) for line in done.stdout.splitlines()]
    memory = read()
    for line in lines:
        key = line_key(line["kernel"], 90, 2, line["constants"])
        limit = memory.get(key, SHARED_MEMORY[90])
        assert line["shared"] <= limit, f"{line} takes more than {limit}: run python -m benchmarks.tile_memory"
    return lines


def of(lines: list[dict[str, Any]], *ops: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["op"] in ops]


def test_attention_and_norms(compiled):
    """Every kernel of the widest heads, forward, split and backward."""
    lines = of(compiled, *ATTENTION)
    names = {"forward", "backward_queries", "backward_keys"}
    assert {line["kernel"] for line in lines} >= {f"span_attention_{name}" for name in names}
    for line in lines:
        assert line["stack"] <= (0 if line["op"] == "norms" else STACK), line
    for line in [line for line in lines if line["products"] is not None]:
        assert line["products"] == 1.0, line  # nothing is computed by two warp groups
        assert line["waits"] < 0.5 * line["issued"], line  # products run on while others are issued
        most = 20 if line["kernel"] == "span_attention_backward_queries" else 0
        assert line["loop_stack"] <= most, line  # reads and writes of the stack in the loop


def test_the_kernels_of_inference(compiled):
    """Those around experts and attention, and weights in fp8, hardly a register spilled."""
    lines = of(compiled, *INFERENCE)
    kernels = {op: {line["kernel"] for line in lines if line["op"] == op} for op in INFERENCE}
    inference = {"attention_heads", "residual_norms", "router_scores", "routed_tokens", "gated_product", "layer_end"}
    assert kernels["inference"] >= inference
    assert kernels["fp8, 256 tokens"] >= {"expert_mlp_gate_up", "expert_mlp_product", "fp8_product", "gated_product"}
    for line in lines:
        assert line["stack"] <= 8, line  # Triton 3.6 spills two registers


def test_products_in_nvfp4_decode_each_weight_once_in_few_instructions(compiled):
    """Forward and to the inputs; Triton's own product of bf16 in place of the one of PTX takes 0.8 or 0.9 more each."""
    lines = [line for line in of(compiled, NVFP4) if line["products"] is not None]
    names = ["expert_mlp_activation_backward", "expert_mlp_gate_up", *["expert_mlp_product", "nvfp4_product"] * 2]
    assert sorted(line["kernel"] for line in lines) == sorted(names)
    for line in lines:
        sizes, matrices = line["constants"], 2 if line["kernel"] == "expert_mlp_gate_up" else 1
        weights = matrices * sizes["COLUMNS"] * sizes["INNER"] / (32 * sizes["num_warps"])
        most = 8.0 if line["kernel"] == "expert_mlp_activation_backward" else 6.6
        assert line["stack"] == 0 and (line["loop_instructions"] - line["issued"]) / weights < most, line


@pytest.mark.parametrize(
    ("op", "names"),
    [
        ("block_sparse", "scores choose forward forward_keys backward_queries backward_keys"),
        ("vocabulary", "tiles rows tokens filters classes probabilities gradients"),
        (
            "expert_mlp, low rank",
            "gate_up product activation_backward outer_product sort_slots sum_slots narrow count_slots",
        ),
    ],
)
def test_every_kernel_of_an_op_fits(compiled, op, names):
    """MiniMax M3's packed rows, canvases and pages; every vocabulary op; experts with adapters, both ways."""
    found = {line["kernel"] for line in of(compiled, op)}
    assert found >= {f"{op.partition(',')[0]}_{name}" for name in names.split()}
