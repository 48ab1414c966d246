"""The benchmark of the vocabulary ops: every op has its peers, and a wrong one quotes nothing."""

from __future__ import annotations

import torch

from benchmarks import kernel_vocabulary
from benchmarks.settings import Settings
from blockdiff.kernels import IN_TORCH


def benchmark(kernels):
    """The lines of the benchmark at a small shape, by case."""
    shape, cpu = kernel_vocabulary.Shape("small", 20, 50, 8), torch.device("cpu")
    inputs = kernel_vocabulary.draw(shape, cpu, torch.float32)
    return {line.case: line for line in kernel_vocabulary.measure(inputs, shape, kernels, Settings(cpu, 2))}


def test_the_benchmark_compares_every_op_with_its_peers():
    lines = benchmark(IN_TORCH)
    ops = ("cross-entropy, frozen table", "cross-entropy, trained table", "soft embedding", "statistics")
    assert list(lines) == [*ops[:3], "soft embedding, floor", "statistics", "statistics, floor"]
    assert all(line.agreement.is_met and line.speedup is not None for line in lines.values())
    assert all(min(lines[op].memory) > 0 for op in ops)
    assert {"loss", "hidden gradient", "table gradient"} == set(lines[ops[1]].agreement.errors)


def test_the_benchmark_quotes_no_speed_up_for_a_wrong_op():
    def wrong(hidden, *rest):
        return IN_TORCH.linear_cross_entropy(hidden * 1.001, *rest)

    lines = benchmark(IN_TORCH.replaced(linear_cross_entropy=wrong))
    assert lines["cross-entropy, frozen table"].speedup is None
    assert lines["statistics"].speedup is not None
