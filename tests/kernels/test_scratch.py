"""Memory that the ops of a call share while they run: never what a caller keeps, and gone with the call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdiff.kernels import scratch as shared
from blockdiff.kernels.expert_mlp import triton as experts
from blockdiff.kernels.scratch import scratch, shared_scratch
from blockdiff.kernels.span_attention import triton as attention
from blockdiff.models.pages import Pages
from tests.support.launches import Commit, DenoisingStep

LAYERS = 2  # one sliding layer, one full one


@pytest.fixture(autouse=True)
def _no_gradient() -> Iterator[None]:
    with torch.no_grad():
        yield


def make(like: Tensor, *sizes: int) -> Tensor:
    return like.new_empty(*sizes)


@pytest.mark.quick
def test_equal_sizes_share_memory_within_a_call_and_nothing_else_does():
    x, found = torch.zeros(1), list[Tensor]()
    with shared_scratch():
        first = scratch(make, x, 4, 3)
        assert scratch(make, x, 4, 3) is first
        others = scratch(make, x, 3, 4), scratch(make, x.double(), 4, 3), scratch(make, x.to("meta"), 4, 3)
        assert [(each.dtype, each.device.type) for each in others[1:]] == [
            (torch.float64, "cpu"),
            (torch.float32, "meta"),
        ]
        with shared_scratch():  # a model that is called inside another one's call
            assert scratch(make, x, 4, 3) is not first
        assert scratch(make, x, 4, 3) is first
        thread = threading.Thread(target=lambda: found.append(scratch(make, x, 4, 3)))
        thread.start()
        thread.join()
    assert found[0] is not first and scratch(make, x, 4, 3) is not first
    with pytest.raises(ZeroDivisionError), shared_scratch():
        1 / 0  # noqa: B018
    assert shared._SCRATCH.buffers is None


def output_of(step: DenoisingStep) -> Tensor:
    """The hidden states of a step, or of a commit of one row more."""
    if isinstance(step, Commit):
        row = step.pages.open()
        step.pages.encode([row], torch.arange(3, 24)[None], [21])
        return step.pages.encode([row], step.canvas, [step.model.canvas_length])
    return step.pages.denoise([step.row], step.canvas, step.soft)


@pytest.fixture(scope="module", params=[DenoisingStep, Commit])
def step(request: Any) -> Iterator[DenoisingStep]:
    """A step or a commit over pages whose attention is in two parts, of a model with numbers that count."""
    torch.manual_seed(0)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "splits_of", lambda *sizes: 2)
        step: DenoisingStep = request.param("sliding", LAYERS - 1)
        for parameter in step.model.parameters():
            parameter.normal_(std=0.1)
        step.pages = Pages(step.model, capacity=4096)
        step.row = step.pages.open()
        step.pages.encode([step.row], torch.arange(3, 24)[None], [21])
        yield step


def test_what_shared_memory_held_before_does_not_count(step, monkeypatch):
    truth, asked = output_of(step), list[Any]()
    assert truth.isfinite().all()

    def spoilt(make: Any, like: Tensor, *sizes: Any) -> Any:
        found = scratch(make, like, *sizes)
        for x in found:
            x.fill_(torch.nan if x.is_floating_point() else -(1 << 30))
        asked.append(tuple(x.data_ptr() for x in found))
        return found

    for op in (attention, experts):
        monkeypatch.setattr(op, "scratch", spoilt)
    assert torch.equal(output_of(step), truth)
    assert len(set(asked)) < len(asked) >= 2 * LAYERS  # layers shared some


def test_what_a_caller_keeps_of_a_layer_or_of_its_parts_stays_as_it_was(step):
    kept = list[tuple[Tensor, Tensor]]()

    def keep(module: Any, inputs: Any, outputs: Any) -> None:
        for x in torch.utils._pytree.tree_leaves(outputs):
            if isinstance(x, Tensor):
                kept.append((x, x.clone()))

    hooks = [module.register_forward_hook(keep) for module in step.model.layers.modules()]
    first = output_of(step)
    kept.append((first, first.clone()))
    output_of(step)
    for hook in hooks:
        hook.remove()
    assert len(kept) > 8 * LAYERS and all(torch.equal(x, before) for x, before in kept)
