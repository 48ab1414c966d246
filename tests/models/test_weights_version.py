"""A change of weights makes another version, whoever made it, and pages of before are shared by nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

from blockdiff.models.pages import Pages
from blockdiff.models.weights import notice_steps, weight_addresses, weights_version
from tests.support.families import small_model

pytestmark = pytest.mark.quick


def stepped(make: Callable[..., torch.optim.Optimizer], **how: Any) -> Callable[[nn.Module], None]:
    """A step of an optimiser."""

    def step(model: nn.Module) -> None:
        weight = model.vocabulary.table
        weight.grad = torch.ones_like(weight)
        optimiser = make([weight], lr=0.1, **how)
        notice_steps(optimiser)
        optimiser.step()

    return step


def stepped_in_groups(model: nn.Module) -> None:
    """A step in which one group of two is fused."""
    weights = [model.vocabulary.table, model.norm.weight]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimiser = torch.optim.AdamW([{"params": weights[:1], "fused": True}, {"params": weights[1:], "lr": 0.0}])
    notice_steps(optimiser)
    optimiser.step()


def filled(model: nn.Module) -> None:
    with torch.no_grad():
        model.layers[0].attention.q_proj.weight.fill_(0.1)


def moved(model: nn.Module) -> None:
    weight = model.layers[0].attention.q_proj.weight
    weight.data = weight.data.clone()


CHANGES = {
    "SGD": stepped(torch.optim.SGD),
    "foreach": stepped(torch.optim.AdamW, foreach=True),
    "fused": stepped(torch.optim.AdamW, fused=True),
    "fused of a group": lambda model: stepped_in_groups(model),
    "one by one": stepped(torch.optim.AdamW, foreach=False),
    "load_state_dict": lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
    "assign": lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True),
    "in place": filled,
    "moved": moved,
    "dtype": lambda model: model.double(),
    "a module more": lambda model: model.add_module("adapter", nn.Linear(2, 2)),
    "a buffer": lambda model: model.register_buffer("own", torch.ones(1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whoever_changes_weights_makes_another_version(change):
    model = small_model("llama", dtype=torch.float32)
    before = weights_version(model)
    model(torch.zeros(1, 3, dtype=torch.int64), torch.arange(3)[None], spans_of(model))
    assert weights_version(model) == before
    CHANGES[change](model)
    after = weights_version(model)
    has_moved = change in ("assign", "moved", "dtype", "a module more", "a buffer")
    assert after != before and (weight_addresses(after) != weight_addresses(before)) == has_moved


def test_importing_registers_nothing_on_the_optimisers_of_others():
    assert not optimizers._global_optimizer_post_hooks and not optimizers._global_optimizer_pre_hooks


def spans_of(model: Any) -> dict[str, Any]:
    return {name: kind.encode_spans(torch.zeros(1, 3, dtype=torch.int64)) for name, kind in model.kinds.items()}


@torch.no_grad()
def test_rows_share_nothing_that_other_weights_encoded_and_open_ones_go_on():
    model = small_model("llama", dtype=torch.float64)
    pages, tokens = Pages(model, 4), torch.arange(3, 23)
    row = pages.open()
    pages.encode([row], tokens[None], [20])
    pages.accept(row)
    assert pages.reuse(pages.open(), tokens.tolist()) == 20
    pages.follow_weights()
    assert pages.reuse(pages.open(), tokens.tolist()) == 20
    model.norm.weight.mul_(2)
    pages.follow_weights()
    other = pages.open()
    assert pages.reuse(other, tokens.tolist()) == 0
    pages.check()
    for each in (row, other):
        pages.encode([each], tokens[None, :5], [5])
        pages.accept(each)
    pages.check()
    assert pages.reuse(pages.open(), tokens[:5].tolist()) == 4
    pages.truncate(row, 18)  # into a page that nobody else can find
    pages.encode([row], tokens[None, :1], [1])
    pages.check()
