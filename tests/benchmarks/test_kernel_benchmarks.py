"""The benchmarks of ops: every peer computes what we compute, and a wrong kernel quotes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import kernel_expert_mlp as benchmark
from benchmarks import kernel_lines, kernel_span_attention, kernel_vocabulary
from benchmarks.kernel_expert_mlp import FORWARD, FROZEN, TRAINED, Shape
from benchmarks.models import sizes
from benchmarks.settings import Settings
from blockdiff.kernels import IN_TORCH
from blockdiff.kernels.expert_mlp.torch import expert_mlp

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
SHAPE = Shape("quickstart", 40, 8, 2, 24, 16)


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("kind", [FORWARD, FROZEN, TRAINED])
def test_every_peer_computes_what_we_compute(kind, skewed, monkeypatch):
    monkeypatch.setattr(kernel_lines, "PEER_BOUND", 1e-6)
    shape = replace(SHAPE, skewed=skewed)
    inputs = benchmark.draw(shape, CPU, torch.float32)
    result = benchmark.measure(shape, kind, inputs, expert_mlp, Settings(CPU, 1), None)
    assert result.agreement.is_met
    assert len(result.agreement.errors) == {FORWARD: 1, FROZEN: 3, TRAINED: 5}[kind]
    assert result.probed.keys() == {"transformers eager", "transformers grouped_mm", "padded bmm"}


def test_a_routing_never_repeats_an_expert_and_a_skewed_one_prefers_some():
    spread = []
    for skewed in (False, True):
        index = benchmark.draw(replace(SHAPE, N=4000, skewed=skewed), CPU, torch.float32).index_Nk
        assert (index[:, 0] != index[:, 1]).all()
        counts = index.flatten().bincount(minlength=8)
        spread.append(float(counts.max() / counts.min()))
    assert spread[0] < 1.2 and spread[1] > 3


def test_a_wrong_kernel_leaves_no_speed_up_to_quote():
    def wrong(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor, *rest: str) -> Tensor:
        return expert_mlp(x, gate_up, down, index, weight * 1.001)

    inputs = benchmark.draw(SHAPE, CPU, torch.float32)
    for op, agrees in ((wrong, False), (expert_mlp, True)):
        result = benchmark.measure(SHAPE, FROZEN, inputs, op, Settings(CPU, 1), None)
        assert result.agreement.is_met == agrees and (result.speedup is not None) == agrees


def test_a_peer_that_cannot_run_or_differs_is_named_and_left_out(monkeypatch, capsys):
    inputs = benchmark.draw(SHAPE, CPU, torch.float32)
    right = expert_mlp(*inputs[:5])

    def refuse() -> list[Tensor]:
        raise NotImplementedError("not on this device")

    peers = {"one": refuse, "two": lambda: [2 * right], "three": lambda: [right]}
    monkeypatch.setattr(benchmark, "_peers", lambda *_: peers.items())
    result = benchmark.measure(SHAPE, FORWARD, inputs, expert_mlp, Settings(CPU, 1), None)
    said = capsys.readouterr().err
    assert "one: not available: NotImplementedError: not on this device" in said
    assert "two: left out, it differs by 1" in said
    assert result.probed.keys() == {"three"}


def test_the_suites_of_ops_run_on_a_gpu_alone(capsys):
    for suite in (benchmark, kernel_span_attention, kernel_vocabulary):
        suite.run(list(sizes(CPU).values()), Settings(CPU, 1), pytest.fail)
        assert capsys.readouterr().err == f"{suite.SUITE}: needs a GPU\n"


@pytest.mark.parametrize("with_backward", [False, True])
def test_attention_agrees_with_its_reference_and_a_wrong_one_quotes_nothing(with_backward):
    heads = kernel_span_attention.Heads(4, 2, 16, 8)
    encode, _ = kernel_span_attention.training("small", heads, 2, 24, 2, 8)
    right = IN_TORCH.span_attention

    def wrong(q: Tensor, *rest: Any) -> Tensor:
        return right(q * 1.01, *rest)

    for attend, agrees in ((right, True), (wrong, False)):
        result = kernel_span_attention.measure(encode, with_backward, attend, Settings(CPU, 1), None)
        assert result.agreement.is_met == agrees and (result.speedup is not None) == agrees
