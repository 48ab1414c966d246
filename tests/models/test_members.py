"""Members that are read straight from a module's tables are those that nn.Module would find."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from blockdiff.layers.members import buffer, parameter, submodule

pytestmark = pytest.mark.quick


class Scaled(nn.Module):
    weight: Tensor = parameter()
    shift: Tensor = buffer()
    inner: nn.Linear | None = submodule()

    def __init__(self, inner: nn.Linear | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.zeros(2))
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.inner is None else self.inner(x)
        return x * self.weight + self.shift


def test_a_member_is_the_one_that_the_module_holds_now():
    module = Scaled(nn.Linear(2, 2))
    assert list(module.state_dict()) == ["weight", "shift", "inner.weight", "inner.bias"]
    module.weight, module.inner = nn.Parameter(torch.full((2,), 3.0)), nn.Linear(2, 2, bias=False)
    assert module.weight is dict(module.named_parameters())["weight"] and module.weight[0] == 3
    assert module.inner is dict(module.named_children())["inner"] and module.inner.bias is None
    module._parameters["weight"] = moved = nn.Parameter(torch.zeros(2))  # as torch itself and FSDP replace one
    assert module.weight is moved
    assert module.to(torch.float64).shift.dtype == torch.float64
    x = torch.ones(1, 2, dtype=torch.float64)
    other = {"weight": torch.ones(2, dtype=torch.float64)}
    assert not module(x).any() and torch.equal(torch.func.functional_call(module, other, x), module.inner(x))


def test_a_member_that_is_not_there_is_missing_and_none_is_none():
    module = Scaled(None)
    assert module.inner is None and torch.equal(module(torch.ones(2)), torch.ones(2))
    del module.weight
    assert not hasattr(module, "weight")
    with pytest.raises(AttributeError, match="weight"):
        module(torch.ones(2))
    module.register_buffer("weight", torch.full((2,), 2.0))  # in another table than the class says
    assert torch.equal(module(torch.ones(2)), torch.full((2,), 2.0))


def test_a_module_with_members_compiles_to_one_graph():
    module = Scaled(nn.Linear(2, 2))
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(1, 2)), module(torch.ones(1, 2)))
    module.weight = nn.Parameter(torch.zeros(2))
    assert not compiled(torch.ones(1, 2)).any()
