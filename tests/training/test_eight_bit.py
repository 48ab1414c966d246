"""8-bit AdamW: it learns, its state fits a safetensors file and goes on to the bit, and how it is refused."""

from __future__ import annotations

import sys

import pytest
from torch import Tensor

from blockdiff.errors import RunError
from blockdiff.training import optimiser as optim
from blockdiff.training.checkpoint_reader import restore
from tests.support.little_net import learn, net
from tests.support.toy_objective import save_checkpoint

pytestmark = pytest.mark.quick


@pytest.mark.portable
def test_it_learns_like_adamw_with_a_quarter_of_the_moments():
    plain, small = net(), net()
    optimisers = [optim.build(plain, lr=1e-2), optim.build(small, name="adamw_8bit", lr=1e-2)]
    expected, got = (learn(m, o, range(1, 31)) for m, o in zip((plain, small), optimisers, strict=True))
    assert got[-1] == pytest.approx(expected[-1], rel=0.05) and expected[-1] < 0.1 * expected[0]
    sizes = [
        sum(v.nbytes for v in optimiser.state[module[0].weight].values() if isinstance(v, Tensor) and v.numel() > 256)
        for module, optimiser in zip((plain, small), optimisers, strict=True)
    ]
    assert sizes[1] < 0.3 * sizes[0]


def test_from_a_checkpoint_it_goes_on_to_the_bit(tmp_path):
    whole = net()
    expected = learn(whole, optim.build(whole, name="adamw_8bit", lr=1e-2), range(1, 31))
    module = net()
    optimiser = optim.build(module, name="adamw_8bit", lr=1e-2)
    learn(module, optimiser, range(1, 16))
    saved = save_checkpoint(tmp_path, 15, module, optimiser, {})
    again = net()
    fresh = optim.build(again, name="adamw_8bit", lr=1e-2)
    assert restore(saved, again, fresh, {}) == 15
    assert learn(again, fresh, range(16, 31)) == expected[15:]


def test_without_a_library_it_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(optim, "find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"^optim\.name: adamw_8bit .*installed"):
        optim.build(net(), name="adamw_8bit", lr=0.1)


def test_a_library_that_cannot_be_imported_is_named_with_its_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(RunError, match=r"adamw_8bit: .*imported \("):
        optim.build(net(), name="adamw_8bit", lr=0.1)
