"""Part "tests" of the quick run: one test of each kernel at a shape of the released model in bf16, and never twice.

Each runs in a process of its own, some beside others: an error on the device takes none of the others with it, and what
one compiles the others need not wait for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.quick import ROOT, TESTS

MOST, LIMIT = 8, 100.0  # processes at once, and the seconds of each
KERNELS = "tests/kernels/test_triton_"
RELEASED_TESTS = {
    "cuda": (
        f"{KERNELS}nvfp4.py::test_every_code_with_every_scale_is_decoded_exactly",
        f"{KERNELS}nvfp4.py::test_bf16_is_about_as_close_to_fp64_as_torch_in_bf16",
        f"{KERNELS}norm_rope.py::test_bf16_is_at_least_as_close_to_fp64_as_torch_in_bf16",
        f"{KERNELS}span_attention.py::test_bf16_is_about_as_close_to_fp64_as_torch_in_bf16[causal-16-8-256]",
        f"{KERNELS}span_attention.py::test_bf16_is_about_as_close_to_fp64_as_torch_in_bf16[canvases-16-2-512]",
        f"{KERNELS}span_attention.py::test_bf16_is_about_as_close_to_fp64_as_torch_in_bf16[split-16-2-512]",
        "tests/kernels/test_paged_attention.py::test_in_bf16_pages_give_the_bits_of_a_dense_prefix[16-8-256-128]",
        "tests/kernels/test_paged_attention.py::test_in_bf16_pages_give_the_bits_of_a_dense_prefix[16-2-512-128]",
        f"{KERNELS}expert_mlp.py::test_bf16_is_about_as_close_to_fp64_as_torch_in_bf16[2500-8-4-some empty-gelu_tanh]",
        f"{KERNELS}expert_mlp.py::test_low_rank_matrices_in_bf16_are_about_as_close_to_fp64_as_torch_in_bf16",
        f"{KERNELS}expert_mlp.py::test_a_graph_replays_with_other_tokens_and_another_routing",
        f"{KERNELS}expert_mlp.py::test_the_same_inputs_give_the_same_bits_on_the_gpu",
        f"{KERNELS}vocabulary.py::test_bf16_cross_entropy_is_as_close_to_fp64_as_torch_in_bf16[257-20000-2816-False]",
        f"{KERNELS}vocabulary.py::test_at_4k_tokens_of_the_released_model_memory_is_a_chunk",
        f"{KERNELS}vocabulary_stats.py::test_bf16_stats_are_as_close_to_fp64_as_torch_in_bf16",
        "tests/kernels/test_vocabulary_classes.py::test_bf16_classes_are_as_close_to_fp64_as_torch_in_bf16",
        f"{KERNELS}block_sparse.py::test_bf16_is_about_as_close_to_fp64_as_torch_in_bf16[canvas]",
        f"{KERNELS}block_sparse.py::test_bf16_scores_choose_as_fp32_ones_do_on_whole_numbers[128]",
        "tests/sampling/test_graphs.py::test_graphs_on_a_gpu_give_the_tokens_of_steps_that_are_launched_anew"
        "[bfloat16-free]",
        "tests/sampling/test_graphs.py::test_graphs_on_a_gpu_give_the_tokens_of_steps_that_are_launched_anew"
        "[bfloat16-held]",
    ),
    "cpu": ("tests/benchmarks/test_gpu_command.py::test_a_line_is_the_same_after_it_was_written_and_read",),
}


def run(name: str, device: str) -> dict[str, Any]:
    """Run a test with all its cases; return a line: how many passed, and pytest's message for the others."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu" if device == "cuda" else "not gpu", name]
    how: dict[str, Any] = dict(cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=LIMIT)
    how |= dict(env=os.environ | dict(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"))  # plugins take seconds to load
    begin = time.monotonic()
    line: dict[str, Any] = dict(part=TESTS, figure=name.removeprefix("tests/"))
    try:
        done = subprocess.run([sys.executable, *words], **how)
    except subprocess.TimeoutExpired:
        return line | dict(short=f"was ended after {LIMIT:.0f} s")
    said = done.stdout.strip().splitlines()
    line |= dict(seconds=round(time.monotonic() - begin, 1), found=said[-1] if said else "")
    if done.returncode:
        print(f"{done.stdout}\n{done.stderr}", file=sys.stderr, flush=True)
        reasons = [each for each in said if each.startswith(("E  ", "ERROR"))]
        line["short"] = " ".join((reasons or [f"ended with code {done.returncode}"])[0].split())[:300]
    return line


def main(words: Sequence[str] | None = None) -> int:
    """Run the tests and print a line of JSON for each as it ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quick_tests", description=__doc__)
    parser.add_argument("device", choices=RELEASED_TESTS)
    parser.add_argument("--done", type=Path, help="a JSON list of the figures that are there")
    options = parser.parse_args(words)
    done = set(json.loads(options.done.read_text(encoding="utf-8"))) if options.done else set()
    names = [name for name in RELEASED_TESTS[options.device] if f"{TESTS}: {name.removeprefix('tests/')}" not in done]
    with ThreadPoolExecutor(max(1, min(MOST, (os.cpu_count() or 1) // 2))) as threads:
        for each in as_completed([threads.submit(run, name, options.device) for name in names]):
            print(json.dumps(each.result()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
